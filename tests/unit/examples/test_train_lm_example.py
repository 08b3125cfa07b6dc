"""examples/train_lm: both attentions train the same model to the same losses, on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from build_tools import backward_tables, context_parallel_tables
from omniattn.bench import document
from tests.unit.distributed.two_processes import in_two_processes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "train_lm"
CHILD = Path(__file__).with_name("train_lm_parallel_child.py")
FSDP_CHILD = Path(__file__).with_name("train_lm_fsdp_child.py")
MODULES = ("model", "text", "train", "plot", "speed", "precisions")


@pytest.fixture(scope="module")
def ex() -> Any:
    """The example's modules, which import each other by bare names: these must not leak into other tests."""
    before, kept = list(sys.path), {name: sys.modules.pop(name, None) for name in MODULES}
    sys.path[:0] = [str(FOLDER)]
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path[:] = before
        for name in MODULES:
            sys.modules.pop(name, None)
            if kept[name] is not None:
                sys.modules[name] = kept[name]


def test_both_attentions_learn_the_same(ex: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "losses.json"
    runs = ex.train.main(["--small", "--steps", "25", "--batch", "4", "--rate", "3e-3", "--out", str(out),
                          "--plot", str(tmp_path / "own.svg")])  # fmt: skip
    text = capsys.readouterr().out
    assert [run.attention for run in runs] == ["omniattn", "sdpa"]
    ours, theirs = (np.array(run.losses) for run in runs)
    assert np.abs(ours - theirs).max() <= 1e-3
    assert ours[0] == pytest.approx(np.log(256), abs=0.1)
    assert ours[-5:].mean() < ours[0] - 1
    assert all(run.tokens_per_second > 0 for run in runs)
    assert "losses differ by 0.000" in text
    report = json.loads(out.read_text(encoding="utf-8"))
    assert out.read_text(encoding="utf-8") == document.to_json(report) + "\n"
    assert (report["schema"], report["bench"], report["environment"]["device"]) == (1, "train_lm", "CPU")
    assert [row["last_loss"] for row in report["rows"]] == [run.losses[-1] for run in runs]
    assert report["runs"][0]["losses"] == runs[0].losses
    ex.plot.main([str(out), str(tmp_path / "losses.svg")])
    figure = (tmp_path / "losses.svg").read_text(encoding="utf-8")
    assert figure == (tmp_path / "own.svg").read_text(encoding="utf-8")
    assert figure.count("<polyline") == 2
    page = backward_tables.training(report)
    assert f"| `omniattn.attention` | {ours[0]:.4f} | {ours[-1]:.4f} |" in page
    assert "Losses differ by 0.000" in page
    assert "omniattn" in figure
    assert "sdpa" in figure


def test_two_processes_share_sequences(tmp_path: Path) -> None:
    """The losses of one process, by torch's context_parallel."""
    said = in_two_processes(CHILD, tmp_path)
    for rank in (0, 1):
        assert f"rank {rank}: --context: expected a length divisible by 4, for 2 devices, received 50" in said
    assert said.count("losses differ by 0.000") == 2


def test_two_processes_share_weights(tmp_path: Path) -> None:
    """The losses of one process, by FSDP2."""
    said = in_two_processes(FSDP_CHILD, tmp_path)
    for rank in (0, 1):
        assert f"rank {rank}: --batch: expected a number divisible by 2, for 2 devices, received 3" in said
    assert said.count("losses differ by 0.000") == 2
    assert said.count("2 processes loss") == 2


def test_table_of_several_gpus() -> None:
    runs = [{"attention": "1 GPU", "losses": [5.5, 3.0]}, {"attention": "2 GPUs", "losses": [5.5, 3.01]}]
    rows = [{"attention": run["attention"], "first_loss": 5.5, "last_loss": run["losses"][-1],
             "tokens_per_second": speed} for run, speed in zip(runs, (100e3, 170e3), strict=True)]  # fmt: skip
    report = {"rows": rows, "runs": runs, "config": {"context": 4096}, "tolerance": 0.02, "batch": 4,
              "environment": {"device": "NVIDIA Test"}, "date": "2026-01-02", "protocol": "training",
              "command": "python examples/train_lm/parallel.py"}  # fmt: skip
    page = context_parallel_tables.training(report)
    assert "| 2 GPUs | 5.5000 | 3.0100 | 170,000 | 1.70× |" in page
    assert "Context 4096, 2 steps: losses differ by 0.0100 at most; 0.02 is allowed." in page


def test_a_file_that_cannot_be_written_is_found_first(ex: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ex.train.main(["--small", "--plot", "no/such/folder/losses.svg"])
    assert "--plot: expected a file in an existing folder" in capsys.readouterr().err


def test_gradients_of_the_whole_model(ex: Any) -> None:
    """In float64, the same for both attentions."""
    made = []
    tokens = torch.from_numpy(ex.text.batches(ex.text.read_text(most=1 << 16), 1, 2, 32, 0))[0]
    for attention in (ex.model.by_omniattn, ex.model.by_sdpa):
        torch.manual_seed(1)
        model = ex.model.Gpt(ex.train.SMALL, attention).double()
        torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        made.append([weights.grad for weights in model.parameters()])
    for a, b in zip(*made, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()


def test_text_and_batches(ex: Any, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("abc", encoding="utf-8")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "b.py").write_text("xyz", encoding="utf-8")
    (tmp_path / "c.py").write_text("def", encoding="utf-8")
    text = ex.text.read_text(tmp_path)
    assert text.tobytes() == b"abc\ndef"
    assert ex.text.read_text(tmp_path, most=2).tobytes() == b"ab"
    one, again = (ex.text.batches(text, 3, 2, 4, 5) for _ in range(2))
    assert one.shape == (3, 2, 5)
    assert np.array_equal(one, again)
    assert all(bytes(row.tolist()) in text.tobytes() for row in one.reshape(-1, 5))
    with pytest.raises(ValueError, match="too short"):
        ex.text.batches(text, 1, 1, 7, 0)
    with pytest.raises(FileNotFoundError):
        ex.text.read_text(tmp_path / "nowhere")


def test_learning_rates(ex: Any) -> None:
    rates = [ex.train.rate(step, 100, 1.0) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_forwards_in_8_bits(ex: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Trained from the same seed as exactly, and compared with that."""
    monkeypatch.setattr(ex.precisions, "SMALL", ex.train.SMALL)
    out, drawn = tmp_path / "losses.json", tmp_path / "losses.svg"
    report = ex.precisions.main(["--small", "--steps", "20", "--out", str(out), "--plot", str(drawn)])
    assert out.read_text(encoding="utf-8") == document.to_json(report) + "\n"
    rows = {row["attention"]: row for row in report["rows"]}
    assert list(rows) == list(ex.precisions.NAMES)
    assert list(rows)[:4] == ["omniattn", "sdpa", "int8", "fp8"]
    assert (rows["omniattn"]["cost"], rows["omniattn"]["cost_deviation"]) == (0.0, 0.0)
    assert abs(rows["sdpa"]["cost"]) < 1e-3
    losses = {run["attention"]: np.array(run["losses"]) for run in report["runs"]}
    for name in ex.precisions.NAMES[2:]:
        apart = losses[name] - losses["omniattn"]
        assert 0 < np.abs(apart).max() < 0.1
        assert rows[name]["cost"] == pytest.approx(apart[-2:].mean())
        assert rows[name]["cost_deviation"] == pytest.approx(apart[-2:].std())
        assert losses[name][-1] < losses[name][0] - 0.5
    figure = drawn.read_text(encoding="utf-8")
    assert figure.count("<polyline") == 5
    assert ">fp8_exact_gradients</text>" in figure
    assert "minus that of omniattn, mean of 2 steps" in figure
    assert "beside omniattn" in capsys.readouterr().out
    page = backward_tables.precisions(report)
    assert f"| {rows['int8']['last_tenth_loss']:.4f} | {rows['int8']['cost']:+.4f} |" in page
    assert "20 steps" in page
    less = {**report, "runs": report["runs"][:2]}
    out.write_text(document.to_json(less), encoding="utf-8")
    again = ex.precisions.main(["--small", "--steps", "20", "--resume", str(out)])
    assert [run["losses"] for run in again["runs"]] == [run["losses"] for run in report["runs"]]
    assert again["runs"][1] == report["runs"][1]
    for options in (["--steps", "21"], ["--steps", "20", "--seed", "1"]):
        with pytest.raises(SystemExit):
            ex.precisions.main(["--small", "--resume", str(out), *options])
        assert "--resume: ValueError: expected" in capsys.readouterr().err


def test_gradients_of_8_bits_are_exact_ones(ex: Any) -> None:
    """Straight through: at the first step they differ from exact ones by what the forward's errors make of them."""
    q, k, v = (torch.randn(2, 40, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    made = {}
    for name in ("omniattn", "int8", "fp8", "fp8_exact_gradients"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = ex.model.ATTENTIONS[name](*leaves)
        made[name] = [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]
    for name in ("int8", "fp8"):
        for a, b in zip(made[name], made["omniattn"], strict=True):
            assert 0 < (a - b).norm() < 0.1 * b.norm()
    low, exact, both = made["fp8"], made["omniattn"], made["fp8_exact_gradients"]
    torch.testing.assert_close(both[0], low[0])
    assert all(torch.equal(a, b) for a, b in zip(both[1:], exact[1:], strict=True))


def test_speeds_by_length(ex: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    report = ex.speed.main(["--small", "--context", "16", "32", "--tokens", "64", "--out", str(out)])
    assert out.read_text(encoding="utf-8") == document.to_json(report) + "\n"
    assert [(row["context"], row["attention"], row["batch"]) for row in report["rows"]] == [
        (16, "omniattn", 4), (16, "sdpa", 4), (32, "omniattn", 2), (32, "sdpa", 2),
    ]  # fmt: skip
    assert all(row["tokens_per_second"] > 0 and row["peak_gib"] is None for row in report["rows"])
    for ours, theirs in (report["rows"][:2], report["rows"][2:]):
        assert ours["last_loss"] == pytest.approx(theirs["last_loss"], abs=1e-3)
    assert "s16     omniattn" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        ex.speed.main(["--small", "--context", "48", "--tokens", "64"])
    assert "--tokens: expected a multiple of each --context" in capsys.readouterr().err


def test_a_compiled_model_learns_the_same(ex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By dynamo and autograd's graphs; the code generator of torch needs a compiler."""
    compiled, compile_ = [], torch.compile

    def compiled_by(model: Any) -> Any:
        compiled.append(model)
        return compile_(model, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", compiled_by)
    how = {"steps": 4, "batch": 2, "device": "cpu", "highest": 3e-3, "seed": 0}
    plain, made = (ex.train.train("omniattn", ex.train.SMALL, **how, by_compiler=by) for by in (False, True))
    assert len(compiled) == 1
    assert made.losses == pytest.approx(plain.losses, abs=1e-5)


def test_flash_attention_4_is_refused_by_name(
    ex: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU; where it is not installed; and its function is called where it is."""
    for program in (ex.train, ex.speed):
        with pytest.raises(SystemExit):
            program.main(["--small", "--attention", "fa4"])
        assert "--attention fa4: expected a GPU, received --small" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    ex.model.fa4_function.cache_clear()
    for program in (ex.train, ex.speed):
        with pytest.raises(SystemExit):
            program.main(["--attention", "omniattn", "fa4"])
        said = capsys.readouterr().err
        assert "--attention fa4: expected flash_attn.cute with flash_attn_func (pip install flash-attn-4)" in said
        assert "ModuleNotFoundError" in said
    q = torch.randn(1, 4, 2, 8)

    def flash_attn_func(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
        return ex.model.by_sdpa(q, k, v), "lse" if causal else None

    there = SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=there))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", there)
    try:
        assert torch.equal(ex.model.by_fa4(q, q, q), ex.model.by_sdpa(q, q, q))
    finally:
        ex.model.fa4_function.cache_clear()


def test_processes_on_the_cpu_need_fsdp(ex: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(FOLDER))
    modules = {name: getattr(ex, name) for name in MODULES}
    try:
        sys.modules.update(modules)
        parallel = importlib.import_module("parallel")
        with pytest.raises(SystemExit):
            parallel.main(["--small"])
    finally:
        sys.path.remove(str(FOLDER))
        for name in (*MODULES, "parallel"):
            sys.modules.pop(name, None)
    assert "--small: expected --fsdp with it" in capsys.readouterr().err
