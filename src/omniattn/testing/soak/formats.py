"""Quantized operands as numbers, read by the tables of docs/quantization.md and by nothing of the library."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from omniattn.testing.soak.machines import Machine

BLOCK = 128
#: Position p of 16 keys of e4m3 values holds this key.
_KEYS_OF_16 = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
#: Rows of q that a slice of scales belongs to.
SLICES = {"sm90": 16, "sm80": 32}
TILES = {"sm90": 128, "sm80": 64}


def e4m3_table() -> list[float]:
    """Values of the 256 bytes."""
    found = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        size = float("nan") if byte & 127 == 127 else size
        found.append(-size if byte & 128 else size)
    return found


@dataclass(frozen=True)
class Span:
    """Rows of one sequence: its number, first row, rows; whether sequences are packed."""

    batch: int
    begin: int
    count: int
    packed: bool

    def block(self, rows: int) -> int:
        """First block of that many rows in what is laid out by blocks."""
        return -(-self.begin // rows) + self.batch if self.packed else 0

    def of(self, array: Any) -> Any:
        """What belongs to all heads of the sequence: (heads, ...)."""
        return array if self.packed else array[self.batch]


@dataclass(frozen=True)
class Rows:
    """Rows of all heads of one sequence: codes (heads, rows, channels), scale (heads, rows, 1)."""

    codes: Any
    scale: Any

    @property
    def values(self) -> Any:
        """What they stand for."""
        return self.codes * self.scale


def slots(qk: Any, count: int, *, is_q: bool) -> list[int]:
    """Where the scale of each row is, counted from the sequence's first."""
    tile = BLOCK if is_q else TILES[qk.grouping]
    if qk.dtype == "float8_e4m3":
        return [row // BLOCK for row in range(count)]
    if qk.granularity == "per_token":
        return list(range(count))
    if is_q:
        rows = SLICES[qk.grouping]
        return [row // rows * 8 + row % 8 for row in range(count)]
    return [row // tile * 4 + row % 8 // 2 for row in range(count)]


def rows_of(m: Machine, qk: Any, span: Span, *, is_q: bool) -> Rows:
    """Q or K of a sequence as `quantize_qk` has left it, rotated if it was rotated."""
    ints, scales = (qk.q_int, qk.q_scale) if is_q else (qk.k_int, qk.k_scale)
    rows = slice(span.begin, span.begin + span.count)
    raw = m.int64(span.of(ints)[:, rows])
    if qk.dtype == "float8_e4m3":
        codes = m.number(e4m3_table())[raw]
    elif qk.dtype == "int4" and qk.grouping == "sm80":
        low, high = raw % 16, raw // 16
        low, high = low - 16 * m.int64(low > 7), high - 16 * m.int64(high > 7)
        codes = m.f64(m.cat([low[..., None], high[..., None]], 3).reshape(*raw.shape[:-1], 2 * raw.shape[-1]))
    else:
        codes = m.f64(raw)
    tile = BLOCK if is_q or qk.dtype == "float8_e4m3" else TILES[qk.grouping]
    per_tile = slots_per_tile(qk, is_q=is_q)
    first = span.block(tile) * per_tile
    at = m.ints([first + slot for slot in slots(qk, span.count, is_q=is_q)])
    return Rows(codes, m.f64(span.of(scales)[:, at])[..., None])


def slots_per_tile(qk: Any, *, is_q: bool) -> int:
    """Scales of 128 queries or of a tile of keys."""
    if qk.dtype == "float8_e4m3":
        return 1
    if qk.granularity == "per_token":
        return BLOCK if is_q else TILES[qk.grouping]
    return BLOCK // SLICES[qk.grouping] * 8 if is_q else 4


@dataclass(frozen=True)
class Values:
    """V of all heads of one sequence: codes (heads, keys, channels); scale and mean (heads, 1, channels)."""

    codes: Any
    scale: Any
    mean: Any

    @property
    def values(self) -> Any:
        """What they stand for."""
        return self.codes * self.scale + self.mean


def values_of(m: Machine, v: Any, span: Span, dim: int) -> Values:
    """V of a sequence as `quantize_v` has left it."""
    scale, mean = (m.f64(x[span.batch])[:, None, :dim] for x in (v.v_scale, v.v_mean))
    own = span.of(v.v)
    if v.dtype == "float16":
        return Values(m.f64(own[:, span.begin : span.begin + span.count, :dim]), scale, mean)
    first = span.block(BLOCK) * BLOCK
    at = m.ints([first + j // 16 * 16 + _KEYS_OF_16.index(j % 16) for j in range(span.count)])
    codes = m.number(e4m3_table())[m.int64(own[:, :dim])[..., at]]
    return Values(codes.swapaxes(-1, -2), scale, mean)


def query_means(m: Machine, qk: Any, span: Span, dim: int) -> Any:
    """The mean that was taken away from each query: (heads, rows, channels)."""
    first = span.block(BLOCK)
    at = m.ints([first + row // BLOCK for row in range(span.count)])
    return m.f64(span.of(qk.q_mean)[:, at, :dim])


@functools.lru_cache(maxsize=32)
def rotation(dim: int, seed: int) -> list[list[float]]:
    """The matrix R of docs/quantization.md, as R[channel of the result][channel]."""
    n = dim & -dim
    size = n**-0.5
    return [
        [size * _sign(c, seed) * (-1) ** bin(r % n & c % n).count("1") if r // n == c // n else 0.0 for c in range(dim)]
        for r in range(dim)
    ]


def _sign(channel: int, seed: int) -> int:
    h = (channel + 0x9E3779B9 * seed) % 2**32
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return -1 if (h ^ h >> 16) & 1 else 1
