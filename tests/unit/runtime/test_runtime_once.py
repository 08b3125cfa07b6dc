"""Processes that need the same kernel at once: one compiles it, and nothing that happens to it stops the others."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from omniattn import runtime
from omniattn.errors import CacheError
from omniattn.runtime import nvrtc, once
from omniattn.runtime.arch import Arch
from omniattn.runtime.cache import CacheEntry, cache_key, get_cache
from omniattn.runtime.driver import set_driver
from omniattn.runtime.sources import Sources
from omniattn.runtime.store import Store, set_store
from tests.unit.runtime.runtime_fakes import FakeCompiler, FakeDriver, World, isolated, toy_spec

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    with isolated(monkeypatch, tmp_path) as world:
        yield world


class SlowCompiler(FakeCompiler):
    """Leaves a file for each compilation that begins, and takes its time, or until there is a file ``enough``."""

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__()
        self.folder, self.seconds = folder, seconds

    def compile(
        self, source: str, name: str, headers: Mapping[str, str], options: tuple[str, ...], ptx: bool
    ) -> tuple[bytes, str]:
        (self.folder / str(os.getpid())).touch()
        limit = time.monotonic() + self.seconds
        while time.monotonic() < limit and not self.folder.with_name("enough").exists():
            time.sleep(0.01)
        return super().compile(source, name, headers, options, ptx)


def _load(kernels: Path, cubins: Path, begun: Path, seconds: float, results: Queue[tuple[str, str]]) -> None:
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.levelname} {record.getMessage()}")
            if "waiting" in said[-1]:
                begun.with_name("waiting").touch()

    logging.getLogger("omniattn").addHandler(Listener())
    logging.getLogger("omniattn").setLevel("INFO")
    set_store(Store.open("wheel", kernels, cubins))
    set_driver(FakeDriver())
    nvrtc.set_compiler(SlowCompiler(begun, seconds))
    results.put((runtime.load(toy_spec(), 0).origin, "\n".join(said)))


class Processes:
    """Processes that load the toy kernel."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.begun = world, folder / "begun"
        self.begun.mkdir()
        self.results: Queue[tuple[str, str]] = SPAWN.Queue()
        self.started: list[BaseProcess] = []

    def start(self, seconds: float) -> BaseProcess:
        """One more, whose compiler takes as long."""
        world = self.world
        arguments = (world.root, world.cubins, self.begun, seconds, self.results)
        self.started.append(SPAWN.Process(target=_load, args=arguments))
        self.started[-1].start()
        return self.started[-1]

    def compiling(self, process: BaseProcess) -> None:
        """Wait until it compiles."""
        self._appears(self.begun / str(process.pid))

    def waiting(self) -> None:
        """Wait until one waits for another."""
        self._appears(self.begun.with_name("waiting"))

    def enough(self) -> None:
        """Have compilations come to an end."""
        self.begun.with_name("enough").touch()

    @staticmethod
    def _appears(path: Path) -> None:
        limit = time.monotonic() + 600
        while not path.exists():
            assert time.monotonic() < limit
            time.sleep(0.01)

    @property
    def compilations(self) -> int:
        """How many have begun."""
        return len(list(self.begun.iterdir()))


@pytest.fixture
def processes(world: World, tmp_path: Path) -> Iterator[Processes]:
    made = Processes(world, tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.join()


def test_two_processes_compile_once(processes: Processes) -> None:
    processes.compiling(processes.start(600))
    processes.start(600)
    processes.waiting()
    processes.enough()
    (second, said), (first, alone) = sorted(processes.results.get(timeout=600) for _ in range(2))
    assert (first, second) == ("jit", "cache")
    assert processes.compilations == 1
    assert "waiting" not in alone
    assert said.count("INFO compiling toy_f3 for sm_90a: another process is at it; waiting for up to 120 s") == 1


def test_a_holder_that_is_killed(processes: Processes) -> None:
    holder = processes.start(600)
    processes.compiling(holder)
    processes.start(0)
    processes.start(0)
    processes.waiting()
    assert processes.compilations == 1
    holder.kill()
    origins = {processes.results.get(timeout=600)[0] for _ in range(2)}
    assert "jit" in origins
    assert origins <= {"jit", "cache"}


@pytest.mark.parametrize("why", ["no folder", "no lock file"])
def test_where_no_lock_can_be_had_each_compiles(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    """A folder below a file cannot be made; a lock file that is a folder cannot be opened. Nobody waits."""
    if why == "no folder":
        (tmp_path / "file").touch()
        monkeypatch.setenv("OMNIATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    else:
        path = runtime.compile_to(toy_spec(), "90a").path
        path.unlink()
        path.with_name(".lock").unlink()
        path.with_name(".lock").mkdir()
    holder = processes.start(600)
    processes.compiling(holder)
    processes.start(0)
    assert processes.results.get(timeout=600)[0] == "jit"
    assert processes.compilations == 2


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EACCES, errno.EINVAL])
def test_a_file_system_without_locks(world: World, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    before = _descriptors()
    assert runtime.load(world.spec, 0).origin == "jit"
    assert runtime.compile_to(world.spec, "90a").path.exists()
    assert _descriptors() == before


def _descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


@pytest.fixture
def held(world: World) -> Iterator[int]:
    """The toy kernel's lock is another's; nothing is cached."""
    path = runtime.compile_to(world.spec, "90a").path
    path.unlink()
    world.reopen()
    world.compiler.compiled.clear()
    descriptor = os.open(path.with_name(".lock"), os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


def test_a_holder_that_takes_too_long(
    world: World, held: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(once, "MAX_SECONDS", 0.3)
    start = time.monotonic()
    assert runtime.load(world.spec, 0).origin == "jit"
    assert 0.3 <= time.monotonic() - start < 100
    assert "others are at it for more than 0.3 s" in caplog.text


def test_compiling_ahead_of_time_waits_for_nobody(world: World, held: int) -> None:
    start = time.monotonic()
    assert runtime.compile_to(world.spec, "90a").path.exists()
    assert time.monotonic() - start < 100


def test_nobody_waits_for_what_is_cached(world: World, held: int) -> None:
    runtime.compile_to(world.spec, "90a")
    world.reopen()
    assert runtime.load(world.spec, 0).origin == "cache"
    assert world.compiler.compiled == ["sm_90a"]


@pytest.mark.parametrize(("version", "origin"), [((12, 8), "jit"), ((12, 9), "cache")])
def test_what_appears_meanwhile_serves_if_this_compiler_would_make_it(
    world: World, held: int, version: tuple[int, int], origin: str
) -> None:
    """That of another NVRTC is not worth a call of the driver: what is compiled here can only be as good."""
    origins: list[str] = []
    thread = threading.Thread(target=lambda: origins.append(runtime.load(world.spec, 0).origin))
    thread.start()
    time.sleep(0.2)
    key = cache_key(world.spec, Arch.parse("sm_90a"), Sources(world.root))
    entry = CacheEntry(world.spec.name, "sm_90a", False, version, (), "", b"\x7fELF of another process")
    assert get_cache().put(key, entry)
    fcntl.flock(held, fcntl.LOCK_UN)
    thread.join(timeout=600)
    assert origins == [origin]
    assert len(world.compiler.compiled) == (origin == "jit")


def test_those_who_waited_for_nothing_work_at_once(tmp_path: Path) -> None:
    """The one before could not keep what it made, as on a full disk: the others do not do it one after the other."""
    path = tmp_path / ".lock"
    held = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    together = threading.Barrier(3)
    made: list[int] = []

    def make() -> int:
        together.wait(timeout=600)
        return 1

    threads = [
        threading.Thread(target=lambda: made.append(once.once(path, lambda: None, make, "work"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    fcntl.flock(held, fcntl.LOCK_UN)
    for thread in threads:
        thread.join(timeout=600)
    os.close(held)
    assert made == [1, 1, 1]


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    inside, found, most = 0, [0], [0]

    def make() -> int:
        nonlocal inside
        inside += 1
        most[0] = max(most[0], inside)
        time.sleep(0.05)
        found[0] = 1
        inside -= 1
        return 2

    results: list[int] = []

    def work() -> None:
        results.append(once.once(tmp_path / ".lock", lambda: found[0] or None, make, "work"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert sorted(results) == [1] * 7 + [2]
    assert most == [1]


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def test_errors_pass_and_the_lock_is_free_after_them(tmp_path: Path) -> None:
    def fail() -> int:
        assert _is_locked(path)
        raise CacheError("x", "y", "z")

    path = tmp_path / ".lock"
    before = _descriptors()
    with pytest.raises(CacheError):
        once.once(path, lambda: None, fail, "work")
    assert not _is_locked(path)
    assert _descriptors() == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork_while_the_lock_is_held(tmp_path: Path) -> None:
    """The child has no lock, and lets go of none: neither as it ends the parent's block nor as it exits."""
    path = tmp_path / ".lock"

    def make() -> int:
        child = os.fork()
        if child == 0:
            return -1
        assert os.waitpid(child, 0)[1] == 0
        assert _is_locked(path)
        return child

    made = 0
    try:
        made = once.once(path, lambda: None, make, "work")
    finally:
        if made == -1:
            os._exit(0 if _is_locked(path) and not once._open else 1)
        if made == 0 and os.getpid() != PARENT:
            os._exit(2)
    assert made > 0
    assert not _is_locked(path)


PARENT = os.getpid()


def _hold_and_fork(path: Path, children: Queue[int]) -> None:
    def make() -> int:
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        children.put(child)
        time.sleep(600)
        return 1

    once.once(path, lambda: None, make, "work")


def test_a_child_does_not_keep_the_lock_of_a_dead_parent(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    children: Queue[int] = SPAWN.Queue()
    holder = SPAWN.Process(target=_hold_and_fork, args=(path, children))
    holder.start()
    child = children.get(timeout=600)
    try:
        assert _is_locked(path)
        holder.kill()
        holder.join()
        limit = time.monotonic() + 600
        while _is_locked(path) and time.monotonic() < limit:
            time.sleep(0.01)
        assert not _is_locked(path)
        os.kill(child, 0)
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
