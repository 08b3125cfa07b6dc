"""``omniattn bench few``, ``short``, ``packed``, ``windows``: cases, what contenders are given, checks, marks; CPU."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import omniattn
from omniattn.bench import shape_cases, shape_contenders, shape_runs, sustained
from omniattn.bench.attempt import ERROR_LIMITS
from omniattn.bench.ceilings import Ceilings
from omniattn.bench.option_contenders import OURS, UnfitError
from omniattn.bench.option_problem import Result
from omniattn.bench.option_report import ERROR, UNSUPPORTED
from omniattn.bench.packed_problem import PackedProblem
from omniattn.bench.shape_cases import REFERENCES, SHAPE_CASES, ShapeCase, chosen_cases
from omniattn.bench.shape_contenders import cudnn, fa2, fa4, flex, forced_way, ours, own_call, tensors_of
from omniattn.bench.shape_report import REFERENCE
from omniattn.bench.shapes import ForwardShape
from omniattn.cli import bench as cli_bench
from omniattn.cli import main
from omniattn.errors import ArgumentError, UnsupportedError
from tests.unit.bench.bench_fakes import CpuTorch, WallClock

ALL = [(bench, case) for bench, cases in SHAPE_CASES.items() for case in cases]
NAMES = [f"{bench}, {case.long_name}" for bench, case in ALL]


def small(case: ShapeCase) -> ShapeCase:
    """The case with fewer and shorter sequences, and fewer channels."""

    def shorter(lengths: tuple[int, ...]) -> tuple[int, ...]:
        most = max(max(case.lengths_q), max(case.lengths_k))
        return tuple(max(1, math.ceil(min(n, 70 * n / most))) for n in lengths[:4])

    window = None if case.window is None else (min(case.window[0], 9), min(case.window[1], 9))
    heads = case.group * (2 if case.group < 7 else 1)
    head_dim = max(8, case.head_dim // 64 * 8)
    return dataclasses.replace(
        case, head_dim=head_dim, heads=heads, own_head_dim_v=case.own_head_dim_v // 8, window=window,
        lengths_q=shorter(case.lengths_q), lengths_k=shorter(case.lengths_k), softcap=case.softcap / 25,
    )  # fmt: skip


SMALL = [(bench, small(case)) for bench, case in ALL]


def as_flash(q: Any, k: Any, v: Any, starts: tuple[Any, Any], longest: tuple[int, int], **options: Any) -> Any:
    """What the operators of other libraries compute, by this package."""
    if starts[0] is None:
        return omniattn.attention(q, k, v, **options)
    cu_seqlens = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    longest_q, longest_k = longest
    return omniattn.attention_varlen(q, k, v, **cu_seqlens, max_seqlen_q=longest_q, max_seqlen_k=longest_k, **options)


def flash_operator(
    q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, longest_q: int, longest_k: int, dropout: float, causal: bool,
    debug: bool, *, scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """torch's operator below SDPA."""
    assert (dropout, debug) == (0.0, False)
    window = (-1 if window_size_left is None else window_size_left, -1 if window_size_right is None else
              window_size_right)  # fmt: skip
    options = {"causal": causal, "softmax_scale": scale, "window": window}
    return (as_flash(q, k, v, (starts_q, starts_k), (longest_q, longest_k), **options), None)


class ShapesTorch(CpuTorch):
    """torch that compiles nothing, and whose FlashAttention-2 is this package."""

    compiler = type("Compiler", (), {"reset": staticmethod(lambda: None)})()
    ops = types.SimpleNamespace(aten=types.SimpleNamespace(_flash_attention_forward=flash_operator))

    @staticmethod
    def compile(call: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return call


@pytest.fixture
def others_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's backends are its math backend, FlexAttention runs as it is written."""
    module = pytest.importorskip("torch.nn.attention.flex_attention", reason="could not import 'torch'")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    monkeypatch.setattr(shape_contenders, "_CUDNN", "MATH")
    monkeypatch.setattr(shape_contenders, "_FA2", "MATH")


@pytest.fixture
def flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with FlashAttention-4's signatures."""

    def options_of(causal: bool, window: tuple[int | None, int | None], softcap: float) -> dict[str, Any]:
        left, right = (-1 if n is None else n for n in window)
        return {"causal": causal, "window": (left, right), "softcap": softcap}

    def dense(
        q: Any, k: Any, v: Any, causal: bool = False, window_size: Any = (None, None), softcap: float = 0.0
    ) -> Any:
        return as_flash(q, k, v, (None, None), (0, 0), **options_of(causal, window_size, softcap)), None

    def packed(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        causal: bool = False, window_size: Any = (None, None), softcap: float = 0.0,
    ) -> Any:  # fmt: skip
        starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return as_flash(q, k, v, starts, longest, **options_of(causal, window_size, softcap))

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_func, module.flash_attn_varlen_func = dense, packed  # type: ignore[attr-defined]
    parent = types.ModuleType("flash_attn")
    parent.cute = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", parent)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, others_on_the_cpu: None) -> None:
    monkeypatch.setattr(shape_runs, "require_torch", ShapesTorch)
    monkeypatch.setattr(sustained, "TorchClock", WallClock)
    monkeypatch.setattr(shape_runs, "measure_ceilings", lambda *_: Ceilings(100.0, 2.0))
    cases = {bench: tuple(case for of, case in SMALL if of == bench) for bench in SHAPE_CASES}
    for place in (shape_cases, cli_bench):
        monkeypatch.setattr(place, "SHAPE_CASES", cases)
    tiny = {key: (ForwardShape(1, 1, 8, 8, causal=shape.causal), speed) for key, (shape, speed) in REFERENCES.items()}
    for module in (shape_cases, shape_runs):
        monkeypatch.setattr(module, "REFERENCES", tiny)


# The table of data


def test_names_are_the_cases() -> None:
    for cases in SHAPE_CASES.values():
        names = [case.long_name for case in cases]
        assert len(set(names)) == len(names)
    assert {
        "few, d128 b1 h32/8 sq16 sk32768 full", "few, d128 b1 h32/8 sq512 sk32768 full",
        "few, d128 b1 h16 sq256 sk65536 full", "few, d128 b8 h32/8 sq32 sk8192 full",
        "few, d128 b1 h32/8 sq16 sk32768 full bool-mask", "few, d128 b1 h32/8 sq16 sk32768 full int8",
        "few, d128 b1 h32/8 sq64 sk32768 full int8 operands",
        "short, d128 b16 h16 s1024 causal", "short, d64 b256 h16 s128 full", "short, d64 b2048 h16 s16 causal",
        "short, d64 b1 h12 s577 full", "short, d192/128 b4 h16 s4096 causal",
        "short, d128 b4 h16 s4096 full expanded over batch", "packed, d128 h32/8 packed lognormal causal",
        "packed, d128 h16 packed 33x17-4096 full", "packed, d64 h16 packed 4096x16 causal",
        "windows, d128 b1 h16 s16384 causal window128", "windows, d128 b1 h16 s16384 full window2048/2048",
    } <= set(NAMES)  # fmt: skip


def test_lengths_of_packed_cases_are_what_they_are_called() -> None:
    by_name = {case.packed: case for _, case in ALL if case.packed}
    for name, count, least, most in (
        ("33x17-4096", 33, 17, 4096), ("128x128-256", 128, 128, 256), ("4096x16", 4096, 16, 16),
        ("8192x1-32", 8192, 1, 32), ("8x32on8192", 8, 32, 32),
    ):  # fmt: skip
        found = by_name[name].lengths_q
        assert (len(found), min(found), max(found)) == (count, least, most)
    assert len(set(by_name["33x17-4096"].lengths_q)) == 33
    assert sum(by_name["lognormal"].lengths_q) == 16384
    assert all(len(case.lengths_q) == len(case.lengths_k) for _, case in ALL)
    assert all(len(set(case.lengths_q)) == len(set(case.lengths_k)) == 1 for _, case in ALL if not case.packed)


@pytest.mark.parametrize("case", [case for _, case in SMALL], ids=NAMES)
def test_pairs_and_bytes_are_those_that_are_seen(case: ShapeCase) -> None:
    left, right = case.bounds
    pairs = keys = 0
    for sq, sk in zip(case.lengths_q, case.lengths_k, strict=True):
        seen: set[int] = set()
        for i in range(sk - sq, sk):
            mine = [j for j in range(sk) if (left < 0 or j >= i - left) and (right < 0 or j <= i + right)]
            pairs += len(mine)
            seen.update(mine)
        keys += len(seen)
    # What a padding mask hides counts as bytes: the kernel may read it, and most of it is left.
    share = (70 + 63 + 52 + 35) / (4 * 70) if case.mask == "padding" and len(case.lengths_q) == 4 else 1.0
    assert case.pairs == pytest.approx(pairs * case.heads * share)
    assert case.flops == 2 * case.pairs * (case.head_dim + case.head_dim_v)
    kept = keys * case.heads // case.group
    kept //= {"": 1, "heads": case.heads // case.group, "batch": len(case.lengths_k)}[case.expanded]
    rows, widths = sum(case.lengths_q) * case.heads, case.head_dim + case.head_dim_v
    arrays = 2 * widths * (rows + kept)
    if case.operands:
        arrays = widths * kept + rows * (case.head_dim + 2 * case.head_dim_v)
    sq, sk = case.lengths_q[0], case.lengths_k[0]
    mask = {"": 0, "padding": len(case.lengths_q) * sk, "mixed": sq * sk, "bias_heads": 2 * case.heads * sq * sk}
    assert case.bytes == arrays + mask[case.mask]


def test_what_is_chosen() -> None:
    assert chosen_cases(SHAPE_CASES["few"], [], []) == SHAPE_CASES["few"]
    assert [c.long_name for c in chosen_cases(SHAPE_CASES["windows"], ["d64", "d256"], [])] == [
        "d64 b1 h32 s16384 causal window1024", "d256 b1 h8 s16384 causal window1024"
    ]  # fmt: skip
    assert [c.long_name for c in chosen_cases(SHAPE_CASES["few"], ["sq16"], ["BIAS", "softcap"])] == [
        "d128 b1 h32/8 sq16 sk32768 full bf16-bias", "d128 b1 h32/8 sq16 sk32768 full softcap50"
    ]  # fmt: skip
    with pytest.raises(ArgumentError, match="--case"):
        chosen_cases(SHAPE_CASES["short"], [], ["window"])
    with pytest.raises(ArgumentError, match="--shapes"):
        chosen_cases(SHAPE_CASES["short"], ["d72"], [])


# What contenders are given


@pytest.mark.frameworks
@pytest.mark.parametrize("case", [case for _, case in SMALL], ids=NAMES)
def test_arguments_are_what_the_table_says(case: ShapeCase) -> None:
    torch = pytest.importorskip("torch")
    problem = tensors_of(ShapesTorch(), case)
    call = own_call(problem, case)
    q, k, v = problem.check.nhd
    given = dict(call.options)
    assert call.function is (omniattn.attention_varlen if case.packed else omniattn.attention)
    if case.packed:
        for name, lengths in (("q", case.lengths_q), ("k", case.lengths_k)):
            assert given.pop(f"cu_seqlens_{name}").diff().tolist() == list(lengths)
            assert given.pop(f"max_seqlen_{name}") == max(lengths)
        assert (len(q), len(k), len(v)) == (sum(case.lengths_q), sum(case.lengths_k), sum(case.lengths_k))
    else:
        assert q.shape[:2] == (len(case.lengths_q), case.lengths_q[0])
        assert k.shape[:2] == v.shape[:2] == (len(case.lengths_k), case.lengths_k[0])
    assert (given.pop("mask", None) is not None) == bool(case.mask)
    expected = {"precision": case.precision}
    expected |= {"causal": True} if case.causal else {}
    expected |= {"window": case.window} if case.window else {}
    assert given == expected | ({"softcap": case.softcap} if case.softcap else {})
    assert (q.shape[-2], k.shape[-2], v.shape[-2]) == (case.heads, *[case.heads // case.group] * 2)
    assert (q.shape[-1], k.shape[-1], v.shape[-1]) == (case.head_dim, case.head_dim, case.head_dim_v)
    assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
    assert [k.stride(axis) == 0 for axis in (0, -2)] == [case.expanded == of for of in ("batch", "heads")]


@pytest.mark.frameworks
@pytest.mark.parametrize("case", [case for _, case in SMALL], ids=NAMES)
def test_others_compute_the_same(case: ShapeCase, others_on_the_cpu: None, flash_attention_4: None) -> None:
    pytest.importorskip("torch")
    problem = tensors_of(ShapesTorch(), case)
    own = ours(problem, case)(problem.check)
    assert problem.errors(own)[0] < (0.2 if case.precision != "exact" else 0.01)
    assert problem.errors(Result(own.o.roll(1, -3)))[0] > 0.1 or max(case.lengths_q) == 1
    ran = set()
    for build in (cudnn, fa2, flex, fa4):
        try:
            forward = build(problem, case)
        except UnfitError:
            continue
        ran.add(build.__name__)
        if build is cudnn and case.packed and (case.causal or case.group > 1):
            continue  # on the CPU nested tensors have neither
        assert problem.errors(forward(problem.check))[0] < 0.01
    expected = {"cudnn", "fa2", "flex", "fa4"}
    if case.mask or case.softcap:
        expected -= {"fa2"}
    if case.mask:
        expected -= {"fa4"}
    if case.own_head_dim_v:
        expected -= {"fa2"}
    if case.softcap or (case.packed and (case.window or (case.causal and case.lengths_q != case.lengths_k))):
        expected -= {"cudnn"}
    if case.packed and case.lengths_q != case.lengths_k:
        expected -= {"flex"}
    assert ran == expected


@pytest.mark.frameworks
def test_what_is_not_installed_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    problem = tensors_of(ShapesTorch(), SMALL[0][1])
    with pytest.raises(UnfitError, match="cannot be imported"):
        fa4(problem, SMALL[0][1])
    assert not shape_runs._has_fa4()


@pytest.mark.frameworks
def test_the_check_of_packed_sequences_finds_faults() -> None:
    pytest.importorskip("torch")
    case = next(case for _, case in SMALL if case.packed == "lognormal" and case.causal)
    problem = PackedProblem(ShapesTorch(), case)
    right = ours(problem, case)(problem.check).o
    assert problem.errors(Result(right[:-1]))[0] == math.inf
    bare = dataclasses.replace(case, causal=False)
    assert problem.errors(ours(problem, bare)(problem.check))[0] > ERROR_LIMITS["exact"]
    nan = right.clone()
    nan[-1] = float("nan")
    assert not problem.errors(Result(nan))[0] <= 1e9


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("name", "way", "family", "split"),
    [
        ("few, d128 b1 h32/8 sq16 sk32768 full", "wgmma", "attn_fwd_sm90", True),
        ("few, d128 b1 h32/8 sq16 sk32768 full", "mma.sync", "attn_fwd_sm80", True),
        ("few, d128 b1 h32/8 sq16 sk32768 full bool-mask", "wgmma", "attn_fwd_sm90", True),
        ("few, d128 b1 h32/8 sq16 sk32768 full bool-mask", "mma.sync", "attn_fwd_sm80", True),
        ("few, d128 b1 h32/8 sq16 sk32768 full int8", "wgmma", "attn_int8_sm90", True),
        ("few, d128 b1 h32/8 sq16 sk32768 full int8", "mma.sync", "attn_int8_sm80", False),
    ],
)
def test_ways_force_rows(monkeypatch: pytest.MonkeyPatch, name: str, way: str, family: str, split: bool) -> None:
    """Rows are tried in their order until one takes the call: here, what `select` says of them on an H200."""
    pytest.importorskip("torch")
    from omniattn.problems import Target
    from omniattn.problems.split import Whole
    from omniattn.registry import by_name
    from omniattn.runtime.env import forced_kernels
    from omniattn.select import choices

    case = ALL[NAMES.index(name)][1]
    # The tensors are small, the heads and widths those of the case.
    problem = tensors_of(
        ShapesTorch(), dataclasses.replace(case, lengths_q=(4,), lengths_k=(64,), heads=2 * case.group)
    )
    explain, found = shape_contenders.OwnCall.explain, []

    def on_a_gpu(call: Any, inputs: Any) -> Any:
        target = Target((9, 0), 227 << 10, 132)
        facts = dataclasses.replace(explain(call, inputs).problem, dtype="bfloat16", tensor_maps=True)
        chosen = choices(facts, target, forced_kernels())[0].candidate
        found.append((forced_kernels(), not isinstance(chosen.schedule, Whole)))

    monkeypatch.setattr(shape_contenders.OwnCall, "explain", on_a_gpu)
    forced_way(problem, case, way)
    assert len(found) == 1
    row, is_split = found[0]
    assert (by_name(row).family, is_split) == (family, split)
    assert by_name(row).op == ("attention_split" if split else "attention")


# A run


@pytest.mark.frameworks
@pytest.mark.parametrize("bench", SHAPE_CASES)
def test_every_case_is_run_and_compared(bench: str, on_the_cpu: None, flash_attention_4: None) -> None:
    report = shape_runs.run_shapes(bench, shape_cases.SHAPE_CASES[bench], iters=1)
    assert len(report.results) == len(SHAPE_CASES[bench])
    assert report.missing == {}
    for result in report.results:
        found = {entry.contender: entry for entry in result.entries}
        case = result.case
        assert found[OURS].timing is not None, found[OURS].reason
        assert result.kernel == "reference (NumPy, CPU)"
        assert ("flex" in found) == case.flex
        assert ({"wgmma", "mma.sync"} <= set(found)) == case.both
        assert (REFERENCE in found) == bool(case.mark and case.mark.reference)
        assert (result.over_fa3 is None) == (case.mark is None)
        ran = [key for key in ("cudnn", "fa2", "flex", "fa4") if key in found and found[key].timing is not None]
        assert ran
        assert all(found[key].difference is not None for key in ran)
        assert result.best in ran


@pytest.mark.frameworks
def test_a_wrong_contender_and_one_that_raises_are_shown(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    monkeypatch.setenv("COLUMNS", "400")

    def raises(problem: Any, case: ShapeCase) -> Any:
        raise RuntimeError("no kernel\nand more lines")

    def wrong(problem: Any, case: ShapeCase) -> Any:
        right = ours(problem, case)
        return lambda inputs: Result(right(inputs).o.roll(1, 0))

    others = (shape_contenders.Other("cudnn", "A", raises), shape_contenders.Other("fa2", "B", wrong))
    monkeypatch.setattr(shape_runs, "SHAPE_OTHERS", others)
    assert main(["bench", "packed", "--case", "33x", "--iters", "1"]) == 0
    output = capsys.readouterr().out
    assert "A, d16 h2 packed 33x17-4096 full: RuntimeError: no kernel\n" in output
    assert "B, d16 h2 packed 33x17-4096 full: wrong result: relative L1 " in output
    assert "not run: fa4: flash_attn.cute cannot be imported" in output


@pytest.mark.frameworks
@pytest.mark.parametrize("fault", ["wrong", "unsupported", "argument", "other"])
def test_own_faults_are_rows(
    fault: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = omniattn.attention

    def attention(*arrays: Any, **given: Any) -> Any:
        if "softcap" not in given:
            return right(*arrays, **given)
        if fault == "unsupported":
            raise UnsupportedError("no softcap")
        if fault == "argument":
            raise ArgumentError("softcap", "none", "some")
        if fault == "other":
            raise TypeError("a fault")
        return right(*arrays, **given) + 1

    monkeypatch.setattr(omniattn, "attention", attention)
    monkeypatch.setattr(shape_runs, "_kernels", lambda *_: ("", (), ()))
    command = ["bench", "windows", "--case", "softcap", "--no-flex", "--iters", "1", "--json"]
    if fault == "other":
        with pytest.raises(TypeError, match="a fault"):
            main(command)
        return
    assert main(command) == (0 if fault == "unsupported" else 1)
    row = next(row for row in json.loads(capsys.readouterr().out)["rows"] if row["contender"] == OURS)
    assert row["median_us"] is row["tflops"] is row["ratio_to_best"] is None
    assert row["marks"] == (UNSUPPORTED if fault == "unsupported" else ERROR)
    assert row["reason"].startswith({"wrong": "wrong result", "unsupported": "Unsupp", "argument": "Argument"}[fault])


@pytest.mark.frameworks
@pytest.mark.parametrize("form", ["--markdown", "--json", ""])
def test_forms(
    form: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    path = tmp_path / "few.json"
    command = ["bench", "few", "--shapes", "d16 sq1", "--no-flex", "--iters", "2", "--out", str(path), *form.split()]
    assert main(command) == 0
    output = capsys.readouterr().out
    data = json.loads(path.read_text(encoding="utf-8"))
    assert {"schema": 1, "bench": "few", "protocol": "interleaved"}.items() <= data.items()
    assert len(data["samples"]) == len(data["rows"])
    if form == "--json":
        assert json.loads(output) == data
        return
    for words in ("d16 b1 h8/2 sq1 sk70 full", "on mma.sync", "not run: FlexAttention: left out", "below 0.95"):
        assert words in output


@pytest.mark.parametrize(
    "words",
    ["--anchor fa2", "--only fa2", "--plot x.svg", "--sustained", "--precision int8", "--format bf16"],
)
def test_options_of_other_benches_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "packed", *words.split(), "--json"]) == 2
    assert words.split()[0] in capsys.readouterr().err
