"""Keys and values of packed sequences in pages of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omniattn.testing.expected import Values

#: A page that no pool has: entries of tables that no key needs.
NOWHERE = 1 << 30


def pools(
    packed: Sequence[Values], lengths: Sequence[int], page_size: int, seed: int = 0
) -> tuple[list[Values], Values]:
    """Arrays, (rows, heads, dim), as pools, (blocks, page_size, heads, dim), and the table of their sequences.

    Pages lie in no order, with some that nobody owns. What no key owns is NaN, and table entries behind a sequence's
    last page are `NOWHERE`.
    """
    counts = [-(-n // page_size) for n in lengths]
    places = np.random.default_rng(seed).permutation(sum(counts) + 3)
    table: Values = np.full((len(lengths), max(counts, default=0) + 2), NOWHERE, np.int32)
    made: list[Values] = [np.full((len(places), page_size, *x.shape[1:]), np.nan, x.dtype) for x in packed]
    taken = row = 0
    for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        table[b, :count] = places[taken : taken + count]
        keys = np.arange(length)
        for pool, x in zip(made, packed, strict=True):
            pool[table[b, keys // page_size], keys % page_size] = x[row : row + length]
        taken, row = taken + count, row + length
    return made, table
