"""Round to nearest even into float16 and bfloat16, on NumPy arrays that have no such types or need none."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.errors import DtypeError

DTYPES = ("float16", "bfloat16", "float32")

# Explicit mantissa bits, and the exponent of the smallest normal number.
_FORMATS = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126)}


def check_dtype(dtype: str, function: str) -> None:
    """Only the names in `DTYPES`."""
    if dtype not in DTYPES:
        raise DtypeError("dtype", "'float16', 'bfloat16' or 'float32'", repr(dtype), function=function)


def round_to(x: npt.ArrayLike, dtype: str) -> npt.NDArray[np.float32]:
    """Values of `x` rounded to the nearest number of `dtype`, ties to even, returned as float32.

    Parameters
    ----------
    x : array_like, floating
        float16, float32 or float64; rounded once, never by way of float32.
    dtype : {"float16", "bfloat16", "float32"}
        Target format. Its subnormal numbers are kept; what lies above its range becomes infinity, as on a GPU.

    Returns
    -------
    ndarray of float32
        Same shape; every element is exactly representable in `dtype`. NaN stays NaN.

    Raises
    ------
    omniattn.errors.DtypeError
        For another `dtype`, or when `x` is not floating.
    """
    check_dtype(dtype, "round_to")
    array = np.asarray(x)
    if array.dtype.kind != "f":
        raise DtypeError("x", "a floating-point array", f"dtype {array.dtype}", function="round_to")
    with np.errstate(all="ignore"):
        if dtype == "float32":
            return array.astype(np.float32)
        if dtype == "float16":
            return array.astype(np.float16).astype(np.float32)
        return _round_to_bfloat16(_to_odd_float32(array))


def _to_odd_float32(x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 such that a second rounding to fewer bits gives the same as one rounding of `x`.

    Rounding to odd: truncate, and set the last bit when anything was cut off. It keeps values off the ties.
    """
    if x.dtype.itemsize <= 4:
        return x.astype(np.float32)
    nearest = x.astype(np.float32)
    wide = nearest.astype(x.dtype)
    truncated = np.where(np.abs(wide) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)
    inexact = (wide != x) & ~np.isnan(x)
    bits = np.array(truncated, dtype=np.float32, order="C").view(np.uint32) | inexact.astype(np.uint32)
    return bits.view(np.float32)


def _round_to_bfloat16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """bfloat16 is the upper half of float32: add half of the lower half, less one when the upper half is even."""
    bits = np.array(x, dtype=np.float32, order="C").view(np.uint32)
    last_kept = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + (np.uint32(0x7FFF) + last_kept)) & np.uint32(0xFFFF0000)
    # The addition would carry a NaN with a full mantissa over into the sign of zero.
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))


def rounding_bound(x: npt.ArrayLike, dtype: str) -> float:
    """Largest error that rounding a finite element of `x` to `dtype` can make: half the spacing at max abs(x).

    Parameters
    ----------
    x : array_like, floating
        Exact values; NaN and infinite elements do not count.
    dtype : {"float16", "bfloat16", "float32"}
        Format rounded to.

    Returns
    -------
    float
        0 for an empty array.
    """
    check_dtype(dtype, "rounding_bound")
    array = np.abs(np.asarray(x, dtype=np.float64))
    largest = float(np.max(array, where=np.isfinite(array), initial=0.0))
    if array.size == 0:
        return 0.0
    mantissa_bits, smallest_exponent = _FORMATS[dtype]
    exponent = int(np.frexp(largest)[1]) - 1 if largest > 0 else smallest_exponent
    return float(np.ldexp(0.5, max(exponent, smallest_exponent) - mantissa_bits))
