"""What ``quantize_qk`` and ``quantize_v`` may be given."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from .. import arguments, arrays
from ..arrays import Tensor
from ..errors import ArgumentError, DtypeError, ShapeError
from ..plan.engine import Call
from ..problems import QuantizeCall, QuantizeProblem
from ..problems.precision import FP8_GRANULARITIES, GRANULARITIES, GROUPINGS, check_choice, value_levels
from ..problems.quantize import QK_DTYPES, Strides3, row_bias_of
from . import values
from .attention import canonical_strides

#: The caller's arrays, in the order of a call.
ARRAYS_QK = ("q", "k", "cu_seqlens_q", "cu_seqlens_k")
ARRAYS_V = ("v", "cu_seqlens_k")
#: What smooth_k takes away, and the words by which kernels see that it is there.
ARRAYS_AROUND = (*ARRAYS_QK, "k_mean", "k_ready")
#: Those that kernels access 16 bytes at a time.
ALIGNED = frozenset({"q", "k", "v"})


class QuantizeQKOptions(NamedTuple):
    """Everything of ``quantize_qk`` that is no array, as the caller gave it."""

    layout: Any
    dtype: Any
    granularity: Any
    grouping: Any
    smooth_k: Any
    smooth_q: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
    with_bias: Any
    hadamard: Any = None
    seed: Any = 0


class QuantizeVOptions(NamedTuple):
    """Everything of ``quantize_v`` that is no array, as the caller gave it."""

    layout: Any
    dtype: Any
    smooth_v: Any
    pv_accumulator: Any
    max_seqlen_k: Any


def check_quantize_qk(call: Call, tensors: dict[str, Tensor]) -> QuantizeCall:
    """The problem of a call of ``quantize_qk``."""
    function, options = "quantize_qk", call.options
    layout = options.layout
    values.check_layout(layout, function)
    check_choice(options.dtype, "dtype", tuple(QK_DTYPES.values()), function)
    e4m3 = options.dtype == QK_DTYPES["fp8"]
    granularity = options.granularity
    if granularity is None:
        granularity = "per_block" if e4m3 else "per_thread"
    check_choice(granularity, "granularity", FP8_GRANULARITIES if e4m3 else GRANULARITIES, function)
    check_choice(options.grouping, "grouping", GROUPINGS[:1] if e4m3 else GROUPINGS, function)
    smooth_k = _check_flag(options.smooth_k, "smooth_k", not e4m3, function)
    hadamard = _check_flag(options.hadamard, "hadamard", e4m3, function)
    seed = arguments.check_int(options.seed, "seed", function, most=2**32 - 1)
    smooth_q = arguments.check_bool(options.smooth_q, "smooth_q", function)
    if smooth_q and e4m3:
        raise ArgumentError("smooth_q", "False with dtype='float8_e4m3'", "True", function=function)
    with_bias = arguments.check_bool(options.with_bias, "with_bias", function)
    q, k = tensors["q"], tensors["k"]
    varlen = "cu_seqlens_q" in tensors or "cu_seqlens_k" in tensors
    values.check_qkv(q, k, k, 3 if varlen else 4, layout, function)
    values.check_quantized_head_dim(q.shape[-1], f"dtype={options.dtype!r}", function)
    batch = _check_sequences(tensors, ("cu_seqlens_q", "cu_seqlens_k"), varlen, function) if varlen else q.shape[0]
    longest_k = _check_longest(options.max_seqlen_q, options.max_seqlen_k, varlen, function)
    arrays.require_same_device(tensors.values())
    for t in (q, k):
        values.check_strides(t, function)
    seq, head = (-3, -2) if layout == "NHD" else (-2, -3)
    problem = QuantizeProblem(
        q.dtype, batch, q.shape[seq], k.shape[seq], q.shape[head], k.shape[head], q.shape[-1], varlen, options.dtype,
        granularity, options.grouping, smooth_q, smooth_k, False, row_bias_of(e4m3, smooth_k, with_bias), v=False,
        max_seqlen_k=longest_k, unpacked=options.dtype == "int4" and options.grouping == "sm90", hadamard=hadamard,
        seed=seed if hadamard else 0, given_mean="k_mean" in tensors,
    )  # fmt: skip
    strides = (_strides(q, layout, varlen), _strides(k, layout, varlen), (0, 0, 0))
    return QuantizeCall(problem, strides, layout, int(options.max_seqlen_q) if varlen else 0)


def check_quantize_v(call: Call, tensors: dict[str, Tensor]) -> QuantizeCall:
    """The problem of a call of ``quantize_v``."""
    function, options = "quantize_v", call.options
    layout = options.layout
    values.check_layout(layout, function)
    check_choice(options.dtype, "dtype", ("float8_e4m3", "float16"), function)
    smooth_v = arguments.check_bool(options.smooth_v, "smooth_v", function)
    check_choice(options.pv_accumulator, "pv_accumulator", ("fp32", "fp16"), function)
    v = tensors["v"]
    varlen = "cu_seqlens_k" in tensors
    _check_values(v, 3 if varlen else 4, function)
    batch = _check_sequences(tensors, ("cu_seqlens_k",), varlen, function) if varlen else v.shape[0]
    longest_k = _check_longest(0 if varlen else None, options.max_seqlen_k, varlen, function)
    arrays.require_same_device(tensors.values())
    values.check_strides(v, function)
    seq, head = (-3, -2) if layout == "NHD" else (-2, -3)
    problem = QuantizeProblem(
        v.dtype, batch, 0, v.shape[seq], 0, v.shape[head], v.shape[-1], varlen, smooth_k=False, smooth_v=smooth_v,
        row_bias="none", qk=False, v_dtype=options.dtype, max_seqlen_k=longest_k,
        v_levels=value_levels("fp16" if options.dtype == "float16" else "fp8", options.pv_accumulator),
    )  # fmt: skip
    return QuantizeCall(problem, ((0, 0, 0), (0, 0, 0), _strides(v, layout, varlen)), layout, 0)


def check_starts(starts: list[int], argument: str, rows: int, function: str) -> None:
    """Cumulative lengths that describe sequences inside the tensor. On a GPU that would need a synchronization."""
    if starts[0] != 0 or starts[-1] > rows or any(b < a for a, b in itertools.pairwise(starts)):
        raise ArgumentError(
            argument, f"0 first, never decreasing, at most the {rows} rows at the end", str(starts), function=function
        )


def _check_flag(value: Any, name: str, usual: bool, function: str) -> bool:
    """None is what is usual."""
    return usual if value is None else arguments.check_bool(value, name, function)


def _strides(t: Tensor, layout: str, varlen: bool) -> Strides3:
    return canonical_strides(tuple(t.shape), tuple(t.strides), layout, varlen)


def _check_values(v: Tensor, ndim: int, function: str) -> None:
    allowed = values.CPU_DTYPES if v.device == "cpu" else values.GPU_DTYPES
    if v.dtype not in allowed:
        raise DtypeError("v", f"{' or '.join(allowed)} on {v.device}", v.dtype, function=function)
    if len(v.shape) != ndim:
        raise ShapeError("v", f"{ndim} dimensions", f"shape {tuple(v.shape)}", function=function)
    values.check_quantized_head_dim(values.check_head_dim(v, function), "8-bit and fp16 operands", function)
    if max(v.shape[:-1]) > arguments.MAX_ROWS:
        raise ShapeError("v", f"at most {arguments.MAX_ROWS} rows", f"shape {tuple(v.shape)}", function=function)


def _check_sequences(tensors: dict[str, Tensor], names: tuple[str, ...], varlen: bool, function: str) -> int:
    """Number of packed sequences."""
    sizes = []
    for name in names:
        if name not in tensors:
            raise ArgumentError(name, "an int32 array of shape (batch + 1,)", "None", function=function)
        values.check_cu_seqlens(tensors[name], name, function)
        sizes.append(tensors[name].shape[0])
    if len(set(sizes)) > 1:
        raise ShapeError(names[1], f"shape ({sizes[0]},), like {names[0]}", f"({sizes[1]},)", function=function)
    if sizes[0] - 1 > values.MAX_PACKED_SEQUENCES:
        raise ShapeError(
            names[0], f"at most {values.MAX_PACKED_SEQUENCES} sequences", str(sizes[0] - 1), function=function
        )
    return int(sizes[0]) - 1


def _check_longest(max_q: Any, max_k: Any, varlen: bool, function: str) -> int:
    for value, name in ((max_q, "max_seqlen_q"), (max_k, "max_seqlen_k")):
        if varlen:
            extent = arguments.check_int(value, name, function)
            if extent > arguments.MAX_ROWS:
                raise ArgumentError(name, f"at most {arguments.MAX_ROWS}", str(extent), function=function)
        elif value is not None:
            raise ArgumentError(name, "None without cu_seqlens", repr(value), function=function)
    return int(max_k) if varlen else 0
