"""Ways to call the public functions wrongly: each takes a valid call, breaks one thing in it and says what must come.

Used by test_arguments.py, which also shows that the unbroken calls work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from omniattn.errors import ArgumentError, DtypeError, OmniattnError, ShapeError, StrideError

Call = dict[str, Any]
FLOATS = ("float16", "float32", "float64")
MARK = 7.75
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


@dataclass(frozen=True)
class Broken:
    """What a fault must lead to. `shows`: text that the message has to repeat."""

    error: type[OmniattnError]
    argument: str
    shows: str = ""


Fault = Callable[[st.DataObject, Call], Broken]


def problems(varlen: bool) -> st.SearchStrategy[Call]:
    """Valid calls, `out` included."""

    @st.composite
    def build(draw: st.DrawFn) -> Call:
        heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(2, 3))
        heads, dim = heads_kv * group, 8 * draw(st.integers(1, 3))
        sq, sk = draw(st.integers(2, 5)), draw(st.integers(2, 5))
        dtype, layout = draw(st.sampled_from(FLOATS)), draw(st.sampled_from(["NHD", "HND"]))
        rng = np.random.default_rng(draw(st.integers(0, 99)))

        def tensor(seqlen: int, heads: int) -> np.ndarray:
            shape = (seqlen, heads, dim) if layout == "NHD" else (heads, seqlen, dim)
            return rng.standard_normal(shape if varlen else (2, *shape)).astype(dtype)

        call: Call = {"q": tensor(sq, heads), "k": tensor(sk, heads_kv), "v": tensor(sk, heads_kv), "layout": layout}
        call["out"] = np.full_like(call["q"], MARK)
        call["causal"] = draw(st.booleans())
        if varlen:
            call["cu_seqlens_q"] = np.array([0, 1, sq], dtype=np.int32)
            call["cu_seqlens_k"] = np.array([0, sk - 1, sk], dtype=np.int32)
            call["max_seqlen_q"], call["max_seqlen_k"] = max(1, sq - 1), sk - 1
        return call

    return build()


def seq_axis(call: Call) -> int:
    return -3 if call["layout"] == "NHD" else -2


def head_axis(call: Call) -> int:
    return -2 if call["layout"] == "NHD" else -3


def longer(array: np.ndarray, axis: int, by: int) -> np.ndarray:
    shape = list(array.shape)
    shape[axis] += by
    return np.zeros(shape, dtype=array.dtype)


def logits_shape(call: Call) -> tuple[int, int, int, int]:
    """(batch, heads_q, rows, keys) that a mask has to broadcast to."""
    heads = call["q"].shape[head_axis(call)]
    if "cu_seqlens_q" in call:
        return 2, heads, call["max_seqlen_q"], call["max_seqlen_k"]
    return 2, heads, call["q"].shape[seq_axis(call)], call["k"].shape[seq_axis(call)]


def other_float(data: st.DataObject, dtype: np.dtype[Any], *allowed: str) -> str:
    return data.draw(st.sampled_from([name for name in FLOATS if name != dtype.name and name not in allowed]))


# Faults of attention and attention_varlen alike.


def integer_input(data: st.DataObject, call: Call) -> Broken:
    dtype = data.draw(st.sampled_from(["int8", "int32", "int64", "uint8", "bool", "complex64"]))
    for name in ("q", "k", "v"):
        call[name] = call[name].real.astype(dtype)
    return Broken(DtypeError, "q", dtype)


def mixed_dtypes(data: st.DataObject, call: Call) -> Broken:
    name = data.draw(st.sampled_from(["k", "v"]))
    dtype = other_float(data, call["q"].dtype)
    call[name] = call[name].astype(dtype)
    return Broken(DtypeError, name, dtype)


def no_array(data: st.DataObject, call: Call) -> Broken:
    name = data.draw(st.sampled_from(["q", "k", "v"]))
    call[name] = data.draw(st.sampled_from([None, "text", 3, [[1.0]], {"a": 1}]))
    return Broken(ArgumentError, name, type(call[name]).__name__)


def wrong_rank(data: st.DataObject, call: Call) -> Broken:
    name = data.draw(st.sampled_from(["q", "k", "v"]))
    call[name] = call[name][0] if data.draw(st.booleans()) else call[name][None]
    return Broken(ShapeError, name, str(call[name].shape))


def wrong_head_dim(data: st.DataObject, call: Call) -> Broken:
    call["k"] = longer(call["k"], -1, 8)
    return Broken(ShapeError, "k", str(call["k"].shape[-1]))


def unusual_head_dim_v(data: st.DataObject, call: Call) -> Broken:
    dim = data.draw(st.sampled_from([0, 4, 12, 63, 65, 257, 513, 520, 576]))
    call["v"] = np.full((*call["v"].shape[:-1], dim), MARK, dtype=call["v"].dtype)
    return Broken(ShapeError, "v", str(dim))


def unusual_head_dim(data: st.DataObject, call: Call) -> Broken:
    dim = data.draw(st.sampled_from([0, 4, 12, 63, 65, 257, 513, 520, 576]))
    for name in ("q", "k", "v", "out"):
        call[name] = np.full((*call[name].shape[:-1], dim), MARK, dtype=call[name].dtype)
    return Broken(ShapeError, "q", str(dim))


def keys_and_values_differ(data: st.DataObject, call: Call) -> Broken:
    axis = data.draw(st.sampled_from([seq_axis(call), head_axis(call)]))
    call["v"] = longer(call["v"], axis, data.draw(st.integers(1, 3)))
    return Broken(ShapeError, "v", str(call["v"].shape[axis]))


def heads_do_not_divide(data: st.DataObject, call: Call) -> Broken:
    axis, heads = head_axis(call), call["q"].shape[head_axis(call)]
    have = call["k"].shape[axis]
    wrong = data.draw(st.sampled_from([n for n in range(have, 2 * heads + 2) if heads % n]))
    for name in ("k", "v"):
        call[name] = longer(call[name], axis, wrong - have)
    return Broken(ShapeError, "k", str(wrong))


def strided_last_dim(data: st.DataObject, call: Call) -> Broken:
    name = data.draw(st.sampled_from(["q", "k", "v"]))
    call[name] = np.repeat(call[name], 2, axis=-1)[..., ::2]
    return Broken(StrideError, name)


def unknown_layout(data: st.DataObject, call: Call) -> Broken:
    call["layout"] = data.draw(st.sampled_from(["nhd", "BSHD", "", "HN", None, 4]) | st.text("HNDSBhnd", max_size=2))
    return Broken(ArgumentError, "layout", str(call["layout"]))


def unknown_precision(data: st.DataObject, call: Call) -> Broken:
    call["precision"] = data.draw(st.sampled_from(["", "Exact", "int3", "bf16", None, 8]))
    return Broken(ArgumentError, "precision", str(call["precision"]))


def bad_softcap(data: st.DataObject, call: Call) -> Broken:
    call["softcap"] = data.draw(st.sampled_from([*NOT_FINITE, "2"]) | st.floats(max_value=-1e-6, min_value=-1e6))
    return Broken(ArgumentError, "softcap", str(call["softcap"]))


def bad_scale(data: st.DataObject, call: Call) -> Broken:
    call["softmax_scale"] = data.draw(st.sampled_from([*NOT_FINITE, "0.1", [0.1]]))
    return Broken(ArgumentError, "softmax_scale", str(call["softmax_scale"]))


def bad_window(data: st.DataObject, call: Call) -> Broken:
    negative = st.tuples(st.integers(-(2**40), -2), st.integers(-1, 9))
    call["window"] = data.draw(
        negative
        | negative.map(lambda pair: pair[::-1])
        | st.sampled_from([(1,), (1, 2, 3), 4, "ab", (1.5, 2), (None, 1), ("1", "2"), (float("nan"), 0)])
    )
    return Broken(ArgumentError, "window", str(call["window"]))


def mask_dtype(data: st.DataObject, call: Call) -> Broken:
    integers = ["int8", "int32", "int64", "uint8"]
    wrong = [*integers, *(name for name in FLOATS if name not in (call["q"].dtype.name, "float32"))]
    dtype = data.draw(st.sampled_from(wrong))
    call["mask"] = np.zeros(logits_shape(call), dtype=dtype)
    return Broken(DtypeError, "mask", dtype)


def mask_shape(data: st.DataObject, call: Call) -> Broken:
    shape = list(logits_shape(call))
    axis = data.draw(st.integers(0, 3))
    shape[axis] += data.draw(st.integers(1, 4))
    call["mask"] = np.ones(shape, dtype=data.draw(st.sampled_from(["bool", "float32"])))
    return Broken(ShapeError, "mask", str(tuple(shape)))


def mask_rank(data: st.DataObject, call: Call) -> Broken:
    call["mask"] = np.ones((1, *logits_shape(call)), dtype=bool)
    return Broken(ShapeError, "mask", str(call["mask"].shape))


def sinks_shape(data: st.DataObject, call: Call) -> Broken:
    heads = call["q"].shape[head_axis(call)]
    shape = data.draw(st.sampled_from([(heads + 1,), (1,), (heads, 1), (1, heads), (), (0,)]))
    call["sinks"] = np.zeros(shape, dtype=np.float32)
    return Broken(ShapeError, "sinks", str(shape))


def sinks_dtype(data: st.DataObject, call: Call) -> Broken:
    wrong = ["int32", "bool", *(name for name in FLOATS if name not in (call["q"].dtype.name, "float32"))]
    dtype = data.draw(st.sampled_from(wrong))
    call["sinks"] = np.zeros(call["q"].shape[head_axis(call)], dtype=dtype)
    return Broken(DtypeError, "sinks", dtype)


def out_shape(data: st.DataObject, call: Call) -> Broken:
    axis = data.draw(st.integers(-3, -1))
    call["out"] = np.full_like(longer(call["out"], axis, data.draw(st.integers(1, 8))), MARK)
    return Broken(ShapeError, "out", str(call["out"].shape))


def out_dtype(data: st.DataObject, call: Call) -> Broken:
    dtype = data.draw(st.sampled_from(["int32", other_float(data, call["q"].dtype)]))
    call["out"] = np.full(call["out"].shape, MARK, dtype=dtype)
    return Broken(DtypeError, "out", dtype)


def out_read_only(data: st.DataObject, call: Call) -> Broken:
    call["out"].flags.writeable = False
    return Broken(ArgumentError, "out", "read-only")


def out_strided(data: st.DataObject, call: Call) -> Broken:
    call["out"] = np.repeat(call["out"], 2, axis=-1)[..., ::2]
    return Broken(StrideError, "out")


def out_no_array(data: st.DataObject, call: Call) -> Broken:
    call["out"] = data.draw(st.sampled_from(["text", 3, [1.0]]))
    return Broken(ArgumentError, "out", type(call["out"]).__name__)


SHARED = [
    integer_input,
    mixed_dtypes,
    no_array,
    wrong_rank,
    wrong_head_dim,
    unusual_head_dim_v,
    unusual_head_dim,
    keys_and_values_differ,
    heads_do_not_divide,
    strided_last_dim,
    unknown_layout,
    unknown_precision,
    bad_softcap,
    bad_scale,
    bad_window,
    mask_dtype,
    mask_shape,
    mask_rank,
    sinks_shape,
    sinks_dtype,
    out_shape,
    out_dtype,
    out_read_only,
    out_strided,
    out_no_array,
]


# Faults of one function only.


def batch_differs(data: st.DataObject, call: Call) -> Broken:
    name = data.draw(st.sampled_from(["k", "v"]))
    call[name] = longer(call[name], 0, data.draw(st.sampled_from([-1, 1])))
    return Broken(ShapeError, name, str(call[name].shape[0]))


def cu_seqlens_dtype(data: st.DataObject, call: Call) -> Broken:
    name = data.draw(st.sampled_from(["cu_seqlens_q", "cu_seqlens_k"]))
    dtype = data.draw(st.sampled_from(["int64", "uint8", "float32", "bool"]))
    call[name] = call[name].astype(dtype)
    return Broken(DtypeError, name, dtype)


def cu_seqlens_shape(data: st.DataObject, call: Call) -> Broken:
    name = data.draw(st.sampled_from(["cu_seqlens_q", "cu_seqlens_k"]))
    shape = data.draw(st.sampled_from([(), (0,), (1, 3), (3, 1)]))
    call[name] = np.zeros(shape, dtype=np.int32)
    return Broken(ShapeError, name, str(shape))


def cu_seqlens_lengths_differ(data: st.DataObject, call: Call) -> Broken:
    call["cu_seqlens_k"] = np.append(call["cu_seqlens_k"], call["cu_seqlens_k"][-1:])
    return Broken(ShapeError, "cu_seqlens_k", "4")


def cu_seqlens_values(data: st.DataObject, call: Call) -> Broken:
    """Only arrays on the CPU can be looked into."""
    name = data.draw(st.sampled_from(["cu_seqlens_q", "cu_seqlens_k"]))
    last = call[name][-1]
    call[name][:] = data.draw(st.sampled_from([(1, 1, last), (-1, 0, last), (0, last, last - 1), (0, 1, last + 1)]))
    return Broken(ArgumentError, name)


def max_seqlen(data: st.DataObject, call: Call) -> Broken:
    name = data.draw(st.sampled_from(["max_seqlen_q", "max_seqlen_k"]))
    call[name] = data.draw(st.sampled_from([-1, -(2**33), 1.5, "3", None]))
    return Broken(ArgumentError, name, str(call[name]))


def max_seqlen_too_small(data: st.DataObject, call: Call) -> Broken:
    name = data.draw(st.sampled_from(["max_seqlen_q", "max_seqlen_k"]))
    call[name] -= 1
    return Broken(ArgumentError, name, str(call[name]))


ATTENTION = [*SHARED, batch_differs]
ATTENTION_VARLEN = [
    *SHARED,
    cu_seqlens_dtype,
    cu_seqlens_shape,
    cu_seqlens_lengths_differ,
    cu_seqlens_values,
    max_seqlen,
    max_seqlen_too_small,
]


# Faults of merge_states.


def good_states(data: st.DataObject) -> Call:
    packed, dtype = data.draw(st.booleans()), data.draw(st.sampled_from(FLOATS))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape, lse_shape = ((5, 3, 8), (3, 5)) if packed else ((2, 5, 3, 8), (2, 3, 5))
    call: Call = {}
    for side in "ab":
        call[f"o_{side}"] = rng.standard_normal(shape).astype(dtype)
        call[f"lse_{side}"] = rng.standard_normal(lse_shape).astype(np.float32)
    return call


def merge_o_shape(data: st.DataObject, call: Call) -> Broken:
    axis = data.draw(st.integers(-3, -1))
    call["o_b"] = longer(call["o_b"], axis, 8)
    return Broken(ShapeError, "o_b", str(call["o_b"].shape))


def merge_rank(data: st.DataObject, call: Call) -> Broken:
    call["o_a"] = call["o_a"].reshape(-1, 8)
    return Broken(ShapeError, "o_a", str(call["o_a"].shape))


def merge_o_dtype(data: st.DataObject, call: Call) -> Broken:
    dtype = other_float(data, call["o_a"].dtype)
    call["o_b"] = call["o_b"].astype(dtype)
    return Broken(DtypeError, "o_b", dtype)


def merge_integer(data: st.DataObject, call: Call) -> Broken:
    call["o_a"], call["o_b"] = call["o_a"].astype(np.int32), call["o_b"].astype(np.int32)
    return Broken(DtypeError, "o_a", "int32")


def merge_lse_dtype(data: st.DataObject, call: Call) -> Broken:
    name = data.draw(st.sampled_from(["lse_a", "lse_b"]))
    dtype = data.draw(st.sampled_from(["float16", "float64", "int32"]))
    call[name] = call[name].astype(dtype)
    return Broken(DtypeError, name, dtype)


def merge_lse_shape(data: st.DataObject, call: Call) -> Broken:
    name = data.draw(st.sampled_from(["lse_a", "lse_b"]))
    call[name] = data.draw(st.sampled_from([call[name].swapaxes(-1, -2), call[name][None], longer(call[name], -1, 1)]))
    return Broken(ShapeError, name, str(call[name].shape))


def merge_no_array(data: st.DataObject, call: Call) -> Broken:
    name = data.draw(st.sampled_from(["o_a", "lse_a", "o_b", "lse_b"]))
    call[name] = data.draw(st.sampled_from([None, "text", 1.5]))
    return Broken(ArgumentError, name, type(call[name]).__name__)


MERGE_STATES = [
    merge_o_shape,
    merge_rank,
    merge_o_dtype,
    merge_integer,
    merge_lse_dtype,
    merge_lse_shape,
    merge_no_array,
]


def check_error(error: Any, function: str, broken: Broken) -> None:
    assert error.argument == broken.argument, str(error)
    text = str(error)
    # Checks that many functions share do not know which of them was called.
    assert error.function is None or error.function.endswith(function)
    assert repr(broken.argument) in text
    assert error.expected
    assert error.expected in text
    assert f"received {error.received}" in text
    assert str(error.received).strip()
    assert broken.shows in text
