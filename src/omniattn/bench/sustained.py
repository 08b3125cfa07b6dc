"""Timing under sustained load: one candidate at a time, back to back, at the clock that it settles at.

The rules, and why:

* **One at a time, for a while.** A GPU at its power limit lowers its clock until the kernel that runs fits the limit,
  so a kernel's speed depends on the power that it takes itself. Interleaved calls (`timing.measure`) share one clock;
  this is what a server sees that runs one of them all day.
* **The first 60 % of a stretch are not timed.** In them the clock settles: on an H200 the limit takes hold after 0.1 s,
  lowers the clock too far, and has given it back after 0.25 to 0.3 s. The rest is timed as a whole: device time from
  its first call to its last over the number of calls. `SustainedTiming.drift` says whether the clock still moved.
* **Two stretches, there and back.** A candidate's time is cut in two. The candidates run in order, then in reverse, so
  that what changes steadily (the chip gets hotter) falls on all of them alike: the mean moment is the same for all.
* **The queue is never empty.** Calls are enqueued in chunks, two of them ahead of the one that runs. Where the device
  catches up with the host all the same, `SustainedTiming.host_limited` says so.
* **No flush between calls.** It would be part of the load. Inputs rotate, and a caller provides so many of them that
  they do not fit in L2.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from omniattn.bench.power import Meter, NvidiaSmi, PowerSample, device_id
from omniattn.bench.timing import Candidate, Timer, Timing, TorchClock, measure
from omniattn.errors import ArgumentError

#: What ``--sustained`` may say, and what it says without a number.
MIN_SECONDS, MAX_SECONDS, DEFAULT_SECONDS = 0.1, 60.0, 1.0
#: A larger change within the timed part is reported: the clock had not settled.
SETTLED = 0.02

_STRETCHES = 2
#: Fraction of a stretch in which the clock settles.
WARMUP = 0.6
#: Chunks of calls in a stretch, about.
_CHUNKS = 20
#: Chunks that wait in the queue while another one runs.
_AHEAD = 2


@dataclass(frozen=True)
class Load:
    """What the GPU did during the timed parts.

    Attributes
    ----------
    samples : int
        Readings that went into it.
    sm_mhz : tuple of float or None
        SM clock: lowest, mean, highest.
    watts : float or None
        Mean power.
    """

    samples: int
    sm_mhz: tuple[float, float, float] | None
    watts: float | None

    @classmethod
    def of(cls, samples: Sequence[PowerSample]) -> Load:
        """Sum up readings."""
        clocks = [s.sm_mhz for s in samples if s.sm_mhz is not None]
        watts = [s.watts for s in samples if s.watts is not None]
        return cls(
            len(samples),
            (min(clocks), statistics.fmean(clocks), max(clocks)) if clocks else None,
            statistics.fmean(watts) if watts else None,
        )


@dataclass(frozen=True)
class SustainedTiming(Timing):
    """Durations of one candidate under load: a sample is the mean time of a call over a stretch's timed part.

    Attributes
    ----------
    profile_us : tuple of tuple of float
        Mean time of a call in each chunk of each stretch, warm-up included: how the clock settled.
    drift : float
        Time in the second half of what was timed relative to that in the first, minus 1; over all stretches.
    host_limited : bool
        The device was waiting for the host at times: the time is not the device's alone.
    load : Load
        Clock and power.
    """

    profile_us: tuple[tuple[float, ...], ...] = ()
    drift: float = 0.0
    host_limited: bool = False
    load: Load = field(default_factory=lambda: Load(0, None, None))

    @property
    def text(self) -> str:
        """Clock and power for a table: ``1545 MHz 698 W``; a dash for what is not known."""
        clock = "–" if self.load.sm_mhz is None else f"{self.load.sm_mhz[1]:.0f}"
        watts = "–" if self.load.watts is None else f"{self.load.watts:.0f}"
        return f"{clock} MHz {watts} W"

    def doubts(self) -> list[str]:
        """A clock that had not settled, a device that waited."""
        found = []
        if abs(self.drift) > SETTLED:
            found.append(
                f"the clock had not settled ({100 * self.drift:+.1f} % within the timed part): give more seconds"
            )
        if self.host_limited:
            found.append("the device was waiting for the host at times")
        return found

    def load_dict(self) -> dict[str, Any]:
        """Clock, power, and what says whether they had settled."""
        clocks = self.load.sm_mhz
        return {
            "sm_mhz": None if clocks is None else dict(zip(("min", "mean", "max"), clocks, strict=True)),
            "watts": self.load.watts,
            "power_samples": self.load.samples,
            "drift": self.drift,
            "host_limited": self.host_limited,
            "profile_us": [list(stretch) for stretch in self.profile_us],
        }


class LoadClock(Protocol):
    """What :func:`sustain` needs of a device. A mark is a point in the queue of its work."""

    def batch(self, candidate: Candidate, calls: int) -> Callable[[], object]:
        """Something that enqueues ``candidate(0)`` to ``candidate(calls - 1)``, as often as it is called."""

    def mark(self) -> Any:
        """Enqueue a mark."""

    def passed(self, mark: Any) -> bool:
        """Whether the device has got there; does not wait."""

    def wait(self, mark: Any) -> None:
        """Wait until it has."""

    def elapsed_us(self, begin: Any, end: Any) -> float:
        """Device time between two marks that it has passed."""

    def now(self) -> float:
        """The host's clock, in seconds, that the meter stamps its readings with."""


def check_seconds(value: float | str, argument: str) -> float:
    """Seconds of load a candidate, as a number.

    Raises
    ------
    ArgumentError
        Not a number, or out of bounds.
    """
    try:
        seconds = float(value)
    except ValueError:
        seconds = float("nan")
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        expected = f"a number of seconds from {MIN_SECONDS:g} to {MAX_SECONDS:g}"
        raise ArgumentError(argument, expected, repr(value))
    return seconds


def sustain(
    candidates: Mapping[str, Candidate], clock: LoadClock, meter: Meter, *, seconds: float, warmup: int = 2
) -> dict[str, Timing]:
    """Run the candidates one at a time, each for ``seconds`` in all.

    Parameters
    ----------
    candidates : mapping of str to callable
        Each is called with the number of the call in its chunk.
    clock : LoadClock
    meter : Meter
    seconds : float
        Device time a candidate, warm-up included.
    warmup : int
        Calls before anything else, at least 1; also how long a call takes is found in them.

    Returns
    -------
    dict of str to SustainedTiming
        In the order of ``candidates``.
    """
    check_seconds(seconds, "seconds")
    if warmup < 1:
        raise ArgumentError("warmup", "an integer >= 1", warmup, function="sustain")
    stretch_us = seconds * 1e6 / _STRETCHES
    chunks: dict[str, tuple[Callable[[], object], int]] = {}
    for name, candidate in candidates.items():
        # The second time around nothing is made that is made once only.
        for _ in range(2):
            begin = clock.mark()
            for number in range(warmup):
                candidate(number)
            end = clock.mark()
            clock.wait(end)
        calls = max(1, round(stretch_us / _CHUNKS / max(clock.elapsed_us(begin, end) / warmup, 1e-3)))
        chunks[name] = clock.batch(candidate, calls), calls
    stretches: dict[str, list[_Stretch]] = {name: [] for name in candidates}
    for stretch in range(_STRETCHES):
        for name in list(chunks)[:: -1 if stretch % 2 else 1]:
            stretches[name].append(_run_stretch(*chunks[name], clock, stretch_us))
    return {name: _timing(found, meter) for name, found in stretches.items()}


@dataclass(frozen=True)
class _Stretch:
    """Mean time of a call in each chunk; the first chunk that is timed; when, on the host's clock, that part ran."""

    chunks_us: tuple[float, ...]
    first_timed: int
    begin_s: float
    end_s: float
    host_limited: bool


def _run_stretch(enqueue: Callable[[], object], calls: int, clock: LoadClock, stretch_us: float) -> _Stretch:
    marks = [clock.mark()]
    first_timed, begin_s = -1, 0.0
    caught_up = False
    while True:
        enqueue()
        marks.append(clock.mark())
        # What was queued when this chunk's first call came is through before its last one is enqueued.
        caught_up = caught_up or (first_timed >= 0 and clock.passed(marks[-2]))
        complete = len(marks) - 1 - _AHEAD
        if complete < 1:
            continue
        clock.wait(marks[complete])
        elapsed_us = clock.elapsed_us(marks[0], marks[complete])
        if first_timed < 0 and elapsed_us >= WARMUP * stretch_us:
            first_timed, begin_s = complete, clock.now()
        if elapsed_us >= stretch_us:
            break
    clock.wait(marks[-1])
    end_s = clock.now()
    times = tuple(clock.elapsed_us(a, b) / calls for a, b in itertools.pairwise(marks))
    return _Stretch(times, first_timed, begin_s, end_s, caught_up)


def _timing(stretches: Sequence[_Stretch], meter: Meter) -> SustainedTiming:
    early: list[float] = []
    late: list[float] = []
    readings: list[PowerSample] = []
    samples = []
    for stretch in stretches:
        timed = stretch.chunks_us[stretch.first_timed :]
        samples.append(statistics.fmean(timed))
        early.append(statistics.fmean(timed[: len(timed) // 2]))
        late.append(statistics.fmean(timed[-(len(timed) // 2) :]))
        readings += meter.between(stretch.begin_s, stretch.end_s)
    return SustainedTiming(
        tuple(samples),
        profile_us=tuple(stretch.chunks_us for stretch in stretches),
        drift=sum(late) / sum(early) - 1,
        host_limited=any(stretch.host_limited for stretch in stretches),
        load=Load.of(readings),
    )


class TorchLoad:
    """:class:`LoadClock` of the current CUDA device and stream of torch.

    Parameters
    ----------
    torch : module
        As returned by `timing.require_torch`.
    graphs : bool
        Capture chunks into CUDA graphs: for calls that take longer to enqueue than to run.
    """

    def __init__(self, torch: Any, *, graphs: bool = False) -> None:
        self._torch = torch
        self._graphs = graphs

    def batch(self, candidate: Candidate, calls: int) -> Callable[[], object]:
        def enqueue() -> None:
            for number in range(calls):
                candidate(number)

        return captured(self._torch, enqueue) if self._graphs else enqueue

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def elapsed_us(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) * 1e3

    def now(self) -> float:
        return time.monotonic()


def captured(torch: Any, enqueue: Callable[[], object]) -> Callable[[], object]:
    """A CUDA graph of what ``enqueue`` enqueues, to replay. Raises what torch does where that cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()

    def replay() -> None:
        graph.replay()

    # What was captured reads arrays that may be nobody's but `enqueue`'s.
    replay.of = enqueue  # type: ignore[attr-defined]
    return replay


@contextlib.contextmanager
def under_load(torch: Any, seconds: float, *, graphs: bool = False) -> Iterator[Timer]:
    """What times candidates by :func:`sustain` on torch's current CUDA device, while ``nvidia-smi`` runs beside it."""
    check_seconds(seconds, "seconds")
    with NvidiaSmi(device_id(torch)) as meter:
        yield functools.partial(sustain, clock=TorchLoad(torch, graphs=graphs), meter=meter, seconds=seconds)


def choose_timer(
    torch: Any, iters: int, sustained_s: float | None, *, graphs: bool = False
) -> contextlib.AbstractContextManager[Timer]:
    """Choose the protocol: `timing.measure`, or, with seconds, `sustain`."""
    if sustained_s is not None:
        return under_load(torch, sustained_s, graphs=graphs)
    return contextlib.nullcontext(functools.partial(measure, clock=TorchClock(torch), iters=iters))
