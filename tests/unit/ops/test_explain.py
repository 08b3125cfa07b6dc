"""explain on the CPU, and what it shares with the call itself: validation, the problem, the plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import omniattn
import omniattn.arrays
import omniattn.runtime
from omniattn import Int4, Int8
from omniattn.errors import AlignmentError, ArgumentError, OmniattnError, ShapeError
from omniattn.ops.explain import Launch
from omniattn.problems import UNLIMITED, Precision
from omniattn.problems.precision import EXACT
from omniattn.runtime.device import DeviceInfo


def arrays(dtype: str = "float32", sq: int = 5, sk: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    q, k, v = ((2, sq, 4, 16), (2, sk, 2, 16), (2, sk, 2, 16))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in (q, k, v))  # type: ignore[return-value]


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def test_dense_on_the_cpu() -> None:
    q, k, v = arrays()
    got = omniattn.explain(q, k, v, causal=True, window=(2, 9), softcap=4.0)
    assert (got.kernel, got.origin, got.arch, got.device) == ("reference (NumPy, CPU)", "python", "cpu", "cpu")
    assert (got.grid, got.threads, got.smem_bytes) == (0, 0, 0)
    problem = got.problem
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (2, 5, 7)
    assert (problem.num_q_heads, problem.num_kv_heads, problem.head_dim) == (4, 2, 16)
    assert (problem.window_left, problem.window_right) == (2, 0)
    assert (problem.softmax_scale, problem.softcap) == (0.25, 4.0)
    # 5 rows that each see 3 keys.
    assert got.flops == 4 * 15 * 16 * 4 * 2


def test_the_short_form_is_one_line() -> None:
    q, k, v = arrays()
    got = omniattn.explain(q, k, v, causal=True)
    assert got.short() == f"reference (NumPy, CPU) (python, cpu) on cpu, {got.flops / 1e9:.3f} GFLOP, 0.009 MB"
    merged = omniattn.explain(
        omniattn.merge_states, q, np.zeros((2, 4, 5), np.float32), q, np.zeros((2, 4, 5), np.float32)
    )
    assert "GFLOP" not in merged.short()
    assert "\n" in str(merged)
    assert "\n" not in merged.short()
    launch = Launch("a", "prebuilt", "sm_90a", 4, 128, 0)
    on_gpu = dataclasses.replace(
        got, kernel="a", grid=4, threads=128, launches=(launch, dataclasses.replace(launch, kernel="b"))
    )
    assert ", 4 CTAs of 128 threads, 1 more launch, " in on_gpu.short()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_least_traffic_is_that_of_the_arrays(dtype: str) -> None:
    q, k, v = arrays(dtype)
    o, lse = omniattn.attention(q, k, v, return_lse=True)
    assert omniattn.explain(q, k, v).min_bytes == sum(x.nbytes for x in (q, k, v, o, lse))


def test_layout_decides_which_dimension_is_which() -> None:
    q, k, v = (x.swapaxes(1, 2) for x in arrays())
    problem = omniattn.explain(q, k, v, layout="HND").problem
    assert (problem.seqlen_q, problem.seqlen_k, problem.num_q_heads, problem.num_kv_heads) == (5, 7, 4, 2)


def test_varlen() -> None:
    q, k, v = (x[0] for x in arrays())
    starts_q, starts_k = np.array([0, 2, 5], np.int32), np.array([0, 7, 7], np.int32)
    got = omniattn.explain(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=3, max_seqlen_k=7)
    assert got.problem.varlen
    assert got.problem.batch == 2
    assert (got.problem.window_left, got.problem.window_right) == (UNLIMITED, UNLIMITED)
    assert got.flops is None
    assert "unknown" in str(got)


def test_text_names_kernel_reason_and_work() -> None:
    text = str(omniattn.explain(*arrays()))
    for words in ("reference (NumPy, CPU)", "the arrays are on the CPU", "python", "GFLOP", "MB"):
        assert words in text
    assert "launch" not in text


def test_nothing_is_written() -> None:
    q, k, v = arrays()
    out = np.full_like(q, 7.5)
    omniattn.explain(q, k, v, out=out)
    assert (out == 7.5).all()


@pytest.mark.parametrize(
    ("options", "error", "argument"),
    [
        ({"causal": 1}, ArgumentError, "causal"),
        ({"window": (1.0, 0)}, ArgumentError, "window"),
        ({"softcap": -1.0}, ArgumentError, "softcap"),
        ({"softcap": 1e-45}, ArgumentError, "softcap"),
        ({"softcap": 10**400}, ArgumentError, "softcap"),
        ({"softmax_scale": float("nan")}, ArgumentError, "softmax_scale"),
        ({"layout": "BSHD"}, ArgumentError, "layout"),
        ({"stream": 5}, ArgumentError, "stream"),
        ({"out": np.zeros((2, 5, 4, 8), np.float32)}, ShapeError, "out"),
        ({"out": read_only(np.zeros((2, 5, 4, 16), np.float32))}, ArgumentError, "out"),
        ({"sinks": np.zeros(3, np.float32)}, ShapeError, "sinks"),
    ],
)
def test_refuses_what_the_call_refuses(options: dict[str, Any], error: type[OmniattnError], argument: str) -> None:
    for function in (omniattn.explain, omniattn.attention):
        with pytest.raises(error) as caught:
            function(*arrays(), **options)
        assert repr(argument) in str(caught.value)
        assert getattr(caught.value, "argument", None) == argument


def test_refuses_memory_that_the_call_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses, as a GPU has them: explain looks at them too, because what it describes would not run."""
    at = {"q": 0x1000, "k": 0x2000, "v": 0x3000, "out": 0x4000}

    def on_gpu(value: Any, name: str, *rest: Any) -> Any:
        t = describe(value, name)
        t.device, t.ptr = "cuda", at[name]
        return t

    describe = omniattn.arrays.describe
    info = DeviceInfo(0, "Hopper", (9, 0), 132, 227 << 10, 50 << 20, (13, 0))
    monkeypatch.setattr(omniattn.arrays, "describe", on_gpu)
    monkeypatch.setattr(omniattn.runtime, "device_info", lambda ordinal: info)
    monkeypatch.setattr(omniattn.runtime, "has_tensor_maps", lambda: True)
    q, k, v = arrays("float16")
    out = np.empty_like(q)
    assert omniattn.explain(q, k, v, out=out).kernel
    for name, address, error in (("q", 0x1002, AlignmentError), ("out", 0x2000, ArgumentError)):
        with monkeypatch.context() as patched:
            patched.setitem(at, name, address)
            with pytest.raises(error) as caught:
                omniattn.explain(q, k, v, out=out)
            assert caught.value.argument == name


def test_one_of_two_cu_seqlens() -> None:
    q, k, v = (x[0] for x in arrays())
    with pytest.raises(ArgumentError, match="'cu_seqlens_k'"):
        omniattn.explain(q, k, v, cu_seqlens_q=np.array([0, 5], np.int32))


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("value", [0, 4])
def test_lengths_without_packed_sequences(name: str, value: int) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ArgumentError, match=name):
        omniattn.explain(*arrays(), **options)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_packed_sequences_without_lengths(name: str) -> None:
    q, k, v = (x[0] for x in arrays())
    starts_q, starts_k = np.array([0, 5], np.int32), np.array([0, 7], np.int32)
    options: dict[str, Any] = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": 5, "max_seqlen_k": 7}
    del options[name]
    for function in (omniattn.explain, omniattn.attention_varlen):
        with pytest.raises(ArgumentError, match=f"'{name}'.*received None"):
            function(q, k, v, **options)


def test_lengths_that_were_left_out_may_be_named() -> None:
    q, k, v = arrays()
    assert omniattn.explain(q, k, v, max_seqlen_q=None, max_seqlen_k=None) == omniattn.explain(q, k, v)


@pytest.mark.parametrize(
    ("precision", "name", "value"),
    [
        ("exact", "exact", EXACT),
        ("int8", "int8", Int8().precision),
        ("int4", "int4", Int4().precision),
        (Int8(smooth_q=True, pv="fp16"), "int8", Int8(smooth_q=True, pv="fp16").precision),
        (Int4(smooth_q=False), "int4", Int4(smooth_q=False).precision),
    ],
    ids=str,
)
def test_precision_and_its_knobs_reach_the_problem(precision: str | Int8 | Int4, name: str, value: Precision) -> None:
    got = omniattn.explain(*arrays(), precision=precision)
    assert (got.problem.precision.name, got.problem.precision) == (name, value)
    assert got.kernel == "reference (NumPy, CPU)"


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"causal": False}, {"causal": 0}),
        ({"softcap": 0.0}, {"softcap": False}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}),
        ({"window": (1, 0)}, {"window": (1.0, 0)}),
        ({"window": (1, 0)}, {"window": (True, 0)}),
        ({"return_lse": True}, {"return_lse": 1}),
        ({"deterministic": True}, {"deterministic": 1.0}),
    ],
)
def test_an_equal_value_of_another_type_is_checked_on_its_own(good: dict[str, Any], bad: dict[str, Any]) -> None:
    """Plans are found again by the call's arguments, and 1 == 1.0 == True."""
    q, k, v = arrays()
    omniattn.attention(q, k, v, **good)
    with pytest.raises(ArgumentError, match=repr(next(iter(bad)))):
        omniattn.attention(q, k, v, **bad)


def test_numpy_booleans_are_booleans() -> None:
    q, k, v = arrays()
    expected = omniattn.attention(q, k, v, causal=True)
    yes: Any = np.True_
    no: Any = np.False_
    assert np.array_equal(omniattn.attention(q, k, v, causal=yes), expected)
    assert not np.array_equal(omniattn.attention(q, k, v, causal=no), expected)


def test_options_given_as_lists() -> None:
    """A list cannot be a dictionary key; the call works all the same."""
    q, k, v = arrays()
    expected = omniattn.attention(q, k, v, window=(2, 1))
    window: Any = [2, 1]
    assert np.array_equal(omniattn.attention(q, k, v, window=window), expected)


@pytest.mark.parametrize("lse", [False, True])
def test_whether_the_lse_is_wanted_decides_with_the_rest(lse: bool) -> None:
    q, k, v = arrays()
    assert omniattn.explain(q, k, v, precision="int8", return_lse=lse).problem.lse is lse
    qk, values = omniattn.quantize_qk(q, k, with_bias=True), omniattn.quantize_v(v)
    assert omniattn.explain(qk.q, qk.k, values, return_lse=lse).problem.lse is lse
