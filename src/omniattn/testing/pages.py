"""Problems of packed sequences with their keys in pages of a pool."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from omniattn.testing.expected import Values

if TYPE_CHECKING:
    from omniattn.testing.cases import Problem


def in_pages(problem: Problem, page_size: int, seed: int = 0) -> Problem:
    """The same problem over pages.

    Pages lie in the pool in no order, with some that nobody owns. NaN is what no key owns, and table entries behind a
    sequence's last page are far outside of the pool.
    """
    q, k, v = problem.positional
    starts = problem.arrays["cu_seqlens_k"][0]
    lengths = np.diff(starts)
    pages = -(-lengths // page_size)
    rng = np.random.default_rng(seed)
    places = rng.permutation(int(pages.sum()) + 3)
    table: Values = np.full((len(lengths), int(pages.max(initial=0)) + 2), 1 << 30, np.int32)
    pools = [np.full((len(places), page_size, *x.shape[1:]), np.nan, x.dtype) for x in (k, v)]
    taken = 0
    for b, (count, length) in enumerate(zip(pages, lengths, strict=True)):
        table[b, :count] = places[taken : taken + count]
        taken += count
        keys = np.arange(length)
        for pool, x in zip(pools, (k, v), strict=True):
            pool[table[b, keys // page_size], keys % page_size] = x[starts[b] : starts[b + 1]]
    arrays: dict[str, tuple[Any, str]] = {name: x for name, x in problem.arrays.items() if name != "cu_seqlens_k"}
    arrays |= {"seqused_k": (lengths.astype(np.int32), "int32"), "block_table": (table, "int32")}
    return dataclasses.replace(problem, positional=(q, *pools), arrays=arrays)
