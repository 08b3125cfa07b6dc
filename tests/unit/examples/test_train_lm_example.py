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
MODULES = ("model", "text", "train", "plot")


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
    for attention in ex.model.ATTENTIONS.values():
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
