"""``quantize_qk`` and ``quantize_v``: operands of low-precision attention, made early or by `attention` itself."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

from . import arguments, arrays
from .arrays import Tensor
from .errors import ArgumentError, DtypeError, ShapeError
from .launch.quantize import QuantizePlan, QuantizeProblem
from .precision import GRANULARITIES, GROUPINGS, check_choice, value_levels
from .quantized import QuantizedQK, QuantizedV
from .quantizer import device_plan, strides_of
from .runtime.driver import on_reset

_MAX_PLANS = 1024
_STARTS = ("cu_seqlens_q", "cu_seqlens_k")
_plans: dict[Any, _Plan] = {}
# A plan holds loaded kernels, which are worth nothing under another driver or in a forked child.
on_reset(_plans.clear)


class _Plan:
    """A validated call."""

    __slots__ = ("layout", "max_seqlen_q", "problem", "quantizer", "shapes")

    def __init__(
        self, problem: QuantizeProblem, layout: str, quantizer: QuantizePlan | None, max_seqlen_q: int = 0
    ) -> None:
        self.problem = problem
        self.max_seqlen_q = max_seqlen_q
        self.layout = layout
        self.quantizer = quantizer
        self.shapes = problem.shapes()


def quantize_qk(
    q: Any,
    k: Any,
    *,
    layout: str = "NHD",
    dtype: str = "int8",
    granularity: str = "per_thread",
    grouping: str = "sm90",
    smooth_k: bool = True,
    smooth_q: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    with_bias: bool = False,
    stream: Any = None,
) -> QuantizedQK:
    """Quantize queries and keys for low-precision attention.

    ::

        k_int = round((k - k_mean) / k_scale);   q_int = round((q - q_mean) / q_scale)
        q . k = q_scale k_scale (q_int . k_int) + delta_s + row_bias            (up to rounding)

    Parameters
    ----------
    q, k : array
        As `attention` takes them, or packed as `attention_varlen` takes them when ``cu_seqlens_*`` are given.
    layout : "NHD" or "HND"
    dtype : "int8" or "int4"
        Values -127 to 127, or -7 to 7: two to a byte in the sm80 grouping, one in the sm90 grouping, because Hopper's
        tensor cores multiply bytes.
    granularity : str
        Rows that share a scale, see `omniattn.Int8`.
    grouping : "sm90" or "sm80"
        Which kernels will read it. "sm90": groups of 2 queries and 32 of 128 keys, on compute capability 9.0. "sm80":
        4 queries and 16 of 64 keys, on every GPU (docs/quantization.md says what suits which). The CPU reads both.
    smooth_k : bool
        Take K's mean over the keys of the sequence (of a long one, a sample of them) away.
    smooth_q : bool
        Take Q's mean over each block of 128 queries away, and compute ``delta_s``.
    cu_seqlens_q, cu_seqlens_k : array, (batch + 1,), int32, optional
        Both or neither: packed sequences.
    max_seqlen_q, max_seqlen_k : int
        With ``cu_seqlens_*``: at least the longest sequence; smaller ones raise on the CPU. max_seqlen_k is the extent
        of ``delta_s``: a smaller one makes NaN on a GPU.
    with_bias : bool
        Compute q . k_mean for every query: LSE, sinks and softcap need it.
    stream : optional
        As in `attention`.

    Returns
    -------
    QuantizedQK
        Its parts ``q`` and ``k`` take the places of q and k in `attention` and `attention_varlen`.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    A query with NaN or infinity becomes zeros and is marked in ``row_bias``; a key with one makes the scale of its
    group NaN. GPUs: compute capability 8.0 and newer; arrays on the CPU run the NumPy reference, which gives the same
    integers and scales bit for bit. SageAttention2 (Zhang et al. 2024), sections 3.1 and 3.2.
    """
    function = "quantize_qk"
    raw = None if stream is None else arrays.resolve_stream(stream)
    tensors = {"q": arrays.describe(q, "q", raw), "k": arrays.describe(k, "k", raw)}
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if value is not None:
            tensors[name] = arrays.describe(value, name, raw)
    options = (layout, dtype, granularity, grouping, smooth_k, smooth_q, max_seqlen_q, max_seqlen_k, with_bias)
    plan = _plan_for(function, tensors, options, _plan_qk)
    out = _run(plan, tensors, stream)
    return QuantizedQK(
        out["q_int"], out["k_int"], out["q_scale"], out["k_scale"], out["row_bias"], out.get("k_mean"),
        out.get("q_mean"), out.get("delta_s"), out.get("cu_seqlens_q"), out.get("cu_seqlens_k"), plan.problem, layout,
    )  # fmt: skip


def quantize_v(
    v: Any,
    *,
    layout: str = "NHD",
    dtype: str = "float8_e4m3",
    smooth_v: bool = True,
    pv_accumulator: str = "fp32",
    cu_seqlens_k: Any = None,
    max_seqlen_k: int | None = None,
    stream: Any = None,
) -> QuantizedV:
    """Quantize values for low-precision attention, one scale a channel.

    ::

        v = v_scale * v_quantized + v_mean                                     (up to rounding)

    Parameters
    ----------
    v : array
        As `attention` takes it, or packed as `attention_varlen` takes it when ``cu_seqlens_k`` is given.
    layout : "NHD" or "HND"
    dtype : "float8_e4m3" or "float16"
        8 bits, transposed; or fp16 with a power of two as scale, which no bfloat16 value overflows.
    smooth_v : bool
        Take the mean over the keys (a sample of long sequences) away, in channels where it is more than 1/16 of the
        range.
        With e4m3 v_mean has the mean of what rounding takes away too, so that the mean over the keys of
        v_scale * v_quantized + v_mean is that of v.
    pv_accumulator : "fp32" or "fp16"
        "fp16": e4m3 values so small that sums of their products may be fp16, which is faster on GeForce GPUs from sm_89
        on (docs/precision.md). float16 values always are.
    cu_seqlens_k : array, (batch + 1,), int32, optional
    max_seqlen_k : int
        With ``cu_seqlens_k``: at least the longest sequence.
    stream : optional
        As in `attention`.

    Returns
    -------
    QuantizedV
        Takes v's place in `attention` and `attention_varlen`.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    NaN and infinity stay where they are: e4m3 has one NaN for both. GPUs and CPU as in `quantize_qk`.
    """
    function = "quantize_v"
    raw = None if stream is None else arrays.resolve_stream(stream)
    tensors = {"v": arrays.describe(v, "v", raw)}
    if cu_seqlens_k is not None:
        tensors["cu_seqlens_k"] = arrays.describe(cu_seqlens_k, "cu_seqlens_k", raw)
    plan = _plan_for(function, tensors, (layout, dtype, smooth_v, pv_accumulator, max_seqlen_k), _plan_v)
    out = _run(plan, tensors, stream)
    return QuantizedV(out["v"], out["v_scale"], out["v_mean"], out.get("cu_seqlens_k"), plan.problem, layout)


def _plan_for(function: str, tensors: dict[str, Tensor], options: tuple[Any, ...], make: Any) -> _Plan:
    key: Any = (function, options, tuple(x.__class__ for x in options))
    for name, t in tensors.items():
        key += (name, t.dtype, t.device, t.ordinal, t.shape, t.strides)
    try:
        plan = _plans.get(key)
    except TypeError:  # an unhashable option: validation has the last word
        plan, key = None, None
    if plan is None:
        plan = make(tensors, *options)
        if key is not None:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
    return plan


def _plan_qk(
    tensors: dict[str, Tensor],
    layout: Any,
    dtype: Any,
    granularity: Any,
    grouping: Any,
    smooth_k: Any,
    smooth_q: Any,
    max_q: Any,
    max_k: Any,
    with_bias: Any,
) -> _Plan:
    function = "quantize_qk"
    arguments.check_layout(layout, function)
    check_choice(dtype, "dtype", ("int8", "int4"), function)
    check_choice(granularity, "granularity", GRANULARITIES, function)
    check_choice(grouping, "grouping", GROUPINGS, function)
    smooth_k = arguments.check_bool(smooth_k, "smooth_k", function)
    smooth_q = arguments.check_bool(smooth_q, "smooth_q", function)
    with_bias = arguments.check_bool(with_bias, "with_bias", function)
    q, k = tensors["q"], tensors["k"]
    varlen = "cu_seqlens_q" in tensors or "cu_seqlens_k" in tensors
    arguments.check_qkv(q, k, k, 3 if varlen else 4, layout, function)
    batch = _check_sequences(tensors, ("cu_seqlens_q", "cu_seqlens_k"), varlen, function) if varlen else q.shape[0]
    longest_k = _check_longest(max_q, max_k, varlen, function)
    arrays.require_same_device(tensors.values())
    seq, head = (-3, -2) if layout == "NHD" else (-2, -3)
    problem = QuantizeProblem(
        q.dtype, batch, q.shape[seq], k.shape[seq], q.shape[head], k.shape[head], q.shape[-1], varlen,
        8 if dtype == "int8" else 4, granularity, grouping, smooth_q, smooth_k, False, "full" if with_bias else "marks",
        v=False, max_seqlen_k=longest_k, wide=dtype == "int4" and grouping == "sm90",
    )  # fmt: skip
    return _finish_plan(problem, q, k, None, layout, function, int(max_q) if varlen else 0)


def _plan_v(
    tensors: dict[str, Tensor], layout: Any, dtype: Any, smooth_v: Any, pv_accumulator: Any, max_k: Any
) -> _Plan:
    function = "quantize_v"
    arguments.check_layout(layout, function)
    check_choice(dtype, "dtype", ("float8_e4m3", "float16"), function)
    smooth_v = arguments.check_bool(smooth_v, "smooth_v", function)
    check_choice(pv_accumulator, "pv_accumulator", ("fp32", "fp16"), function)
    v = tensors["v"]
    varlen = "cu_seqlens_k" in tensors
    _check_values(v, 3 if varlen else 4, function)
    batch = _check_sequences(tensors, ("cu_seqlens_k",), varlen, function) if varlen else v.shape[0]
    longest_k = _check_longest(0 if varlen else None, max_k, varlen, function)
    arrays.require_same_device(tensors.values())
    seq, head = (-3, -2) if layout == "NHD" else (-2, -3)
    problem = QuantizeProblem(
        v.dtype, batch, 0, v.shape[seq], 0, v.shape[head], v.shape[-1], varlen, smooth_k=False, smooth_v=smooth_v,
        row_bias="none", qk=False, v_dtype=dtype, max_seqlen_k=longest_k,
        v_levels=value_levels("fp16" if dtype == "float16" else "fp8", pv_accumulator),
    )  # fmt: skip
    return _finish_plan(problem, None, None, v, layout, function)


def _check_values(v: Tensor, ndim: int, function: str) -> None:
    allowed = arguments.CPU_DTYPES if v.device == "cpu" else arguments.GPU_DTYPES
    if v.dtype not in allowed:
        raise DtypeError("v", f"{' or '.join(allowed)} on {v.device}", v.dtype, function=function)
    if len(v.shape) != ndim:
        raise ShapeError("v", f"{ndim} dimensions", f"shape {tuple(v.shape)}", function=function)
    if not (8 <= v.shape[-1] <= arguments.MAX_HEAD_DIM and v.shape[-1] % 8 == 0):
        expected = f"head_dim a multiple of 8 from 8 to {arguments.MAX_HEAD_DIM}"
        raise ShapeError("v", expected, f"{v.shape[-1]}", function=function)
    if max(v.shape[:-1]) > arguments.MAX_ROWS:
        raise ShapeError("v", f"at most {arguments.MAX_ROWS} rows", f"shape {tuple(v.shape)}", function=function)


def _check_sequences(tensors: dict[str, Tensor], names: tuple[str, ...], varlen: bool, function: str) -> int:
    """Number of packed sequences."""
    sizes = []
    for name in names:
        if name not in tensors:
            raise ArgumentError(name, "an int32 array of shape (batch + 1,)", "None", function=function)
        arguments.check_cu_seqlens(tensors[name], name, function)
        sizes.append(tensors[name].shape[0])
    if len(set(sizes)) > 1:
        raise ShapeError(names[1], f"shape ({sizes[0]},), like {names[0]}", f"({sizes[1]},)", function=function)
    if sizes[0] - 1 > arguments.MAX_PACKED_SEQUENCES:
        raise ShapeError(
            names[0], f"at most {arguments.MAX_PACKED_SEQUENCES} sequences", str(sizes[0] - 1), function=function
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


def _finish_plan(
    problem: QuantizeProblem,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    layout: str,
    function: str,
    max_seqlen_q: int = 0,
) -> _Plan:
    given = [t for t in (q, k, v) if t is not None]
    for t in given:
        arguments.check_strides(t, function)
    if given[0].device == "cpu":
        return _Plan(problem, layout, None, max_seqlen_q)
    strides = (
        strides_of(q, layout, problem.varlen),
        strides_of(k, layout, problem.varlen),
        strides_of(v, layout, problem.varlen),
    )
    return _Plan(problem, layout, device_plan(problem, strides, given[0].ordinal, run=True))


def _run(plan: _Plan, tensors: dict[str, Tensor], stream: Any) -> dict[str, Any]:
    ref = next(iter(tensors.values()))
    if plan.quantizer is None:
        return _run_on_cpu(plan, tensors, ref, stream)
    for name, t in tensors.items():
        multiple = 16 if name in ("q", "k", "v") else t.itemsize
        arguments.check_alignment(t, "quantize_v" if "v" in tensors else "quantize_qk", multiple)
    outputs = {name: arrays.empty_like_framework(ref, shape, dtype) for name, (shape, dtype) in plan.shapes.items()}
    starts = {
        name: arrays.empty_like_framework(ref, t.shape, "int32") for name, t in tensors.items() if name in _STARTS
    }
    workspace = arrays.empty_like_framework(ref, (max(plan.quantizer.workspace_bytes, 1),), "uint8")
    everything = [*tensors.values(), *outputs.values(), *starts.values(), workspace]
    handle = arrays.prepare(everything, stream)
    inputs = [tensors[name].ptr if name in tensors else 0 for name in ("q", "k", "v", *_STARTS)]
    copies = [starts[name].ptr if name in starts else 0 for name in _STARTS]
    plan.quantizer.launch(
        handle,
        (inputs[0], inputs[1], inputs[2], inputs[3], inputs[4]),
        {name: t.ptr for name, t in outputs.items()},
        workspace.ptr,
        (copies[0], copies[1]),
    )
    arrays.retire(everything, handle)
    return {name: arrays.finish(t, handle) for name, t in (outputs | starts).items()}


def _run_on_cpu(plan: _Plan, tensors: dict[str, Tensor], ref: Tensor, stream: Any) -> dict[str, Any]:
    """The NumPy reference; computes all before it writes anything."""
    import numpy as np

    from .reference import quantize as reference
    from .reference.varlen import check_max_seqlen

    arrays.prepare([ref], stream)  # refuses a stream
    problem = plan.problem
    given: dict[str, Any] = {name: arrays.to_numpy(t) for name, t in tensors.items()}
    for name, rows in (("cu_seqlens_q", problem.rows_q), ("cu_seqlens_k", problem.rows_k)):
        if name in given:
            _check_starts([int(x) for x in given[name]], name, rows, ref.argument)
    function = "quantize_v" if ref.argument == "v" else "quantize_qk"
    for name, extent in (("q", plan.max_seqlen_q), ("k", problem.max_seqlen_k)):
        if f"cu_seqlens_{name}" in given:
            longest = int(np.diff(given[f"cu_seqlens_{name}"]).max(initial=0))
            check_max_seqlen(extent, longest, f"max_seqlen_{name}", function)
    if plan.layout == "NHD":
        given = {name: x.swapaxes(-3, -2) if name in ("q", "k", "v") else x for name, x in given.items()}
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    values = reference.quantize(problem, *(given.get(name) for name in names))
    results = {}
    copies = {name: np.asarray(given[name], dtype=np.int32) for name in _STARTS if name in given}
    for name, source in (values | copies).items():
        result = arrays.empty_like_framework(ref, source.shape, source.dtype.name)
        source = np.ascontiguousarray(source)
        # `arrays.store` rounds to floating types; these bytes are final.
        if source.nbytes:
            ctypes.memmove(result.ptr, source.ctypes.data, source.nbytes)
        results[name] = arrays.finish(result, 0)
    return results


def _check_starts(starts: list[int], argument: str, rows: int, of: str) -> None:
    """Cumulative lengths that describe sequences inside the tensor. On a GPU that would need a synchronization."""
    function = "quantize_v" if of == "v" else "quantize_qk"
    if starts[0] != 0 or starts[-1] > rows or any(b < a for a, b in itertools.pairwise(starts)):
        raise ArgumentError(
            argument, f"0 first, never decreasing, at most the {rows} rows at the end", str(starts), function=function
        )
