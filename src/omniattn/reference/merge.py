"""Combination of attention over two disjoint sets of keys, in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniattn.errors import DtypeError, ShapeError
from omniattn.reference import checks
from omniattn.reference.core import Array

_NAME = "reference.merge_states"


def merge_states(
    o_a: npt.ArrayLike,
    lse_a: npt.ArrayLike,
    o_b: npt.ArrayLike,
    lse_b: npt.ArrayLike,
    *,
    compute_dtype: npt.DTypeLike = np.float32,
) -> tuple[Array, Array]:
    r"""Attention over two disjoint sets of keys, from the results over each.

    .. math::
        \mathrm{lse} = \log(e^{\mathrm{lse}_a} + e^{\mathrm{lse}_b}), \qquad
        o = e^{\mathrm{lse}_a - \mathrm{lse}} o_a + e^{\mathrm{lse}_b - \mathrm{lse}} o_b

    Parameters
    ----------
    o_a, o_b : array_like, floating
        (batch, seq, heads, dim) or, packed, (total, heads, dim).
    lse_a, lse_b : array_like, floating
        (batch, heads, seq) or (heads, total), natural logarithm.
    compute_dtype : dtype
        float32 or float64: arithmetic and results.

    Returns
    -------
    o : ndarray
        Shape of `o_a`, `compute_dtype`.
    lse : ndarray
        Shape of `lse_a`, `compute_dtype`.

    Raises
    ------
    omniattn.errors.ArgumentError
        Its ShapeError or DtypeError: names the argument, what was expected and what came.

    Notes
    -----
    A side with lse = -inf has seen no key: its o is not looked at, whatever it holds. Where both sides are such, o = 0
    and lse = -inf. Source: online softmax of Milakov and Gimelshein (2018); FlashAttention-2, section 2.3.1.
    """
    dtype = np.dtype(compute_dtype)
    if dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise DtypeError("compute_dtype", "float32 or float64", str(dtype), function=_NAME)
    a = np.asarray(o_a)
    if a.ndim not in (3, 4):
        raise ShapeError("o_a", "(batch, seq, heads, dim) or (total, heads, dim)", f"shape {a.shape}", function=_NAME)
    a = checks.as_array(a, "o_a", _NAME, ndim=a.ndim).astype(dtype, copy=False)
    b = checks.as_array(o_b, "o_b", _NAME, ndim=a.ndim).astype(dtype, copy=False)
    if b.shape != a.shape:
        raise ShapeError("o_b", f"shape {a.shape} as o_a", f"shape {b.shape}", function=_NAME)
    lse_shape = (*a.shape[:-3], a.shape[-2], a.shape[-3])
    logs = []
    for value, argument in ((lse_a, "lse_a"), (lse_b, "lse_b")):
        log = checks.as_array(value, argument, _NAME, ndim=a.ndim - 1).astype(dtype, copy=False)
        if log.shape != lse_shape:
            raise ShapeError(argument, f"shape {lse_shape}", f"shape {log.shape}", function=_NAME)
        logs.append(log)

    with np.errstate(all="ignore"):
        largest = np.maximum(logs[0], logs[1])
        shift = np.where(np.isneginf(largest), dtype.type(0), largest)
        weights = [np.exp(log - shift) for log in logs]
        total = weights[0] + weights[1]
        lse = shift + np.log(total)
        divisor = np.where(total == 0, dtype.type(1), total)
        o = np.zeros_like(a)
        for part, log, weight in zip((a, b), logs, weights, strict=True):
            per_row = (weight / divisor).swapaxes(-1, -2)[..., None]
            seen = ~np.isneginf(log).swapaxes(-1, -2)[..., None]
            o += np.where(seen, per_row * part, dtype.type(0))
    return o, lse
