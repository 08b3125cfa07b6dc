"""Argument checks of the reference: enough that a wrong call is an error and never a wrong result.

`omniattn.attention` checks more, and earlier; these guard direct calls of the oracle.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.errors import ArgumentError, DtypeError, ShapeError
from omniattn.reference.core import Array, Options

LAYOUTS = ("NHD", "HND")


def as_array(value: Any, argument: str, function: str, *, ndim: int) -> Array:
    """A real floating array with `ndim` dimensions, without a copy where `value` is one already."""
    array = np.asarray(value)
    if array.dtype.kind != "f":
        raise DtypeError(argument, "a floating-point array", f"dtype {array.dtype}", function=function)
    if array.ndim != ndim:
        raise ShapeError(argument, f"{ndim} dimensions", f"shape {array.shape}", function=function)
    return array


def heads_first(value: Any, argument: str, function: str, ndim: int, is_nhd: bool) -> Array:
    """`value` with the dimensions (..., heads, seq, dim): a view, or a copy where sums would hang on its strides.

    Before NumPy 1.25 a product of a matrix that BLAS cannot read (reversed, broadcast) rounds otherwise than a copy's.
    """
    array = as_array(value, argument, function, ndim=ndim)
    rows, columns = array.strides[-3 if is_nhd else -2], array.strides[-1]
    if array.size and (columns != array.itemsize or rows < array.shape[-1] * array.itemsize):
        array = np.ascontiguousarray(array)
    return array.swapaxes(-3, -2) if is_nhd else array


def check_layout(layout: str, function: str) -> None:
    """Only the two layouts that `LAYOUTS` names."""
    if layout not in LAYOUTS:
        raise ArgumentError("layout", "'NHD' or 'HND'", repr(layout), function=function)


def check_heads(q: Array, k: Array, v: Array, function: str) -> None:
    """Shapes of canonical (..., heads, seq, dim) arrays against each other; sequence lengths of q are free."""
    if k.shape[:-3] != q.shape[:-3]:
        raise ShapeError("k", f"batch {q.shape[:-3]} as in q", f"batch {k.shape[:-3]}", function=function)
    if k.shape[-1] != q.shape[-1]:
        raise ShapeError("k", f"head_dim {q.shape[-1]} as in q", f"head_dim {k.shape[-1]}", function=function)
    if v.shape[:-1] != k.shape[:-1]:
        raise ShapeError(
            "v",
            f"batch, heads and sequence length of k, (heads, seq) = {k.shape[-3:-1]}",
            f"(heads, seq) = {v.shape[-3:-1]}, batch {v.shape[:-3]}",
            function=function,
        )
    if q.shape[-1] == 0:
        raise ShapeError("q", "head_dim of at least 1", "head_dim 0", function=function)
    heads_q, heads_kv = q.shape[-3], k.shape[-3]
    if heads_q != 0 and (heads_kv == 0 or heads_q % heads_kv != 0):
        raise ShapeError(
            "k", f"a number of heads that divides the {heads_q} of q", f"{heads_kv} heads", function=function
        )


def make_options(
    head_dim: int,
    causal: bool,
    window: tuple[int, int] | None,
    softmax_scale: float | None,
    softcap: float,
    compute_dtype: npt.DTypeLike,
    function: str,
) -> Options:
    """Check the scalar options and fold `causal` into the window."""
    dtype = np.dtype(compute_dtype)
    if dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise DtypeError("compute_dtype", "float32 or float64", str(dtype), function=function)
    left, right = (-1, -1) if window is None else (int(window[0]), int(window[1]))
    if left < -1 or right < -1:
        raise ArgumentError("window", "(left, right), each -1 or more", repr(window), function=function)
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else float(softmax_scale)
    if not math.isfinite(scale):
        raise ArgumentError("softmax_scale", "a finite number", repr(softmax_scale), function=function)
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ArgumentError("softcap", "a finite number, 0 or more", repr(softcap), function=function)
    return Options(scale, float(softcap), left, 0 if causal else right, dtype)


def broadcast_mask(mask: Any, shape: tuple[int, int, int, int], function: str) -> Array:
    """View of the mask in the shape (batch, heads_q, seqlen_q, seqlen_k)."""
    array = np.asarray(mask)
    if array.dtype.kind not in "bf":
        raise DtypeError("mask", "bool or floating point", str(array.dtype), function=function)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ShapeError(
            "mask",
            f"broadcastable to (batch, heads_q, seqlen_q, seqlen_k) = {shape}",
            f"shape {array.shape}",
            function=function,
        ) from None


def check_sinks(sinks: Any, heads_q: int, function: str) -> Array:
    """One logit for each query head."""
    array = as_array(sinks, "sinks", function, ndim=1)
    if array.shape != (heads_q,):
        raise ShapeError("sinks", f"shape (heads_q,) = ({heads_q},)", f"shape {array.shape}", function=function)
    return array
