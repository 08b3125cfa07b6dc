"""KVCache, PagedKVCache, append and decode on the CPU: values, formats, frameworks, wrong calls."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from omniattn import reference, testing
from omniattn.errors import ArgumentError, DtypeError, OmniattnError, ShapeError
from omniattn.kv.cache import KVCache, PagedKVCache
from omniattn.ops import append, copy_blocks, decode
from omniattn.reference.decode import on_host, read_tokens
from omniattn.reference.kv_cache import bf16_round, rotate

LIKE = np.zeros(1, dtype=np.float32)
#: Relative L1 error that a format may bring into O on normal inputs.
WORST = {"bf16": 0.005, "fp16": 0.001, "fp8": 0.05, "int8": 0.012, "int4": 0.16}


def lengths(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def make(kind: str = "normal", **more: Any) -> Any:
    shape = {"batch": 2, "seqlen_q": 3, "seqlen_k": 45, "heads_q": 4, "heads_kv": 2, "head_dim": 40} | more
    return testing.make_qkv(kind, **shape)


def relative_l1(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum() / np.abs(b).sum())


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
@pytest.mark.parametrize("dtype", list(WORST))
def test_decode_is_attention_over_the_cache(dtype: str, head_dim: int) -> None:
    q, k, v = make(head_dim=head_dim)
    cache = KVCache(2, 50, 2, head_dim, like=LIKE, k_dtype=dtype)
    append(cache, k, v, seq_lens=lengths(45, 45))
    o, lse = decode(q, cache, seq_lens=lengths(45, 45), return_lse=True)
    exact_o, exact_lse = reference.attention(q, k, v, causal=True)
    assert relative_l1(o, exact_o) <= WORST[dtype]
    host = on_host(cache)
    rows = [read_tokens(host, np.array([b]), 45) for b in range(2)]
    seen_k, seen_v = (np.stack([row[i] for row in rows]) for i in range(2))
    same_o, same_lse = reference.attention(q, seen_k, seen_v, causal=True)
    np.testing.assert_allclose(o, same_o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, same_lse, rtol=1e-5, atol=1e-5)
    assert np.abs(lse - exact_lse).max() < 0.5


@pytest.mark.parametrize(("k_dtype", "v_dtype"), [("int4", "fp8"), ("bf16", "int4"), ("int8", "fp16")])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_pages_hold_what_a_contiguous_cache_holds(k_dtype: str, v_dtype: str, block_size: int) -> None:
    q, k, v = make(seqlen_k=20)
    options = {"like": LIKE, "k_dtype": k_dtype, "v_dtype": v_dtype, "group_size": 32}
    flat = KVCache(2, 20, 2, 40, **options)
    blocks = -(-20 // block_size)
    paged = PagedKVCache(2 * blocks + 3, block_size, 2, 40, **options)
    table = np.random.default_rng(0).permutation(2 * blocks + 3)[: 2 * blocks].reshape(2, blocks).astype(np.int32)
    lens = lengths(20, 13)
    starts = lengths(0, 20, 33)
    packed = [np.concatenate([x[0], x[1, :13]]) for x in (k, v)]
    append(flat, *packed, seq_lens=lens, cu_seqlens=starts)
    append(paged, *packed, seq_lens=lens, cu_seqlens=starts, block_table=table)
    np.testing.assert_array_equal(decode(q, flat, seq_lens=lens), decode(q, paged, seq_lens=lens, block_table=table))


def test_tokens_one_by_one_are_a_prompt_at_once() -> None:
    _, k, v = make(seqlen_k=7)
    angle = np.random.default_rng(1).standard_normal((9, 12)).astype(np.float32)
    turn = {"cos": np.cos(angle), "sin": np.sin(angle), "rope": "interleaved"}
    caches = [KVCache(2, 9, 2, 40, like=LIKE, k_dtype="int8", v_dtype="int4") for _ in range(2)]
    for cache in caches:
        for plane in (cache.k, cache.v, cache.k_params, cache.v_params):
            plane[...] = 0
    append(caches[0], k, v, seq_lens=lengths(7, 9), **turn)
    for i in range(7):
        append(caches[1], k[:, i : i + 1], v[:, i : i + 1], seq_lens=lengths(i + 1, i + 3), **turn)
    for name in ("k", "v", "k_params", "v_params"):
        np.testing.assert_array_equal(getattr(caches[0], name), getattr(caches[1], name))
    seen, _ = read_tokens(on_host(caches[0]), np.array([1]), 9)
    turned = rotate(k[1], turn["cos"][2:9, None], turn["sin"][2:9, None], True)
    assert relative_l1(seen[2:], turned) < 0.02


def test_angles_of_new_tokens_are_enough() -> None:
    """A sequence without new tokens, or one that is padding, needs none, however long it is."""
    cache = KVCache(3, 20, 2, 40, like=LIKE)
    k = make(seqlen_k=7)[1][0]
    turn = {"cos": np.ones((8, 12), np.float32), "sin": np.zeros((8, 12), np.float32)}
    append(cache, k, k, seq_lens=lengths(8, 20, 0), cu_seqlens=lengths(0, 4, 4, 7), **turn)
    np.testing.assert_array_equal(read_tokens(on_host(cache), np.array([0]), 8)[0][4:], bf16_round(k[:4]))
    with pytest.raises(ArgumentError, match="'cos': expected a row for each position up to 8, received 8 rows"):
        append(cache, k, k, seq_lens=lengths(9, 20, 0), cu_seqlens=lengths(0, 4, 4, 7), **turn)


def test_options_of_decode() -> None:
    q, k, v = make()
    cache = KVCache(2, 45, 2, 40, like=LIKE, k_dtype="fp16")
    append(cache, k, v, seq_lens=lengths(45, 45))
    kf, vf = k.astype(np.float16).astype(np.float32), v.astype(np.float16).astype(np.float32)
    sinks = np.array([0.5, -1.0, 2.0, 0.0], dtype=np.float32)
    options: dict[str, Any] = {"window": (7, 0), "softmax_scale": 0.3, "softcap": 5.0, "sinks": sinks}
    o, lse = decode(q, cache, seq_lens=lengths(45, 45), return_lse=True, **options)
    ref_o, ref_lse = reference.attention(q, kf, vf, causal=True, **options)
    np.testing.assert_allclose(o, ref_o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, ref_lse, rtol=1e-5, atol=1e-5)
    out = np.empty_like(q)
    assert decode(q, cache, seq_lens=lengths(45, 45), out=out, **options) is out
    np.testing.assert_array_equal(out, o)


def test_sequences_without_tokens() -> None:
    q, k, v = make(seqlen_k=5)
    cache = KVCache(2, 5, 2, 40, like=LIKE, k_dtype="int4")
    append(cache, k, v, seq_lens=lengths(5, 5))
    o, lse = decode(q, cache, seq_lens=lengths(0, 2), return_lse=True)
    assert (o[0] == 0).all()
    assert np.isneginf(lse[0]).all()
    # Two keys, three queries: the first one sees none.
    assert (o[1, 0] == 0).all()
    assert np.isfinite(lse[1, :, 1:]).all()


@pytest.mark.parametrize(
    "repair", [{"k_channel_scale"}, {"k_mean"}, {"hadamard"}, {"k_mean", "k_channel_scale", "hadamard"}],
    ids=lambda names: "+".join(sorted(names)),
)  # fmt: skip
def test_repairs_of_keys_with_strong_channels(repair: set[str]) -> None:
    """Per-token int4 loses small channels beside a strong one; each repair brings them back."""
    rng = np.random.default_rng(4)
    q, k, v = make(head_dim=64, seqlen_k=200)
    q, k = q.copy(), k.copy()
    biased = "k_mean" in repair
    k[..., [3, 40]] += 40.0 if biased else 0.0
    k[..., [3, 40]] *= 1.0 if biased else 20.0
    q[..., [3, 40]] *= 0.05
    v = rng.standard_normal(v.shape).astype(np.float32)
    exact, exact_lse = reference.attention(q, k, v, causal=True)
    given: dict[str, Any] = {
        "k_mean": k.mean(axis=(0, 1)), "k_channel_scale": np.abs(k).max(axis=(0, 1)), "hadamard": True,
    }  # fmt: skip
    errors = []
    for options in ({}, {name: given[name] for name in repair}):
        cache = KVCache(2, 200, 2, 64, like=LIKE, k_dtype="int4", v_dtype="fp16", **options)
        append(cache, k, v, seq_lens=lengths(200, 200))
        o, lse = decode(q, cache, seq_lens=lengths(200, 200), return_lse=True)
        errors.append((relative_l1(o, exact), float(np.abs(lse - exact_lse).max())))
    assert errors[1][0] < 0.6 * errors[0][0]
    assert errors[1][1] < 0.3


@pytest.mark.frameworks
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("k_dtype", ["bf16", "int4"])
def test_frameworks(framework: str, k_dtype: str) -> None:
    """Arrays of other frameworks give what NumPy's give, and the cache's memory is the framework's own."""
    module = pytest.importorskip(framework)
    q, k, v = make(seqlen_k=6)
    array = module.from_numpy if framework == "torch" else importlib.import_module("jax.numpy").asarray
    lens = lengths(6, 6)
    results = []
    for convert in (np.asarray, array):
        cache = KVCache(2, 6, 2, 40, like=convert(LIKE), k_dtype=k_dtype)
        append(cache, convert(k), convert(v), seq_lens=convert(lens))
        results.append(decode(convert(q), cache, seq_lens=convert(lens)))
        assert type(cache.v) is type(convert(LIKE))
    np.testing.assert_array_equal(results[0], np.asarray(results[1]))
    assert type(results[1]) is type(array(q))


def test_sizes() -> None:
    cache = PagedKVCache(10, 16, 2, 128, like=LIKE, k_dtype="int4", group_size=32, v_dtype="fp8")
    assert cache.k.shape == (10, 2, 16, 64)
    assert cache.k_params.shape == (10, 2, 16, 4)
    assert cache.token_bytes == 2 * (64 + 16 + 128 + 16)
    assert cache.nbytes == 160 * cache.token_bytes
    assert "10 x 16 tokens" in repr(cache)
    assert KVCache(1, 4, 1, 64, like=LIKE).k_params is None


CACHE = {"batch": 2, "max_seqlen": 8, "num_kv_heads": 2, "head_dim": 40, "like": LIKE, "k_dtype": "int8"}


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"batch": 0}, "batch", ArgumentError),
        ({"max_seqlen": -1}, "max_seqlen", ArgumentError),
        ({"num_kv_heads": 1.5}, "num_kv_heads", ArgumentError),
        ({"head_dim": 20}, "head_dim", ArgumentError),
        ({"head_dim": 520}, "head_dim", ArgumentError),
        ({"max_seqlen": 2**31}, "max_seqlen", ArgumentError),
        ({"k_dtype": "float16"}, "k_dtype", ArgumentError),
        ({"v_dtype": 4}, "v_dtype", ArgumentError),
        ({"k_dtype": "bf16", "v_dtype": "fp16"}, "v_dtype", ArgumentError),
        ({"group_size": 16}, "group_size", ArgumentError),
        ({"k_dtype": "bf16", "group_size": 32}, "group_size", ArgumentError),
        ({"zero_point": 1}, "zero_point", ArgumentError),
        ({"zero_point": False, "k_dtype": "fp8"}, "zero_point", ArgumentError),
        ({"zero_point": False, "k_dtype": "bf16"}, "zero_point", ArgumentError),
        ({"hadamard": None}, "hadamard", ArgumentError),
        ({"k_dtype": "bf16", "hadamard": True}, "hadamard", ArgumentError),
        ({"k_dtype": "bf16", "k_mean": np.zeros((2, 40), np.float32)}, "k_mean", ArgumentError),
        ({"k_mean": np.zeros((2, 40))}, "k_mean", DtypeError),
        ({"k_channel_scale": np.ones((40,), np.float32)}, "k_channel_scale", ShapeError),
        ({"k_mean": np.zeros((40, 2), np.float32).T}, "k_mean", ArgumentError),
        ({"like": 3}, "like", ArgumentError),
    ],
)  # fmt: skip
def test_wrong_caches(changes: dict[str, Any], argument: str, error: type[OmniattnError]) -> None:
    with pytest.raises(error) as caught:
        KVCache(**(CACHE | changes))
    assert caught.value.argument == argument


def good_calls() -> tuple[dict[str, Any], dict[str, Any]]:
    q, k, v = make(seqlen_k=5)
    cache = PagedKVCache(6, 3, 2, 40, like=LIKE, k_dtype="int8")
    table = np.arange(4, dtype=np.int32).reshape(2, 2)
    angle = np.zeros((6, 4), dtype=np.float32)
    both = {"cache": cache, "seq_lens": lengths(5, 6), "block_table": table}
    return both | {"k": k, "v": v, "cos": angle, "sin": angle}, both | {"q": q}


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"cache": None}, "cache", ArgumentError),
        ({"k": np.zeros((2, 5, 2, 40), np.int32)}, "k", DtypeError),
        ({"k": np.zeros((5, 2, 40), np.float32)}, "k", ShapeError),
        ({"k": np.zeros((2, 5, 2, 48), np.float32)}, "k", ShapeError),
        ({"v": np.zeros((2, 4, 2, 40), np.float32)}, "v", ShapeError),
        ({"v": np.zeros((2, 5, 2, 40), np.float64)}, "v", DtypeError),
        ({"seq_lens": np.array([5, 6])}, "seq_lens", DtypeError),
        ({"seq_lens": lengths(5)}, "seq_lens", ShapeError),
        ({"seq_lens": lengths(4, 6)}, "seq_lens", ArgumentError),
        ({"seq_lens": lengths(5, 7)}, "seq_lens", ArgumentError),
        ({"block_table": None}, "block_table", ArgumentError),
        ({"block_table": np.zeros((1, 2), np.int32)}, "block_table", ShapeError),
        ({"block_table": np.full((2, 2), 6, np.int32)}, "block_table", ArgumentError),
        ({"block_table": np.full((2, 2), -1, np.int32)}, "block_table", ArgumentError),
        ({"sin": None}, "sin", ArgumentError),
        ({"cos": np.zeros((6, 21), np.float32)}, "cos", ShapeError),
        ({"cos": np.zeros((6, 4))}, "cos", DtypeError),
        ({"cos": np.zeros((5, 4), np.float32), "sin": np.zeros((5, 4), np.float32)}, "cos", ArgumentError),
        ({"rope": "full"}, "rope", ArgumentError),
        ({"cu_seqlens": lengths(0, 5, 10)}, "k", ShapeError),
        ({"stream": 5}, "stream", ArgumentError),
    ],
)
def test_wrong_appends_write_nothing(changes: dict[str, Any], argument: str, error: type[OmniattnError]) -> None:
    call, _ = good_calls()
    cache = call["cache"]
    for plane in (cache.k, cache.v):
        plane[...] = 9
    with pytest.raises(error) as caught:
        append(**(call | changes))
    assert caught.value.argument == argument
    assert (cache.k == 9).all()
    assert (cache.v == 9).all()


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"cache": 1}, "cache", ArgumentError),
        ({"q": np.zeros((2, 40), np.float32)}, "q", ShapeError),
        ({"q": np.zeros((2, 17, 4, 40), np.float32)}, "q", ShapeError),
        ({"q": np.zeros((2, 3, 3, 40), np.float32)}, "q", ShapeError),
        ({"q": np.zeros((2, 3, 4, 64), np.float32)}, "q", ShapeError),
        ({"q": np.zeros((2, 3, 4, 40), np.int8)}, "q", DtypeError),
        ({"seq_lens": lengths(5, 7)}, "seq_lens", ArgumentError),
        ({"seq_lens": lengths(-1, 6)}, "seq_lens", ArgumentError),
        ({"block_table": np.zeros((2, 2), np.int64)}, "block_table", DtypeError),
        ({"window": (3, 1)}, "window", ArgumentError),
        ({"window": 3}, "window", ArgumentError),
        ({"softcap": -1.0}, "softcap", ArgumentError),
        ({"softmax_scale": float("nan")}, "softmax_scale", ArgumentError),
        ({"sinks": np.zeros(3, np.float32)}, "sinks", ShapeError),
        ({"out": np.zeros((2, 3, 4, 40), np.float16)}, "out", DtypeError),
        ({"return_lse": 1}, "return_lse", ArgumentError),
        ({"deterministic": "yes"}, "deterministic", ArgumentError),
    ],
)
def test_wrong_decodes(changes: dict[str, Any], argument: str, error: type[OmniattnError]) -> None:
    _, call = good_calls()
    with pytest.raises(error) as caught:
        decode(**(call | changes))
    assert caught.value.argument == argument


def test_the_unbroken_calls_work() -> None:
    to_append, to_decode = good_calls()
    # Its token 0 is written by nobody, and new memory may hold NaN.
    for plane in to_append["cache"].tensors:
        plane.obj[...] = 0
    append(**to_append)
    assert np.isfinite(decode(**(to_decode | {"cache": to_append["cache"]}))).all()


def test_a_contiguous_cache_takes_no_table() -> None:
    cache = KVCache(2, 6, 2, 40, like=LIKE)
    table = np.zeros((2, 1), np.int32)
    with pytest.raises(ArgumentError, match="block_table"):
        decode(np.zeros((2, 1, 2, 40), np.float32), cache, seq_lens=lengths(0, 0), block_table=table)


@pytest.mark.parametrize("copies", [[(0, 6)], [(0, 1), (1, 2)], [(0, 1), (2, 1)], [(0,)], [(0, -1)]])
def test_wrong_copies(copies: Any) -> None:
    call, _ = good_calls()
    with pytest.raises(ArgumentError) as caught:
        copy_blocks(call["cache"], copies)
    assert caught.value.argument == "copies"
