"""Caches of libraries that have no stream to ask for (JAX, plain DLPack): launches and the library's reads, in order.

The GPU is faked: what is asked of the driver and of events, in one list. The effect is for tests/gpu.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import omniattn as oa
from omniattn.arrays import Tensor, events
from omniattn.arrays.order import LaunchOrder
from omniattn.arrays.tensor import fill
from omniattn.kv.cache import KVCache
from omniattn.plan import engine
from omniattn.plan.engine import PLANS
from omniattn.runtime.store import set_store
from tests.unit.arrays.arrays_fakes import FakeEvents, FakeExporter
from tests.unit.runtime.runtime_fakes import World, isolated

#: The library's own stream.
THEIRS = 0x5000
CODES = {"float16": (2, 16), "int32": (0, 32), "uint8": (1, 8)}


class Library:
    """An array library with an ``empty`` and a ``from_dlpack``; it reads on `THEIRS`."""

    float16, int32, uint8 = "float16", "int32", "uint8"

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str) -> LibraryArray:
        return LibraryArray(shape, dtype)

    @staticmethod
    def from_dlpack(exporter: Any) -> LibraryArray:
        exporter.__dlpack__(stream=THEIRS, max_version=(1, 0))
        return LibraryArray((1,), "uint8", imported=exporter)


class LibraryArray(FakeExporter):
    """An array on GPU 0, of memory that nobody reads."""

    def __init__(self, shape: tuple[int, ...], dtype: str, imported: Any = None) -> None:
        code, bits = CODES[dtype]
        super().__init__(shape, code=code, bits=bits, device=(2, 0))
        self.imported = imported
        self.copied_from: Any = None

    def __array_namespace__(self) -> type[Library]:
        return Library

    def __deepcopy__(self, memo: dict[int, Any]) -> LibraryArray:
        found = LibraryArray(self.shape, "uint8")
        found.copied_from = self
        return found

    def __reduce__(self) -> Any:
        return type(self), (self.shape, "uint8")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[World, FakeEvents]]:
    """A fake GPU that runs this installation's kernels, or says so."""
    with isolated(monkeypatch, tmp_path) as world:
        set_store(None)
        backend = FakeEvents()
        world.driver.calls = backend.log
        events.set_backend(backend)
        PLANS.clear()
        yield world, backend
        PLANS.clear()
        events.set_backend(None)


def make() -> KVCache:
    return KVCache(1, 32, 1, 64, like=LibraryArray((1,), "float16"), k_dtype="fp16")


def append(cache: KVCache, **options: Any) -> None:
    k, v = (LibraryArray((1, 4, 1, 64), "float16") for _ in range(2))
    oa.append(cache, k, v, seq_lens=LibraryArray((1,), "int32"), **options)


def of(backend: FakeEvents, *kinds: str) -> list[tuple[Any, ...]]:
    """What was asked for, of these kinds: a launch by its stream, the rest as it is."""
    return [("launch", entry[3]) if entry[0] == "launch" else entry for entry in backend.log if entry[0] in kinds]


def test_what_the_library_reads_after_an_append_waits_for_it(world: tuple[World, FakeEvents]) -> None:
    _, backend = world
    cache = make()
    first = cache.k
    assert cache.k is first
    assert of(backend, "record", "wait", "launch") == [], "nothing has been written yet"
    append(cache)
    launched, recorded = of(backend, "launch", "record")[:2]
    assert launched == ("launch", 0)
    assert recorded[::2] == ("record", 0)
    k = cache.k
    assert k is not first
    assert k.imported is not None
    assert of(backend, "wait") == [("wait", THEIRS, recorded[1])]
    assert cache.k is k, "once for each launch"
    assert cache.v is not k
    assert of(backend, "wait") == [("wait", THEIRS, recorded[1])] * 2
    append(cache)
    again = cache.k
    assert again is not k
    assert of(backend, "wait")[-1][2] not in (0, recorded[1])


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_wait_for_the_last_append(world: tuple[World, FakeEvents], way: str) -> None:
    _, backend = world
    cache = make()
    append(cache)
    twin = copy.deepcopy(cache) if way == "deepcopy" else pickle.loads(pickle.dumps(cache))
    assert len(of(backend, "wait")) == 2, "K and V"
    if way == "deepcopy":
        assert twin.k.copied_from is cache.k
    del backend.log[:]
    assert twin.k is twin.k
    assert of(backend, "wait") == [], "nothing has been written to the copy"
    append(twin)
    assert twin.k is not None
    assert of(backend, "wait")[-1][:2] == ("wait", THEIRS)


def test_events_from_before_a_fork_are_nobodys(world: tuple[World, FakeEvents]) -> None:
    """Their handles mean nothing in a child process, nor under another driver."""
    _, backend = world
    cache = make()
    append(cache)
    seen = len(backend.log)
    events._forget()  # what both of them do
    events.set_backend(backend)
    append(cache, stream=0x7000)
    assert of(backend, "wait", "destroy") == []
    assert [entry[0] for entry in backend.log[seen:]].count("launch") == 1
    append(cache, stream=0x8000)
    ((_, stream, event),) = of(backend, "wait")
    assert stream == 0x8000
    assert ("record", event, 0x7000) in of(backend, "record")


def test_launches_on_different_streams_wait_for_each_other(world: tuple[World, FakeEvents]) -> None:
    _, backend = world
    cache = make()
    append(cache, stream=0x7000)
    (event,) = {entry[1] for entry in of(backend, "record")[:1]}
    del backend.log[:]
    q = LibraryArray((1, 1, 1, 64), "float16")
    oa.decode(q, cache, seq_lens=LibraryArray((1,), "int32"))
    seen = of(backend, "wait", "launch")
    assert seen[0] == ("wait", 0, event)
    assert seen[1] == ("launch", 0)
    del backend.log[:]
    oa.decode(q, cache, seq_lens=LibraryArray((1,), "int32"))
    assert of(backend, "wait", "launch")[0] == ("launch", 0), "the same stream: it waits by itself"
    backend.log.clear()
    append(cache, stream=0x7000)
    waited, launched = of(backend, "wait", "launch")[:2]
    assert waited[:2] == ("wait", 0x7000), "decode may still read what is written over"
    assert launched == ("launch", 0x7000)


def test_graph_capture_sees_nothing_but_launches(world: tuple[World, FakeEvents]) -> None:
    _, backend = world
    cache = make()
    append(cache)
    backend.capture_streams.add(0x7000)
    del backend.log[:]
    append(cache, stream=0x7000)
    assert [entry[0] for entry in of(backend, "record", "wait", "launch")] == ["launch"]


def test_torch_orders_its_arrays_by_streams_itself(world: tuple[World, FakeEvents]) -> None:
    _, backend = world
    plane = Tensor()
    fill(plane, object(), "torch", 4096, (2, 8), (8, 1), "float16", "cuda", 0, False, "cache.k")
    order = LaunchOrder()
    order.after([plane], 0x7000)
    order.before(0x8000)
    assert order.array("k", plane) is plane.obj
    assert backend.log == []


@pytest.mark.parametrize("theirs", [True, False])
def test_the_fast_path_is_for_caches_of_torch(
    world: tuple[World, FakeEvents], monkeypatch: pytest.MonkeyPatch, theirs: bool
) -> None:
    """It looks at the stream of torch's arrays only: another library's cache goes the way that waits."""
    _, backend = world
    repeated: list[Any] = []

    def repeat(objects: Any, addresses: Any, cache: Any, stream: Any) -> list[Any]:
        repeated.append(cache)
        return []

    repeat.writes = None  # type: ignore[attr-defined]
    monkeypatch.setattr(engine.arrays, "torch_facts", lambda objects: (("facts",), [0] * len(objects)))
    monkeypatch.setattr(engine.Repeat, "of", lambda *args: repeat)
    cache = make()
    if not theirs:
        cache._plain_torch = True
    for _ in range(2):
        append(cache)
    assert repeated == ([] if theirs else [cache])
    assert len(of(backend, "launch")) == (2 if theirs else 1)
