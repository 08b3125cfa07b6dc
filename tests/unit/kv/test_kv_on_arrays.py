"""Caches on the caller's arrays: what they take, where rows are, values on the CPU against caches of their own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from omniattn.errors import (
    AlignmentError,
    ArgumentError,
    DeviceError,
    DtypeError,
    OmniattnError,
    ShapeError,
    StrideError,
    UnsupportedError,
)
from omniattn.kv import on_arrays
from omniattn.kv.cache import KVCache, PagedKVCache
from omniattn.kv.places import own_strides, row_places
from omniattn.launch.structs import DECODE, KV_APPEND, KV_COPY
from omniattn.ops import append, copy_blocks, decode
from omniattn.plan.others import plan_append, plan_copy, plan_decode
from omniattn.problems import AppendProblem, CopyProblem, DecodeProblem, Target
from tests.foreign_pools import ORDERS, memory_shape, planes
from tests.unit.launch.launch_fakes import fields_of_record

HOPPER = Target((9, 0), 232448, 132)
LIKE = np.zeros(1, np.float16)
LENGTHS = np.array([37, 0, 50], np.int32)
TOKENS = 50


def filled(order: str, blocks: int, size: int, heads: int, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """K and V of a pool, and its memory, all of it NaN."""
    memory = np.full(memory_shape(order, blocks, size, heads, dim), np.nan, np.float16)
    return *planes(order, memory, blocks, size, heads, dim), memory


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def table_of(size: int) -> tuple[np.ndarray, int]:
    """Blocks of three sequences in a random order, and how many blocks there are."""
    columns = -(-TOKENS // size)
    numbers = np.random.default_rng(1).permutation(3 * columns + 2)[: 3 * columns]
    return numbers.reshape(3, columns).astype(np.int32), 3 * columns + 2


def check_against_own(cache: PagedKVCache, q: np.ndarray, k: np.ndarray, v: np.ndarray, table: np.ndarray) -> None:
    own = PagedKVCache(
        cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_dim, like=LIKE, k_dtype="fp16"
    )
    for each in (cache, own):
        append(each, k, v, seq_lens=LENGTHS, cu_seqlens=np.array([0, 37, 37, 87], np.int32), block_table=table)
    results = [
        decode(q, each, seq_lens=LENGTHS, block_table=table, return_lse=True, window=(41, 0)) for each in (cache, own)
    ]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.isfinite(results[0][0]).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("size", "dim"), [(1, 64), (3, 96), (16, 128), (48, 8)])
def test_every_order_holds_what_a_cache_of_its_own_holds(order: str, size: int, dim: int) -> None:
    table, blocks = table_of(size)
    k_plane, v_plane, memory = filled(order, blocks, size, 2, dim)
    cache = PagedKVCache.from_arrays(k_plane, v_plane)
    assert (cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_dim) == (blocks, size, 2, dim)
    assert cache.k is k_plane
    assert cache.v is v_plane
    assert cache.token_bytes == 2 * 2 * 2 * dim
    assert cache.nbytes == blocks * size * cache.token_bytes
    k, v = normal(87, 2, dim), normal(87, 2, dim, seed=1)
    check_against_own(cache, normal(3, 2, 4, dim, seed=2), k, v, table)
    # Nothing else is written: as many numbers as the tokens have.
    assert np.isfinite(memory).sum() == 2 * 87 * 2 * dim
    assert np.isfinite(k_plane).sum() == 87 * 2 * dim


@pytest.mark.parametrize("size", [1, 16])
def test_dimensions_in_the_other_order(size: int) -> None:
    table, blocks = table_of(size)
    k_plane, v_plane, _ = filled("BHNC", blocks, size, 2, 64)
    cache = PagedKVCache.from_arrays(k_plane.swapaxes(1, 2), v_plane.swapaxes(1, 2), layout="HND")
    assert (cache.block_size, cache.num_kv_heads) == (size, 2)
    assert cache.facts.strides == ((2 * size * 128, size * 128, 128) if size > 1 else (256, 128, 0))
    check_against_own(cache, normal(3, 1, 4, 64), normal(87, 2, 64), normal(87, 2, 64, seed=1), table)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_both_in_one_row(layout: str) -> None:
    table, blocks = table_of(16)
    memory = np.full((blocks, 16, 2, 128) if layout == "NHD" else (blocks, 2, 16, 128), np.nan, np.float16)
    cache = PagedKVCache.from_arrays(memory, layout=layout)
    assert cache.head_dim == 64
    check_against_own(cache, normal(3, 1, 4, 64), normal(87, 2, 64), normal(87, 2, 64, seed=1), table)
    assert np.isfinite(memory).sum() == 2 * 87 * 2 * 64


def test_extents_of_one_have_any_stride() -> None:
    for shape, at in (((5, 16, 1, 64), 2), ((5, 1, 3, 64), 1), ((1, 16, 3, 64), 0)):
        pair = [np.zeros(shape, np.float16) for _ in "kv"]
        odd = [
            np.lib.stride_tricks.as_strided(x, strides=[(7, -6)[i] if j == at else s for j, s in enumerate(x.strides)])
            for i, x in enumerate(pair)
        ]
        cache = PagedKVCache.from_arrays(*odd)
        assert cache.facts is PagedKVCache.from_arrays(*pair).facts
        k = normal(3, shape[2], 64)
        append(cache, k, k, slot_mapping=np.arange(3) if shape[1] > 1 else np.arange(3) % 5)
        assert np.count_nonzero(pair[0]) == np.count_nonzero(k)


def test_a_contiguous_cache() -> None:
    memory = np.full((2, 40, 3, 128), np.nan, np.float16)
    k, v, q = normal(2, 9, 3, 64), normal(2, 9, 3, 64, seed=1), normal(2, 2, 6, 64, seed=2)
    caches = [KVCache.from_arrays(memory), KVCache(2, 40, 3, 64, like=LIKE, k_dtype="fp16")]
    assert not caches[0].paged
    lengths = np.array([9, 20], np.int32)
    for cache in caches:
        append(cache, *(normal(2, 11, 3, 64, seed=n) for n in (5, 6)), seq_lens=np.array([11, 11], np.int32))
        append(cache, k, v, seq_lens=lengths)
    results = [decode(q, cache, seq_lens=lengths) for cache in caches]
    np.testing.assert_array_equal(*results)


# Slots


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("k_dtype", ["fp16", "int8", "fp8"])
def test_slots(dtype: Any, k_dtype: str) -> None:
    """Where seq_lens and block_table put tokens, slots do: all bytes are the same."""
    caches = [PagedKVCache(7, 3, 2, 72, like=LIKE, k_dtype=k_dtype) for _ in range(2)]
    for cache in caches:
        for plane in (cache.k, cache.v):
            plane[...] = 9
    table = np.array([[4, 1, 6], [0, 5, 2]], np.int32)
    k, v = normal(2, 7, 2, 72), normal(2, 7, 2, 72, seed=1)
    append(caches[0], k, v, seq_lens=np.array([7, 8], np.int32), block_table=table)
    slots = [table[b, at // 3] * 3 + at % 3 for b, first in ((0, 0), (1, 1)) for at in range(first, first + 7)]
    more = np.full((5, 2, 72), np.nan, np.float16)
    packed = [np.concatenate([more[:2], x.reshape(14, 2, 72), more]) for x in (k, v)]
    append(caches[1], *packed, slot_mapping=np.array([-1, -7, *slots], dtype))
    for name in ("k", "v", "k_params", "v_params"):
        a, b = (getattr(cache, name) for cache in caches)
        if a is not None and name in ("k", "v"):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_slots_are_rotated_by_their_positions(rope: str) -> None:
    angle = normal(9, 12).astype(np.float32)
    turn = {"cos": np.cos(angle), "sin": np.sin(angle), "rope": rope}
    caches = [KVCache(2, 9, 2, 40, like=LIKE, k_dtype="fp16") for _ in range(2)]
    k, v = normal(2, 4, 2, 40), normal(2, 4, 2, 40, seed=1)
    lengths = np.array([4, 9], np.int32)
    append(caches[0], k, v, seq_lens=lengths, **turn)
    positions = np.array([0, 1, 2, 3, 5, 6, 7, 8, 999])
    slots = positions + 9 * (np.arange(9) >= 4)
    slots[8] = -1  # its position is not looked at
    packed = [np.concatenate([x.reshape(8, 2, 40), x[0, :1]]) for x in (k, v)]
    append(caches[1], *packed, slot_mapping=slots, positions=positions, **turn)
    for b, places in ((0, slice(0, 4)), (1, slice(5, 9))):
        np.testing.assert_array_equal(caches[0].k[b, :, places], caches[1].k[b, :, places])


def test_no_slots() -> None:
    cache = PagedKVCache(2, 3, 1, 64, like=LIKE, k_dtype="fp16")
    cache.k[...] = 9
    append(cache, normal(4, 1, 64), normal(4, 1, 64), slot_mapping=np.zeros((0,), np.int64))
    append(cache, normal(0, 1, 64), normal(0, 1, 64), slot_mapping=np.zeros((0,), np.int64))
    append(cache, normal(4, 1, 64), normal(4, 1, 64), slot_mapping=np.full((4,), -1))
    assert (cache.k == 9).all()


COS = np.zeros((6, 4), np.float32)


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"slot_mapping": None}, "seq_lens", ArgumentError),
        ({"seq_lens": np.array([3], np.int32)}, "seq_lens", ArgumentError),
        ({"block_table": np.zeros((1, 2), np.int32)}, "block_table", ArgumentError),
        ({"cu_seqlens": np.array([0, 3], np.int32)}, "cu_seqlens", ArgumentError),
        ({"slot_mapping": np.zeros(4, np.int64)}, "slot_mapping", ShapeError),
        ({"slot_mapping": np.zeros((1, 3), np.int64)}, "slot_mapping", ShapeError),
        ({"slot_mapping": np.zeros(3, np.int16)}, "slot_mapping", DtypeError),
        ({"slot_mapping": np.zeros(6, np.int64)[::2]}, "slot_mapping", ArgumentError),
        ({"slot_mapping": np.array([0, 18, -1])}, "slot_mapping", ArgumentError),
        ({"k": np.zeros((1, 3, 2, 64), np.float16), "v": np.zeros((1, 3, 2, 64), np.float16)}, "k", ShapeError),
        ({"cos": COS, "sin": COS}, "positions", ArgumentError),
        ({"positions": np.zeros(3, np.int32)}, "positions", ArgumentError),
        ({"cos": COS, "sin": COS, "positions": np.zeros(2, np.int32)}, "positions", ShapeError),
        ({"cos": COS, "sin": COS, "positions": np.zeros(3, np.float32)}, "positions", DtypeError),
        ({"cos": COS, "sin": COS, "positions": np.array([0, 6, 1])}, "positions", ArgumentError),
        ({"cos": COS, "sin": COS, "positions": np.array([0, -1, 1])}, "positions", ArgumentError),
    ],
)
def test_wrong_slots_write_nothing(changes: dict[str, Any], argument: str, error: type[OmniattnError]) -> None:
    cache = PagedKVCache(6, 3, 2, 64, like=LIKE, k_dtype="fp16")
    cache.k[...] = 9
    call = {"k": normal(3, 2, 64), "v": normal(3, 2, 64), "slot_mapping": np.array([0, 17, -1])}
    append(copy.deepcopy(cache), **call)
    with pytest.raises(error) as caught:
        append(cache, **(call | changes))
    assert caught.value.argument == argument
    assert (cache.k == 9).all()


def test_slots_and_a_recent_window() -> None:
    cache = PagedKVCache(6, 3, 2, 64, like=LIKE, k_dtype="int8", recent_window=4, recent_slots=2)
    with pytest.raises(ArgumentError, match="recent_window") as caught:
        append(cache, normal(3, 2, 64), normal(3, 2, 64), slot_mapping=np.arange(3))
    assert caught.value.argument == "slot_mapping"
    with pytest.raises(ArgumentError, match="slot_mapping") as caught:
        append(
            PagedKVCache(6, 3, 2, 64, like=LIKE, k_dtype="fp16"), normal(1, 3, 2, 64), normal(1, 3, 2, 64),
            seq_lens=np.array([3], np.int32), block_table=np.zeros((1, 1), np.int32), positions=np.arange(3),
        )  # fmt: skip
    assert caught.value.argument == "positions"


# What is refused


def strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> np.ndarray:
    memory = np.zeros(1 << 16, np.float16)
    memory = memory[(-memory.ctypes.data % 16) // 2 + offset :]
    return np.lib.stride_tricks.as_strided(memory, shape, [2 * s for s in strides])


GOOD = (4, 3, 2, 64)
ZEROS = np.zeros(GOOD, np.float16)


@pytest.mark.parametrize(
    ("arguments", "argument", "error"),
    [
        ((ZEROS, ZEROS[:2]), "v", ShapeError),
        ((ZEROS[0], ZEROS[0]), "k", ShapeError),
        ((ZEROS[0],), "k", ShapeError),
        ((np.zeros((4, 3, 2, 20), np.float16),) * 2, "k", ShapeError),
        ((np.zeros((4, 3, 2, 520), np.float16),) * 2, "k", ShapeError),
        ((np.zeros((4, 3, 2, 272), np.int8),) * 2, "k", ShapeError),
        ((np.zeros((4, 3, 2, 129), np.float16),), "k", ShapeError),
        ((np.zeros((0, 3, 2, 64), np.float16),) * 2, "k", ShapeError),
        ((np.zeros(GOOD, np.float32),) * 2, "k", DtypeError),
        ((ZEROS, np.zeros(GOOD, np.int16)), "v", DtypeError),
        ((ZEROS, strided(GOOD, (512, 128, 64, 1))), "v", StrideError),
        ((strided(GOOD, (384, 128, 64, 2)),) * 2, "k", StrideError),
        ((strided(GOOD, (420, 140, 70, 1)),) * 2, "k", StrideError),
        ((ZEROS[::-1], ZEROS[::-1]), "k", StrideError),
        ((strided(GOOD, (384, 128, 0, 1)),) * 2, "k", StrideError),
        ((strided(GOOD, (384, 128, 56, 1)),) * 2, "k", StrideError),
        ((ZEROS, strided(GOOD, (384, 128, 64, 1), 4)), "v", AlignmentError),
        ((None, ZEROS), "k", ArgumentError),
        ((ZEROS, 3), "v", ArgumentError),
    ],
)
def test_wrong_arrays(arguments: tuple[Any, ...], argument: str, error: type[OmniattnError]) -> None:
    with pytest.raises(error) as caught:
        PagedKVCache.from_arrays(*arguments)
    assert caught.value.argument == argument


def test_wrong_options() -> None:
    for layout in ("fragment", None, 3, ["NHD"]):
        with pytest.raises(ArgumentError, match="'NHD' or 'HND'"):
            PagedKVCache.from_arrays(ZEROS, ZEROS, layout=layout)
    for name, other in (("k_scale", "v_scale"), ("v_scale", "k_scale")):
        with pytest.raises(ArgumentError, match=other):
            PagedKVCache.from_arrays(ZEROS, ZEROS, **{name: np.ones(1, np.float32)})
    with pytest.raises(DtypeError, match=r"float8_e4m3fn or int8.*view"):
        PagedKVCache.from_arrays(*[np.zeros(GOOD, np.uint8)] * 2)


def test_a_read_only_array_is_for_decode() -> None:
    k = np.zeros(GOOD, np.float16)
    k.flags.writeable = False
    cache = PagedKVCache.from_arrays(k, np.zeros(GOOD, np.float16))
    lens, table = np.array([3], np.int32), np.array([[1]], np.int32)
    assert (decode(normal(1, 1, 2, 64), cache, seq_lens=lens, block_table=table) == 0).all()
    with pytest.raises(ArgumentError, match="writable"):
        append(cache, normal(1, 1, 2, 64), normal(1, 1, 2, 64), seq_lens=lens, block_table=table)


def test_one_array_twice_is_for_decode() -> None:
    """As V of a cache that is K too; kernels that write it would write both."""
    k = normal(*GOOD)
    cache = PagedKVCache.from_arrays(k, k)
    lens, table = np.array([1], np.int32), np.array([[1]], np.int32)
    np.testing.assert_array_equal(decode(normal(1, 1, 2, 64), cache, seq_lens=lens, block_table=table)[0], k[1, :1])
    with pytest.raises(ArgumentError, match="shares memory"):
        append(cache, normal(1, 2, 64), normal(1, 2, 64), slot_mapping=np.zeros(1, np.int32))


def test_new_tokens_out_of_the_pool() -> None:
    memory = np.zeros((4, 3, 2, 128), np.float16)
    cache = PagedKVCache.from_arrays(memory)
    with pytest.raises(ArgumentError, match="shares memory") as caught:
        append(cache, memory[0, ..., :64], normal(3, 2, 64), slot_mapping=np.arange(3))
    assert caught.value.argument == "k"
    # Between the rows of K and V of other blocks nothing is shared.
    wider = np.zeros((4, 3, 2, 192), np.float16)
    cache = PagedKVCache.from_arrays(wider[..., :64], wider[..., 64:128])
    append(cache, wider[0, ..., 128:], normal(3, 2, 64), slot_mapping=np.arange(3))


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def elsewhere(obj: Any, argument: str, stream: Any = None) -> Any:
        t = describe(obj, argument)
        t.device, t.ordinal = "cuda", len(seen)
        seen.append(argument)
        return t

    describe = on_arrays.arrays.describe
    monkeypatch.setattr(on_arrays.arrays, "describe", elsewhere)
    with pytest.raises(DeviceError) as caught:
        PagedKVCache.from_arrays(ZEROS, ZEROS.copy())
    assert caught.value.argument == "v"


# Copies


@pytest.mark.parametrize("order", ORDERS)
def test_copies_have_memory_of_their_own(order: str) -> None:
    k, v, memory = filled(order, 6, 3, 2, 64)
    k[...], v[...] = normal(*k.shape), normal(*k.shape, seed=1)
    cache = PagedKVCache.from_arrays(k, v)
    query = {"seq_lens": np.array([5], np.int32), "block_table": np.array([[4, 1]], np.int32)}
    q = normal(1, 1, 2, 64)
    expected = decode(q, cache, **query)
    for other in (copy.deepcopy(cache), copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        np.testing.assert_array_equal(decode(q, other, **query), expected)
        assert other.array_order == "NHD"
    other = copy.deepcopy(cache)
    memory[...] = 0
    np.testing.assert_array_equal(decode(q, other, **query), expected)


@pytest.mark.parametrize("order", ORDERS)
def test_copies_of_blocks(order: str) -> None:
    k, v, memory = filled(order, 6, 3, 2, 64)
    k[4], v[4] = normal(3, 2, 64), normal(3, 2, 64, seed=1)
    k[0], v[0] = 1, 2
    copy_blocks(PagedKVCache.from_arrays(k, v), [(4, 1), (0, 5)])
    np.testing.assert_array_equal(k[1], normal(3, 2, 64))
    np.testing.assert_array_equal(v[1], normal(3, 2, 64, seed=1))
    assert (k[5] == 1).all()
    assert (v[5] == 2).all()
    assert np.isfinite(memory).sum() == 2 * 4 * 3 * 2 * 64


def test_attributes_are_fixed() -> None:
    cache = PagedKVCache.from_arrays(ZEROS, ZEROS.copy())
    with pytest.raises(AttributeError):
        cache.array_order = "HND"
    assert "4 x 3 tokens" in repr(cache)


# Known facts


def test_pools_alike_have_the_same_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_arrays, "_known", {})
    memory = np.zeros((3, 4, 3, 2, 128), np.float16)
    first = PagedKVCache.from_arrays(memory[0])
    monkeypatch.setattr(on_arrays, "_check", None)  # not asked again
    caches = [first, *(PagedKVCache.from_arrays(memory[i]) for i in (1, 2))]
    assert len({id(cache.facts) for cache in caches}) == 1
    assert len({cache.key for cache in caches}) == 3
    for i, cache in enumerate(caches):
        assert cache.address("k") == memory[i].ctypes.data
        assert cache.addresses[1] == memory[i].ctypes.data + 128
        append(cache, *[np.full((1, 2, 64), i + 1, np.float16)] * 2, slot_mapping=np.array([5]))
        assert (memory[i, 1, 2] == i + 1).all()
    assert cache.order is not first.order


def test_known_facts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[Any, Any] = {}
    monkeypatch.setattr(on_arrays, "_known", known)
    monkeypatch.setattr(on_arrays, "_MOST_KNOWN", 2)
    for blocks in range(1, 6):
        PagedKVCache.from_arrays(*[np.zeros((blocks, 3, 2, 64), np.float16)] * 2)
    assert len(known) <= 2


# Launches


def decode_fields(cache: PagedKVCache | KVCache, columns: int = 8) -> dict[str, Any]:
    facts, dim = cache.facts, cache.head_dim
    row = 4 * cache.num_kv_heads * dim
    capacity = columns * cache.block_size if cache.paged else cache.block_size
    batch = 2 if cache.paged else cache.num_blocks
    problem = DecodeProblem(
        "float16", facts, batch, 1, 4 * cache.num_kv_heads, cache.num_kv_heads, dim, capacity, cache.block_size,
        cache.num_blocks, columns if cache.paged else 0, -1, 0.125, 0.0, "none", False, 0, False,
        (row, row, dim, 1), (row, row, dim, 1),
    )  # fmt: skip
    return fields_of_record(plan_decode(problem, HOPPER, None).records[0], DECODE)


def append_fields(cache: PagedKVCache | KVCache, **more: Any) -> dict[str, Any]:
    problem = AppendProblem(
        "float16", cache.facts, 0, 5, 0, cache.head_dim, cache.num_kv_heads, cache.block_size, cache.block_size,
        cache.num_blocks, 0, "none", 0, 0, (cache.num_kv_heads * cache.head_dim, cache.head_dim, 1),
        (cache.num_kv_heads * cache.head_dim, cache.head_dim, 1), **more,
    )  # fmt: skip
    return fields_of_record(plan_append(problem, HOPPER, None).records[0], KV_APPEND)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("size", "heads", "dim"), [(1, 2, 64), (3, 1, 96), (16, 4, 128), (256, 2, 192), (48, 1, 256)])
def test_where_kernels_find_rows(order: str, size: int, heads: int, dim: int) -> None:
    """Each row's address, computed as the kernels do."""
    k, v, _ = filled(order, 5, size, heads, dim)
    cache = PagedKVCache.from_arrays(k, v)
    of_decode = decode_fields(cache)
    of_append = append_fields(cache, slots="int64")
    copied = plan_copy(CopyProblem(cache.facts, False, ((0, 4),)), HOPPER, None).records[0]
    of_copy = fields_of_record(copied, KV_COPY)
    for fields in (of_decode, of_append):
        assert fields["row_chunks"] == dim // 8
        assert fields["place_bytes"] % 16 == 0
        for block, token, head in ((0, 0, 0), (4, size - 1, heads - 1), (2, size // 2, 0), (3, 0, heads // 2)):
            place = (
                block * fields["block_places"] + head * fields["head_places"] + token * fields["token_places"]
            ) * fields["place_bytes"]
            for x in (k, v):
                assert place == x[block, token, head].ctypes.data - x.ctypes.data
                step = block * of_copy["block_step"] + head * of_copy["head_step"] + token * of_copy["token_step"]
                assert step == place
    assert (of_copy["row_chunks"], of_copy["block_size"]) == (dim // 8, size)
    assert list(of_copy["block_bytes"][:2]) == [heads * size * 2 * dim] * 2
    # 16 tokens are copied by one look-up where they are in one block.
    assert of_decode["token_bytes"] == (0 if size % 16 else k.strides[1])


def test_rows_of_own_caches() -> None:
    """Contiguous and padded, with units of whole rows: 2^32 of them."""
    paged = PagedKVCache(6, 16, 3, 96, like=LIKE, k_dtype="fp16")
    fields = decode_fields(paged)
    expected = {"block_places": 48, "head_places": 16, "token_places": 1, "place_bytes": 256, "row_chunks": 16}
    assert {name: fields[name] for name in expected} == expected
    assert fields["token_bytes"] == 256
    assert {name: append_fields(paged, slots="int32")[name] for name in expected} == expected
    assert decode_fields(PagedKVCache(6, 3, 3, 96, like=LIKE, k_dtype="fp16"))["token_bytes"] == 0
    assert decode_fields(KVCache(6, 33, 3, 96, like=LIKE, k_dtype="fp16"))["token_bytes"] == 256
    for k_dtype, v_dtype in (("int8", "int8"), ("fp16", "int4")):
        cache = PagedKVCache(6, 16, 3, 96, like=LIKE, k_dtype=k_dtype, v_dtype=v_dtype)
        for fields in (decode_fields(cache), append_fields(cache)):
            assert not any(fields[name] for name in expected)


def test_a_contiguous_cache_of_the_caller_is_read_in_runs() -> None:
    memory = np.zeros((2, 33, 3, 128), np.float16)
    assert decode_fields(KVCache.from_arrays(memory))["token_bytes"] == 2 * 3 * 128


def test_rows_far_apart() -> None:
    # 2^30 bytes between tokens: kernels multiply steps in 32 bits.
    far = row_places((1 << 34, 64, 1 << 29), (3, 2, 16), 64, "decode")
    assert far.run_bytes(16, False) == 0
    assert row_places((1 << 34, 64, 1 << 27), (3, 2, 16), 64, "decode").run_bytes(16, False) == 1 << 28
    # A warp copies 8 rows of 64 bytes at once and goes on by as many steps, in 32 bits.
    apart = row_places((1 << 34, 64, 1 << 29), (3, 2, 16), 64, "decode", 1)
    assert apart.token * apart.unit_bytes == 1 << 29
    assert apart.run_bytes(16, False) == 0
    assert far.unit_bytes == 128
    # Places are numbers of 32 bits in units of the greatest common divisor.
    row_places((8, 1 << 34, 16), (2, 2, 2), 8, "decode")
    with pytest.raises(UnsupportedError, match="32 bits"):
        row_places((8, 1 << 34, 16), (2, 3, 2), 8, "decode")
    # All rows that a cache can have, of 256 channels: more than 64 GiB.
    row_places(own_strides(3, 5, 256), ((2**32 - 1) // 15, 3, 5), 256, "decode")


def test_slots_of_a_launch() -> None:
    cache = PagedKVCache(6, 16, 3, 64, like=LIKE, k_dtype="int8")
    fields = append_fields(cache, slots="int64", positions="int32")
    assert fields["slots"].operand == "slot_mapping"
    assert fields["positions"].operand == "positions"
    assert (fields["wide_slots"], fields["wide_positions"]) == (1, 0)
    assert fields["seq_lens"] == fields["cu_seqlens"] == fields["block_table"] is None
    assert (fields["rows"], fields["capacity"]) == (5, 16)
    assert (fields["k_stride_b"], fields["k_stride_s"], fields["k_stride_h"]) == (0, 192, 64)
