"""The 8-bit float e4m3 (4 exponent bits, 3 mantissa bits, no infinity, NaN = 0x7f) on NumPy, which has no such type."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Largest finite value.
E4M3_MAX = 448.0


def encode_e4m3(x: Array) -> npt.NDArray[np.uint8]:
    """Nearest e4m3 of float32 values, ties to even, as bytes; beyond the range 448, NaN and infinity 0x7f."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    sign = (bits >> np.uint32(24)) & np.uint32(0x80)
    a = bits & np.uint32(0x7FFFFFFF)
    # Normal numbers: drop 20 mantissa bits, rounding; the exponent's bias is 7 and not 127.
    normal = ((a + np.uint32(0x7FFFF) + ((a >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - np.uint32(120 << 3)
    # Below 2^-6 the steps are 2^-9, the unit in the last place of 2^14.
    small = (a.view(np.float32) + np.float32(16384.0)).view(np.uint32) - np.uint32(0x46800000)
    code = np.where(a < np.uint32(0x3C800000), small, normal)
    code = np.where(a >= np.uint32(0x43E80000), np.uint32(0x7E), code) | sign
    code = np.where(a >= np.uint32(0x7F800000), np.uint32(0x7F), code)
    return code.astype(np.uint8)


def _table() -> npt.NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = np.where(codes & 128, -magnitude, magnitude)
    values[codes & 127 == 127] = np.nan
    return values.astype(np.float32)


_VALUES = _table()


def encode_by_logarithm(x: Array, linear: bool = False) -> npt.NDArray[np.uint8]:
    """e4m3 of float32 values as ``attn_int8_sm90`` makes them of logarithms, in integers alone.

    With h the largest integer up to 128 (log2 x + 7 + shift), the byte is, cut to 0 .. 127,

        linear: h / 16, with a shift of 0.0054
        else:   (16 (h - 35) + 112 - (h & 112)) / 256, with a shift of 0.252

    (kernels_cu/attention/integer_powers.cuh). Next to `encode_e4m3` it is the same or one more or less for normal
    numbers, with the same mean; below 2^-6 it is too small, and 0 from 2^-7 on.

    Parameters
    ----------
    x : ndarray, float32
        At least 0. NaN gives 0x7f.
    linear : bool
    """
    shift = 0.0054 if linear else 0.252
    with np.errstate(divide="ignore", invalid="ignore"):
        h = np.floor(128.0 * (np.log2(np.asarray(x, dtype=np.float64)) + (7.0 + shift)))
    nan = np.isnan(h)
    # Beyond these every byte is 0, or 0x7f.
    steps = np.clip(np.where(nan, 0.0, h), -1e6, 1e6).astype(np.int32)
    corrected = np.clip(steps - 35, 0, 0x7F8) * 16 + ((steps & 0x70) ^ 0x70) >> 8
    code = np.clip(steps, 0, 0x7FF) >> 4 if linear else corrected
    return np.where(nan, 0x7F, code).astype(np.uint8)


def decode_e4m3(codes: Array) -> npt.NDArray[np.float32]:
    """Values of e4m3 bytes as float32, exactly."""
    return _VALUES[codes]
