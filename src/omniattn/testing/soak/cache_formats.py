"""Bytes of caches as numbers, read by the tables of docs/kv_formats.md and by nothing of the library."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from omniattn.testing.expected import Grade
from omniattn.testing.soak.formats import e4m3_table
from omniattn.testing.soak.judge import grade, truth
from omniattn.testing.soak.limits import LEAST, ROUNDING
from omniattn.testing.soak.machines import Machine

BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
#: Rounding of fp32 on the way to a code, relative to the largest magnitude of a row.
_SLOP = 2.0**-19


@dataclass(frozen=True)
class Format:
    """How K or V lies in a cache.

    Attributes
    ----------
    dtype : str
    dim, row : int
        Channels of the caller, and of a stored row.
    group : int
        Channels that share parameters.
    zero : bool
        Whether a zero is fitted.
    key : bool
    fbgemm : bool
    """

    dtype: str
    dim: int
    row: int
    group: int
    zero: bool
    key: bool
    fbgemm: bool

    @property
    def quantized(self) -> bool:
        """Whether there are codes."""
        return BITS[self.dtype] < 16


def row_width(dim: int) -> int:
    """Channels of a stored row."""
    return next(width for width in (64, 128, 256, 512) if dim <= width)


@functools.lru_cache(maxsize=64)
def positions(fmt: Format) -> tuple[list[int], list[int]]:
    """Byte, and bit within it, of each channel's code."""
    bits, found = BITS[fmt.dtype], []
    if fmt.fbgemm:
        first = 4 * (fmt.row // fmt.group)
        found = [8 * (first + c // 2) + 4 * (c % 2) for c in range(fmt.row)]
    else:
        lanes = 4 if fmt.key else 8
        unit_bytes = bits // 2
        chunk = min(16, fmt.row // (4 * lanes) * unit_bytes)
        for c in range(fmt.row):
            unit, lane, e = c // (4 * lanes), c % (4 * lanes) // 4, c % 4
            if fmt.key and fmt.dtype == "int4":
                # A word of 32 bits has two units: docs/kv_formats.md, "Bits of word i of a lane".
                begin = unit // 2 * 2 * unit_bytes
                nibble = (unit % 2) * 2 + e // 2 + 4 * (e % 2)
                byte = (begin // chunk * lanes + lane) * chunk + begin % chunk
                found.append(8 * byte + 4 * nibble)
            else:
                begin = unit * unit_bytes
                byte = (begin // chunk * lanes + lane) * chunk + begin % chunk
                found.append(8 * byte + bits * e)
    return [at // 8 for at in found], [at % 8 for at in found]


@dataclass(frozen=True)
class Stored:
    """Rows (tokens, heads, channels) as they are stored: values, the sizes that bounds take, scale and zero."""

    values: Any
    size: Any
    scale: Any
    zero: Any


def read(m: Machine, fmt: Format, data: Any, params: Any) -> Stored:
    """Rows of a cache. data: (tokens, heads, bytes or numbers), params: (tokens, heads, groups) words or None."""
    if not fmt.quantized:
        if m.dtype_name(data) in ("uint16", "int16"):
            raw = m.int64(data) % 65536
            values = m.words_to_float(raw * 65536) if fmt.dtype == "bf16" else m.halves_to_float(raw)
        else:
            values = m.f64(data)
        return Stored(values, abs(values), None, None)
    raw = m.int64(data)
    bytes_at, shifts = positions(fmt)
    codes = raw[..., m.ints(bytes_at)] // m.ints([2**shift for shift in shifts]) % 2 ** BITS[fmt.dtype]
    groups = fmt.row // fmt.group
    if fmt.fbgemm:
        words = raw[..., : 4 * groups]
        halves = m.halves_to_float(words[..., 0::2] + 256 * words[..., 1::2])
        scale, zero, offset = halves[..., 0::2], halves[..., 1::2], 0
    else:
        words = m.int64(params) % 2**32
        scale = m.words_to_float(words % 65536 * 65536)
        zero = m.words_to_float(words // 65536 * 65536)
        offset = {"fp8": 0, "int8": 128, "int4": 8}[fmt.dtype]
    numbers = m.number(e4m3_table())[codes] if fmt.dtype == "fp8" else m.f64(codes - offset)
    grouped = numbers.reshape(*numbers.shape[:-1], groups, fmt.group)
    product = grouped * scale[..., None]
    values = (product + zero[..., None]).reshape(numbers.shape)
    size = (abs(product) + abs(zero)[..., None]).reshape(numbers.shape)
    return Stored(values, size, scale, zero)


def hadamard(m: Machine, x: Any) -> Any:
    """The orthonormal Hadamard matrix times rows whose width is a power of two."""
    return x @ m.number(_hadamard(x.shape[-1]))


@functools.lru_cache(maxsize=8)
def _hadamard(n: int) -> Any:
    return np.array([[(-1) ** bin(i & j).count("1") * n**-0.5 for j in range(n)] for i in range(n)])


def widened(m: Machine, x: Any, row: int) -> Any:
    """Zeros behind the channels."""
    missing = row - x.shape[-1]
    return m.cat([x, m.zeros(*x.shape[:-1], missing)], len(x.shape) - 1) if missing else x


def compare(m: Machine, name: str, fmt: Format, got: Stored, wanted: Any, padded: bool, own: float) -> list[Grade]:
    """What is stored beside what should be, (tokens, heads, row).

    padded: whether channels behind ``dim`` are padding; own: the largest rounding error of ``wanted`` itself.
    """
    if wanted.shape[0] == 0:
        return []
    largest = m.amax(abs(wanted), 2)
    slop = _SLOP * largest + own
    if not fmt.quantized:
        dtype = DTYPES[fmt.dtype]
        return [grade(m, name, got.values, wanted, ROUNDING[dtype] * abs(wanted) * 1.001 + slop + LEAST[dtype])]
    tokens, heads, row = wanted.shape
    groups = row // fmt.group
    shape = (tokens, heads, groups, fmt.group)
    scale, zero = got.scale[..., None], got.zero[..., None]
    grouped, values = wanted.reshape(shape), got.values.reshape(shape)
    slop = slop[..., None]
    if fmt.dtype == "fp8":
        step = abs(values) / 16 + scale * 2.0**-10
    else:
        step = scale / 2
    # Padding counts in no group, so that it is stored as whatever comes nearest.
    seen = m.arange(0, row).reshape(groups, fmt.group) < float(fmt.dim if padded else row)
    grades = [grade(m, name, values, grouped, m.where(seen, 1.0001 * step + slop + 2.0**-60, math.inf))]
    first = grouped[..., :1]
    shown = m.where(seen, grouped, first) if padded else grouped
    most, least = m.amax(shown, 3), -m.amax(-shown, 3)
    if fmt.fbgemm:
        fits = m.maximum((most - zero) / 15, 2.0**-24)
        shift_bound = 2.0**-10 * abs(least) + 2.0**-24 + slop
        grades.append(grade(m, f"{name} shift", zero, least - shift_bound / 2, shift_bound / 2 + slop))
        grades.append(grade(m, f"{name} scale", scale, fits, fits * 2.0**-9 + slop / 15 + 2.0**-24))
        return grades
    lo, hi = {"fp8": (-448.0, 448.0), "int8": (-128.0, 127.0), "int4": (-8.0, 7.0)}[fmt.dtype]
    if fmt.zero:
        middle = least - lo * (most / (hi - lo) - least / (hi - lo))
        grades.append(grade(m, f"{name} zero", zero, middle, 2.0**-8 * abs(middle) + slop + 2.0**-60))
        fits = m.maximum((most - zero) / hi, (zero - least) / -lo)
    else:
        grades.append(truth(f"{name} zero", not bool((zero != 0).any()), "a zero where there should be none"))
        fits = m.amax(abs(grouped), 3) / hi
    fits = m.maximum(fits, 2.0**-60)
    grades.append(grade(m, f"{name} scale", scale, fits * (1 + 2.0**-8), fits * 2.0**-7 + slop / hi))
    return grades
