"""Turns of the GPU suite's tests, without a GPU: who waits for whom."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

pytest.importorskip("fcntl")

import fcntl

from tests.gpu.memory_turns import Turn, alone, beside_others, in_background

ROOT = Path(__file__).resolve().parents[3]


#: Looks, a tenth of a second each, at what has to come true. Looks are counted and not time: a machine that stands
#: still for minutes, with all processes on it, costs one of them.
_LOOKS = 600


def _comes_true(happened: Callable[[], object]) -> bool:
    for _ in range(_LOOKS):
        if happened():
            return True
        time.sleep(0.1)
    return bool(happened())


def _is_held(file: Path) -> bool:
    """Whether somebody has the lock, or waits with it for another."""
    with file.open("ab") as mine:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Other:
    """A thread that enters a block, stays until it is told to leave, and says when it is in.

    However long that takes: one that left by itself would let others in, whom a test expects to wait.
    """

    def __init__(self, block: AbstractContextManager[None]) -> None:
        self.inside, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(block,), daemon=True)
        self._thread.start()

    def _run(self, block: AbstractContextManager[None]) -> None:
        with block:
            self.inside.set()
            self._leave.wait()

    def waits(self) -> bool:
        """Whether it is still not in."""
        return not self.inside.wait(timeout=0.2)

    def enters(self) -> bool:
        """Whether it comes in."""
        return _comes_true(self.inside.is_set)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join()


def test_tests_run_beside_each_other(tmp_path: Path) -> None:
    others = [Other(beside_others(tmp_path)) for _ in range(8)]
    assert all(other.enters() for other in others)
    background = Other(in_background(tmp_path))
    assert background.enters()
    for other in (*others, background):
        other.leave()


@pytest.mark.parametrize("other", [beside_others, in_background, alone])
def test_nothing_runs_beside_one_that_is_alone(
    tmp_path: Path, other: Callable[[Path], AbstractContextManager[None]]
) -> None:
    one = Other(alone(tmp_path))
    assert one.enters()
    second = Other(other(tmp_path))
    assert second.waits()
    one.leave()
    assert second.enters()
    second.leave()


def test_one_that_wants_to_be_alone_is_next(tmp_path: Path) -> None:
    """It waits for those that run, but not for those that come."""
    running = [Other(beside_others(tmp_path)) for _ in range(3)]
    assert all(other.enters() for other in running)
    one = Other(alone(tmp_path))
    assert _comes_true(lambda: _is_held(tmp_path / "gate"))
    assert one.waits()
    late = Other(beside_others(tmp_path))
    assert late.waits()
    for other in running:
        other.leave()
    assert one.enters()
    assert late.waits()
    one.leave()
    assert late.enters()
    late.leave()


def test_tests_go_on_while_one_waits_for_the_background(tmp_path: Path) -> None:
    """The tests of the module whose processes it waits for have to end, too."""
    with in_background(tmp_path / "elsewhere"):
        pass
    child = subprocess.Popen([sys.executable, "-c", HOLD, "in_background", str(tmp_path)], stdout=-1, cwd=ROOT)
    assert child.stdout is not None
    assert child.stdout.readline() == b"in\n"
    one = Other(alone(tmp_path))
    assert one.waits()
    test = Other(beside_others(tmp_path))
    assert test.enters()
    test.leave()
    child.kill()
    child.wait()
    assert one.enters()
    one.leave()


#: A process that stays in a block.
HOLD = """
import sys, time
from pathlib import Path
from tests.gpu import memory_turns
with getattr(memory_turns, sys.argv[1])(Path(sys.argv[2])):
    print("in", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["alone", "beside_others"])
def test_a_process_that_dies_holds_nothing(tmp_path: Path, kind: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLD, kind, str(tmp_path)], stdout=-1, cwd=ROOT)
    assert child.stdout is not None
    assert child.stdout.readline() == b"in\n"
    one = Other(alone(tmp_path))
    assert one.waits()
    child.kill()
    child.wait()
    assert one.enters()
    one.leave()


def test_many_at_random(tmp_path: Path) -> None:
    """Nobody is ever beside one that is alone, and nobody waits for ever."""
    inside = {True: 0, False: 0}
    wrong: list[dict[bool, int]] = []
    guard = threading.Lock()

    def work(number: int) -> None:
        turn = Turn(tmp_path)
        for i in range(30):
            by_itself = (number + i) % 5 == 0
            turn.take(by_itself=by_itself)
            with guard:
                inside[by_itself] += 1
                if inside[True] and inside[True] + inside[False] > 1:
                    wrong.append(dict(inside))
            time.sleep(0.001)
            with guard:
                inside[by_itself] -= 1
            turn.end()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    assert _comes_true(lambda: not any(thread.is_alive() for thread in threads))
    assert wrong == []


def test_one_turn_for_several_tests(tmp_path: Path) -> None:
    turn = Turn(tmp_path)
    turn.take(by_itself=True)
    waiting = Other(beside_others(tmp_path))
    turn.take(by_itself=True)
    assert waiting.waits()
    turn.take(by_itself=False)
    assert waiting.enters()
    waiting.leave()
    turn.end()
    turn.end()
    one = Other(alone(tmp_path))
    assert one.enters()
    one.leave()


def test_a_module_does_not_wait_for_itself(tmp_path: Path) -> None:
    with in_background(tmp_path), pytest.raises(AssertionError, match="wait for itself"), alone(tmp_path):
        pass


SUITE = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.gpu import conftest
from tests.gpu.conftest import memory_for_others, pytest_runtest_teardown  # noqa: F401
from tests.gpu.memory_turns import Turn
conftest._TURN = Turn(Path({folder!r}))

def pytest_collection_finish():
    Path("collected").touch()
"""
#: The usual test stays until it may go on, so that who else has a turn when the next one asks is not left to chance.
TESTS = """
import time
from pathlib import Path

import pytest

def test_usual():
    Path("usual").touch()
    while not Path("go_on").exists():
        time.sleep(0.05)

@pytest.mark.alone
@pytest.mark.parametrize("i", range(2))
def test_alone(i):
    Path(f"alone{i}").touch()
    assert i == 0, "and one that fails"

def test_usual_again(): Path("again").touch()
"""


def test_fixture_and_hook_of_the_suite(tmp_path: Path) -> None:
    """A run of pytest with the conftest of tests/gpu, beside what this process has."""
    turns = tmp_path / "turns"
    (tmp_path / "conftest.py").write_text(SUITE.format(root=str(ROOT), folder=str(turns)))
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_it.py"]
    first = Other(alone(turns))
    assert first.enters()
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    assert _comes_true((tmp_path / "collected").exists)
    time.sleep(0.5)
    assert not (tmp_path / "usual").exists(), "one is alone"
    first.leave()
    assert _comes_true((tmp_path / "usual").exists)
    second = Other(beside_others(turns))
    assert second.enters(), "beside another"
    (tmp_path / "go_on").touch()
    time.sleep(1)
    assert not (tmp_path / "alone0").exists()
    second.leave()
    text, _ = run.communicate(timeout=600)
    assert "1 failed, 3 passed" in text
    assert (tmp_path / "again").exists()
