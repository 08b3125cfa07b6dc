"""The newest tokens of a quantized cache in 16 bits: which are read so, after appends, drops, forks; wrong calls."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniattn import reference, testing
from omniattn.errors import ArgumentError, DtypeError, OutOfSlotsError, ShapeError
from omniattn.kv.blocks import BlockManager
from omniattn.kv.cache import RECENT_SPARE, KVCache, PagedKVCache
from omniattn.ops import append, copy_blocks, copy_recent, decode
from omniattn.reference.decode import on_host, read_tokens
from omniattn.reference.kv_cache import rotate

Array = npt.NDArray[Any]
LIKE = np.zeros(1, dtype=np.float32)


def lengths(*values: int) -> Array:
    return np.array(values, dtype=np.int32)


def tokens(batch: int, count: int, heads: int = 2, dim: int = 64, seed: int = 0) -> tuple[Array, Array]:
    """K and V that bf16 and fp16 hold exactly and int4 does not."""
    rng = np.random.default_rng(seed)
    k, v = (rng.integers(-128, 128, size=(batch, count, heads, dim)) / 64 for _ in range(2))
    return k.astype(np.float32), v.astype(np.float32)


def as_read(cache: KVCache, length: int, b: int = 0, *, window: bool = True) -> tuple[Array, Array]:
    """K and V as `decode` reads them; without ``window`` from the quantized planes alone."""
    host = on_host(cache) if window else dataclasses.replace(on_host(cache), recent=None)
    return read_tokens(host, np.array([b]), length, b)


def exact_from(cache: KVCache, k: Array, length: int, b: int = 0) -> int:
    """First position from which all keys are read as they came; older ones must all be quantized."""
    seen, _ = as_read(cache, length, b)
    same = (seen == k[b, :length]).all(axis=(1, 2))
    first = length
    while first and same[first - 1]:
        first -= 1
    assert not same[:first].any()
    return first


@pytest.mark.parametrize("dtype", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("steps", [(40,), (1,) * 40, (7, 20, 13), (30, 10)], ids=str)
def test_the_newest_are_exact_and_the_others_quantized(dtype: str, steps: tuple[int, ...]) -> None:
    k, v = tokens(2, 40)
    caches = [KVCache(2, 64, 2, 64, like=LIKE, k_dtype=dtype, recent_window=n) for n in (9, 0)]
    for cache in caches:
        at = 0
        for n in steps:
            append(cache, k[:, at : at + n], v[:, at : at + n], seq_lens=lengths(at + n, at + n))
            at += n
    windowed, plain = (as_read(cache, 40) for cache in caches)
    for seen, quantized, x in zip(windowed, plain, (k, v), strict=True):
        np.testing.assert_array_equal(seen[:31], quantized[:31])
        np.testing.assert_array_equal(seen[31:], x[0, 31:])
    # The quantized planes are those of a cache without window, bit for bit.
    for name in ("k", "v", "k_params", "v_params"):
        np.testing.assert_array_equal(getattr(caches[0], name)[:, :, :40], getattr(caches[1], name)[:, :, :40])


@pytest.mark.parametrize("window", [1, 16, 100])
@pytest.mark.parametrize("options", [{}, {"window": (7, 0)}, {"softcap": 3.0, "softmax_scale": 0.3}], ids=str)
def test_decode_is_attention_over_both(window: int, options: dict[str, Any]) -> None:
    k, v = tokens(2, 50)
    q = np.random.default_rng(1).standard_normal((2, 3, 4, 64)).astype(np.float32)
    cache = KVCache(2, 64, 2, 64, like=LIKE, k_dtype="int4", v_dtype="fp8", recent_window=window)
    append(cache, k, v, seq_lens=lengths(50, 50))
    o, lse = decode(q, cache, seq_lens=lengths(50, 50), return_lse=True, **options)
    seen = [as_read(cache, 50, b) for b in range(2)]
    seen_k, seen_v = (np.stack([x[i] for x in seen]) for i in range(2))
    old_k, _ = as_read(cache, 50, window=False)
    first = max(50 - window, 0)
    np.testing.assert_array_equal(seen_k[0, :first], old_k[:first])
    np.testing.assert_array_equal(seen_k[:, first:], k[:, first:])
    expected_o, expected_lse = reference.attention(q, seen_k, seen_v, causal=True, **options)
    np.testing.assert_allclose(o, expected_o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_changes_of_keys_are_nothing_to_the_newest() -> None:
    k, v = tokens(1, 30)
    q = np.random.default_rng(1).standard_normal((1, 1, 2, 64)).astype(np.float32)
    angle = np.random.default_rng(2).standard_normal((30, 8)).astype(np.float32)
    mean, scale = np.full((2, 64), 0.3, np.float32), np.full((2, 64), 1.7, np.float32)
    cache = KVCache(
        1, 30, 2, 64, like=LIKE, k_dtype="int4", k_mean=mean, k_channel_scale=scale, hadamard=True, recent_window=30,
        recent_dtype="fp16",
    )  # fmt: skip
    append(cache, k, v, seq_lens=lengths(30), cos=np.cos(angle), sin=np.sin(angle))
    turned = rotate(k[0], np.cos(angle)[:, None], np.sin(angle)[:, None], False).astype(np.float16)[None]
    expected, _ = reference.attention(q, turned.astype(np.float32), v, causal=True)
    np.testing.assert_allclose(decode(q, cache, seq_lens=lengths(30)), expected, rtol=1e-5, atol=1e-6)


def test_dropped_tokens_leave_the_window_whole() -> None:
    """As many as decode takes may be dropped again, at once or over and over."""
    window = 8
    k, v = tokens(1, 200)
    cache = KVCache(1, 200, 2, 64, like=LIKE, k_dtype="int4", recent_window=window)
    append(cache, k[:, :40], v[:, :40], seq_lens=lengths(40))
    length = 40
    for kept in (16, 3, 1, 16, 2):
        guess_k, guess_v = tokens(1, RECENT_SPARE, seed=9)
        append(cache, guess_k, guess_v, seq_lens=lengths(length + RECENT_SPARE))
        k[0, length : length + kept] = guess_k[0, :kept]
        length += kept
        assert exact_from(cache, k, length) <= length - window
    # Many are dropped: the window is what is left of it, and grows again.
    append(cache, k[:, length : length + 40], v[:, :40], seq_lens=lengths(length + 40))
    end, length = length + 40, length + 2
    assert exact_from(cache, k, length) == length
    for step in range(1, 12):
        append(cache, k[:, length : length + 1], v[:, :1], seq_lens=lengths(length + 1))
        length += 1
        assert exact_from(cache, k, length) == length - min(step, window)
    assert length < end


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_whatever_happens_every_key_is_its_own(data: st.DataObject) -> None:
    """Appends and drops in any order: each key read is that token's, exact or quantized, and the newest are exact."""
    window = data.draw(st.integers(1, 20))
    ring = window + RECENT_SPARE
    cache = KVCache(1, 120, 1, 64, like=LIKE, k_dtype="int8", recent_window=window)
    plain = KVCache(1, 120, 1, 64, like=LIKE, k_dtype="int8")
    k = np.zeros((1, 120, 1, 64), dtype=np.float32)
    length, intact, end = 0, 0, 0
    for step in range(data.draw(st.integers(1, 8))):
        new = data.draw(st.integers(0, min(60, 120 - length)))
        fresh, v = tokens(1, new, heads=1, seed=100 + step)
        for each in (cache, plain):
            append(each, fresh, v, seq_lens=lengths(length + new))
        k[:, length : length + new] = fresh
        if new:
            intact = max(intact, end - ring)
            intact = max(length if intact > length else intact, length + new - ring)
            length = end = length + new
        if data.draw(st.booleans()):
            length = data.draw(st.integers(0, length))
        seen, quantized = as_read(cache, length)[0], as_read(plain, length)[0]
        first = min(max(intact, end - ring, length - window, 0), length)
        np.testing.assert_array_equal(seen[first:], k[0, first:length])
        np.testing.assert_array_equal(seen[:first], quantized[:first])


def test_pages_slots_and_forks() -> None:
    manager = BlockManager(12, 4, num_slots=3)
    cache = PagedKVCache(12, 4, 2, 64, like=LIKE, k_dtype="int4", recent_window=5, recent_slots=3)
    k, v = tokens(2, 20)

    def grow(name: str, source: int, begin: int, end: int) -> None:
        copy_blocks(cache, manager.extend({name: end - begin}))
        append(
            cache, k[source : source + 1, begin:end], v[source : source + 1, begin:end],
            seq_lens=manager.seq_lens([name]), block_table=manager.block_table([name]),
            recent_slots=manager.slots([name]),
        )  # fmt: skip

    def newest(name: str) -> Array:
        slot = int(manager.slots([name])[0])
        return read_tokens(on_host(cache), manager.block_table([name])[0], manager.length(name), slot)[0]

    manager.add("other")
    grow("other", 1, 0, 11)
    manager.free("other")
    manager.add("a")
    grow("a", 0, 0, 10)
    pairs = manager.fork("a", "b")
    assert len(pairs) == 1
    copy_recent(cache, pairs)
    grow("a", 0, 10, 12)
    grow("b", 1, 10, 13)
    np.testing.assert_array_equal(newest("a")[7:], k[0, 7:12])
    np.testing.assert_array_equal(newest("b")[8:10], k[0, 8:10])
    np.testing.assert_array_equal(newest("b")[10:], k[1, 10:13])
    assert (newest("b")[:8] != k[0, :8]).any(axis=(1, 2)).all()
    manager.add("c")
    with pytest.raises(OutOfSlotsError) as caught:
        manager.fork("a", "d")
    assert caught.value.num_slots == 3
    assert manager.sequences == ("a", "b", "c")
    # The batch in one call, in any order, is the sequences one by one.
    q = np.random.default_rng(4).standard_normal((2, 1, 4, 64)).astype(np.float32)
    names = ["b", "a"]
    call = {"block_table": manager.block_table(names), "recent_slots": manager.slots(names)}
    both = decode(q, cache, seq_lens=manager.seq_lens(names), **call)
    for i, name in enumerate(names):
        alone = decode(
            q[i : i + 1], cache, seq_lens=manager.seq_lens([name]), block_table=manager.block_table([name]),
            recent_slots=manager.slots([name]),
        )  # fmt: skip
        np.testing.assert_array_equal(alone[0], both[i])
    manager.free("b")
    manager.add("e")
    assert sorted(manager.slots(["a", "c", "e"]).tolist()) == [0, 1, 2]


def test_tokens_that_never_went_through_the_window_are_read_quantized() -> None:
    k, v = tokens(1, 20)
    plain = KVCache(1, 20, 2, 64, like=LIKE, k_dtype="int4")
    append(plain, k, v, seq_lens=lengths(20))
    cache = KVCache(1, 20, 2, 64, like=LIKE, k_dtype="int4", recent_window=6)
    for name in ("k", "v", "k_params", "v_params"):
        getattr(cache, name)[...] = getattr(plain, name)
    np.testing.assert_array_equal(as_read(cache, 20)[0], as_read(plain, 20)[0])
    # Only what is appended is exact.
    append(cache, k[:, 18:], v[:, 18:], seq_lens=lengths(20))
    assert exact_from(cache, k, 20) == 18


@pytest.mark.frameworks
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks(framework: str) -> None:
    """Rings begin empty and are written in place in every framework's memory."""
    module = pytest.importorskip(framework)
    array = module.from_numpy if framework == "torch" else importlib.import_module("jax.numpy").asarray
    k, v = tokens(1, 30)
    results = []
    for convert in (np.asarray, array):
        cache = KVCache(1, 40, 2, 64, like=convert(LIKE), k_dtype="int4", recent_window=8)
        assert not np.asarray(cache.recent_state).any()
        for begin, end in ((0, 20), (20, 30)):
            append(
                cache, convert(k[:, begin:end].copy()), convert(v[:, begin:end].copy()), seq_lens=convert(lengths(end))
            )
        results.append(np.asarray(decode(convert(k[:, :1].copy()), cache, seq_lens=convert(lengths(30)))))
        assert as_read(cache, 30)[0].shape == (30, 2, 64)
        assert exact_from(cache, k, 30) == 22
    np.testing.assert_array_equal(*results)


def test_sizes_copies_and_other_layouts() -> None:
    cache = KVCache(3, 40, 2, 72, like=LIKE, k_dtype="int8", v_dtype="fp16", recent_window=8)
    assert cache.recent_k.shape == cache.recent_v.shape == (3, 2, 8 + RECENT_SPARE, 128)
    assert cache.recent_k.dtype == np.float16
    assert (cache.recent_state == 0).all()
    assert cache.nbytes == 3 * 40 * cache.token_bytes + 2 * 3 * 2 * 24 * 256 + 24
    assert KVCache(3, 40, 2, 72, like=LIKE, k_dtype="int8").recent_k is None
    k, v = tokens(1, 30)
    one = KVCache(1, 40, 2, 64, like=LIKE, k_dtype="int4", layout="fbgemm", recent_window=8)
    append(one, k, v, seq_lens=lengths(30))
    assert exact_from(one, k, 30) == 22
    two = copy.deepcopy(one)
    append(two, -k[:, :1], v[:, :1], seq_lens=lengths(31))
    assert exact_from(one, k, 30) == 22
    assert exact_from(two, np.concatenate([k, -k[:, :1]], axis=1), 31) == 23


CACHE: dict[str, Any] = {
    "num_blocks": 4, "block_size": 4, "num_kv_heads": 2, "head_dim": 64, "like": LIKE, "k_dtype": "int4",
    "recent_window": 4, "recent_slots": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"recent_window": -1}, "recent_window"),
        ({"recent_window": 1.5}, "recent_window"),
        ({"recent_window": True}, "recent_window"),
        ({"recent_window": 2**31}, "recent_window"),
        ({"k_dtype": "bf16"}, "recent_window"),
        ({"recent_dtype": "bfloat16"}, "recent_dtype"),
        ({"v_dtype": "fp16", "recent_dtype": "bf16"}, "recent_dtype"),
        ({"recent_slots": None}, "recent_slots"),
        ({"recent_slots": 0}, "recent_slots"),
        ({"recent_slots": 2**60}, "recent_slots"),
        ({"recent_window": 0}, "recent_slots"),
        ({"recent_window": 0, "recent_slots": None, "recent_dtype": "fp16"}, "recent_dtype"),
    ],
)
def test_wrong_caches(changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        PagedKVCache(**(CACHE | changes))
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("slots", "error"),
    [
        (None, ArgumentError),
        (lengths(0, 2), ArgumentError),
        (lengths(-1, 0), ArgumentError),
        (lengths(1, 1), ArgumentError),
        (lengths(0), ShapeError),
        (np.array([0, 1]), DtypeError),
    ],
)
def test_wrong_slots(slots: Any, error: type[ArgumentError]) -> None:
    cache = PagedKVCache(**CACHE)
    k, v = tokens(2, 3)
    both = {"seq_lens": lengths(3, 3), "block_table": np.array([[0], [1]], np.int32), "recent_slots": slots}
    cache.k[...] = 9
    for call in (lambda: append(cache, k, v, **both), lambda: decode(k, cache, **both)):
        with pytest.raises(error) as caught:
            call()
        assert caught.value.argument == "recent_slots"
    assert (cache.k == 9).all()
    assert (cache.recent_state == 0).all()


def test_slots_are_for_caches_that_have_them() -> None:
    k, v = tokens(2, 3)
    plain = PagedKVCache(4, 4, 2, 64, like=LIKE, k_dtype="int4")
    flat = KVCache(2, 4, 2, 64, like=LIKE, k_dtype="int4", recent_window=3)
    table = np.array([[0], [1]], np.int32)
    for cache, pages in ((plain, {"block_table": table}), (flat, {})):
        with pytest.raises(ArgumentError, match="recent_slots"):
            append(cache, k, v, seq_lens=lengths(3, 3), recent_slots=lengths(0, 1), **pages)
    with pytest.raises(ArgumentError, match="recent_window"):
        copy_recent(plain, [(0, 1)])
    with pytest.raises(ArgumentError, match="num_slots"):
        BlockManager(4, 4).slots([])
    with pytest.raises(ArgumentError, match="num_slots"):
        BlockManager(4, 4, num_slots=-1)


def test_padding_rows_leave_the_window_alone() -> None:
    """Rows with seq_lens 0 have no new tokens, whatever slot they name: another sequence's, here."""
    cache = PagedKVCache(8, 16, 2, 64, k_dtype="int4", recent_window=20, recent_slots=2, like=LIKE)
    table = np.arange(4, dtype=np.int32).reshape(2, 2)
    rng = np.random.default_rng(4)
    k, v = (rng.standard_normal((2, 30, 2, 64)).astype(np.float32) for _ in range(2))
    slots = np.array([1, 0], np.int32)
    append(cache, k, v, seq_lens=lengths(30, 30), block_table=table, recent_slots=slots)
    arrays = (cache.recent_state, cache.recent_k, cache.k)
    before = [np.array(x) for x in arrays]
    append(cache, k[:, :1], v[:, :1], seq_lens=lengths(0, 0), block_table=table, recent_slots=slots[::-1].copy())
    for old, new in zip(before, arrays, strict=True):
        # Bytes: places without a token hold what memory held, NaN at times.
        np.testing.assert_array_equal(old.view(np.uint8), np.array(new).view(np.uint8))
    # One row goes on, the others pad: its slot is written once.
    append(cache, k[:, :1], v[:, :1], seq_lens=lengths(31, 0), block_table=table, recent_slots=slots)
    np.testing.assert_array_equal(cache.recent_state, [[0, 30], [0, 31]])


def test_the_reference_passes_over_tokens_before_position_0() -> None:
    from omniattn.reference.decode import append_tokens

    cache = KVCache(1, 40, 2, 64, k_dtype="int4", recent_window=20, like=LIKE)
    k, v = np.ones((2, 3, 2, 64), np.float32)
    append_tokens(on_host(cache), k, v, np.array([0]), -1)
    np.testing.assert_array_equal(cache.recent_state, [[0, 2]])
    append_tokens(on_host(cache), k[:1], v[:1], np.array([0]), -1)
    np.testing.assert_array_equal(cache.recent_state, [[0, 2]])


@pytest.mark.parametrize("copies", [[(0, 2)], [(0, 1), (1, 0)], [(0,)], 3])
def test_wrong_copies(copies: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        copy_recent(PagedKVCache(**CACHE), copies)
    assert caught.value.argument == "copies"


def test_what_testing_makes_is_read_exactly_within_the_window() -> None:
    """A cache whose window holds everything is a 16-bit cache."""
    q, k, v = testing.make_qkv("normal", batch=2, seqlen_q=2, seqlen_k=33, heads_q=4, heads_kv=2, head_dim=40)
    results = []
    for options in ({"k_dtype": "bf16"}, {"k_dtype": "int4", "recent_window": 33}):
        cache = KVCache(2, 40, 2, 40, like=LIKE, **options)
        append(cache, k, v, seq_lens=lengths(33, 33))
        results.append(decode(q, cache, seq_lens=lengths(33, 33)))
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)
