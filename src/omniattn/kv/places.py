"""Where rows of caches with strides are: what kernels take of the strides of K's and V's planes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UnsupportedError
from .formats import arrays_row_bytes
from .layout import CacheLayout

#: Bytes that kernels copy at a time: rows begin at multiples of it.
CHUNK_BYTES = 16
#: Kernels count places in 32 bits.
MAX_PLACES = 2**32
#: Steps between tokens from which on each row is looked up: kernels multiply them in 32 bits by the rows that a warp
#: copies at once, 8 of the shortest, which have 64 bytes.
MAX_TOKEN_BYTES = 2**29
#: Tokens of a block that are copied by one look-up, from a multiple of it on.
RUN = 16
#: The orders of a caller's dimensions: (blocks, tokens, heads, dim) and (blocks, heads, tokens, dim).
ORDERS: tuple[str, ...] = ("NHD", "HND")


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Steps between rows, of K and V alike.

    Attributes
    ----------
    block, head, token : int
        From one to the next, in units of ``unit_bytes``; 0 for extents of 1.
    unit_bytes : int
        The greatest that all steps are multiples of.
    chunks : int
        16-byte chunks of a row.
    """

    block: int
    head: int
    token: int
    unit_bytes: int
    chunks: int

    def run_bytes(self, block_size: int, blocks_follow_each_other: bool) -> int:
        """Bytes from a token to the next, where 16 of them are in one block; 0 where each row is looked up."""
        step = self.token * self.unit_bytes
        return step if (blocks_follow_each_other or block_size % RUN == 0) and step < MAX_TOKEN_BYTES else 0


def row_places(
    strides: Sequence[int], extents: Sequence[int], row_elems: int, function: str, itemsize: int = 2
) -> RowPlaces:
    """Places of rows.

    Parameters
    ----------
    strides, extents : (block, head, token)
        Strides in elements, multiples of 16 bytes.
    row_elems : int
        Elements of a row.
    itemsize : int
        Bytes of an element.
    function : str
        For errors.

    Raises
    ------
    UnsupportedError
        Rows so far apart that their places are no 32-bit numbers.
    """
    steps = [itemsize * step if n > 1 else 0 for step, n in zip(strides, extents, strict=True)]
    unit = math.gcd(*steps) or CHUNK_BYTES
    # A block index out of range reads the last block, whatever its number: nothing else is multiplied.
    if sum((n - 1) * (step // unit) for step, n in zip(steps, extents, strict=True)) >= MAX_PLACES:
        raise UnsupportedError(
            f"{function}(): rows of K and V with strides {tuple(strides)} of {tuple(extents)} blocks, heads and "
            f"tokens, whose places in units of {unit} bytes are no numbers of 32 bits",
            instead="strides that are multiples of a larger number of bytes, or a smaller pool",
        )
    block, head, token = (step // unit for step in steps)
    return RowPlaces(block, head, token, unit, itemsize * row_elems // CHUNK_BYTES)


def own_strides(num_kv_heads: int, block_size: int, row_elems: int) -> tuple[int, int, int]:
    """Strides (block, head, token) of a cache's own 16-bit planes, in elements."""
    return num_kv_heads * block_size * row_elems, block_size * row_elems, row_elems


def places_of(cache: CacheLayout, function: str) -> RowPlaces | None:
    """Places of a cache's rows; None where K or V is quantized by `append`: rows are found by their numbers."""
    extents = (cache.num_blocks, cache.num_kv_heads, cache.block_size)
    if cache.strides is not None:
        itemsize = cache.k_format.bits // 8
        return row_places(cache.strides, extents, arrays_row_bytes(cache.k_format) // itemsize, function, itemsize)
    if cache.k_format.quantized or cache.v_format.quantized:
        return None
    row = cache.k_format.row_dim
    return row_places(own_strides(cache.num_kv_heads, cache.block_size, row), extents, row, function)


def by_position(shape: Sequence[int], strides: Sequence[int], order: str) -> tuple[tuple[int, int, int], ...]:
    """Extents and strides (block, head, token) of a caller's array; strides of extents of 1 are 0."""
    head, token = (2, 1) if order == "NHD" else (1, 2)
    at = (0, head, token)
    return tuple(shape[i] for i in at), tuple(strides[i] if shape[i] > 1 else 0 for i in at)  # type: ignore[return-value]
