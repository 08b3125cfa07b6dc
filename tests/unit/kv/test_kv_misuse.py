"""KV caches and the block manager in unfriendly hands: what raises, what it says, and that nothing has changed then."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from omniattn import arrays
from omniattn.errors import ArgumentError
from omniattn.kv.blocks import BlockManager
from omniattn.kv.cache import KVCache, PagedKVCache
from omniattn.kv.swap import SwapSpace
from omniattn.ops import append, copy_blocks, decode
from omniattn.plan import engine

LIKE = np.zeros(1, dtype=np.float32)
THREE = np.array([3, 3], dtype=np.int32)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, dtype=np.float32)


def filled(like: Any = LIKE, **options: Any) -> KVCache:
    cache = KVCache(2, 8, 1, 64, like=like, **options)
    append(cache, ones(2, 3, 1, 64), ones(2, 3, 1, 64), seq_lens=THREE)
    return cache


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=pytest.mark.frameworks)])
@pytest.mark.parametrize("k_dtype", ["bf16", "int4"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_has_memory_of_its_own(framework: str, k_dtype: str, duplicate: Callable[[KVCache], KVCache]) -> None:
    like = LIKE if framework == "numpy" else pytest.importorskip("torch").zeros(1)
    options = {"k_mean": ones(1, 64)} if k_dtype == "int4" else {}
    cache = filled(like, k_dtype=k_dtype, **options)
    other = duplicate(cache)
    assert other.facts == cache.facts
    assert type(other.v) is type(cache.v)
    assert all(a.ptr != b.ptr and a.argument == b.argument for a, b in zip(cache.tensors, other.tensors, strict=True))
    append(other, 5 * ones(2, 1, 1, 64), 5 * ones(2, 1, 1, 64), seq_lens=THREE)
    q = ones(2, 1, 1, 64)
    np.testing.assert_allclose(decode(q, cache, seq_lens=THREE), 1, rtol=1e-6)
    assert (decode(q, other, seq_lens=THREE) > 4).all()


def test_like_is_not_kept_alive() -> None:
    like = np.zeros(10, dtype=np.float32)
    gone = weakref.ref(like)
    cache = KVCache(1, 4, 1, 64, like=like)
    del like
    gc.collect()
    assert gone() is None
    assert "cpu" in repr(cache)


@pytest.mark.frameworks
def test_like_may_be_a_parameter_of_a_module() -> None:
    torch = pytest.importorskip("torch")
    cache = KVCache(1, 4, 1, 64, like=torch.nn.Linear(2, 2).weight)
    assert isinstance(cache.k, torch.Tensor)
    assert not cache.k.requires_grad


@pytest.mark.parametrize("name", ["hadamard", "num_blocks", "head_dim", "k_format", "k", "smoothness"])
def test_a_cache_stays_what_it_is(name: str) -> None:
    cache = KVCache(1, 4, 1, 64, like=LIKE, k_dtype="int8")
    facts = cache.facts
    with pytest.raises(AttributeError, match=name):
        setattr(cache, name, 3)
    assert cache.facts == facts
    assert not hasattr(cache, "smoothness")


@pytest.mark.parametrize(
    ("options", "argument", "expected"),
    [
        ({"k_channel_scale": np.zeros((1, 64), np.float32)}, "k_channel_scale", "above 0"),
        ({"k_channel_scale": np.full((1, 64), -1, np.float32)}, "k_channel_scale", "above 0"),
        ({"k_channel_scale": np.full((1, 64), np.nan, np.float32)}, "k_channel_scale", "above 0"),
        ({"k_mean": np.full((1, 64), np.inf, np.float32)}, "k_mean", "finite numbers"),
        ({"k_dtype": "fp16", "k_mean": 1.0}, "k_mean", "received the float 1.0"),
        ({"batch": True}, "batch", "an integer >= 1"),
        ({"batch": -1}, "batch", "an integer >= 1"),
        ({"batch": 2**31}, "batch", "at most 2147483136"),
        ({"max_seqlen": 2**31}, "max_seqlen", "at most 2147483136"),
        ({"num_kv_heads": 2**60}, "num_kv_heads", "at most 2147483136"),
        ({"group_size": True}, "group_size", "None or one of 32, 64"),
        ({"group_size": 64.0}, "group_size", "None or one of 32, 64"),
        ({"k_dtype": "fp16", "v_dtype": "bf16"}, "v_dtype", "'fp16' or an 8- or 4-bit type"),
    ],
)
def test_caches_that_cannot_be(options: dict[str, Any], argument: str, expected: str) -> None:
    call = {"batch": 1, "max_seqlen": 8, "num_kv_heads": 1, "head_dim": 64, "like": LIKE, "k_dtype": "int8"} | options
    with pytest.raises(ArgumentError) as caught:
        KVCache(**call)
    assert caught.value.argument == argument
    assert expected in str(caught.value)
    assert str(caught.value).startswith("KVCache(): ")


def test_integers_of_numpy_are_integers() -> None:
    cache = KVCache(
        np.int64(1), np.int32(8), np.uint8(1), np.int16(64), like=LIKE, k_dtype="int8", group_size=np.int64(32)
    )
    assert cache.k_format.groups == 2
    assert type(cache.k_format.group_size) is int


@pytest.mark.parametrize("window", [(7.0, 0), (True, 0), (1.0, False)])
def test_a_valid_call_does_not_let_a_similar_one_pass(window: Any) -> None:
    """True == 1 == 1.0 also in the key of a plan."""
    cache = filled()
    call = {"seq_lens": THREE}
    for good in ((7, 0), (1, 0)):
        decode(ones(2, 1, 1, 64), cache, window=good, **call)
    with pytest.raises(ArgumentError) as caught:
        decode(ones(2, 1, 1, 64), cache, window=window, **call)
    assert caught.value.argument == "window"


def test_out_that_is_q_raises_on_a_gpu_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are no part of a plan: what they must not be is checked behind it."""
    describe = arrays.describe

    def on_gpu(value: Any, name: str, *rest: Any) -> Any:
        t = describe(value, name)
        t.device = "cuda"
        return t

    plan = engine.Plan(None, None, None, 0)
    cache = filled()
    engine.PLANS.clear()
    monkeypatch.setattr(engine, "make_plan", lambda *_, **__: plan)
    monkeypatch.setattr(arrays, "describe", on_gpu)
    q = ones(2, 1, 1, 64)
    for _ in range(2):
        with pytest.raises(ArgumentError) as caught:
            decode(q, cache, seq_lens=THREE, out=q)
        assert caught.value.argument == "out"
    assert len(engine.PLANS) == 1
    engine.PLANS.clear()


def test_out_may_be_q_on_the_cpu() -> None:
    cache = filled(k_dtype="int8")
    q = np.random.default_rng(0).standard_normal((2, 1, 1, 64)).astype(np.float32)
    expected = decode(q, cache, seq_lens=THREE)
    assert decode(q, cache, seq_lens=THREE, out=q) is q
    np.testing.assert_array_equal(q, expected)


def test_packed_rows_of_no_sequence() -> None:
    cache = filled()
    none = np.zeros(0, np.int32)
    for rows in (0, 2):
        append(cache, ones(rows, 1, 64), ones(rows, 1, 64), seq_lens=none, cu_seqlens=np.zeros(1, np.int32))
    with pytest.raises(ArgumentError, match=r"seq_lens.*shape \(batch,\)"):
        append(cache, ones(0, 1, 64), ones(0, 1, 64), seq_lens=none[:, None], cu_seqlens=np.zeros(1, np.int32))


def test_a_table_that_is_too_small_is_named() -> None:
    cache = PagedKVCache(6, 4, 1, 64, like=LIKE)
    table = np.array([[0], [1]], dtype=np.int32)
    lens = np.array([3, 5], np.int32)
    with pytest.raises(ArgumentError, match=r"received 5 at 1\. block_table has 1 blocks of 4 tokens"):
        append(cache, ones(2, 3, 1, 64), ones(2, 3, 1, 64), seq_lens=lens, block_table=table)
    with pytest.raises(ArgumentError, match="max_blocks >= 1"):
        decode(ones(2, 1, 1, 64), cache, seq_lens=lens, block_table=table[:, :0])


def test_not_a_number_harms_only_who_attends_to_it() -> None:
    cache = KVCache(2, 8, 1, 64, like=LIKE, k_dtype="int8")
    k, v = ones(2, 8, 1, 64), ones(2, 8, 1, 64)
    k[0, 7, 0, 3], v[0, 7, 0, 9] = np.nan, np.inf
    eight = np.array([8, 8], np.int32)
    append(cache, k, v, seq_lens=eight)
    o = decode(ones(2, 3, 1, 64), cache, seq_lens=eight)
    assert np.isnan(o).any(axis=(2, 3)).tolist() == [[False, False, True], [False, False, False]]


@pytest.mark.parametrize("k_dtype", ["bf16", "fp16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("value", [np.inf, 1e300, 3e38])
def test_overflow_is_no_warning_and_leaves_nothing_half_written(k_dtype: str, value: float) -> None:
    k = np.ones((2, 3, 1, 64))
    k[1, 2, 0, 5], k[1, 1, 0, 6] = value, -value
    repairs = [{"hadamard": True}, {"k_channel_scale": np.full((1, 64), 1e-30, np.float32)}]
    turn = {"cos": np.zeros((9, 32), np.float32), "sin": np.ones((9, 32), np.float32)}
    for options in ({}, *(repairs if k_dtype in ("fp8", "int8", "int4") else [])):
        cache = KVCache(2, 8, 1, 64, like=LIKE, k_dtype=k_dtype, **options)
        with np.errstate(all="raise"):
            append(cache, k, k, seq_lens=THREE, **turn)
            o = decode(ones(2, 1, 1, 64), cache, seq_lens=THREE)
        # Ones, turned by a quarter, in both halves: finite where nothing overflows.
        assert np.isfinite(o[0]).all()


def test_block_numbers_behind_the_end_are_not_looked_at() -> None:
    cache = PagedKVCache(4, 2, 1, 64, like=LIKE)
    table = np.array([[3, 1, -1, 99], [0, 2, -1, -1]], dtype=np.int32)
    append(cache, ones(2, 3, 1, 64), ones(2, 3, 1, 64), seq_lens=THREE, block_table=table)
    assert (decode(ones(2, 1, 1, 64), cache, seq_lens=THREE, block_table=table) == 1).all()


@pytest.mark.parametrize("copies", [None, 5, [(0, 1.0)], [(True, 1)], np.array([[0, 1]]), {0: 1}, [(1, 1)], "ab"])
def test_copies_that_are_no_pairs(copies: Any) -> None:
    cache = PagedKVCache(4, 2, 1, 64, like=LIKE)
    cache.k[...] = np.arange(4).reshape(4, 1, 1, 1)
    before = cache.k.copy()
    with pytest.raises(ArgumentError) as caught:
        copy_blocks(cache, copies)
    assert caught.value.argument == "copies"
    np.testing.assert_array_equal(cache.k, before)


def manager() -> BlockManager:
    m = BlockManager(8, 4)
    m.add("a")
    m.extend({"a": 6})
    m.fork("a", "b")
    return m


def state(m: BlockManager) -> Any:
    names = m.sequences
    return names, m.num_free, [(m.length(n), m.blocks(n)) for n in names], [m.references(i) for i in range(8)]


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda m: m.add(["x"]), "sequence"),
        (lambda m: m.add("a"), "sequence"),
        (lambda m: m.fork("a", {}), "child"),
        (lambda m: m.fork([], "c"), "parent"),
        (lambda m: m.fork("a", "b"), "child"),
        (lambda m: m.extend(["a"]), "growth"),
        (lambda m: m.extend(None), "growth"),
        (lambda m: m.extend({"a": 1, "z": 1}), "sequence"),
        (lambda m: m.extend({"a": 1, "b": -1}), "growth['b']"),
        (lambda m: m.extend({"a": 1, "b": 1.0}), "growth['b']"),
        (lambda m: m.extend({"a": True}), "growth['a']"),
        (lambda m: m.extend({"a": 2**31 - 1}), "growth['a']"),
        (lambda m: m.references("a"), "block"),
        (lambda m: m.references(1.5), "block"),
        (lambda m: m.references(True), "block"),
        (lambda m: m.references(8), "block"),
        (lambda m: m.truncate("a", 7), "length"),
        (lambda m: m.truncate("a", True), "length"),
        (lambda m: m.truncate([], 1), "sequence"),
        (lambda m: m.free({}), "sequence"),
        (lambda m: m.length([]), "sequence"),
        (lambda m: m.block_table(5), "sequences"),
        (lambda m: m.block_table([["a"]]), "sequence"),
        (lambda m: m.block_table(["a"], 1), "max_blocks"),
        (lambda m: m.seq_lens(None), "sequences"),
        (lambda m: m.seq_lens(["a", "z"]), "sequence"),
    ],
)
def test_wrong_calls_of_the_manager_change_nothing(call: Callable[[BlockManager], Any], argument: str) -> None:
    m = manager()
    before = state(m)
    with pytest.raises(ArgumentError) as caught:
        call(m)
    assert caught.value.argument == argument
    assert str(caught.value).startswith("BlockManager.")
    assert state(m) == before


@pytest.mark.parametrize("count", [2**31, 2**60, 2**70])
def test_counts_beyond_int32_are_named_with_their_limit(count: int) -> None:
    for argument, least in (("num_blocks", 1), ("block_size", 1), ("num_slots", 0)):
        counts: dict[str, Any] = {"num_blocks": 4, "block_size": 4, argument: count}
        with pytest.raises(ArgumentError) as caught:
            BlockManager(**counts)
        assert caught.value.argument == argument
        assert f"expected an integer from {least} to {2**31 - 1}, received {count}" in str(caught.value)
    with pytest.raises(ArgumentError, match=rf"SwapSpace\(\): argument 'num_blocks': .* to {2**31 - 1}, rec"):
        SwapSpace(PagedKVCache(4, 4, 1, 64, like=LIKE), count)
    m = manager()
    with pytest.raises(ArgumentError, match=rf"argument 'max_blocks': .* to {2**31 - 1}, received {count}"):
        m.block_table(["a"], count)


def test_small_integers_do_not_overflow_in_the_manager() -> None:
    m = BlockManager(100, 4)
    m.add("a")
    for _ in range(3):
        m.extend({"a": np.int8(100)})
    assert m.length("a") == 300
    m.truncate("a", np.uint8(200))
    m.extend({"a": 100})
    assert (m.length("a"), len(m.blocks("a"))) == (300, 75)
    # A number in an array is a number of now.
    count = np.array(5)
    m.add("b")
    m.extend({"b": count})
    count += 50
    assert (m.length("b"), len(m.blocks("b"))) == (5, 2)


def test_facts_are_one_object_for_equal_caches_and_go_with_the_last() -> None:
    """Plans are found by their identity; a process that makes caches of ever new sizes keeps none of them."""
    like = np.zeros(1, dtype=np.float32)
    first, second = (KVCache(1, 48, 1, 64, like=like) for _ in range(2))
    assert first.facts is second.facts
    assert first.identity == second.identity
    assert hash(first.identity) == hash(second.identity)
    other = KVCache(1, 49, 1, 64, like=like)
    assert other.identity != first.identity
    gone = weakref.ref(other.facts)
    del other
    gc.collect()
    assert gone() is None
