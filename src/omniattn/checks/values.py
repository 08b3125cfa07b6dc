"""Checks of the public functions' arguments. Every error names argument, expected and received."""

from __future__ import annotations

import operator
from typing import Any

from ..arguments import MAX_HEAD_DIM, MAX_QUANTIZED_HEAD_DIM, MAX_ROWS, check_alignment, check_number
from ..arrays import Tensor
from ..arrays.strides import overlaps_itself
from ..errors import ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError
from ..problems import EXACT, KNOBS, PRECISIONS, UNLIMITED, Precision
from ..problems.precision import NAMED, auto_of

LAYOUTS = ("NHD", "HND")
GPU_DTYPES = ("float16", "bfloat16")
CPU_DTYPES = ("float16", "bfloat16", "float32", "float64")
#: The 8-bit float that q, k and v may come in.
E4M3 = "float8_e4m3fn"
#: Packed sequences: each may add a partly filled tile, and the tiles of a head are counted in 32 bits too.
MAX_PACKED_SEQUENCES = 2**30
#: Smallest number that the kernels' fp32 arithmetic keeps: its inverse is finite.
_LEAST_FP32 = 2.0**-126


def check_layout(layout: Any, function: str) -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ArgumentError("layout", "'NHD' or 'HND'", repr(layout), function=function)


def check_window(window: Any, causal: bool, function: str) -> tuple[int, int]:
    """(left, right) with causal folded in; `UNLIMITED` for all."""
    left, right = UNLIMITED, UNLIMITED
    if window is not None:
        expected = "None or (left, right), two integers >= -1 (-1: unlimited)"
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ArgumentError("window", expected, repr(window), function=function)
        try:
            left, right = (operator.index(x) for x in window)
        except TypeError:
            raise ArgumentError("window", expected, repr(window), function=function) from None
        if left < UNLIMITED or right < UNLIMITED or any(isinstance(x, bool) for x in window):
            raise ArgumentError("window", expected, repr(window), function=function)
        # Wider than any sequence is unlimited; the kernels count keys in 32 bits.
        left, right = (UNLIMITED if x >= MAX_ROWS else x for x in (left, right))
    return left, 0 if causal else right


def hiding_window(window: tuple[int, int], rows_q: int, rows_k: int) -> tuple[int, int]:
    """A window with `UNLIMITED` for each side that hides nothing; of packed sequences, whatever their lengths are."""
    left, right = window
    # The last query stands at the last key, the first one rows_q - 1 before it.
    return UNLIMITED if left >= rows_k - 1 else left, UNLIMITED if right >= rows_q - 1 else right


def check_precision(precision: Any, function: str) -> Precision:
    """The precision that a name or a set of knobs means; of "auto" and an `Auto` that of calls that nothing serves."""
    if precision.__class__ in KNOBS:
        found: Precision = precision.precision
        return found
    if auto_of(precision) is not None:
        return EXACT
    if not isinstance(precision, str) or precision not in PRECISIONS:
        names = ", ".join(map(repr, (*PRECISIONS, "auto")))
        expected = f"one of {names}, an Int8, an Int4, an Fp8 or an Auto"
        raise ArgumentError("precision", expected, repr(precision), function=function)
    return NAMED[precision]


def most_head_dim(precision: Any) -> int:
    """Channels of a head that `attention` takes at a precision, which it checks itself."""
    is_exact = auto_of(precision) is not None or (isinstance(precision, str) and precision == "exact")
    return MAX_HEAD_DIM if is_exact else MAX_QUANTIZED_HEAD_DIM


def dtype_name(dtype: Any) -> str:
    """Name of an element type that the caller gives by name or as the framework's own."""
    if isinstance(dtype, str):
        return dtype
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    import numpy as np

    try:
        return str(np.dtype(dtype).name)
    except (TypeError, ValueError):  # the latter of an array
        return repr(dtype)


def check_out_dtype(out_dtype: Any, q_dtype: str, function: str) -> str:
    """Element type of o: q's, and of q in e4m3 bfloat16 unless the caller says float16."""
    allowed = GPU_DTYPES if q_dtype == E4M3 else (q_dtype,)
    if out_dtype is None:
        return "bfloat16" if q_dtype == E4M3 else q_dtype
    if dtype_name(out_dtype) not in allowed:
        expected = " or ".join(map(repr, allowed)) + ("" if q_dtype == E4M3 else ", like q, or None")
        raise ArgumentError("out_dtype", expected, repr(out_dtype), function=function)
    return dtype_name(out_dtype)


def check_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ndim: int,
    layout: str,
    function: str,
    *,
    with_e4m3: bool = False,
    paged: bool = False,
) -> None:
    """Dtypes, ranks, head_dim and heads of q, k, v, in the caller's layout. v may have a head_dim of its own.

    paged: k and v are pages, whose first dimension is their number.
    """
    dims = {
        (4, "NHD"): "(batch, seq, heads, head_dim)",
        (4, "HND"): "(batch, heads, seq, head_dim)",
        (3, "NHD"): "(rows, heads, head_dim)",
        (3, "HND"): "(heads, rows, head_dim)",
    }
    pages = "(blocks, tokens, heads, head_dim)" if layout == "NHD" else "(blocks, heads, tokens, head_dim)"
    allowed = (CPU_DTYPES if q.device == "cpu" else GPU_DTYPES) + ((E4M3,) if with_e4m3 else ())
    for t in (q, k, v):
        if t.dtype == "float8_e5m2" and with_e4m3:
            hint = "The 8-bit products take e4m3, whose third bit of mantissa attention needs more than e5m2's range"
            raise DtypeError(t.argument, " or ".join(allowed), t.dtype, function=function, hint=hint)
    if q.dtype not in allowed:
        raise DtypeError("q", f"{' or '.join(allowed)} on {q.device}", q.dtype, function=function)
    for t in (q, k, v):
        of_pages = paged and t is not q
        rank, names = (4, pages) if of_pages else (ndim, dims[ndim, layout])
        if len(t.shape) != rank:
            raise ShapeError(t.argument, f"{rank} dimensions {names}", f"shape {tuple(t.shape)}", function=function)
        if t.dtype != q.dtype:
            raise DtypeError(t.argument, f"{q.dtype}, like q", t.dtype, function=function)
    seq, head = (-3, -2) if layout == "NHD" else (-2, -3)
    head_dim = check_head_dim(q, function)
    if k.shape[-1] != head_dim:
        raise ShapeError("k", f"head_dim {head_dim}, like q", f"{k.shape[-1]}", function=function)
    check_head_dim(v, function)
    for t in (k, v):
        if ndim == 4 and t.shape[0] != q.shape[0]:
            raise ShapeError(t.argument, f"batch {q.shape[0]}, like q", f"{t.shape[0]}", function=function)
    if v.shape[:-1] != k.shape[:-1]:
        expected = f"shape {tuple(k.shape[:-1])} before head_dim, like k"
        raise ShapeError("v", expected, f"{tuple(v.shape)}", function=function)
    heads_q, heads_kv = q.shape[head], k.shape[head]
    if (heads_kv == 0 and heads_q > 0) or (heads_kv > 0 and heads_q % heads_kv != 0):
        raise ShapeError(
            "k",
            f"a number of heads that divides q's {heads_q}",
            f"{heads_kv} heads, layout {layout}",
            function=function,
        )
    for t in (q, k):
        if t.shape[seq] > MAX_ROWS:
            raise ShapeError(t.argument, f"at most {MAX_ROWS} rows", f"{t.shape[seq]}", function=function)


def check_head_dim(t: Tensor, function: str) -> int:
    """head_dim of one of q, k, v, its last dimension."""
    head_dim = int(t.shape[-1])
    if not (8 <= head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0):
        expected = f"head_dim a multiple of 8 from 8 to {MAX_HEAD_DIM}"
        raise ShapeError(t.argument, expected, f"{head_dim}", function=function)
    return head_dim


def check_quantized_head_dim(head_dim: int, what: str, function: str) -> None:
    """Raise for heads that are wider than kernels on 8 and 4 bits take. what: that the call wants of them."""
    if head_dim > MAX_QUANTIZED_HEAD_DIM:
        raise UnsupportedError(
            f"{function}(): {what} with a head_dim of {head_dim}",
            instead=f"head_dim up to {MAX_QUANTIZED_HEAD_DIM}, or 16-bit arrays with precision='exact', which take "
            f"{MAX_HEAD_DIM}",
        )


def check_strides(t: Tensor, function: str, *, written: bool = False) -> None:
    """The last dimension contiguous; on a GPU rows that start at multiples of 16 bytes."""
    shape, strides = t.shape, t.strides
    if 0 in shape:
        return
    if shape[-1] > 1 and strides[-1] != 1:
        raise StrideError(t.argument, "stride 1 in the last dimension", f"{strides[-1]}", function=function)
    for n, s in zip(shape[:-1], strides[:-1], strict=True):
        if n == 1:
            continue
        if t.device == "cuda" and s * t.itemsize % 16 != 0:
            raise StrideError(
                t.argument,
                f"strides that are multiples of {16 // t.itemsize} elements (16 bytes)",
                f"strides {tuple(strides)}",
                function=function,
                hint="A contiguous copy has such strides",
            )
    if written:
        check_no_overlap(t, function)


def check_no_overlap(t: Tensor, function: str) -> None:
    """An output whose elements share memory would hold whatever was written last."""
    if overlaps_itself(t.shape, t.strides):
        raise StrideError(
            t.argument, "elements that do not share memory", f"strides {tuple(t.strides)}", function=function
        )


def check_softcap(value: Any, function: str) -> float:
    softcap = check_number(value, "softcap", function, least=0.0)
    if 0.0 < softcap < _LEAST_FP32:
        raise ArgumentError("softcap", f"0, or a number >= {_LEAST_FP32:.3g}", repr(value), function=function)
    return softcap


def check_addresses(tensors: dict[str, Tensor], aligned: frozenset[str], function: str) -> None:
    """Addresses at multiples of 16 bytes for ``aligned``, of the element size for the others."""
    for name, t in tensors.items():
        multiple = 16 if name in aligned else t.itemsize
        if t.ptr % multiple:
            check_alignment(t, function, multiple)


def check_mask(mask: Tensor, shape: tuple[int, int, int, int], io_dtype: str, function: str) -> str:
    """Kind of the mask: ``"bool"``, ``"float32"`` or ``"io"``."""
    kinds = {"bool": "bool", "float32": "float32"} | {io_dtype: "io"}
    # On the CPU q itself may be float32.
    if mask.dtype not in kinds:
        expected = " or ".join(dict.fromkeys(("bool (True: visible)", "float32", io_dtype)))
        hint = "mask != 0 makes booleans of integers" if "int" in mask.dtype else ""
        raise DtypeError("mask", expected, mask.dtype, function=function, hint=hint)
    if len(mask.shape) > 4 or any(m not in (1, n) for m, n in zip(reversed(mask.shape), reversed(shape), strict=False)):
        raise ShapeError(
            "mask",
            f"a shape that broadcasts to (batch, heads, seqlen_q, seqlen_k) = {shape}",
            f"{tuple(mask.shape)}",
            function=function,
        )
    return kinds[mask.dtype]


def broadcast_strides(mask: Tensor, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Strides of the mask seen in the full shape; 0 where it is broadcast."""
    missing = 4 - len(mask.shape)
    own = [0] * missing + [s if n > 1 else 0 for n, s in zip(mask.shape, mask.strides, strict=True)]
    return (own[0], own[1], own[2], own[3])


def check_sinks(sinks: Tensor, heads: int, io_dtype: str, function: str) -> str:
    """Kind of the sinks: ``"float32"`` or ``"io"``."""
    kinds = {"float32": "float32"} | {io_dtype: "io"}
    if sinks.dtype not in kinds:
        raise DtypeError("sinks", f"float32 or q's {io_dtype}", sinks.dtype, function=function)
    if tuple(sinks.shape) != (heads,):
        raise ShapeError("sinks", f"shape ({heads},), one per query head", f"{tuple(sinks.shape)}", function=function)
    if heads > 1 and sinks.strides[0] != 1:
        raise StrideError("sinks", "a contiguous array", f"stride {sinks.strides[0]}", function=function)
    return kinds[sinks.dtype]


def check_cu_seqlens(cu: Tensor, argument: str, function: str) -> None:
    if cu.dtype != "int32":
        raise DtypeError(argument, "int32", cu.dtype, function=function)
    if len(cu.shape) != 1 or cu.shape[0] < 1:
        raise ShapeError(argument, "shape (batch + 1,)", f"{tuple(cu.shape)}", function=function)
    if cu.shape[0] > 1 and cu.strides[0] != 1:
        raise StrideError(argument, "a contiguous array", f"stride {cu.strides[0]}", function=function)


def check_seqused(tensors: dict[str, Tensor], batch: int, function: str) -> None:
    """``seqused_q`` and ``seqused_k`` of packed sequences, where they are given."""
    for name in ("seqused_q", "seqused_k"):
        if name not in tensors:
            continue
        t = tensors[name]
        if t.dtype != "int32":
            raise DtypeError(name, "int32", t.dtype, function=function)
        if tuple(t.shape) != (batch,):
            raise ShapeError(name, f"shape (batch,) = ({batch},)", f"{tuple(t.shape)}", function=function)
        if batch > 1 and t.strides[0] != 1:
            raise StrideError(name, "a contiguous array", f"stride {t.strides[0]}", function=function)


def check_like(t: Tensor, shape: tuple[int, ...], dtype: str, function: str) -> None:
    """An array that the caller gives for a known shape and dtype."""
    if t.dtype != dtype:
        raise DtypeError(t.argument, dtype, t.dtype, function=function)
    if tuple(t.shape) != tuple(shape):
        raise ShapeError(t.argument, f"shape {tuple(shape)}", f"{tuple(t.shape)}", function=function)
