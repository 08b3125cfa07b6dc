"""A soak: problems in a process of their own, which may hang or die without taking the report along."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniattn.testing.soak import operations, program
from omniattn.testing.soak.outcome import FAILED, Outcome
from omniattn.testing.soak.tally import Tally

#: Seconds after which a problem counts as hung. The first ones may compile kernels.
HANG = 300.0
#: Seconds that a process may take to begin.
START = 300.0


class CannotSoakError(Exception):
    """The process that runs problems cannot begin.

    Attributes
    ----------
    code : int
        Exit code of the command.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Soak:
    """What to run.

    Attributes
    ----------
    seconds : float
        How long to begin problems; one is always run.
    seed : int
    only : int or None
        Number of the one problem to run.
    ops : tuple of str
        Operations; numbers of other problems are passed over. None: all of them.
    count : int or None
        Problems to end after, whatever the time is.
    library : str
        As `chosen.machine` has it; empty: it chooses.
    cpu : bool
    hang : float
        Seconds after which a problem counts as hung.
    folder : Path or None
        Where the program of the first failure goes; None: the current folder.
    """

    seconds: float
    seed: int
    only: int | None = None
    count: int | None = None
    library: str = ""
    cpu: bool = False
    hang: float = HANG
    folder: Path | None = None
    ops: tuple[str, ...] = ()


@dataclass
class Result:
    """What a soak has found.

    Attributes
    ----------
    tally : Tally
    machine : dict
        ``"library"``, ``"where"``.
    program : Path or None
        Of the first failure.
    """

    tally: Tally
    machine: dict[str, str]
    program: Path | None = None


class _Worker:
    """The process, and its lines."""

    def __init__(self, soak: Soak, first: int) -> None:
        options = {
            "library": soak.library, "cpu": soak.cpu, "seed": soak.seed, "first": first, "only": soak.only is not None,
            "ops": soak.ops,
        }  # fmt: skip
        command = [sys.executable, "-m", "omniattn.testing.soak.worker", json.dumps(options)]
        # Control-C is for the process that has the counts; it ends this one.
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def message(self, seconds: float) -> dict[str, Any] | None:
        """The next line; None if the process has ended; queue.Empty if none comes in time."""
        line = self._lines.get(timeout=seconds)
        found: dict[str, Any] | None = None if line is None else json.loads(line)
        return found

    def stop(self) -> int:
        """End the process; its exit code, negative for a signal."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout=0.2)
        self.process.kill()
        return self.process.wait()


def _messages(worker: _Worker, soak: Soak) -> Iterator[dict[str, Any]]:
    """What a worker says; a hang or a death in a problem is an outcome, and the last one."""
    current: int | None = None
    begun = False
    while True:
        start = time.perf_counter()
        try:
            message = worker.message(soak.hang if begun else max(START, soak.hang))
        except queue.Empty:
            message, code = None, worker.stop()
            what = f"hangs: no result after {time.perf_counter() - start:.0f} s"
        else:
            if message is None:
                code = worker.stop()
                what = f"ended the process with exit code {code}" + (" (a signal)" if code < 0 else "")
        if message is None:
            if current is not None:
                yield {"outcome": _dead(soak, current, what, time.perf_counter() - start)}
            elif code or not begun:
                raise CannotSoakError(f"the process that runs problems {what}", 1)
            return
        if "error" in message:
            raise CannotSoakError(message["error"], message["code"])
        begun = True
        current = message.get("begin")
        yield message


def _dead(soak: Soak, number: int, what: str, seconds: float) -> dict[str, Any]:
    problem = operations.problem(soak.seed, number, cpu=soak.cpu)
    found = Outcome(number, problem.operation, problem.precision, FAILED, math.inf, what, True, seconds)
    return dict(vars(found))


def run(soak: Soak, step: Callable[[Tally], None] = lambda _: None) -> Result:
    """Run problems until the time is up, or somebody presses Control-C.

    Parameters
    ----------
    soak : Soak
    step : callable
        Told the counts after each problem.

    Raises
    ------
    CannotSoakError
        There is no GPU, or no such framework.
    """
    result = Result(Tally(), {})
    end = time.perf_counter() + soak.seconds
    number = soak.only or 0
    while True:
        worker = _Worker(soak, number)
        again = False
        try:
            for message in _messages(worker, soak):
                if "machine" in message:
                    result.machine = message["machine"]
                if "outcome" not in message:
                    continue
                outcome = Outcome(**message["outcome"])
                number = outcome.number + 1
                _add(soak, result, outcome)
                step(result.tally)
                enough = soak.count is not None and result.tally.total("problems") >= soak.count
                if soak.only is not None or enough or time.perf_counter() >= end:
                    return result
                if outcome.raised:
                    # Its GPU may take no further calls.
                    again = True
                    break
        except KeyboardInterrupt:
            return result
        finally:
            worker.process.kill()
            worker.process.wait()
        if not again:
            return result


def _add(soak: Soak, result: Result, outcome: Outcome) -> None:
    result.tally.add(outcome)
    if outcome.status == FAILED and result.program is None:
        problem = operations.problem(soak.seed, outcome.number, cpu=soak.cpu)
        library, where = result.machine.get("library", soak.library), result.machine.get("where", "")
        result.program = program.write(
            problem, outcome.text, library=library, cpu=soak.cpu, where=where, folder=soak.folder
        )
