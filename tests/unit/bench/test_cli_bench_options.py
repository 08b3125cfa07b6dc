"""``omniattn bench options``: cases and what is called for them, checks, marks, forms; on the CPU."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

import omniattn
from build_tools import option_tables
from omniattn.bench import Timing, option_cases, options, sustained
from omniattn.bench.attempt import ERROR_LIMITS
from omniattn.bench.ceilings import Ceilings
from omniattn.bench.option_cases import CASES, MASKS, OPTION_SHAPES, PLAIN, Case, Extents, OptionShape, chosen
from omniattn.bench.option_contenders import MATH, OTHERS, OURS, PLAIN_CALL, Other, UnfitError, flex, ours, sdpa
from omniattn.bench.option_problem import InputSet, Problem, Result
from omniattn.bench.option_report import (
    BELOW_BEST,
    BELOW_PLAIN,
    ERROR,
    UNSUPPORTED,
    CaseResult,
    Entry,
    OptionReport,
)
from omniattn.cli import main
from tests.unit.bench.bench_fakes import CpuTorch, WallClock

SHAPE = OptionShape(4, 4, 48, 32)


def small(case: Case) -> Case:
    """The case with lengths that suit `SHAPE`; of fewer keys the largest scores are smaller, and softcap does less."""
    changes: dict[str, Any] = {"gain": 2 * case.gain if case.score else case.gain}
    if "window" in case.options:
        changes["options"] = {**case.options, "window": (11, 0)}
    if case.seqlen_q is not None:
        changes.update(seqlen_q=5, seqlen_k=80)
    if case.blocks:
        changes.update(seqlen_q=128, seqlen_k=128)
    return dataclasses.replace(case, **changes)


SMALL = tuple(map(small, CASES))
NAMES = [case.name for case in CASES]


class OptionsTorch(CpuTorch):
    """torch that compiles nothing."""

    compiler = type("Compiler", (), {"reset": staticmethod(lambda: None)})()

    @staticmethod
    def compile(call: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return call


@pytest.fixture
def plain_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention runs as it is written, where this torch can."""
    module = pytest.importorskip("torch.nn.attention.flex_attention", reason="could not import 'torch'")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, plain_flex: None) -> None:
    monkeypatch.setattr(options, "require_torch", OptionsTorch)
    monkeypatch.setattr(sustained, "TorchClock", WallClock)
    monkeypatch.setattr(options, "measure_ceilings", lambda *_: Ceilings(100.0, 2.0))
    monkeypatch.setattr(option_cases, "CASES", SMALL)
    monkeypatch.setattr(option_cases, "OPTION_SHAPES", (SHAPE, dataclasses.replace(SHAPE, head_dim=40, only=(PLAIN,))))


# The table of data


def test_names_are_the_cases() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert NAMES[0] == PLAIN
    for shape in OPTION_SHAPES:
        assert set(shape.only) <= set(NAMES)
        assert shape.cases()[0].name == PLAIN
    assert {case.mask for case in CASES} == {"", *MASKS}


@pytest.mark.parametrize("case", SMALL, ids=NAMES)
def test_pairs_are_those_that_are_seen(case: Case) -> None:
    e = Extents.of(case, SHAPE)
    left, right = case.bounds
    seen = 0
    for query in range(e.seqlen_q):
        own = query + e.seqlen_k - e.seqlen_q
        seen += sum((left < 0 or j >= own - left) and (right < 0 or j <= own + right) for j in range(e.seqlen_k))
    share = (48 + 43 + 36 + 24) / (4 * 48) if "padding" in case.mask else 0.5 if case.mask == "half" else 1.0
    share = 0.5 if case.blocks else 1 / 8 if case.documents else share
    assert e.pairs == pytest.approx(seen * 16 * share)
    assert e.flops == 4 * e.pairs * 32
    assert (case.counted == option_cases.ALL) == (share == 1.0 and case.bounds == (-1, -1))


def test_what_is_chosen() -> None:
    assert chosen([], []) == {shape: shape.cases() for shape in OPTION_SHAPES}
    found = chosen(["d128", "d96"], ["SOFTCAP"])
    assert {shape.head_dim: [case.name for case in cases] for shape, cases in found.items()} == {
        128: [PLAIN, "softcap 50", "softcap 50, causal", "packed, softcap 50"]
    }
    assert [case.name for case in chosen(["d40"], ["plain"])[OPTION_SHAPES[-1]]] == [PLAIN]


# What contenders are given


def seen_call(monkeypatch: pytest.MonkeyPatch, case: Case) -> tuple[str, tuple[Any, ...], dict[str, Any], Problem]:
    """Name, arrays and options of this package's call for a case."""
    found: list[Any] = []

    def recorded(name: str, real: Any) -> Any:
        def record(*arrays: Any, **given: Any) -> Any:
            found.append((name, arrays, given))
            return real(*arrays, **given)

        return record

    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(omniattn, name, recorded(name, getattr(omniattn, name)))
    problem = Problem(OptionsTorch(), case, SHAPE)
    ours(problem, "exact")(problem.check)
    ((name, arrays, given),) = found
    return name, arrays, given, problem


@pytest.mark.frameworks
@pytest.mark.parametrize("case", SMALL, ids=NAMES)
def test_arguments_are_what_the_table_says(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    name, (q, k, v), given, problem = seen_call(monkeypatch, case)
    e = problem.extents
    assert name == ("attention_varlen" if case.packed else "attention")
    expected = {"precision": "exact", **case.options}
    if case.packed:
        starts = [b * e.seqlen_q for b in range(5)]
        assert given.pop("cu_seqlens_q").tolist() == given.pop("cu_seqlens_k").tolist() == starts
        expected.update(max_seqlen_q=48, max_seqlen_k=48)
    assert (given.get("mask") is not None) == bool(case.mask)
    assert (given.get("sinks") is not None) == case.sinks
    if case.scale != 1.0:
        expected["softmax_scale"] = pytest.approx(case.scale / math.sqrt(32))
    mask, _ = given.pop("mask", None), given.pop("sinks", None)
    mod = given.pop("score_mod", None)
    assert (case.expression, case.mask_expression) == (("", "") if mod is None else (mod.expression, mod.mask or ""))
    if case.blocks:
        assert given.pop("block_mask").shape == (2, 2)
        expected["block_size"] = (64, 64)
    if case.dropout:
        expected |= {"dropout_p": 0.1, "dropout_rng": option_cases.DROPOUT_RNG}
    assert given == expected
    lead = (4 * e.seqlen_q,) if case.packed else (4, e.seqlen_q)
    assert q.shape == (*lead, 4, 32)
    assert k.shape == v.shape == ((4 * e.seqlen_k,) if case.packed else (4, e.seqlen_k)) + (4 // case.group, 32)
    assert q.dtype == torch.bfloat16
    repeats = [case.expanded == of for of in ("batch", "heads")]
    assert [[x.stride(axis) == 0 for axis in (0, -2)] for x in (k, v)] == [repeats, repeats]
    if mask is not None:
        kind = MASKS[case.mask]
        sizes = zip("bhqk", (4, 4, e.seqlen_q, e.seqlen_k), strict=True)
        assert mask.shape == tuple(n if letter in kind.extents else 1 for letter, n in sizes)
        assert mask.dtype == {"bool": torch.bool, "fp32": torch.float32, "q": torch.bfloat16}[kind.values]
        if kind.contents == "padding":
            visible = mask if kind.values == "bool" else mask == 0
            assert visible.sum(dim=-1).flatten().tolist() == option_cases.lengths(4, 48)
        if kind.contents == "half":
            blocks = mask[0, 0].unfold(0, 3, 3).unfold(1, 3, 3).flatten(2).any(dim=-1)
            assert blocks.sum(dim=-1).max() == 8  # a block of nine may be empty by chance
        elif kind.contents == "random" and kind.values == "bool":
            assert 0.4 < float(mask.float().mean()) < 0.6


@pytest.mark.frameworks
@pytest.mark.parametrize("case", SMALL, ids=NAMES)
def test_others_compute_the_same(case: Case, plain_flex: None) -> None:
    pytest.importorskip("torch")
    problem = Problem(OptionsTorch(), case, SHAPE)
    own = ours(problem, "exact")(problem.check)
    error, lse = problem.errors(own)
    assert error < 0.01
    assert (lse is None) == (not case.options.get("return_lse"))
    assert lse is None or lse < 1e-3
    assert problem.errors(Result(own.o.roll(1, 1)))[0] > 0.1
    for build in (sdpa("MATH"), flex):
        if case.dropout or (build is not flex and (case.score is not None or case.sinks)):
            with pytest.raises(UnfitError):
                build(problem)
            continue
        result = build(problem)(problem.check)
        assert problem.errors(result)[0] < 0.01
        difference = (result.o.float() - own.o.float()).abs().sum() / own.o.float().abs().sum()
        assert float(difference) < 0.01


@pytest.mark.frameworks
@pytest.mark.parametrize("case", [case for case in SMALL if case.score or case.sinks or case.mask or case.bounds[1] == 0
                                  or case.scale != 1.0 or case.dropout], ids=lambda case: case.name)  # fmt: skip
def test_an_option_that_is_left_out_is_found(case: Case) -> None:
    pytest.importorskip("torch")
    problem = Problem(OptionsTorch(), case, SHAPE)
    bare = Problem(OptionsTorch(), Case(PLAIN, packed=case.packed), SHAPE)
    assert problem.errors(ours(bare, "exact")(problem.check))[0] > ERROR_LIMITS["exact"]


@pytest.mark.frameworks
@pytest.mark.parametrize("p", [0.001, 0.999])
def test_the_reference_rounds_shares_of_dropout_as_calls_do(p: float) -> None:
    """To 1/256 and 255/256: never to nothing, or to all."""
    pytest.importorskip("torch")
    problem = Problem(OptionsTorch(), Case("dropout", dropout=p), SHAPE)
    assert problem.errors(ours(problem, "exact")(problem.check))[0] < 0.01


# A run


@pytest.mark.frameworks
def test_every_case_is_run_and_compared(on_the_cpu: None) -> None:
    report = options.run_options(chosen([], []), precision="exact", iters=1, use_flex=False)
    assert [result.case.name for result in report.results] == [*NAMES, PLAIN]
    for result in report.results:
        found = {entry.contender: entry for entry in result.entries}
        assert (PLAIN_CALL in found) == (result.case.name != PLAIN)
        assert found[OURS].timing is not None, found[OURS].reason
        assert found["cudnn"].timing is None
        assert found["cudnn"].reason
        ran = [key for key, entry in found.items() if key not in (OURS, PLAIN_CALL) and entry.timing is not None]
        # The math backend is a fallback; nothing but FlexAttention has softcap and sinks. Each drops what it draws.
        alone = result.case.score is not None or result.case.sinks or result.case.dropout > 0
        assert bool(ran) != alone
        assert MATH not in ran or ran == [MATH]
        assert all(found[key].difference is not None for key in ran)
        assert result.best == (min(ran, key=lambda key: result.us(key) or 0.0) if ran else None)
    assert report.missing == {"flex": "left out by --no-flex"}


@pytest.mark.frameworks
def test_a_wrong_contender_and_one_that_raises_are_shown(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")

    def raises(problem: Problem) -> Any:
        raise RuntimeError("no kernel\nand more lines")

    def wrong_row(problem: Problem) -> Any:
        right = sdpa("MATH")(problem)

        def forward(inputs: InputSet) -> Result:
            o = right(inputs).o.clone()
            o[1, 7] += 40.0  # neither of the heads whose rows are sampled
            return Result(o)

        return forward

    def nan(problem: Problem) -> Any:
        return lambda inputs: Result(inputs.nhd[0] * float("nan"))

    others = (Other("cudnn", "A", raises), Other("fa2", "B", wrong_row), Other("efficient", "C", nan), OTHERS[-1])
    monkeypatch.setattr(options, "OTHERS", others)
    assert main(["bench", "options", "--shapes", "d40", "--iters", "1"]) == 0
    output = capsys.readouterr().out
    assert "A, plain, d40 b4 h4 s48: RuntimeError: no kernel\n" in output
    assert "B, plain, d40 b4 h4 s48: wrong result: relative L1 " in output
    assert " from omniattn, limit 0.04" in output
    assert "C, plain, d40 b4 h4 s48: wrong result: relative L1 nan against fp64" in output
    assert "torch math" in output


@pytest.mark.frameworks
@pytest.mark.parametrize("fault", ["wrong", "unsupported", "argument", "other"])
def test_own_faults_are_rows(
    fault: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = omniattn.attention

    def attention(*arrays: Any, **given: Any) -> Any:
        if "sinks" not in given:
            return right(*arrays, **given)
        if fault == "unsupported":
            raise omniattn.errors.UnsupportedError("no sinks")
        if fault == "argument":
            raise omniattn.errors.ArgumentError("sinks", "none", "some")
        if fault == "other":
            raise TypeError("a fault")
        del given["sinks"]
        return right(*arrays, **given)

    monkeypatch.setattr(omniattn, "attention", attention)
    command = ["bench", "options", "--case", "sinks", "--no-flex", "--iters", "1", "--json"]
    if fault == "other":
        with pytest.raises(TypeError, match="a fault"):
            main(command)
        return
    assert main(command) == (0 if fault == "unsupported" else 1)
    rows = json.loads(capsys.readouterr().out)["rows"]
    row = next(row for row in rows if row["case"] == "sinks" and row["contender"] == OURS)
    assert row["median_us"] is row["tflops"] is row["ratio_to_plain"] is None
    assert row["marks"] == (UNSUPPORTED if fault == "unsupported" else ERROR)
    assert row["reason"].startswith({"wrong": "wrong result", "unsupported": "Unsupp", "argument": "Argument"}[fault])


@pytest.mark.frameworks
@pytest.mark.parametrize("form", ["--markdown", "--json", ""])
def test_forms(
    form: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    path = tmp_path / "options.json"
    command = ["bench", "options", "--case", "causal", "--no-flex", "--iters", "2", "--out", str(path), *form.split()]
    assert main(command) == 0
    output = capsys.readouterr().out
    data = json.loads(path.read_text(encoding="utf-8"))
    head = {"schema": 1, "bench": "options", "protocol": "interleaved", "precision": "exact"}
    assert head.items() <= data.items()
    assert len(data["samples"]) == len(data["rows"])
    if form == "--json":
        assert json.loads(output) == data
        return
    for words in ("d32 b4 h4 s48", "packed, causal", "visible, 0.51", "not run: FlexAttention: left out", "below 0.8"):
        assert words in output


@pytest.mark.frameworks
def test_a_low_precision_is_compared_with_itself(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    right = omniattn.attention

    def attention(*arrays: Any, precision: str, **given: Any) -> Any:
        seen.append(precision)
        return right(*arrays, precision=precision, **given)

    monkeypatch.setattr(omniattn, "attention", attention)
    report = options.run_options(chosen(["d32"], ["padding"]), precision="int8", iters=1, use_flex=False)
    assert report.to_dict()["precision"] == "int8"
    assert set(seen) == {"int8"}
    assert all(result.us(OURS) is not None and result.best is not None for result in report.results)


# Arithmetic

BIG = OPTION_SHAPES[0]


def result_of(case: Case, own: float | None, plain: float | None, **others: float | None) -> CaseResult:
    times = {OURS: own, **({} if case.name == PLAIN else {PLAIN_CALL: plain}), **others}
    entries = (Entry(key, us and Timing((us,)), reason="" if us else "why") for key, us in times.items())
    return CaseResult(BIG, case, tuple(entries))


def test_ratios_are_per_pair_that_counts() -> None:
    by_name = {case.name: case for case in CASES}
    half = result_of(by_name["mask, bool (1,1,s,s), half of the blocks empty"], 800.0, 1000.0, cudnn=1600.0, flex=600.0)
    assert half.share == 0.5
    assert half.over_plain == pytest.approx(0.625)
    assert (half.best, half.over_best) == ("flex", pytest.approx(0.75))
    assert half.marks == [BELOW_PLAIN, BELOW_BEST]
    assert half.tflops(OURS) == pytest.approx(4 * 64 * 4096**2 * 128 * 0.5 / 800e-6 * 1e-12)
    assert half.tflops(PLAIN_CALL) == pytest.approx(4 * 64 * 4096**2 * 128 / 1000e-6 * 1e-12)
    few = result_of(by_name["128 queries on 32768 keys"], 250.0, 1000.0)
    assert few.over_plain == pytest.approx(1.0)
    assert few.best is few.over_best is None
    assert few.marks == []
    assert result_of(by_name[PLAIN], 10.0, None).over_plain == 1.0


@pytest.mark.parametrize(
    ("own", "plain", "best", "marks"),
    [
        (100.0, 80.0, 95.0, []),
        (100.0, 79.9, 95.0, [BELOW_PLAIN]),
        (100.0, 80.0, 94.9, [BELOW_BEST]),
        (100.0, 50.0, 50.0, [BELOW_PLAIN, BELOW_BEST]),
        (100.0, None, None, []),
        (None, 80.0, 95.0, [ERROR]),
    ],
)
def test_marks(own: float | None, plain: float | None, best: float | None, marks: list[str]) -> None:
    result = result_of(next(case for case in CASES if case.name == "softcap 50"), own, plain, flex=best)
    assert result.marks == marks
    assert result.failed == (own is None)


def test_tables() -> None:
    by_name = {case.name: case for case in CASES}
    results = (
        result_of(by_name[PLAIN], 1000.0, None, cudnn=1200.0),
        result_of(by_name["causal"], 800.0, 1000.0, cudnn=400.0),
        result_of(by_name["sinks"], None, 1000.0, flex=900.0),
    )
    facts = {"device": "TEST", "date": "2000-01-01", "driver": "1"}
    report = OptionReport("exact", facts, 800.0, 4.0, results, {"cudnn": "cuDNN", "flex": "FlexAttention"},
                          {"flex": "left out"}, "omniattn bench options")  # fmt: skip
    header, (plain, causal, sinks) = report.table()
    assert len(header) == len(plain) == 10
    assert plain[1:] == [PLAIN, "1000.0 ±0.0%", "550", "all", "1.00×", "cuDNN", "1200.0", "1.20×", ""]
    assert causal[4:] == ["visible, 0.50", "0.63×", "cuDNN", "400.0", "0.50×", "below plain, below best"]
    assert sinks[2:] == ["–", "–", "all", "–", "FlexAttention", "900.0", "–", "error"]
    assert report.notes() == ["not run: FlexAttention: left out", "omniattn, sinks, d128 b4 h16 s4096: why"]
    page = option_tables.options(json.loads(report.to_json()))
    assert f"| d128 b4 h16 s4096 | {PLAIN} | 1000.0 | 550 | all | 1.00× | cuDNN | 1200.0 | 1.20× |  |" in page
    assert "| 344 | visible, 0.50 | 0.63× | cuDNN | 400.0 | 0.50× | below plain, below best |" in page
    assert "| sinks | – | – | all | – | FlexAttention | 900.0 | – | error |" in page
    assert "Not run: FlexAttention." in page
    assert "contenders interleaved, medians. Measured by `omniattn bench options`" in " ".join(page.split())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("options --shapes d129", "'--shapes': expected words out of b4, d128"),
        ("options --shapes causal", "--shapes"),
        ("options --case nothing", "--case"),
        ("options --shapes d40 --case softcap", "'--case': expected a case of one of the chosen shapes"),
        ("options --anchor fa2", "--anchor"),
        ("options --only fa2", "--only"),
        ("options --plot x.png", "--plot"),
        ("options --sustained 1", "--sustained"),
        ("options --format int4", "--format"),
        ("options --iters 0", "--iters"),
        ("decode --no-flex", "--no-flex"),
        ("forward --case causal", "--case"),
    ],
)
def test_options_that_do_not_fit(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *command.split()]) == 2
    assert words in capsys.readouterr().err
