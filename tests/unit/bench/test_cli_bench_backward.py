"""``omniattn bench backward``: shapes, checks of gradients, what is called, reports and pages; on the CPU."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import pytest

import omniattn
from build_tools import backward_tables
from omniattn.bench import Timing, backward, backward_cases, backward_contenders, backward_problem, sustained
from omniattn.bench.backward_cases import BACKWARD_SHAPES, BackwardShape, filter_backward, lognormal_lengths
from omniattn.bench.backward_contenders import DENSE, DETERMINISTIC, FA2, LAYOUTS, LIBRARIES, OURS, Library, sdpa
from omniattn.bench.backward_problem import BackwardProblem
from omniattn.bench.backward_report import BACKWARD, BOTH, BackwardEntry, BackwardReport, BackwardResult
from omniattn.bench.ceilings import Ceilings
from omniattn.cli import main
from omniattn.registry import by_name
from omniattn.runtime import env
from tests.unit.bench.bench_fakes import CpuTorch, WallClock

SMALL = (
    BackwardShape(4, 32, (48, 48), False),
    BackwardShape(4, 32, (40, 40), True, group=2),
    BackwardShape(4, 32, (17, 5, 70, 2), True, packed=True),
    BackwardShape(2, 32, (80,), True, window=11),
    BackwardShape(2, 32, (48,), False, softcap=5.0),
    BackwardShape(2, 32, (48,), True, generic=True),
)


def math_alone(shape: BackwardShape) -> tuple[str, ...]:
    """Layouts of what torch can do without a GPU."""
    return () if shape.softcap or shape.window or shape.packed else LAYOUTS


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(backward, "require_torch", CpuTorch)
    monkeypatch.setattr(sustained, "TorchClock", WallClock)
    monkeypatch.setattr(backward, "measure_ceilings", lambda *_: Ceilings(100.0, 2.0))
    monkeypatch.setattr(backward_cases, "BACKWARD_SHAPES", SMALL)
    # Several blocks of queries and of heads.
    monkeypatch.setattr(backward_problem, "_SCORES", 3000)
    names = {library.key: library.label for library in LIBRARIES}
    libraries = (Library("cudnn", names["cudnn"], sdpa("MATH"), math_alone),
                 Library("fa2", names["fa2"], sdpa("MATH"), math_alone))  # fmt: skip
    monkeypatch.setattr(backward_contenders, "LIBRARIES", libraries)


# Shapes


def test_shapes_are_those_that_are_asked_for() -> None:
    names = [shape.long_name for shape in BACKWARD_SHAPES]
    assert len(set(names)) == len(names)
    assert sum(shape.plain for shape in BACKWARD_SHAPES) == 18
    assert {shape.tokens for shape in BACKWARD_SHAPES if not shape.short} == {16384}
    for name in ("d128 b4 h32/8 s4096 causal", "d128 b16 h16 packed full", "d128 b1 h16 s16384 causal window1024",
                 "d128 b4 h16 s4096 full softcap50", "d64 b256 h16 s128 causal",
                 "d64 b1 h12 s577 full", "d256 b4 h8 s4096 causal generic"):  # fmt: skip
        assert name in names
    assert {shape.head_dim for shape in BACKWARD_SHAPES if shape.generic} == {64, 128, 256}
    assert [shape.long_name for shape in filter_backward(["generic d64 full"])] == ["d64 b4 h32 s4096 full generic"]
    assert {(s.head_dim, s.seqlen) for s in BACKWARD_SHAPES if s.plain} == set(backward_tables.GOALS)


@pytest.mark.parametrize("shape", [*SMALL, BackwardShape(2, 8, (5, 30), True, window=9, packed=True)])
def test_pairs_are_those_that_are_seen(shape: BackwardShape) -> None:
    seen = sum(
        (not shape.causal or j <= i) and (not shape.window or j > i - shape.window)
        for n in shape.lengths
        for i in range(n)
        for j in range(n)
    )
    assert shape.pairs == seen * shape.heads
    assert shape.flops == 2.5 * shape.forward_flops == 10 * shape.pairs * shape.head_dim


def test_lengths_of_packed_sequences() -> None:
    for count, tokens in ((16, 16384), (3, 100), (1, 7)):
        lengths = lognormal_lengths(count, tokens)
        assert len(lengths) == count
        assert sum(lengths) == tokens
        assert min(lengths) >= 1
    lengths = lognormal_lengths(16, 16384)
    assert lengths != tuple(sorted(lengths))
    for shape in BACKWARD_SHAPES:
        if shape.packed:
            twin = shape.dense_twin()
            assert not twin.packed
            assert twin.flops == pytest.approx(shape.flops, rel=0.05)
            assert twin.tokens == shape.tokens


# The check


@pytest.mark.frameworks
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.long_name)
def test_the_reference_is_what_autograd_gives(shape: BackwardShape, on_the_cpu: None) -> None:
    torch = pytest.importorskip("torch")
    problem = BackwardProblem(CpuTorch(), shape, torch.float32)
    leaves = [x.double().requires_grad_() for x in problem.sets[0][:3]]
    flat = [x.reshape(-1, *x.shape[-2:]) for x in leaves]
    parts, first = [], 0
    for n in shape.lengths:
        q, k, v = (x[first : first + n].transpose(0, 1) for x in flat)
        k, v = (x.repeat_interleave(shape.group, 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * shape.head_dim**-0.5
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        hidden = problem.hidden(torch.arange(n)[:, None], torch.arange(n))
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
        first += n
    do = problem.sets[0].do.double().reshape(-1, *problem.sets[0].do.shape[-2:])
    expected = torch.autograd.grad(torch.cat(parts), leaves, do)
    for found, gradient in zip(problem.reference, expected, strict=True):
        assert (found - gradient.reshape(found.shape)).abs().max() <= 2e-5 * gradient.abs().max()
    assert max(problem.errors(expected)) <= 1e-4


@pytest.mark.frameworks
def test_wrong_gradients_are_found(on_the_cpu: None) -> None:
    torch = pytest.importorskip("torch")
    problem = BackwardProblem(CpuTorch(), BackwardShape(2, 16, (2048,), True), torch.float32)
    right = [x.reshape(like.shape).clone() for x, like in zip(problem.reference, problem.sets[0], strict=False)]
    assert problem.errors(tuple(right)) == (0.0, 0.0)
    for name in range(3):
        lost = [x.clone() for x in right]
        lost[name][0, 1984:, 1] = 0
        whole, rows = problem.errors(tuple(lost))
        assert rows >= 0.5
        assert whole <= 0.03
        lost[name][0, 5, 0, 3] = float("nan")
        assert all(error != error for error in problem.errors(tuple(lost)))
    assert problem.errors((right[0][:, :5], *right[1:])) == (float("inf"), float("inf"))


# The run


@pytest.mark.frameworks
def test_every_shape_runs(on_the_cpu: None) -> None:
    before = dict(os.environ)
    report = backward.run_backward(SMALL, iters=2, use_flex=False)
    assert dict(os.environ) == before
    assert not any(result.failed for result in report.results)
    for result in report.results:
        shape = result.shape
        expected = {(OURS, BACKWARD), (OURS, BOTH)}
        expected |= set() if shape.generic else {(DETERMINISTIC, BACKWARD)}
        expected |= {(DENSE, BACKWARD)} if shape.packed else set()
        expected |= {(key, what) for key in ("cudnn", "fa2") for what in (BACKWARD, BOTH) if math_alone(shape)}
        assert {(e.contender, e.what) for e in result.entries} == expected
        assert all(len(e.timing.samples_us) == 2 for e in result.entries if e.timing)
        assert all(e.rows_l1 is not None and e.rows_l1 < 0.02 for e in result.entries)
        assert all(e.timing is not None for e in result.entries)
    rows = report.to_dict()["rows"]
    for name in {row["shape"] for row in rows}:
        of_library = [row for row in rows if (row["shape"], row["contender"], row["what"]) == (name, FA2, BACKWARD)]
        assert {row["layout"] for row in of_library} in ({*LAYOUTS}, set())
        best = [row for row in of_library if row["best_layout"]]
        assert len(best) == (1 if of_library else 0)
        assert all(row["median_us"] >= best[0]["median_us"] for row in of_library)


@pytest.mark.frameworks
def test_what_this_package_is_called_with(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, Any], str | None]] = []

    def recorded(name: str, right: Any) -> Any:
        def call(*arrays: Any, **given: Any) -> Any:
            seen.append((name, given, env.forced_kernels()))
            return right(*arrays, **given)

        return call

    for name in ("attention", "attention_backward", "attention_varlen", "attention_varlen_backward"):
        monkeypatch.setattr(omniattn, name, recorded(name, getattr(omniattn, name)))

    def calls_of(shape: BackwardShape) -> dict[str, tuple[dict[str, Any], str | None]]:
        seen.clear()
        backward.run_backward([shape], iters=1, only=["cudnn"])
        return {name: (given, forced) for name, given, forced in seen}

    full, _, packed, window, softcap, generic = (calls_of(shape) for shape in SMALL)
    given, forced = full["attention_backward"]
    assert {"dq", "dk", "dv", "causal", "deterministic"} == set(given)
    assert forced is None
    assert packed["attention_varlen_backward"][0]["max_seqlen_k"] == 70
    assert packed["attention_varlen"][0]["cu_seqlens_q"].tolist() == [0, 17, 22, 92, 94]
    assert window["attention_backward"][0]["window"] == (10, 0)
    assert softcap["attention_backward"][0]["softcap"] == 5.0
    for name in ("attention", "attention_backward"):
        forced = generic[name][1]
        assert forced is not None
        specs = [by_name(word) for word in forced.split(",")]
        assert {spec.op for spec in specs} == {"attention", "attention_backward"}
        assert not any(spec.arch_specific for spec in specs)
        assert {spec.head_dim for spec in specs if spec.op == "attention_backward"} == {64}


@pytest.mark.frameworks
@pytest.mark.parametrize("fault", ["wrong", "unsupported", "other"])
def test_own_faults_fail_the_command(
    fault: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = omniattn.attention_backward

    def wrong(*arrays: Any, **given: Any) -> Any:
        if fault == "unsupported":
            raise omniattn.errors.UnsupportedError("no gradients")
        if fault == "other":
            raise TypeError("a fault")
        dq, dk, dv = right(*arrays, **given)
        return dq, dk * 1.05, dv

    monkeypatch.setattr(omniattn, "attention_backward", wrong)
    command = ["bench", "backward", "--shapes", "b2 full", "--iters", "1", "--no-flex", "--json"]
    if fault == "other":
        with pytest.raises(TypeError, match="a fault"):
            main(command)
        return
    assert main(command) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    row = next(row for row in rows if (row["contender"], row["what"]) == (OURS, BACKWARD))
    assert row["median_us"] is row["tflops"] is None
    assert row["reason"].startswith("wrong result: relative L1 0.0" if fault == "wrong" else "Unsupp")
    assert any(row["contender"] == FA2 and row["median_us"] for row in rows)


@pytest.mark.frameworks
def test_others_faults_are_notes(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any) -> Any:
        raise RuntimeError("no kernel\nmore")

    libraries = (Library("cudnn", "A", raises, math_alone), *backward_contenders.LIBRARIES[1:])
    monkeypatch.setattr(backward_contenders, "LIBRARIES", libraries)
    report = backward.run_backward(SMALL[:1], iters=1, use_flex=False)
    (result,) = report.results
    assert not result.failed
    assert result.us("cudnn") is result.over("cudnn") is None
    assert result.over(FA2) is not None
    notes = report.notes()
    assert any("NHD, backward, d32 b2 h4 s48 full: RuntimeError: no kernel" in note for note in notes)
    assert not any("more" in note for note in notes)


@pytest.mark.frameworks
@pytest.mark.parametrize("form", ["--markdown", "--json", ""])
def test_forms(
    form: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    path = tmp_path / "backward.json"
    command = ["bench", "backward", "--shapes", "packed", "--shapes", "b2 full", "--iters", "2", "--no-flex",
               "--out", str(path), *form.split()]  # fmt: skip
    assert main(command) == 0
    output = capsys.readouterr().out
    data = json.loads(path.read_text(encoding="utf-8"))
    assert {"schema": 1, "bench": "backward", "protocol": "interleaved"}.items() <= data.items()
    assert len(data["samples"]) == len(data["rows"])
    if form == "--json":
        assert json.loads(output) == data
        return
    for words in (
        "d32 b2 h4 s48 full",
        "over dense",
        "geometric mean",
        "not run: FlexAttention: left out by --no-flex",
    ):
        assert words in output


# Arithmetic and pages


def result_of(shape: BackwardShape, *times: tuple[str, str, str, float | None]) -> BackwardResult:
    """Of (contender, layout, what, microseconds)."""
    entries = (
        BackwardEntry(key, layout, what, Timing((us,)) if us else None, reason="" if us else "why")
        for key, layout, what, us in times
    )
    return BackwardResult(shape, tuple(entries))


def page_report(results: tuple[BackwardResult, ...]) -> BackwardReport:
    facts = {"device": "TEST", "date": "2000-01-01", "driver": "1"}
    missing = {"fa4": "not there", "flex": "left out"}
    return BackwardReport(facts, 800.0, 4.0, results, {"cudnn": "cuDNN"}, missing, "omniattn bench backward")


def test_tables() -> None:
    by_name = {shape.long_name: shape for shape in BACKWARD_SHAPES}
    plain = result_of(
        by_name["d128 b4 h16 s4096 full"],
        (OURS, "NHD", BACKWARD, 2000.0), (OURS, "NHD", BOTH, 3000.0), (DETERMINISTIC, "NHD", BACKWARD, 2500.0),
        ("cudnn", "NHD", BACKWARD, 3000.0), ("cudnn", "HND", BACKWARD, 2600.0), ("cudnn", "HND", BOTH, 3600.0),
        ("fa2", "NHD", BACKWARD, 5000.0), ("fa2", "HND", BACKWARD, None),
        ("fa3", "NHD", BACKWARD, 2200.0),
    )  # fmt: skip
    packed = result_of(
        by_name["d128 b16 h16 packed causal"],
        (OURS, "NHD", BACKWARD, 1000.0), (DENSE, "NHD", BACKWARD, 900.0), ("fa2", "NHD", BACKWARD, 1500.0),
    )  # fmt: skip
    generic = result_of(
        by_name["d256 b4 h8 s4096 causal generic"], (OURS, "NHD", BACKWARD, 3000.0), ("fa2", "HND", BACKWARD, 3600.0)
    )
    assert (plain.us("cudnn"), plain.over("cudnn"), plain.over("fa2")) == (2600.0, 1.3, 2.5)
    assert plain.over(OURS, contender=DETERMINISTIC) == pytest.approx(0.8)
    assert plain.tflops(OURS) == pytest.approx(2.5 * 4 * 64 * 4096**2 * 128 / 2000e-6 * 1e-12)
    assert plain.tflops(OURS, BOTH) == pytest.approx(3.5 * 4 * 64 * 4096**2 * 128 / 3000e-6 * 1e-12)
    assert packed.over(DENSE) == pytest.approx(0.9 * packed.shape.flops / packed.shape.dense_twin().flops)
    assert result_of(plain.shape, (OURS, "NHD", BACKWARD, None)).failed
    report = page_report((plain, packed, generic))
    assert report.mean_over("cudnn") == pytest.approx(1.3)
    _, lines = report.table()
    assert lines[0] == ["d128 b4 h16 s4096 full", "687 ±0.0%", "1.30×", "2.50×", "1.10×", "550 ±0.0%", "0.80×",
                        "–", "641 ±0.0%", "1.20×", "–", "–"]  # fmt: skip
    data = json.loads(report.to_json())
    page = backward_tables.headline(data)
    assert "| d128 b4 h16 s4096 full | 687 | 1.30× (1.20) | 2.50× | 1.10× | 550 | 0.80× (0.85) |" in page
    assert "packed" not in page
    assert "Geometric mean of the ratios to cuDNN: 1.30×." in page
    assert "| d128 b4 h16 s4096 full | 641 | 1.20× | – | – |" in backward_tables.together(data)
    assert "| d128 b16 h16 packed causal | 1000 | 349 | – | 1.50× | – | 0.91× (0.85) | – |" in backward_tables.options(
        data
    )
    assert "| d256 b4 h8 s4096 causal generic | 229 | 1.20× (1.15) | – | – |" in backward_tables.generic(data)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("backward --shapes d129", "'--shapes': expected words out of"),
        ("backward --anchor fa2", "--anchor"),
        ("backward --only efficient", "'--only': expected cudnn, fa2, fa3, fa4 with"),
        ("backward --plot x.png", "--plot"),
        ("backward --sustained 1", "--sustained"),
        ("backward --precision int8", "low precisions have no gradient"),
        ("backward --case causal", "--case"),
        ("backward --format int4", "--format"),
        ("backward --iters 0", "--iters"),
        ("forward --no-flex", "--no-flex"),
    ],
)
def test_options_that_do_not_fit(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *command.split()]) == 2
    assert words in capsys.readouterr().err


def test_layouts_that_are_timed() -> None:
    cudnn, fa2, fa3, fa4, flex = LIBRARIES
    for shape in BACKWARD_SHAPES:
        assert flex.layouts(shape) == (("HND",) if shape.softcap or shape.window else ())
        assert bool(cudnn.layouts(shape)) == (not (shape.softcap or shape.window or shape.generic))
        assert bool(fa2.layouts(shape)) == (not shape.softcap)
        assert fa3.layouts(shape) == fa4.layouts(shape) == (() if shape.generic else ("NHD",))
    assert fa2.layouts(dataclasses.replace(BACKWARD_SHAPES[0], window=5)) == ("NHD",)
