"""Fork after import, and many processes that start at once on an empty cache."""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from omniattn import runtime
from omniattn.errors import DriverError
from omniattn.runtime import nvrtc
from omniattn.runtime.driver import get_driver, set_driver
from omniattn.runtime.store import Store, set_store
from tests.unit.runtime.runtime_fakes import FakeDriver, World, isolated, toy_spec

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
#: More than there are cores, on the machines that have few; each takes a second to start.
PROCESSES = 6


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    with isolated(monkeypatch, tmp_path) as world:
        world.use_compiler(None)
        yield world


def _start_cold(kernels: Path, cubins: Path, barrier: Barrier, results: Queue[tuple[str, str]]) -> None:
    set_store(Store.open("wheel", kernels, cubins))
    driver = FakeDriver()
    set_driver(driver)
    nvrtc.get_compiler()
    barrier.wait(timeout=600)
    loaded = runtime.load(toy_spec(), 0)
    results.put((loaded.origin, hashlib.sha256(driver.images[-1]).hexdigest()))


@pytest.mark.parametrize("damaged", [False, True], ids=["empty cache", "damaged cache"])
def test_many_processes_at_once(world: World, damaged: bool) -> None:
    """Real NVRTC in each; one compiles, all get the same working binary, and the cache ends with one whole file."""
    if damaged:
        path = runtime.compile_to(world.spec, "90a").path
        path.write_bytes(path.read_bytes()[:-7])
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(PROCESSES)
    results: Queue[tuple[str, str]] = context.Queue()
    workers = [
        context.Process(target=_start_cold, args=(world.root, world.cubins, barrier, results)) for _ in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join(timeout=600)
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
    assert sorted(origin for origin, _ in found) == ["cache"] * (PROCESSES - 1) + ["jit"]
    assert len({digest for _, digest in found}) == 1
    files = [path.name for path in world.cache.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) == 1, files
    world.reopen()
    assert runtime.load(world.spec, 0).origin == "cache"


def _in_child(work: Callable[[], str]) -> str:
    """What ``work`` returns, or the error that it raises, in a forked child."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forking with threads, which pytest plugins may have started.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            text = work()
        except DriverError as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, text.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    return text


@needs_fork
def test_fork_after_import(world: World) -> None:
    set_driver(None)

    def work() -> str:
        set_driver(FakeDriver())
        return runtime.load(world.spec, 0).origin

    assert _in_child(work) == "jit"
    assert _in_child(work) == "cache"


@needs_fork
def test_fork_after_cuda_was_used(world: World) -> None:
    runtime.load(world.spec, 0)
    text = _in_child(lambda: runtime.load(world.spec, 0).origin)
    assert text.startswith("DriverError: cuInit failed with CUDA_ERROR_NOT_INITIALIZED: process ")
    assert f"process {os.getpid()} had already used CUDA through omniattn when it forked" in text
    assert "multiprocessing.get_context('spawn')" in text
    assert get_driver() is world.driver, "the parent goes on"


@needs_fork
@pytest.mark.parametrize("module", ["loader", "nvrtc"])
def test_fork_while_another_thread_holds_the_lock(world: World, module: str) -> None:
    """A lock that is held at the fork would never be released in the child."""
    set_driver(None)
    world.use_compiler(None)

    def work() -> str:
        set_driver(FakeDriver())
        return runtime.load(world.spec, 0).origin

    with importlib.import_module(f"omniattn.runtime.{module}")._lock:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(_in_child(work)))
        thread.start()
        thread.join(timeout=600)
    assert found == ["jit"]
