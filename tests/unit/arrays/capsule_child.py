"""How what we export is let go of: ``python capsule_child.py LIBRARY CASE``, LIBRARY numpy, torch, jax or none.

Processes of their own, because a fault here ends them.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from omniattn.arrays import capsule
from omniattn.arrays.exporter import OwnArray

_COUNT = 10_000
# Other than PYFUNCTYPE it gives the interpreter lock back for the call.
_WITHOUT_LOCK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _importers(library: str) -> list[Callable[[Any], Any]]:
    if library == "numpy":
        return [np.from_dlpack]
    if library == "torch":
        import torch

        return [torch.from_dlpack]
    if library == "jax":
        import jax.dlpack

        return [jax.dlpack.from_dlpack]
    return [lambda x: x.__dlpack__(), lambda x: x.__dlpack__(max_version=(1, 0))]


def _fails() -> Any:
    raise ValueError("the caller's")


def _alive() -> int:
    return sum(type(x) is capsule._Memory for x in gc.get_objects())


def _taken(versioned: bool, owner: object) -> tuple[Any, int]:
    """The deleter of a tensor that was taken out of its capsule, and the tensor's address."""
    memory = np.zeros(6, np.float32)
    made = capsule.export(memory.ctypes.data, (2, 3), (3, 1), "float32", (1, 0), (memory, owner), versioned=versioned)
    taken = capsule.Capsule(made, "x")
    deleter, managed = taken._deleter, taken._managed
    taken._deleter = taken._managed = 0
    return _WITHOUT_LOCK(deleter), managed


def exception(take: Callable[[Any], Any]) -> None:
    """An expression fails while it holds an import: its own exception comes out, and the memory goes back."""
    for dtype in ("float32", "bfloat16"):
        if dtype == "bfloat16" and take is np.from_dlpack:
            continue
        for _ in range(3):
            with pytest.raises(ValueError, match="the caller's") as caught:
                print(take(OwnArray((64,), dtype, "cpu")), _fails())
            assert caught.value.__context__ is None
            del caught
    gc.collect()
    assert not _alive()


def growth(take: Callable[[Any], Any]) -> None:
    """Neither references nor memory grow with the number of exports."""
    array = OwnArray((2, 8), "float32", "cpu")
    tracemalloc.start()
    for _ in range(50):
        take(array)
    gc.collect()
    references, (before, _) = sys.getrefcount(array._tensor), tracemalloc.get_traced_memory()
    for _ in range(_COUNT):
        take(array)
    gc.collect()
    assert not _alive()
    assert sys.getrefcount(array._tensor) == references
    grown = tracemalloc.get_traced_memory()[0] - before
    assert grown < 16 * _COUNT, grown  # the smallest block of memory that each export could leave behind


def threads(take: Callable[[Any], Any]) -> None:
    """Deleters are called by another thread, with and without the interpreter lock, and capsules die there."""
    array = OwnArray((2, 8), "float32", "cpu")
    ended: list[None] = []

    def drop(held: list[Any]) -> None:
        while held:
            item = held.pop()
            if isinstance(item, tuple):
                item[0](item[1])
            del item
        ended.append(None)

    owner = object()
    references = sys.getrefcount(owner)
    held = [x for i in range(200) for x in (take(array), _taken(bool(i % 2), owner))]
    assert sys.getrefcount(owner) > references
    workers = [threading.Thread(target=drop, args=(held[i::4],)) for i in range(4)]
    held.clear()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    gc.collect()
    assert len(ended) == len(workers)
    assert not _alive()
    assert sys.getrefcount(owner) == references


def end(take: Callable[[Any], Any]) -> None:
    """What is held at the end is let go of with the interpreter, and on POSIX after it: by handlers of C's exit."""
    sys.held = [take(OwnArray((64,), "float32", "cpu")) for _ in range(3)]  # type: ignore[attr-defined]
    if sys.platform == "win32":
        return
    at_exit = ctypes.CDLL(None).__cxa_atexit
    at_exit.argtypes = (ctypes.c_void_p,) * 3
    for versioned in (False, True):
        deleter, managed = _taken(versioned, None)
        assert at_exit(ctypes.cast(deleter, ctypes.c_void_p), managed, None) == 0


if __name__ == "__main__":
    for importer in _importers(sys.argv[1]):
        {"exception": exception, "growth": growth, "threads": threads, "end": end}[sys.argv[2]](importer)
    print("done")
