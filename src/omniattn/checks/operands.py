"""What quantized operands of one call have to have in common. Every error names argument, expected and received."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import arguments, arrays, runtime
from ..arrays import Tensor
from ..errors import ArgumentError, DtypeError, ShapeError, StrideError
from ..plan.engine import Call
from ..problems import (
    AttentionProblem,
    AttentionStrides,
    Precision,
    QuantizedK,
    QuantizedQ,
    QuantizedQK,
    QuantizedV,
    QuantizeProblem,
)
from ..problems.precision import auto_of, knobs_of, value_levels
from ..problems.quantize import QK_DTYPES
from . import values
from .attention import USED, canonical_strides, check_common, check_mask, check_out, check_scale, mask_has_map

#: Whose array each operand is, in the order in which a call looks at them. Attention reads neither q_mean nor k_mean.
_Q_ARRAYS = ("q_int", "q_scale", "row_bias", "delta_s")
_K_ARRAYS = ("k_int", "k_scale")
_V_ARRAYS = ("v", "v_scale", "v_mean")
STARTS = ("cu_seqlens_q", "cu_seqlens_k")
ARRAYS = (*_Q_ARRAYS, *_K_ARRAYS, *_V_ARRAYS)
#: All arrays of a call.
ALL = (*ARRAYS, *STARTS, "out", "mask", "sinks")
#: Which argument each belongs to.
ARGUMENT = {
    **dict.fromkeys((*_Q_ARRAYS, "cu_seqlens_q"), "q"),
    **dict.fromkeys((*_K_ARRAYS, "cu_seqlens_k"), "k"),
    **dict.fromkeys(_V_ARRAYS, "v"),
}

#: Those that kernels access 16 bytes at a time.
ALIGNED = frozenset({*ARRAYS, "out"})

#: Of what Q and K became: what `Precision.qk` calls it.
_PRECISION_OF = {element: name for name, element in QK_DTYPES.items()}
_WORDS = {"qk_dtype": "dtype", "rows_k": "rows", "heads_kv": "heads", "dtype": "dtype of what was quantized"}


def check_kinds(function: str, q: Any, k: Any, v: Any, *sequences: Any) -> None:
    """sequences: cu_seqlens_q and cu_seqlens_k, of packed calls seqused_q and seqused_k."""
    for value, argument, kind, source in (
        (q, "q", QuantizedQ, "quantize_qk(...).q"),
        (k, "k", QuantizedK, "quantize_qk(...).k"),
        (v, "v", QuantizedV, "quantize_v(...)"),
    ):
        if value.__class__ is not kind:
            raise ArgumentError(
                argument, f"a {kind.__name__}, from {source}, because one of q, k, v is quantized",
                type(value).__name__, function=function,
            )  # fmt: skip
    for value, argument in zip(sequences, (*STARTS, *USED, "block_table"), strict=False):
        if value is not None:
            raise ArgumentError(
                argument,
                "None, because quantized operands bring their sequences",
                type(value).__name__,
                function=function,
            )


def arrays_of(of_q: QuantizedQK, of_k: QuantizedQK, v: QuantizedV, out: Any, mask: Any, sinks: Any) -> tuple[Any, ...]:
    """All arrays of a call in the order of `ALL`."""
    return (
        of_q.q_int, of_q.q_scale, of_q.row_bias, of_q.delta_s, of_k.k_int, of_k.k_scale, v.v, v.v_scale, v.v_mean,
        of_q.cu_seqlens_q, of_k.cu_seqlens_k, out, mask, sinks,
    )  # fmt: skip


def combine(function: str, of_q: QuantizedQK, of_k: QuantizedQK, v: QuantizedV, layout: str) -> QuantizeProblem:
    """The quantization of all three together, if they belong together."""
    a, b, c = of_q.problem, of_k.problem, v.problem
    for own, argument in ((of_q.layout, "q"), (of_k.layout, "k"), (v.layout, "v")):
        if own != layout:
            raise ArgumentError(
                argument, f"operands quantized with layout {layout!r}, that of this call", repr(own), function=function
            )
    varlen = function == "attention_varlen"
    kind = {True: "packed sequences", False: "a batch"}
    for problem, argument in ((a, "q"), (b, "k"), (c, "v")):
        if problem.varlen != varlen:
            hint = f"attention{'_varlen' if problem.varlen else ''} takes {kind[problem.varlen]}"
            raise ArgumentError(
                argument, f"operands quantized from {kind[varlen]}", kind[problem.varlen], function=function, hint=hint
            )
    if of_q is not of_k:
        for there, what in (
            (of_q.delta_s is not None, "smooth_q (delta_s)"),
            (a.row_bias == "full" and a.smooth_k, "with_bias (row_bias)"),
        ):
            if there:
                raise ArgumentError(
                    "k", f"the K of q's own quantize_qk call, to which {what} ties q", "K of another call",
                    function=function,
                )  # fmt: skip
        _check_equal(function, "k", a, b, "q", ("qk_dtype", "unpacked", "granularity", "grouping", "hadamard", "seed"))
        if a.heads_kv != b.heads_kv and (b.heads_kv == 0 or a.heads_q % b.heads_kv):
            raise ArgumentError(
                "k", f"a number of heads that divides q's {a.heads_q}", str(b.heads_kv), function=function
            )
    _check_equal(function, "k", a, b, "q", ("dtype", "batch", "head_dim"))
    _check_equal(function, "v", b, c, "k", ("dtype", "batch", "rows_k", "heads_kv", "head_dim"))
    return dataclasses.replace(
        b, rows_q=a.rows_q, heads_q=a.heads_q, smooth_q=a.smooth_q, row_bias=a.row_bias, v=True, v_dtype=c.v_dtype,
        smooth_v=c.smooth_v, v_levels=c.v_levels,
    )  # fmt: skip


def _check_equal(
    function: str, argument: str, wanted: QuantizeProblem, got: QuantizeProblem, like: str, names: tuple[str, ...]
) -> None:
    for name in names:
        expected, received = getattr(wanted, name), getattr(got, name)
        if expected != received:
            raise ArgumentError(
                argument, f"{_WORDS.get(name, name)} {expected}, like {like}", str(received), function=function
            )


def check_precision(function: str, precision: Any, operands: QuantizeProblem) -> Precision:
    """The precision that the operands were made with. ``"exact"``, the default, leaves it to them."""
    pv = "fp16" if operands.v_dtype == "float16" else "fp8"
    # Sums of float16 values, and of e4m3 ones that are small enough, may be of either type.
    either = pv == "fp16" or operands.v_levels <= value_levels(pv, "fp16")
    own = Precision(
        _PRECISION_OF[operands.qk_dtype], pv, "auto" if either else "fp32", operands.granularity, operands.smooth_q,
        operands.smooth_k, operands.smooth_v, operands.hadamard, operands.seed,
    )  # fmt: skip
    asked = values.check_precision(precision, function)
    if auto_of(precision) is not None:
        expected = f"that of the operands, {knobs_of(own)!r}, or left out"
        raise ArgumentError("precision", expected, repr(precision), function=function)
    if not asked.quantized or precision == asked.qk == own.qk:
        return own
    if either and not isinstance(precision, str):
        own = dataclasses.replace(own, pv_accumulator=asked.pv_accumulator)
    wanted = dataclasses.replace(
        asked,
        pv=pv if asked.pv == "auto" else asked.pv,
        pv_accumulator=own.pv_accumulator if asked.pv_accumulator == "auto" else asked.pv_accumulator,
    )
    if isinstance(precision, str) or wanted != own:
        hint = None
        if wanted == dataclasses.replace(own, pv_accumulator="fp16"):
            hint = "fp16 sums need values of quantize_v(pv_accumulator='fp16') or quantize_v(dtype='float16')"
        raise ArgumentError(
            "precision",
            f"that of the operands, {knobs_of(own)!r}, or left out",
            repr(precision),
            function=function,
            hint=hint,
        )
    return own


def check_extents(function: str, operands: QuantizeProblem, max_q: Any, max_k: Any, has_mask: bool) -> tuple[int, int]:
    """Extents of the mask along queries and keys."""
    if not operands.varlen:
        return operands.rows_q, operands.rows_k
    found = []
    for value, name in ((max_q, "max_seqlen_q"), (max_k, "max_seqlen_k")):
        if value is None and not has_mask:
            found.append(0)
        else:
            found.append(arguments.check_int(value, name, function, most=arguments.MAX_ROWS))
    return found[0], found[1]


def check_arrays(function: str, operands: QuantizeProblem, tensors: dict[str, Tensor]) -> None:
    expected = {name: facts for name, facts in operands.shapes().items() if name in ARRAYS}
    if operands.varlen:
        expected |= dict.fromkeys(STARTS, ((operands.batch + 1,), "int32"))
    for name in (*ARRAYS, *STARTS):
        t, wanted = tensors.get(name), expected.get(name)
        argument = f"{ARGUMENT[name]}.{name}"
        if t is None and wanted is None:
            continue
        if t is None or wanted is None:
            raise ArgumentError(
                argument, "None" if wanted is None else "an array", "an array" if t is not None else "None",
                function=function,
            )  # fmt: skip
        shape, dtype = wanted
        if t.dtype != dtype:
            raise DtypeError(argument, dtype, t.dtype, function=function)
        if tuple(t.shape) != tuple(shape):
            raise ShapeError(argument, f"shape {tuple(shape)}", f"{tuple(t.shape)}", function=function)
        steps = arrays.contiguous_strides(tuple(shape))
        if 0 not in shape and any(n > 1 and s != x for n, s, x in zip(shape, t.strides, steps, strict=True)):
            raise StrideError(argument, "a contiguous array", f"strides {tuple(t.strides)}", function=function)
    arrays.require_same_device(tensors.values())


def check_same_sequences(function: str, v: QuantizedV, tensors: dict[str, Tensor]) -> None:
    """For the CPU; on a GPU that would need a synchronization."""
    if v.cu_seqlens_k is None:
        return
    starts = arrays.to_numpy(arrays.describe_of(function, v.cu_seqlens_k, "v.cu_seqlens_k"))
    wanted = arrays.to_numpy(tensors["cu_seqlens_k"])
    if starts.tolist() != wanted.tolist():
        raise ArgumentError("v", f"cu_seqlens_k {wanted.tolist()}, like k", str(starts.tolist()), function=function)


def check_operands(call: Call, tensors: dict[str, Tensor]) -> AttentionProblem:
    """The problem of a call on quantized operands; ``call.subject`` are the operands q, k, v."""
    function, options = call.operation.name, call.options
    q, k, v = call.subject
    common = check_common(options, function)
    operands = combine(function, q.pair, k.pair, v, options.layout)
    absolute = common.return_lse or common.softcap > 0 or "sinks" in tensors
    if absolute and operands.smooth_k and operands.row_bias != "full":
        raise ArgumentError(
            "q", "operands of quantize_qk(with_bias=True), because LSE, sinks and softcap need q . k_mean",
            "with_bias=False", function=function,
        )  # fmt: skip
    precision = check_precision(function, options.precision, operands)
    scale = check_scale(options, operands.head_dim, function)
    values.check_out_dtype(options.out_dtype, operands.dtype, function)
    extents = check_extents(function, operands, options.max_seqlen_q, options.max_seqlen_k, "mask" in tensors)
    check_arrays(function, operands, tensors)
    heads, rows, batch, varlen = operands.heads_q, operands.rows_q, operands.batch, operands.varlen
    mask, mask_strides = check_mask(tensors, (batch, heads, *extents), operands.dtype, function)
    sinks = "none"
    if "sinks" in tensors:
        sinks = values.check_sinks(tensors["sinks"], heads, operands.dtype, function)
    on_gpu = tensors["q_int"].device == "cuda"
    maps = on_gpu and runtime.has_tensor_maps()
    problem = AttentionProblem(
        operands.dtype, batch, rows, operands.rows_k, heads, operands.heads_kv, operands.head_dim, *common.window,
        scale, common.softcap, mask, sinks, varlen, precision, common.deterministic,
        maps, operands, common.return_lse, options.layout,
        *(extents if varlen else (0, 0)),
        maps and mask in ("float32", "io") and mask_has_map(tensors["mask"], mask_strides),
    )  # fmt: skip
    o_strides = check_out(tensors, problem.o_shape, operands.dtype, function)
    if on_gpu and operands.dtype not in values.GPU_DTYPES:
        raise DtypeError(
            "q", f"operands quantized from {' or '.join(values.GPU_DTYPES)} on a GPU", operands.dtype,
            function=function,
        )  # fmt: skip
    unused = (0, 0, 0)
    own = canonical_strides(problem.o_shape, o_strides, options.layout, varlen)
    strides = AttentionStrides(unused, unused, unused, own, (0 if varlen else heads * rows, rows), mask_strides)
    return dataclasses.replace(problem, strides=strides)
