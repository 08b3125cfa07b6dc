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


def decode_e4m3(codes: Array) -> npt.NDArray[np.float32]:
    """Values of e4m3 bytes as float32, exactly."""
    return _VALUES[codes]
