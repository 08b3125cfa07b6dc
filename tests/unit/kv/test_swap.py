"""Sequences that leave the cache and come back: what is copied, what is shared, what a failure leaves behind."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, OutOfBlocksError, OutOfHostBlocksError

BLOCKS, SIZE = 8, 4


class CountingSpace(oa.SwapSpace):
    """Knows the (block, slot) pairs of its last copies, and fails when it is told to."""

    last: tuple[tuple[int, int], ...] = ()
    fails = False

    def copy_plane(self, index: int, pairs: Any, side: int, to_host: bool) -> None:
        if self.fails:
            super().copy_plane(index, pairs[:1], side, to_host)
            raise RuntimeError("the copy has failed")
        self.last = tuple(pairs)
        super().copy_plane(index, pairs, side, to_host)


class Served:
    """A cache on the CPU with marks in it, and its manager."""

    def __init__(self, slots: int = 6, **options: Any) -> None:
        self.cache = oa.PagedKVCache(BLOCKS, SIZE, 2, 16, like=np.zeros(0, np.float16), k_dtype="fp16", **options)
        self.cache.k[...] = self.cache.v[...] = -1
        self.space = CountingSpace([self.cache], slots)
        self.manager = oa.BlockManager(BLOCKS, SIZE, swap_space=self.space)

    def write(self, name: str, count: int, mark: int) -> None:
        oa.copy_blocks(self.cache, self.manager.extend({name: count}))
        rows = np.full((1, count, 2, 16), mark, dtype=np.float16) + np.arange(count, dtype=np.float16)[:, None, None]
        lens, table = self.manager.seq_lens([name]), self.manager.block_table([name])
        oa.append(self.cache, rows, -rows, seq_lens=lens, block_table=table)

    def read(self, name: str) -> list[int]:
        table, length = self.manager.blocks(name), self.manager.length(name)
        k = [self.cache.k[table[i // SIZE], 1, i % SIZE, 5] for i in range(length)]
        assert [-self.cache.v[table[i // SIZE], 0, i % SIZE, 2] for i in range(length)] == k
        return [int(x) for x in k]

    def spoil(self) -> None:
        """What blocks hold that nobody has is gone, as if others had used them."""
        for block in range(BLOCKS):
            if not self.manager.references(block):
                self.cache.k[block] = self.cache.v[block] = -1


def test_a_sequence_goes_and_comes_back() -> None:
    served = Served()
    manager = served.manager
    manager.add("a")
    served.write("a", 10, 100)
    assert manager.swap_out("a").done()
    assert (manager.num_free, manager.num_free_host, manager.sequences, manager.swapped) == (8, 3, (), ("a",))
    assert manager.length("a") == 10
    served.spoil()
    manager.add("b")
    served.write("b", 20, 200)
    event = manager.swap_in("a")
    event.wait()
    event.synchronize()
    assert served.read("a") == list(range(100, 110))
    assert served.read("b") == list(range(200, 220))
    assert (manager.num_free, manager.num_free_host, manager.swapped) == (0, 6, ())
    with pytest.raises(ArgumentError, match=r"SwapEvent\.wait\(\): argument 'stream'.*on the CPU"):
        event.wait(7)
    with pytest.raises(ArgumentError, match=r"BlockManager\.swap_out\(\): argument 'stream'.*on the CPU"):
        manager.swap_out("a", stream=7)
    assert manager.swapped == ()
    manager.swap_out("a")
    with pytest.raises(ArgumentError, match=r"BlockManager\.swap_in\(\): argument 'stream'.*on the CPU"):
        manager.swap_in("a", stream=7)
    assert manager.swapped == ("a",)


@pytest.mark.parametrize("which", ["k", "v", "k_scale"])
def test_no_space_for_a_cache_that_cannot_be_written(which: str) -> None:
    """swap_in would write to it."""
    dtypes = {"k": np.int8, "v": np.int8, "k_scale": np.float32, "v_scale": np.float32}
    given = {name: np.ones((8, 4, 2, 16)[: 4 if dtype is np.int8 else 3], dtype) for name, dtype in dtypes.items()}
    oa.SwapSpace(oa.PagedKVCache.from_arrays(**given), 2)
    given[which].flags.writeable = False
    caches = [oa.PagedKVCache(8, 4, 2, 16, like=given["k"]), oa.PagedKVCache.from_arrays(**given)]
    with pytest.raises(ArgumentError, match=r"SwapSpace\(\): argument 'caches\[1\]'.*read-only arrays"):
        oa.SwapSpace(caches, 2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_scales_of_rows_go_with_their_blocks(layout: str) -> None:
    shape = (BLOCKS, SIZE, 2, 16) if layout == "NHD" else (BLOCKS, 2, SIZE, 16)
    k, v = (np.zeros(shape, np.int8) for _ in range(2))
    k_scale, v_scale = np.ones((2, *shape[:3], 2), np.float32)[..., 0]  # of strides of their own
    cache = oa.PagedKVCache.from_arrays(k, v, layout=layout, k_scale=k_scale, v_scale=v_scale)
    space = oa.SwapSpace(cache, 4)
    assert space.nbytes == 4 * SIZE * cache.token_bytes
    manager = oa.BlockManager(BLOCKS, SIZE, swap_space=space)
    rng = np.random.default_rng(0)

    def write(name: str, count: int, size: float) -> None:
        manager.extend({name: count})
        rows = size * rng.standard_normal((1, count, 2, 16))
        oa.append(cache, rows, -rows, seq_lens=manager.seq_lens([name]), block_table=manager.block_table([name]))

    def read(name: str) -> Any:
        return oa.decode(q, cache, seq_lens=manager.seq_lens([name]), block_table=manager.block_table([name]))

    q = rng.standard_normal((1, 1, 2, 16))
    manager.add("a")
    write("a", 10, 1.0)
    expected = read("a")
    manager.swap_out("a")
    manager.add("b")
    write("b", 18, 100.0)
    manager.swap_in("a")
    np.testing.assert_array_equal(read("a"), expected)


def test_shared_blocks_go_and_come_once_and_others_keep_theirs() -> None:
    served = Served()
    manager = served.manager
    manager.add("a")
    served.write("a", 10, 100)
    for name in "bc":
        manager.fork("a", name)
    served.write("b", 1, 50)
    shared, last = manager.blocks("a")[:2], manager.blocks("a")[2]
    manager.swap_out("a")
    assert [block for block, _ in served.space.last] == [*shared, last]
    assert [manager.references(block) for block in (*shared, last)] == [2, 2, 1]
    manager.swap_out("b")
    assert len(served.space.last) == 1, "its own last block"
    manager.swap_out("c")
    assert served.space.last == ()
    assert (manager.num_free, manager.num_free_host) == (8, 2)
    served.spoil()
    manager.swap_in("b")
    assert len(served.space.last) == 3
    manager.swap_in("a")
    assert len(served.space.last) == 1
    manager.swap_in("c")
    assert served.space.last == ()
    assert manager.blocks("c") == manager.blocks("a")
    assert manager.blocks("a")[:2] == manager.blocks("b")[:2]
    assert (manager.num_free, manager.num_free_host) == (4, 6)
    for name in "ac":
        assert served.read(name) == list(range(100, 110))
    assert served.read("b") == [*range(100, 110), 50]


def test_a_copy_is_no_copy_any_more_when_its_block_is_written() -> None:
    served = Served()
    manager = served.manager
    manager.add("a")
    served.write("a", 7, 100)
    manager.fork("a", "b")
    manager.swap_out("a")
    manager.truncate("b", 5)
    served.write("b", 2, 50)
    assert len(served.space.last) == 2
    manager.swap_in("a")
    assert len(served.space.last) == 1
    assert served.read("a") == list(range(100, 107))
    assert served.read("b") == [*range(100, 105), 50, 51]


def test_what_is_in_the_cache_still_or_again_is_not_copied() -> None:
    served = Served()
    manager, tokens = served.manager, list(range(9))
    manager.match_prefix("a", tokens)
    served.write("a", 9, 100)
    manager.commit("a", tokens)
    manager.swap_out("a")
    assert manager.num_cached == 2
    manager.swap_in("a")
    assert len(served.space.last) == 1, "the two full blocks were nobody's, and are there"
    assert served.read("a") == list(range(100, 109))
    manager.swap_out("a")
    manager.evict(2)
    served.spoil()
    assert manager.match_prefix("b", tokens) == 0
    served.write("b", 9, 100)
    manager.commit("b", tokens)
    manager.swap_in("a")
    assert len(served.space.last) == 1, "b has computed them again"
    assert manager.blocks("a")[:2] == manager.blocks("b")[:2]
    assert served.read("a") == list(range(100, 109))


def test_what_comes_back_can_be_matched() -> None:
    served = Served()
    manager, tokens = served.manager, list(range(9))
    manager.match_prefix("a", tokens)
    served.write("a", 9, 100)
    manager.commit("a", tokens)
    manager.swap_out("a")
    manager.evict(2)
    served.spoil()
    assert manager.match_prefix("b", tokens) == 0
    manager.free("b")
    manager.swap_in("a")
    assert manager.match_prefix("b", tokens) == 8
    assert served.read("b") == list(range(100, 108))


def test_recomputing_takes_what_is_still_there() -> None:
    """The other way to make room: end the sequence, and begin it again."""
    served = Served()
    manager, tokens = served.manager, list(range(14))
    manager.match_prefix("a", tokens)
    served.write("a", 14, 100)
    manager.commit("a", tokens)
    manager.free("a")
    manager.add("b")
    served.write("b", 24, 200)
    manager.free("b")
    there = manager.match_prefix("a", tokens)
    assert there == 8, "of three full blocks the last one has gone"
    assert served.read("a") == list(range(100, 108))


def test_windows_and_slots_of_the_recent_window() -> None:
    served = Served()
    manager = served.manager
    manager.add("a")
    served.write("a", 22, 100)
    manager.free_before("a", 17)
    manager.swap_out("a")
    assert len(served.space.last) == 3
    served.spoil()
    manager.swap_in("a")
    assert served.read("a")[12:] == list(range(112, 122))
    blocks = manager.blocks("a")
    assert blocks[:4] == (blocks[3],) * 4
    recent = oa.BlockManager(BLOCKS, SIZE, 1, swap_space=oa.SwapSpace(served.cache, 4))
    recent.add("a")
    recent.extend({"a": 5})
    recent.swap_out("a")
    with pytest.raises(oa.errors.OutOfSlotsError):
        recent.add("b")
    recent.swap_in("a")
    assert recent.slots(["a"]) == [0]


@pytest.mark.parametrize("fails", [True, False])
def test_a_failed_swap_leaves_all_as_it_was(fails: bool) -> None:
    """A copy fails in the middle, or there is no room: on the host, then in the cache."""
    served = Served(slots=3)
    manager = served.manager
    for name, count in (("a", 10), ("b", 8)):
        manager.add(name)
        served.write(name, count, 100)
    manager.fork("b", "c")
    if not fails:
        served.write("a", 8, 110)

    def state() -> Any:
        blocks = {name: manager.blocks(name) for name in manager.sequences}
        return blocks, manager.swapped, manager.num_free, manager.num_free_host, [*map(manager.references, range(8))]

    def attempt(call: Any, error: type[Exception]) -> None:
        before, served.space.fails = state(), fails
        with pytest.raises(RuntimeError if fails else error):
            call()
        served.space.fails = False
        assert state() == before

    attempt(lambda: manager.swap_out("a"), OutOfHostBlocksError)
    assert served.read("a") == [*range(100, 110), *(() if fails else range(110, 118))]
    manager.swap_out("b")
    manager.free("c")
    served.write("a", 4, 130)
    if not fails:
        manager.add("d")
        served.write("d", 8, 0)
    attempt(lambda: manager.swap_in("b"), OutOfBlocksError)
    if not fails:
        manager.free("d")
    manager.swap_in("b")
    assert served.read("b") == list(range(100, 108))


def test_names_that_are_away() -> None:
    served = Served()
    manager = served.manager
    manager.add("a")
    served.write("a", 5, 1)
    manager.swap_out("a")
    for call in (
        lambda: manager.extend({"a": 1}), lambda: manager.fork("a", "b"), lambda: manager.blocks("a"),
        lambda: manager.swap_out("a"), lambda: manager.block_table(["a"]), lambda: manager.free_before("a", 0),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="It is swapped out"):
            call()
    for call in (lambda: manager.add("a"), lambda: manager.match_prefix("a", [1])):
        with pytest.raises(ArgumentError, match="a name that no sequence has"):
            call()
    manager.free("a")
    assert (manager.num_free, manager.num_free_host, manager.swapped) == (8, 6, ())
    with pytest.raises(ArgumentError, match="the name of a sequence"):
        manager.swap_in("a")
    manager.add("a")
    with pytest.raises(ArgumentError, match="a sequence that is swapped out"):
        manager.swap_in("a")


@pytest.mark.frameworks
@pytest.mark.parametrize(
    "options", [{"k_dtype": "int4"}, {"k_dtype": "fp8"}, {"k_dtype": "bf16"}, {"k_dtype": "int4", "layout": "fbgemm"}]
)
def test_every_plane_goes_along(options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    dim = 64
    cache = oa.PagedKVCache(BLOCKS, SIZE, 2, dim, like=torch.zeros(0), **options)
    manager = oa.BlockManager(BLOCKS, SIZE, swap_space=oa.SwapSpace(cache, 4))
    manager.add("a")
    manager.extend({"a": 9})
    k, v, q = (torch.randn(1, n, 2, dim) for n in (9, 9, 1))

    def decode() -> Any:
        places = {"seq_lens": manager.seq_lens(["a"]), "block_table": manager.block_table(["a"])}
        return {name: torch.from_numpy(x) for name, x in places.items()}

    oa.append(cache, k, v, **decode())
    o = oa.decode(q, cache, **decode())
    manager.swap_out("a")
    for plane in (cache.k, cache.v, cache.k_params, cache.v_params):
        if plane is not None:
            plane.view(torch.uint8).fill_(0xFF)
    manager.add("b")
    manager.extend({"b": 1})
    versions = [cache.k._version, cache.v._version]
    manager.swap_in("a")
    assert all(now > then for now, then in zip((cache.k._version, cache.v._version), versions))
    assert manager.blocks("a") != (0, 1, 2)
    assert torch.equal(oa.decode(q, cache, **decode()), o)


def test_a_space_says_what_it_does_not_take() -> None:
    served = Served()
    other = oa.PagedKVCache(BLOCKS, 8, 2, 16, like=np.zeros(0, np.float16), k_dtype="fp16")
    contiguous = oa.KVCache(BLOCKS, SIZE, 2, 16, like=np.zeros(0, np.float16), k_dtype="fp16")
    for caches, argument in (
        (contiguous, "caches"), ([], "caches"), (5, "caches"), ([served.cache, None], "caches"),
        ([served.cache, other], "caches[1]"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            oa.SwapSpace(caches, 4)
        assert caught.value.argument == argument
    with pytest.raises(ArgumentError, match="num_blocks"):
        oa.SwapSpace(served.cache, 0)
    with pytest.raises(ArgumentError, match="one that no other manager has"):
        oa.BlockManager(BLOCKS, SIZE, swap_space=served.space)
    space = oa.SwapSpace([served.cache, served.cache], 3)
    assert space.nbytes == 2 * 3 * served.cache.nbytes // BLOCKS
    for blocks, size in ((BLOCKS, 8), (4, SIZE)):
        with pytest.raises(ArgumentError, match="one of caches with"):
            oa.BlockManager(blocks, size, swap_space=space)
    assert oa.BlockManager(BLOCKS, SIZE, swap_space=space).num_free_host == 3
    gc.collect()
    assert oa.BlockManager(BLOCKS, SIZE, swap_space=space).num_free_host == 3
