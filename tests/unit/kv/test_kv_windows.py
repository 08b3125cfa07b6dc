"""Blocks left of every query's window: nobody reads them, whatever the table says and whatever they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError

SIZE, HEADS, DIM, LEFT = 4, 2, 16, 6
LENGTHS = np.array([23, 9, 5], np.int32)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("nowhere", [-1, 1 << 30, 0])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("k_dtype", ["fp16", "int8"])
def test_what_lies_left_of_the_window(k_dtype: str, queries: int, nowhere: int) -> None:
    cache = oa.PagedKVCache(19, SIZE, HEADS, DIM, like=normal(1), k_dtype=k_dtype)
    table = np.random.default_rng(1).permutation(np.arange(1, 19)).reshape(3, 6).astype(np.int32)
    tokens = [normal(3, 23, HEADS, DIM, seed=n) for n in (1, 2)]
    oa.append(cache, *tokens, seq_lens=np.full(3, 23, np.int32), block_table=table)
    q = normal(3, queries, 4, DIM, seed=3)
    options = {"seq_lens": LENGTHS, "window": (LEFT, 0), "return_lse": True}
    packed = {"cu_seqlens_q": np.arange(0, 3 * queries + 1, queries, dtype=np.int32), "max_seqlen_q": queries}
    whole = oa.decode(q, cache, block_table=table, **options)
    freed = table.copy()
    for b, length in enumerate(LENGTHS):
        freed[b, : max(length - queries - LEFT, 0) // SIZE] = nowhere
    assert (freed != table).any()
    if k_dtype == "fp16":
        for plane in (cache.k, cache.v):
            plane[0] = np.nan
    for made in (
        oa.decode(q, cache, block_table=freed, **options),
        oa.attention_with_kvcache(q, cache, block_table=freed, **options),
    ):
        assert all(map(np.array_equal, made, whole))
    rows = oa.attention_with_kvcache(q.reshape(-1, 4, DIM), cache, block_table=freed, **packed, **options)
    assert np.array_equal(rows[0].reshape(q.shape), whole[0])
    with pytest.raises(ArgumentError, match="'block_table': expected blocks 0 to 18"):
        oa.decode(q, cache, block_table=np.where(freed == nowhere, -1, freed), **options | {"window": (LEFT + SIZE, 0)})


@pytest.mark.parametrize("nowhere", [-1, 1 << 30])
def test_append_looks_at_the_blocks_of_new_tokens_alone(nowhere: int) -> None:
    """Others a window may have left behind; those of a sequence without new tokens are nobody's matter."""
    caches = [oa.PagedKVCache(18, SIZE, HEADS, DIM, like=normal(1), k_dtype="fp16") for _ in range(2)]
    table = np.random.default_rng(1).permutation(18).reshape(3, 6).astype(np.int32)
    freed = table.copy()
    freed[0, : 20 // SIZE], freed[1], freed[2, : 4 // SIZE] = nowhere, nowhere, nowhere
    tokens = [normal(4, HEADS, DIM, seed=n) for n in (1, 2)]
    starts = {"seq_lens": LENGTHS, "cu_seqlens": np.array([0, 3, 3, 4], np.int32)}
    for cache, blocks in zip(caches, (table, freed), strict=True):
        for plane in (cache.k, cache.v):
            plane[...] = 0
        oa.append(cache, *tokens, block_table=blocks, **starts)
    assert np.array_equal(caches[0].k, caches[1].k)
    assert np.array_equal(caches[0].v, caches[1].v)
    freed[0, 5] = nowhere
    with pytest.raises(ArgumentError, match=f"'block_table'.*received {nowhere} at sequence 0"):
        oa.append(cache, *tokens, block_table=freed, **starts)
