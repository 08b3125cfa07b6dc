"""Calls on the caller's pools for compute-sanitizer: pools end where their last rows do."""

from __future__ import annotations

import numpy as np
from sanitizer_arrays import check, in_bfloat16, poisoned, to_gpu

import omniattn as oa
from omniattn.testing.frameworks import E4m3Array


def pools(rng: np.random.Generator) -> None:
    """Append by slots and by positions, decode and copies; K and V in one row, which is the pool's last at that."""
    for dim, size in ((64, 16), (96, 16), (96, 3), (200, 1)):
        columns = -(-40 // size)
        blocks = 2 * columns + 1
        memory = poisoned((blocks, size, 2, 2 * dim))
        cache = oa.PagedKVCache.from_arrays(memory)
        numbers = np.arange(blocks)[::-1][: 2 * columns].reshape(2, columns)
        table, lens = to_gpu(numbers, np.int32), to_gpu((40, 33), np.int32)
        k, v = (to_gpu(rng.standard_normal((80, 2, dim))) for _ in range(2))
        at = np.arange(40)
        slots = (numbers[:, at // size] * size + at % size).reshape(-1)
        slots[73:78] = (-1, -(2**31), blocks * size, 2**31 - 1, -5)  # of tokens that seq_lens leaves out
        for dtype in (np.int32, np.int64):
            oa.append(cache, k, v, slot_mapping=to_gpu(slots[:78], dtype))
        oa.append(cache, k[:4].reshape(2, 2, 2, dim), v[:4].reshape(2, 2, 2, dim), seq_lens=lens, block_table=table)
        oa.copy_blocks(cache, [(blocks - 1, 0)])
        for queries, heads in ((1, 8), (4, 8), (9, 16)):
            q = to_gpu(rng.standard_normal((2, queries, heads, dim)))
            check(*oa.decode(q, cache, out=poisoned(q.shape), return_lse=True, seq_lens=lens, block_table=table))


def eight_bits(rng: np.random.Generator) -> None:
    """The same in int8, with a scale a row, and without scales; rows that end before the kernel's do."""
    for dim, size in ((64, 16), (96, 3), (208, 1)):
        columns = -(-40 // size)
        blocks = 2 * columns + 1
        numbers = np.arange(blocks)[::-1][: 2 * columns].reshape(2, columns)
        table, lens = to_gpu(numbers, np.int32), to_gpu((40, 33), np.int32)
        k, v = (to_gpu(rng.standard_normal((80, 2, dim))) for _ in range(2))
        at = np.arange(40)
        slots = to_gpu((numbers[:, at // size] * size + at % size).reshape(-1), np.int32)
        for has_scales in (True, False):
            data = [to_gpu(np.full((blocks, size, 2, dim), -1), np.int8) for _ in "kv"]
            scales = (
                [to_gpu(np.full((blocks, size, 2), np.nan), np.float32) for _ in "kv"] if has_scales else [None] * 2
            )
            cache = oa.PagedKVCache.from_arrays(*data, k_scale=scales[0], v_scale=scales[1])
            oa.append(cache, k, v, slot_mapping=slots)
            oa.append(cache, k[:4].reshape(2, 2, 2, dim), v[:4].reshape(2, 2, 2, dim), seq_lens=lens, block_table=table)
            oa.copy_blocks(cache, [(blocks - 1, 0)])
            for queries, heads in ((1, 8), (9, 4)):
                q = to_gpu(rng.standard_normal((2, queries, heads, dim)))
                check(*oa.decode(q, cache, out=poisoned(q.shape), return_lse=True, seq_lens=lens, block_table=table))


def indexer(rng: np.random.Generator) -> None:
    """Scores of keys in blocks of any size, which end where the cache does, and positions."""
    for size, new in ((16, 1), (16, 3), (7, 2)):
        blocks = -(-200 // size)
        raw = to_gpu(rng.integers(0, 120, (blocks, size, 1, 132)), np.uint8)
        q = E4m3Array(to_gpu(rng.integers(0, 120, (2, new, 33, 128)), np.uint8))
        table, lens = (
            to_gpu([np.arange(blocks)[::-1], np.arange(blocks)], np.int32),
            to_gpu((blocks * size, 9), np.int32),
        )
        weights = to_gpu(rng.standard_normal((2 * new, 33)), np.float32)
        out = to_gpu(np.full((2 * new, blocks * size), np.nan), np.float32)
        check(oa.index_logits(q, raw, weights, seq_lens=lens, block_table=table, out=out))
        oa.top_k(out, 64, lengths=lens, next_n=new, block_table=table, block_size=size)
    for rows, width in ((1, 70001), (200, 9003), (3, 5)):
        logits = to_gpu(rng.standard_normal((rows, width)), np.float32)
        for k in (1, 2048):
            check(oa.top_k(logits, k, starts=to_gpu(np.arange(rows) % 4, np.int32)))
    check(oa.top_k(to_gpu(np.ones((2, 90001)), np.float32), 2048))  # a sample that says nothing


def latent(rng: np.random.Generator) -> None:
    """Latent rows by TMA, by threads and in 8 bits, and lists of them; more sequences than CTAs, of a few blocks."""
    batch, longest = 160, 330
    lens = rng.integers(1, longest, batch)
    lens[:3] = longest, 0, 64
    for size, form in ((64, "16"), (3, "16"), (16, "e4m3"), (16, "656")):
        columns = -(-longest // size)
        blocks = batch * columns
        if form == "e4m3":
            rows = to_gpu(rng.integers(0, 120, (blocks, size, 1, 576)), np.uint8)
            cache = oa.PagedKVCache.from_arrays(E4m3Array(rows), head_dim_v=512)
        elif form == "656":  # codes, four scales, bf16 numbers: 0x3C3C is about 0.01 in fp32 and in bf16
            bytes_ = rng.integers(0, 120, (blocks, size, 1, 656))
            bytes_[..., 512:] = 0x3C
            cache = oa.PagedKVCache.from_arrays(to_gpu(bytes_, np.uint8), head_dim_v=512)
        else:
            rows = to_gpu(rng.standard_normal((blocks, size, 1, 576)))
            cache = oa.PagedKVCache.from_arrays(rows, head_dim_v=512)
        table = to_gpu(np.arange(blocks)[::-1].reshape(batch, columns), np.int32)
        for tokens, heads in ((1, 16), (1, 64), (2, 40), (3, 32)):
            make = in_bfloat16 if form == "656" else to_gpu
            q = make(rng.standard_normal((batch, tokens, heads, 576)))
            out = make(np.full((batch, tokens, heads, 512), np.nan))
            pages = {"seq_lens": to_gpu(np.maximum(lens, tokens), np.int32), "block_table": table}
            check(*oa.decode(q, cache, out=out, return_lse=True, **pages))
            check(*oa.decode(q, cache, out=out, return_lse=True, window=(70, 0), deterministic=True, **pages))
            lists = to_gpu(rng.integers(-40, blocks * size, (batch, tokens, 150)), np.int32)
            check(*oa.decode(q, cache, out=out, return_lse=True, indices=lists))
