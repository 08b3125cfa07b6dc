"""Swaps on a GPU that is faked: host memory in its place, and a list of all that is asked of streams and events."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.arrays import events
from omniattn.errors import DriverError, UnsupportedError
from omniattn.kv import swap
from tests.unit.arrays.arrays_fakes import FakeEvents, FakeExporter

BLOCKS, SIZE = 8, 4


@pytest.fixture
def gpu() -> Iterator[FakeEvents]:
    backend = FakeEvents()
    events.set_backend(backend)
    yield backend
    gc.collect()
    events.set_backend(None)


#: Orders of a pool's dimensions: block, head and token strides in elements, of 2 heads and 4 tokens of 8; a half of
#: rows that K and V share, a layer of two.
POOLS = {
    "NHD": (64, 8, 16),
    "HND": (64, 32, 8),
    "K and V in blocks": (128, 8, 16),
    "K and V in rows": (128, 64, 16),
    "K and V in rows, NHD": (128, 16, 32),
    "layers inside heads": (256, 128, 16),
}


class Pool:
    """K or V of GPU memory that is the host's."""

    def __init__(self, strides: tuple[int, int, int]) -> None:
        block, head, token = strides
        self.exporter = FakeExporter((BLOCKS, SIZE, 2, 8), bits=16, device=(2, 0), strides=(block, token, head, 1))
        self.memory = np.frombuffer(self.exporter.memory, np.int16)
        whole = np.lib.stride_tricks.as_strided
        steps = tuple(2 * step for step in (block, token, head, 1))
        self.view = whole(self.memory, (BLOCKS, SIZE, 2, 8), steps, writeable=True)


@pytest.mark.parametrize("strides", POOLS.values(), ids=POOLS)
def test_rows_wherever_they_are(gpu: FakeEvents, strides: tuple[int, int, int]) -> None:
    pools = [Pool(strides) for _ in range(2)]
    rng = np.random.default_rng(1)
    for pool in pools:
        pool.memory[:] = rng.integers(0, 1000, pool.memory.size)
    cache = oa.PagedKVCache.from_arrays(*(pool.exporter for pool in pools))
    space = oa.SwapSpace(cache, 5)
    assert space.nbytes == 2 * 5 * 128
    manager = oa.BlockManager(BLOCKS, SIZE, swap_space=space)
    for name in "ab":
        manager.add(name)
        manager.extend({name: 10})
    before = [(pool.memory.copy(), pool.view[list(manager.blocks("a"))].copy()) for pool in pools]
    manager.swap_out("a")
    for pool, (memory, _) in zip(pools, before):
        np.testing.assert_array_equal(pool.memory, memory)
        pool.view[[0, 1, 2, 6, 7]] = 0
    manager.add("c")
    manager.extend({"c": 4})
    manager.swap_in("a")
    assert 0 not in manager.blocks("a")
    for pool, (memory, blocks) in zip(pools, before):
        np.testing.assert_array_equal(pool.view[list(manager.blocks("a"))], blocks)
        np.testing.assert_array_equal(pool.view[list(manager.blocks("b"))], _view(memory, pool)[[3, 4, 5]])
        # Nothing beside the blocks has been written: other layers, and V's half of the rows.
        pool.view[...] = 0
        _view(memory, pool)[...] = 0
        np.testing.assert_array_equal(pool.memory, memory)


def _view(memory: Any, pool: Pool) -> Any:
    return np.lib.stride_tricks.as_strided(memory, pool.view.shape, pool.view.strides)


@pytest.mark.parametrize("strides", [(8, 2, 1), (8, 1, 4), (16, 4, 2), (4, 1, 32)])
def test_scales_of_rows(gpu: FakeEvents, strides: tuple[int, int, int]) -> None:
    """Steps of blocks, tokens and heads: NHD and HND, every other element, heads before blocks."""
    shape, gpu_0 = (BLOCKS, SIZE, 2), {"device": (2, 0)}
    codes = [FakeExporter((*shape, 16), code=0, bits=8, **gpu_0) for _ in range(2)]
    scales = [FakeExporter(shape, strides=strides, **gpu_0) for _ in range(2)]
    views = []
    for exporter in scales:
        memory = np.frombuffer(exporter.memory, np.float32)
        memory[:] = np.random.default_rng(1).standard_normal(memory.size)
        views.append(np.lib.stride_tricks.as_strided(memory, shape, tuple(4 * step for step in strides)))
    cache = oa.PagedKVCache.from_arrays(*codes, k_scale=scales[0], v_scale=scales[1])
    space = oa.SwapSpace(cache, 5)
    assert space.nbytes == 5 * SIZE * 2 * 2 * (16 + 4)
    manager = oa.BlockManager(BLOCKS, SIZE, swap_space=space)
    for name in "ab":
        manager.add(name)
        manager.extend({name: 10})
    before = [view.copy() for view in views]
    manager.swap_out("a")
    for view in views:
        view[[0, 1, 2, 6, 7]] = 0
    manager.add("c")
    manager.extend({"c": 4})
    manager.swap_in("a")
    for view, old in zip(views, before):
        np.testing.assert_array_equal(view[list(manager.blocks("a"))], old[[0, 1, 2]])
        np.testing.assert_array_equal(view[list(manager.blocks("b"))], old[[3, 4, 5]])


def test_blocks_that_follow_each_other_are_one_copy(gpu: FakeEvents) -> None:
    cache = oa.PagedKVCache.from_arrays(*(Pool(POOLS["NHD"]).exporter for _ in range(2)))
    manager = oa.BlockManager(BLOCKS, SIZE, swap_space=oa.SwapSpace(cache, 8))
    manager.add("a")
    manager.extend({"a": 16})
    manager.swap_out("a")
    side = events.side_stream(0, "swap")
    assert [entry for entry in gpu.log if entry[0] == "rows"] == [("rows", 128, 4, side)] * 2
    assert swap._runs([(0, 0), (1, 1), (3, 2), (4, 3), (5, 5), (4, 6)]) == [(0, 0, 2), (3, 2, 2), (5, 5, 1), (4, 6, 1)]


def test_copies_run_behind_the_steps_on_a_stream_of_their_own(gpu: FakeEvents) -> None:
    cache = oa.PagedKVCache.from_arrays(*(Pool(POOLS["NHD"]).exporter for _ in range(2)))
    manager = oa.BlockManager(BLOCKS, SIZE, swap_space=oa.SwapSpace(cache, 8))
    manager.add("a")
    manager.extend({"a": 9})
    gpu.log.clear()
    event = manager.swap_out("a", stream=0x7000)
    side = events.side_stream(0, "swap")
    assert side not in (0, 0x7000, events.side_stream(0))
    order = [entry for entry in gpu.log if entry[0] in ("record", "wait", "rows")]
    ((_, before, _), *_) = order
    assert order[:2] == [("record", before, 0x7000), ("wait", side, before)]
    assert {entry[3] for entry in order if entry[0] == "rows"} == {side}
    end = order[-1][1]
    assert order[-1] == ("record", end, side)
    assert not event.done()
    gpu.passed.add(end)
    assert event.done()
    gpu.log.clear()
    event.wait(0x7000)
    event.wait()
    event.synchronize()
    assert gpu.log == [("wait", 0x7000, end), ("wait", 0, end), ("synchronize", end)]
    gpu.log.clear()
    again = manager.swap_in("a", stream=0x7000)
    waits = [entry for entry in gpu.log if entry[0] == "wait"]
    assert waits[0][1] == side
    assert [entry[0] for entry in gpu.log].index("wait") < [entry[0] for entry in gpu.log].index("rows")
    assert not again.done()
    gpu.capture_streams.add(0x7000)
    with pytest.raises(UnsupportedError, match="captured"):
        manager.swap_out("a", stream=0x7000)
    assert manager.swapped == ()


@pytest.mark.parametrize("outward", [True, False])
def test_the_host_waits_for_what_a_failed_swap_has_queued(
    gpu: FakeEvents, monkeypatch: pytest.MonkeyPatch, outward: bool
) -> None:
    """Its blocks and slots are others' at once, and their work would not wait for the copies."""
    cache = oa.PagedKVCache.from_arrays(*(Pool(POOLS["K and V in rows"]).exporter for _ in range(2)))
    manager = oa.BlockManager(BLOCKS, SIZE, swap_space=oa.SwapSpace(cache, 8))
    manager.add("a")
    manager.extend({"a": 9})
    if not outward:
        manager.swap_out("a")
    rows, count = gpu.copy_rows, 0

    def failing(*arguments: int) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise DriverError("cuMemcpy2DAsync", "CUDA_ERROR_UNKNOWN", "it has failed")
        rows(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu, "copy_rows", failing)
    gpu.log.clear()
    with pytest.raises(DriverError, match="it has failed"):
        (manager.swap_out if outward else manager.swap_in)("a")
    assert [entry[0] for entry in gpu.log if entry[0] in ("rows", "synchronize")] == ["rows"] * 3 + ["synchronize"]
    assert (manager.num_free, manager.num_free_host) == ((5, 8) if outward else (8, 5))
    assert manager.swapped == (() if outward else ("a",))


def test_the_same_by_cupys_runtime() -> None:
    """Names and order of the arguments are those of CUDA's runtime; 4 is a copy whose direction the addresses say."""
    calls: list[tuple[Any, ...]] = []

    class Runtime:
        CUDARuntimeError = RuntimeError

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: calls.append((name, *arguments)) or 4096

    backend = object.__new__(events._Cupy)
    backend._rt = Runtime()
    assert backend.host_allocate(64) == 4096
    backend.copy_rows(1, 8, 2, 8, 8, 5, 0x7000)
    backend.copy_rows(1, 8, 2, 16, 8, 5, 0x7000)
    backend.copy_rows(1, 2**31, 2, 16, 8, 2, 0x7000)
    backend.synchronize(77)
    backend.host_free(4096)
    assert calls == [
        ("hostAlloc", 64, 1), ("memcpyAsync", 1, 2, 40, 4, 0x7000), ("memcpy2DAsync", 1, 8, 2, 16, 8, 5, 4, 0x7000),
        ("memcpyAsync", 1, 2, 8, 4, 0x7000), ("memcpyAsync", 1 + 2**31, 18, 8, 4, 0x7000),
        ("eventSynchronize", 77), ("freeHost", 4096),
    ]  # fmt: skip


def test_page_locked_memory_goes_behind_its_last_copy(gpu: FakeEvents) -> None:
    cache = oa.PagedKVCache.from_arrays(*(Pool(POOLS["NHD"]).exporter for _ in range(2)))
    manager = oa.BlockManager(BLOCKS, SIZE, swap_space=oa.SwapSpace(cache, 8))
    assert [entry for entry in gpu.log if entry[0] == "host allocate"] == [("host allocate", 8 * 128)] * 2
    manager.add("a")
    manager.extend({"a": 3})
    event = manager.swap_out("a")
    assert len(gpu.memory) == 2
    gpu.log.clear()
    del manager, event
    gc.collect()
    assert [entry[0] for entry in gpu.log if entry[0] != "destroy"] == ["synchronize", "host free"] * 2
    assert not gpu.memory
