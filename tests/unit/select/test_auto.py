"""``precision="auto"``: what it chooses by the model, what it never does, and where it says so."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import omniattn as oa
from omniattn import runtime
from omniattn.arrays import Tensor, contiguous_strides
from omniattn.arrays.tensor import fill
from omniattn.bench.option_cases import CASES
from omniattn.bench.shape_cases import ShapeCase
from omniattn.bench.shape_plan import problem_of
from omniattn.checks.attention import AttentionOptions, check_attention
from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.plan import attention as plan
from omniattn.plan.engine import Call, make_plan
from omniattn.problems import Alternatives, AttentionProblem, Target
from omniattn.problems.precision import CHOSEN_BY_AUTO, EXACT, MEAN_ERRORS, NAMED, auto_of
from omniattn.registry import by_name
from omniattn.runtime.device import DeviceInfo
from omniattn.select import preferences, ranked
from omniattn.select.auto import least_gain
from omniattn.select.model import rules

#: The package has a function of that name.
ops = importlib.import_module("omniattn.ops.attention")
RESULTS = Path(__file__).parents[3] / "docs/performance/results"
H100 = Target((9, 0), 227 << 10, 132, clock_mhz=1980.0, memory_gb_s=3352.0)
H200 = replace(H100, memory_gb_s=4916.0)
A100 = Target((8, 0), 163 << 10, 108, clock_mhz=1410.0, memory_gb_s=1555.0)


def rows_of(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["rows"]
    return found


def left_open(problem: AttentionProblem, max_error: float = 0.05) -> AttentionProblem:
    others = tuple(replace(problem, precision=precision) for precision in CHOSEN_BY_AUTO)
    return replace(problem, precision=EXACT, alternatives=Alternatives(max_error, others))


def problem(length: int, head_dim: int = 128, batch: int = 4, heads: int = 16, **more: Any) -> AttentionProblem:
    case = ShapeCase(head_dim, heads, (length,) * batch, (length,) * batch, **more)
    return problem_of(case)


def chosen(of: AttentionProblem, target: Target = H200, force: str | None = None) -> str:
    return preferences(of, target, force)[0].problem.precision.name


# The argument


def test_auto_is_a_value() -> None:
    assert auto_of("auto") == oa.Auto() == oa.Auto(0.05) == oa.Auto(max_error=np.float64(0.05))
    assert auto_of(oa.Auto(0.1)) == oa.Auto(0.1) != oa.Auto()
    assert type(oa.Auto(1).max_error) is float
    assert [auto_of(x) for x in ("exact", "int8", oa.Int8(), None, 0.05, np.ones(3))] == [None] * 6


@pytest.mark.parametrize("value", [0, 0.0, -1e-3, math.nan, math.inf, True, "0.05", None, 10**400, 1j])
def test_max_error_is_checked(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"Auto.*'max_error'.*a finite number > 0"):
        oa.Auto(max_error=value)


def test_errors_are_those_of_the_page() -> None:
    of_table = [row for row in rows_of("low_precision_accuracy") if row["table"] == "rotated"]
    for name, error in MEAN_ERRORS.items():
        found = [row["rel_l1"] for row in of_table if row["variant"] == name]
        assert len(found) == (0 if name == "exact" else 8)
        assert error == (round(sum(found) / len(found), 4) if found else 0.0)
    assert tuple(precision.name for precision in CHOSEN_BY_AUTO) == ("int8", "fp8", "int4")
    assert set(MEAN_ERRORS) == set(NAMED) == set(oa.PRECISIONS)


# What was measured


def measured() -> list[tuple[str, AttentionProblem, float]]:
    """Calls with (time of exact attention / time of int8 end to end), one H200."""
    found = []
    for row in rows_of("int8"):
        if row["contender"] == "omniattn_int8":
            of = problem(row["seqlen"], row["head_dim"], row["batch"], row["heads"], causal=row["causal"])
            found.append((row["shape"], of, row["ratio_to_exact"]))
    cases = {case.name: case for case in CASES}
    us = {
        name: {(r["shape"], r["case"]): r["median_us"] for r in rows_of(name) if r["contender"] == "omniattn"}
        for name in ("options", "options_int8")
    }
    shapes = {(r["shape"], r["case"]): r for r in rows_of("options_int8") if r["contender"] == "omniattn"}
    for (shape, name), row in shapes.items():
        exact, low = us["options"].get((shape, name)), us["options_int8"][shape, name]
        case = cases[name]
        # A scale that is not positive cannot be said of a `ShapeCase`.
        if exact is None or low is None or case.scale != 1.0:
            continue
        lengths_q, lengths_k = (row["seqlen_q"],) * row["batch"], (row["seqlen_k"],) * row["batch"]
        of = problem_of(
            ShapeCase(
                row["head_dim"], row["heads"], lengths_q, lengths_k, causal=case.options.get("causal", False),
                group=case.group, window=case.options.get("window"), softcap=case.options.get("softcap", 0.0),
                mask=case.mask, expanded=case.expanded, packed="equal" if case.packed else "",
            ),
            lse=name == "return_lse", sinks="float32" if case.sinks else "none",
            mask_map=case.mask.startswith("bias"),
        )  # fmt: skip
        found.append((f"{shape}, {name}", of, exact / low))
    return found


#: Measured since the files were written, one H200: 363.5 µs exact, 334.9 µs int8 (docs/performance/attn_int8_sm90.md).
SINCE = {"d256 s4096 causal": 1.085, "d256 b4 h8 s4096, causal": 1.085}


def test_no_call_that_was_measured_becomes_slower() -> None:
    calls = [(name, of, SINCE.get(name, gain)) for name, of, gain in measured()]
    assert len(calls) > 60
    taken = {name: gain for name, of, gain in calls if chosen(left_open(of)) != "exact"}
    assert {name: gain for name, gain in taken.items() if gain < 0.99} == {}  # runs differ by 1 %
    assert len(taken) >= 12
    # What the margin loses.
    lost = {name: gain for name, _, gain in calls if name not in taken and gain > 1.06}
    assert lost == {}, lost


def test_times_of_an_h100() -> None:
    """Medians on one H100 (cold L2), end to end: exact, int8."""
    for batch, heads, group, length, head_dim, full, causal in (
        (4, 32, 1, 2048, 128, (367, 412), (232, 315)), (4, 32, 4, 2048, 128, (362, 358), (211, 252)),
        (4, 32, 4, 8192, 128, (5350, 4539), (2764, 2493)), (4, 32, 1, 8192, 128, (5276, 4691), (2829, 2803)),
        (1, 24, 1, 32760, 128, (15944, 13154), (8254, 7009)), (4, 32, 1, 8192, 64, (3353, 3442), (1720, 1887)),
    ):  # fmt: skip
        for is_causal, (exact, low) in ((False, full), (True, causal)):
            of = left_open(problem(length, head_dim, batch, heads, group=group, causal=is_causal))
            took = chosen(of, H100)
            assert took == "int8" if exact / low > 1.06 else exact >= low or took == "exact", (length, is_causal)


def test_margins_are_no_smaller_than_what_the_model_was_wrong_by() -> None:
    """Of kernels on mma.sync, which GPUs other than Hopper run, the model promises most."""
    exact, low = "attn_fwd_sm80_bf16_d128_n48", "attn_int8_mbarrier_sm90_bf16_d128"
    rows = [row for row in rows_of("int8_sm80") if row["contender"] == "omniattn_int8"]
    assert len(rows) >= 10
    for row in rows:
        of = problem(row["seqlen"], row["head_dim"], row["batch"], row["heads"], causal=row["causal"])
        as_int8 = replace(of, precision=NAMED["int8"])
        gain = ranked(of, H200, by_name(exact))[0][0] / ranked(as_int8, H200, by_name(low))[0][0]
        assert gain / least_gain(as_int8, by_name(low)) < row["ratio_to_exact"], row["shape"]
    assert min(rules().auto.values()) >= 1.1


# The choice


def test_what_is_chosen_by_shapes() -> None:
    assert chosen(left_open(problem(8192))) == "int8"
    assert chosen(left_open(problem(1024))) == "exact"
    assert chosen(left_open(problem(4096, causal=True))) == "exact"
    few = problem_of(ShapeCase(128, 32, (16,), (32768,), group=4))
    assert chosen(left_open(few)) == "exact"


def test_the_bound_decides_which_are_compared() -> None:
    for max_error, names in ((0.01, set()), (0.03, {"int8"}), (0.05, {"int8", "fp8"}), (0.3, {"int8", "fp8", "int4"})):
        why = preferences(left_open(problem(8192), max_error), H200)[0].why
        assert {name for name in ("int8", "fp8", "int4") if f"; {name} " in why[0]} == names
        for name in {"int8", "fp8", "int4"} - names:
            assert f"{name} has a mean error of {MEAN_ERRORS[name]:g}" in why[1]
        assert why[-1].endswith("no promise for the values of a call")
    assert chosen(left_open(problem(8192), 0.01)) == "exact"


def test_of_equally_fast_ones_the_most_accurate_is_taken() -> None:
    of = left_open(problem(16384, batch=1), 0.3)
    assert [way.problem.precision.name for way in preferences(of, H200)] == ["int8", "exact"]
    # Where nothing is gained: exact, which is compared first.
    empty = left_open(problem(0))
    assert chosen(empty) == "exact"


def test_it_may_choose_a_less_accurate_one_that_is_much_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    from omniattn.select import auto

    times = {"exact": 100.0, "int8": 90.0, "fp8": 80.0, "int4": 10.0}
    fastest = auto._fastest

    def timed(of: AttentionProblem, target: Target, force: str | None) -> Any:
        return times[of.precision.name], fastest(of, target, force)[1]

    monkeypatch.setattr(auto, "_fastest", timed)
    of = left_open(problem(8192))
    assert [way.problem.precision.name for way in preferences(of, H200)] == ["fp8", "int8", "exact"]
    times["fp8"] = 82.0  # 1.098 times as fast as int8
    assert [way.problem.precision.name for way in preferences(of, H200)] == ["int8", "exact"]
    times["int8"] = 91.0  # 1.099 times as fast as exact: fp8 is compared with that
    assert [way.problem.precision.name for way in preferences(of, H200)] == ["fp8", "exact"]


def test_options_ask_for_more() -> None:
    plain = replace(problem(8192), precision=NAMED["int8"])
    row = ranked(plain, H200)[0][1].row
    factors = rules().auto
    assert least_gain(plain, row) == factors["least"]
    for changes, name in (
        ({"lse": True}, "lse"), ({"varlen": True}, "packed"), ({"mask": "bool"}, "masks"),
        ({"softcap": 5.0}, "functions"), ({"softmax_scale": -1.0}, "functions"), ({"head_dim": 72}, "padded"),
        ({"own_head_dim_v": 96}, "padded"),
    ):  # fmt: skip
        assert least_gain(replace(plain, **changes), row) == pytest.approx(factors["least"] * factors[name])
    bias = replace(problem(1024, mask="bias_heads"), precision=NAMED["int8"])
    assert least_gain(bias, row) == pytest.approx(factors["least"] * factors["bias"])
    both = least_gain(replace(plain, lse=True), ranked(plain, A100)[0][1].row)
    assert both == pytest.approx(factors["least"] * factors["lse"] * factors["sync"])


def test_other_gpus() -> None:
    assert chosen(left_open(problem(1024)), A100) == "exact"
    why = preferences(left_open(problem(16384, batch=1)), A100)[0].why
    assert why[0].startswith("int8 by precision=Auto(max_error=0.05): predicted exact ")
    assert "no kernel serves fp8" in why[1]
    with pytest.raises(UnsupportedError, match="no attention kernel serves exact"):
        preferences(left_open(problem(1024)), Target((7, 5), 64 << 10, 40))


def test_forced_kernels() -> None:
    of = left_open(problem(8192))
    exact, low = "attn_fwd_sm90_bf16_d128_m192n64", "attn_int8_sm90_bf16_d128"
    assert chosen(of, H200, exact) == "exact"
    assert f"OMNIATTN_FORCE_KERNEL={exact} does not serve int8" in preferences(of, H200, exact)[0].why[1]
    short = left_open(problem(256))
    assert chosen(short, H200, low) == "int8"
    with pytest.raises(ArgumentError, match="OMNIATTN_FORCE_KERNEL"):
        preferences(left_open(problem(256), 0.01), H200, low)


# The plan


def call_on_gpu(monkeypatch: pytest.MonkeyPatch, length: int = 8192, **options: Any) -> Any:
    """The plan of a call on contiguous arrays of a GPU that is not there."""
    monkeypatch.setattr(runtime, "has_tensor_maps", lambda: True)
    device = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 227 << 10, 50 << 20, (13, 0), 1980.0, 4916.0)
    monkeypatch.setattr(runtime, "device_info", lambda ordinal: device)
    monkeypatch.setattr(plan, "without_binary", options.pop("without_binary", lambda *_: None))
    head_dim = options.pop("head_dim", 128)
    strides = options.pop("strides", None)
    tensors = {}
    for name in ("q", "k", "v"):
        shape, t = (4, length, 16, head_dim), Tensor()
        own = contiguous_strides(shape) if strides is None else strides
        fill(t, None, "torch", 0, shape, own, "bfloat16", "cuda", 0, False, name)
        tensors[name] = t
    said = {"layout": "NHD", "causal": False, "window": None, "softmax_scale": None, "softcap": 0.0,
            "return_lse": False, "deterministic": False, **options}  # fmt: skip
    return make_plan(Call(ops._ATTENTION, (None,) * 8, AttentionOptions(**said)), tensors, load=False)


@pytest.mark.parametrize("length", [1024, 8192])
@pytest.mark.parametrize("options", [{}, {"return_lse": True, "causal": True}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("strides", [None, (-8192 * 2048, 2048, 128, 1)], ids=["contiguous", "negative"])
def test_a_plan_is_that_of_the_precision(
    length: int, options: dict[str, Any], strides: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = call_on_gpu(monkeypatch, length, precision="auto", strides=strides, **options)
    name = found.problem.precision.name
    wanted = call_on_gpu(monkeypatch, length, precision=name, strides=strides, **options)
    assert found.problem == wanted.problem
    assert found.launches.records == wanted.launches.records
    assert found.launches.workspace_bytes == wanted.launches.workspace_bytes
    assert found.launches.selection.why[0].startswith(f"{name} by precision=Auto(max_error=0.05): predicted exact ")
    if options == {} and strides is None:
        assert name == ("exact" if length == 1024 else "int8")


def test_advice_about_precisions_is_for_those_who_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    low = call_on_gpu(monkeypatch, 2048, precision="int8").launches.selection.why
    assert any("faster choice" in reason for reason in low)
    monkeypatch.setattr("omniattn.select.auto.least_gain", lambda *_: 0.5)
    found = call_on_gpu(monkeypatch, 2048, precision="auto")
    assert found.problem.precision.name == "int8"
    assert not any("faster choice" in reason for reason in found.launches.selection.why)


def test_kernels_that_cannot_be_had_leave_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(launches: Any, cc: tuple[int, int]) -> Any:
        return next((r.spec for r in launches.records if r.spec.quantized or r.spec.op == "quantize"), None)

    found = call_on_gpu(monkeypatch, precision="auto", without_binary=lacking)
    assert found.problem.precision == EXACT
    why = found.launches.selection.why
    assert any(r.startswith("not int8: ") and r.endswith("not prebuilt and cannot be compiled here") for r in why)


def test_what_8_bits_do_not_have_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    found = call_on_gpu(monkeypatch, precision="auto", head_dim=512)
    assert found.problem.precision == EXACT
    reason = "exact in place of auto: low precisions take a head_dim of up to 256, not 512"
    assert reason in found.launches.selection.why


# On the CPU


def arrays(dtype: str = "float16") -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal((1, 40, 2, 16)).astype(dtype) for _ in range(3)]


@pytest.mark.parametrize("precision", ["auto", oa.Auto(), oa.Auto(max_error=9.0)], ids=str)
def test_the_cpu_is_exact(precision: Any) -> None:
    q, k, v = arrays()
    for options in ({}, {"causal": True, "return_lse": True}):
        both = [oa.attention(q, k, v, precision=p, **options) for p in (precision, "exact")]
        got, want = (np.concatenate([x.ravel() for x in r]) if isinstance(r, tuple) else r for r in both)
        np.testing.assert_array_equal(got, want)
    found = oa.explain(q, k, v, precision=precision)
    assert found.problem.precision == EXACT
    assert found.why[0] == "exact in place of auto: no precision is faster on the CPU"
    starts = np.array([0, 10, 40], np.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 30, "max_seqlen_k": 30}
    got, want = (oa.attention_varlen(q[0], k[0], v[0], precision=p, **packed) for p in (precision, "exact"))
    np.testing.assert_array_equal(got, want)


def test_pages_and_score_mods_are_exact() -> None:
    q, k, v = arrays("float32")
    mod = oa.ScoreMod("score + 1.0f * k", reference=lambda score, b, h, q, k, **_: score + k)
    got, want = (oa.attention(q, k, v, precision=p, score_mod=mod) for p in ("auto", "exact"))
    np.testing.assert_array_equal(got, want)
    blocks = np.ones((1, 1), bool)
    got, want = (oa.attention(q, k, v, precision=p, block_mask=blocks) for p in ("auto", "exact"))
    np.testing.assert_array_equal(got, want)
    paged = {
        "cu_seqlens_q": np.array([0, 40], np.int32), "max_seqlen_q": 40, "max_seqlen_k": 40,
        "seqused_k": np.array([33], np.int32), "block_table": np.array([[0]], np.int32),
    }  # fmt: skip
    got, want = (oa.attention_varlen(q[0], k, v, precision=p, **paged) for p in ("auto", "exact"))
    np.testing.assert_array_equal(got, want)


def test_a_score_mod_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "has_tensor_maps", lambda: True)
    tensors = {}
    for name, shape, dtype in (*((n, (1, 256, 2, 64), "float16") for n in "qkv"), ("block_mask", (2, 2), "bool")):
        t = Tensor()
        fill(t, None, "torch", 0, shape, contiguous_strides(shape), dtype, "cuda", 0, False, name)
        tensors[name] = t
    said = AttentionOptions("NHD", False, None, None, 0.0, "auto", False, False)
    operation = ops._with_arrays("attention", ("block_mask",))
    of = operation.check(Call(operation, (None,) * 9, said, facts=(None, (128, 128), 0.0)), tensors)
    assert of.alternatives is None
    assert of.note == "exact in place of auto: it is not weighed with score_mod, block_mask and dropout"
    del tensors["block_mask"]
    alone = check_attention(Call(ops._ATTENTION, (None,) * 8, said), tensors)
    assert alone.alternatives is not None
    assert alone.alternatives.max_error == 0.05


def test_arrays_that_have_a_precision_refuse_it() -> None:
    q, k, v = arrays()
    qk, values = oa.quantize_qk(q, k), oa.quantize_v(v)
    with pytest.raises(ArgumentError, match=r"'precision': expected that of the operands, .*received 'auto'"):
        oa.attention(qk.q, qk.k, values, precision="auto")
    e4m3 = [x.astype(ml_dtypes.float8_e4m3fn) for x in (q, k, v)]
    with pytest.raises(ArgumentError, match=r"'precision': expected 'fp8' or nothing.*received Auto"):
        oa.attention(*e4m3, precision=oa.Auto())
