"""Caches on the caller's arrays in 8 bits: what `append` writes, what `decode` makes of it, which scales there are."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, DtypeError, ShapeError, StrideError

E4M3 = ml_dtypes.float8_e4m3fn
DTYPES = (E4M3, np.int8)
LARGEST = {E4M3: 448.0, np.int8: 127.0}
BATCH, BLOCKS, SIZE, HEADS, DIM = 3, 12, 4, 2, 32
LENGTHS = np.array([7, 16, 9], np.int32)
TABLE = np.random.default_rng(0).permutation(BLOCKS).reshape(BATCH, 4).astype(np.int32)
KINDS = ("none", "one", "heads", "sequences", "rows", "rows apart")


def shape_of(order: str) -> tuple[int, ...]:
    return (BLOCKS, SIZE, HEADS, DIM) if order == "NHD" else (BLOCKS, HEADS, SIZE, DIM)


def scales_of(kind: str, order: str, dtype: Any) -> Any:
    """Scales of a kind, by which numbers up to 4 have codes; those of rows are NaN until they are written."""
    least = 4.0 / LARGEST[dtype]
    if kind == "none":
        return None
    if kind == "one":
        return np.full(1, least, np.float32)
    if kind == "heads":
        return np.array([least, 2 * least], np.float32)
    if kind == "sequences":
        return (least * (1 + np.random.default_rng(1).random((BATCH, HEADS)))).astype(np.float32)
    wide = np.full((*shape_of(order)[:3], 3), math.nan, np.float32)
    return wide[..., 1] if kind == "rows apart" else wide[..., 0].copy()


def normal(*shape: int, seed: int = 0) -> Any:
    return np.clip(np.random.default_rng(seed).standard_normal(shape), -3.9, 3.9).astype(np.float32)


def codes(x: Any, dtype: Any) -> Any:
    """Nearest codes of numbers."""
    return np.rint(x).astype(np.int8) if dtype is np.int8 else np.asarray(x).astype(E4M3)


def by_token(x: Any, order: str) -> Any:
    """(sequences, tokens, heads, ...) of an array of blocks."""
    x = x if order == "NHD" else x.swapaxes(1, 2)
    return x[TABLE].reshape(BATCH, 4 * SIZE, *x.shape[2:])


def values(x: Any, scale: Any, order: str) -> Any:
    """Numbers of all tokens in float64."""
    found = by_token(x, order).astype(np.float64)
    if scale is None:
        return found
    if scale.ndim == 3:
        return found * by_token(scale, order)[..., None].astype(np.float64)
    if scale.ndim == 2:
        return found * scale[:, None, :, None].astype(np.float64)
    return found * scale[:, None].astype(np.float64)


def attention(q: Any, k: Any, v: Any) -> Any:
    """In float64, causal at the bottom right; every query head of a kv head."""
    batch, queries, heads, dim = q.shape
    out = np.zeros(q.shape)
    for b in range(batch):
        length = int(LENGTHS[b])
        for h in range(heads):
            at = h // (heads // HEADS)
            s = q[b, :, h].astype(np.float64) @ k[b, :length, at].T * dim**-0.5
            s[np.arange(length)[None] > np.arange(length - queries, length)[:, None]] = -np.inf
            p = np.exp(s - s.max(-1, keepdims=True))
            out[b, :, h] = p / p.sum(-1, keepdims=True) @ v[b, :length, at]
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_and_decode(dtype: Any, order: str, kind: str) -> None:
    """Codes are the nearest ones of x / scale, and attention is that of code times scale."""
    k, v = (np.zeros(shape_of(order), dtype) for _ in "kv")
    k_scale, v_scale = (scales_of(kind, order, dtype) for _ in "kv")
    if v_scale is not None:
        v_scale *= np.float32(1.5)
    cache = oa.PagedKVCache.from_arrays(k, v, layout=order, k_scale=k_scale, v_scale=v_scale)
    new = [normal(BATCH, 4 * SIZE, HEADS, DIM, seed=n) for n in (1, 2)]
    full = np.full(BATCH, 4 * SIZE, np.int32)
    if kind == "sequences":
        with pytest.raises(ArgumentError, match="do not depend on the sequence"):
            oa.append(cache, *new, seq_lens=full, block_table=TABLE)
        at = np.random.default_rng(3)
        for x in (k, v):
            x[...] = codes(at.uniform(-100, 100, x.shape), dtype)
    else:
        oa.append(cache, *new, seq_lens=full, block_table=TABLE)
        for x, scale, given in ((k, k_scale, new[0]), (v, v_scale, new[1])):
            if scale is not None and scale.ndim == 3:
                largest = np.float32(LARGEST[dtype])
                assert np.array_equal(by_token(scale, order), np.abs(given).max(-1) / largest)
            of = (
                np.float32(1)
                if scale is None
                else by_token(scale, order)[..., None]
                if scale.ndim == 3
                else scale[:, None]
            )
            assert np.array_equal(by_token(x, order), codes(given / of, dtype))
    q = normal(BATCH, 2, 4, DIM, seed=3)
    expected = attention(q, values(k, k_scale, order), values(v, v_scale, order))
    for function in (oa.decode, oa.attention_with_kvcache):
        got = function(q, cache, seq_lens=LENGTHS, block_table=TABLE)
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_and_copies(dtype: Any) -> None:
    """By slots the same bytes; a copied block has its scales too."""
    made = []
    for by_slot in (False, True):
        k, v = (np.zeros(shape_of("NHD"), dtype) for _ in "kv")
        scales = [scales_of("rows", "NHD", dtype) for _ in "kv"]
        cache = oa.PagedKVCache.from_arrays(k, v, k_scale=scales[0], v_scale=scales[1])
        new = [normal(BATCH, 16, HEADS, DIM, seed=n) for n in (1, 2)]
        if by_slot:
            slots = (TABLE[:, :, None] * SIZE + np.arange(SIZE)).reshape(-1)
            oa.append(cache, *(x.reshape(-1, HEADS, DIM) for x in new), slot_mapping=slots)
        else:
            oa.append(cache, *new, seq_lens=np.full(BATCH, 16, np.int32), block_table=TABLE)
        made.append([x.view(np.uint8) for x in (k, v, *scales)])
    for a, b in zip(*made, strict=True):
        assert np.array_equal(a, b)
    oa.copy_blocks(cache, [(2, 5)])
    assert np.array_equal(k[2].view(np.uint8), k[5].view(np.uint8))
    for scale in scales:
        assert np.array_equal(scale[2], scale[5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_has_no_code(dtype: Any) -> None:
    """Beyond the largest code that one; rows with values that are not finite have no scale."""
    x = np.zeros((1, 4, HEADS, DIM), np.float32)
    x[0, 0, 0, :3], x[0, 1, 1, 5], x[0, 2, 0, 0] = (1e4, -1e4, 1.0), np.inf, np.nan
    lengths, table = np.array([4], np.int32), np.array([[3]], np.int32)
    k, v = (np.zeros(shape_of("NHD"), dtype) for _ in "kv")
    oa.append(oa.PagedKVCache.from_arrays(k, v), x, x, seq_lens=lengths, block_table=table)
    found = k[3].astype(np.float32)
    assert tuple(found[0, 0, :3]) == ((448, -448, 1) if dtype is E4M3 else (127, -128, 1))
    assert found[1, 1, 5] == LARGEST[dtype]
    assert np.isnan(found[2, 0, 0]) if dtype is E4M3 else found[2, 0, 0] == 0
    scales = [scales_of("rows", "NHD", dtype) for _ in "kv"]
    cache = oa.PagedKVCache.from_arrays(k, v, k_scale=scales[0], v_scale=scales[1])
    oa.append(cache, x, x, seq_lens=lengths, block_table=table)
    assert np.isnan(scales[0][3]).tolist() == [[False, False], [False, True], [True, False], [False, False]]
    assert (k[3][1, 1].view(np.uint8) == 0).all()
    assert scales[0][3][0, 1] == np.float32(2.0**-60)
    o = oa.decode(x[:, 3:4], cache, seq_lens=lengths, block_table=table)
    assert np.isnan(o).all()


def test_zero_dimensional_scales_and_repeated_ones() -> None:
    k = codes(normal(*shape_of("NHD")) * 100, np.int8)
    q = normal(BATCH, 1, 4, DIM)
    found = []
    half = np.full(1, 0.5, np.float32)
    for scale in (half.reshape(()), half, np.broadcast_to(half, (BATCH, HEADS))):
        cache = oa.PagedKVCache.from_arrays(k, k.copy(), k_scale=scale, v_scale=scale)
        found.append(oa.decode(q, cache, seq_lens=LENGTHS, block_table=TABLE))
    assert all(np.array_equal(found[0], x) for x in found[1:])
    assert np.abs(found[0]).max() > 1


def test_contiguous_caches_and_an_index() -> None:
    """Scales of a call's sequences, not of those that it reads."""
    k = codes(normal(4, 16, HEADS, DIM) * 100, np.int8)
    scale = scales_of("sequences", "NHD", np.int8)[:2]
    cache = oa.KVCache.from_arrays(k, k.copy(), k_scale=scale, v_scale=scale)
    q, lengths = normal(2, 1, 4, DIM), np.array([5, 9], np.int32)
    got = oa.attention_with_kvcache(q, cache, seq_lens=lengths, batch_index=np.array([3, 1], np.int32))
    own = oa.KVCache.from_arrays(k[[3, 1]], k[[3, 1]], k_scale=scale, v_scale=scale)
    assert np.array_equal(got, oa.decode(q, own, seq_lens=lengths))


def test_wrong_scales() -> None:
    pool, one = np.zeros(shape_of("NHD"), np.int8), np.ones(1, np.float32)

    def make(k_scale: Any, v_scale: Any, k: Any = pool) -> Any:
        return oa.PagedKVCache.from_arrays(k, k.copy(), k_scale=k_scale, v_scale=v_scale)

    with pytest.raises(ArgumentError, match="'v_scale': expected an array"):
        make(one, None)
    with pytest.raises(ArgumentError, match="'k_scale': expected None with float16"):
        make(one, one, pool.astype(np.float16))
    with pytest.raises(ArgumentError, match=r"'k_scale': expected None with float16.*received the float 1\.0"):
        make(1.0, 1.0, pool.astype(np.float16))
    with pytest.raises(DtypeError, match="'k_scale': expected float32"):
        make(one.astype(np.float64), one)
    for shape in ((3,), (4, 3), (0, HEADS), (BLOCKS, HEADS, SIZE), (1, 1, 1, 1)):
        with pytest.raises(ShapeError, match="'k_scale'"):
            make(np.ones(shape, np.float32), one)
    with pytest.raises(ShapeError, match=r"'v_scale'.*like k_scale"):
        make(one, np.ones(HEADS, np.float32))
    rows = np.ones(pool.shape[:3], np.float32)
    with pytest.raises(StrideError, match=r"'v_scale'.*like k_scale"):
        make(rows, np.asfortranarray(rows))
    with pytest.raises(StrideError, match="do not share memory"):
        make(np.broadcast_to(one[0], rows.shape), np.broadcast_to(one[0], rows.shape))
    with pytest.raises(StrideError, match="0 or more"):
        make(rows[::-1], rows[::-1])
    with pytest.raises(ShapeError, match="a multiple of 16 from 16"):
        make(None, None, np.zeros((2, 4, 2, 24), np.int8))
    with pytest.raises(StrideError, match="multiples of 16"):
        make(None, None, np.zeros((2, 4, 2, 40), np.int8)[..., :32])


def test_wrong_calls() -> None:
    pool, many = np.zeros(shape_of("NHD"), np.int8), np.ones((2, HEADS), np.float32)
    cache = oa.PagedKVCache.from_arrays(pool, pool.copy(), k_scale=many, v_scale=many)
    q = normal(BATCH, 1, 4, DIM)
    for function in (oa.decode, oa.attention_with_kvcache):
        with pytest.raises(ShapeError, match=r"scales for 3 sequences.*those of 2"):
            function(q, cache, seq_lens=LENGTHS, block_table=TABLE)
        with pytest.raises(ArgumentError, match=r"shared_prefix.*scales of their own"):
            function(q[:2], cache, seq_lens=LENGTHS[:2], block_table=TABLE[:2], shared_prefix=4)
