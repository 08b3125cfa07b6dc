"""Interleaved timing with device events: short calls at one common clock. For sustained load: `sustained`.

The rules, and why:

* **Cold L2.** A buffer several times the size of L2 is written before every timed call. It also keeps the GPU busy for
  longer than the host needs to enqueue the call, so that the events enclose device time and not launch latency.
* **Interleaved order.** All candidates run once in every round, and the order rotates by one each round: clock drift
  and heat fall on all of them alike, and none always runs in the wake of the same neighbour.
* **Rotating inputs.** Call ``i`` gets input set ``i % n``.
* **Median and spread** instead of a mean: one disturbed run does not move them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omniattn.errors import ArgumentError, OmniattnError

#: A candidate: called with the number of the round, enqueues its work, returns nothing of interest.
Candidate = Callable[[int], object]
#: Times candidates by name; takes ``warmup=`` (rounds, or calls, before anything is timed).
Timer = Callable[..., "dict[str, Timing]"]


class BenchError(OmniattnError):
    """The benchmark cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Timing:
    """Durations of one candidate on one problem, in microseconds.

    Attributes
    ----------
    samples_us : tuple of float
        One entry a round, in the order in which they were measured.
    """

    samples_us: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples_us or not all(sample > 0 for sample in self.samples_us):
            raise ArgumentError(
                "samples_us", "one or more positive durations", repr(self.samples_us), function="Timing"
            )

    @property
    def median_us(self) -> float:
        """Median duration."""
        return statistics.median(self.samples_us)

    @property
    def spread(self) -> float:
        """Half the distance between the 10th and the 90th percentile, as a fraction of the median."""
        ordered = sorted(self.samples_us)
        return (percentile(ordered, 0.9) - percentile(ordered, 0.1)) / (2.0 * self.median_us)

    @property
    def text(self) -> str:
        """What a table says beside the figure."""
        return ""

    def doubts(self) -> list[str]:
        """What a reader should know before quoting the time."""
        return []

    def load_dict(self) -> dict[str, Any] | None:
        """How the device was loaded, ready for JSON; None unless that was what was measured."""
        return None


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Linearly interpolated percentile of values that are sorted already."""
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class Clock(Protocol):
    """What :func:`measure` needs of a device."""

    def flush(self) -> None:
        """Evict the caches."""

    def time(self, call: Callable[[], object]) -> Callable[[], float]:
        """Enqueue ``call`` between two marks; the result reads microseconds, valid after :meth:`synchronize`."""

    def synchronize(self) -> None:
        """Wait for everything enqueued."""


def measure(
    candidates: Mapping[str, Candidate], clock: Clock, *, iters: int, warmup: int = 2, flush: bool = True
) -> dict[str, Timing]:
    """Time all candidates side by side.

    Parameters
    ----------
    candidates : mapping of str to callable
        Each is called with the number of the round.
    clock : Clock
    iters : int
        Timed rounds, at least 1.
    warmup : int
        Rounds before the first timed one.
    flush : bool
        Evict the caches before each timed call.

    Returns
    -------
    dict of str to Timing
        In the order of ``candidates``.
    """
    if iters < 1:
        raise ArgumentError("iters", "an integer >= 1", str(iters), function="measure")
    names = list(candidates)
    for round_number in range(warmup):
        for name in names:
            candidates[name](round_number)
    clock.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(iters):
        shift = round_number % len(names) if names else 0
        pending: list[tuple[str, Callable[[], float]]] = []
        for name in names[shift:] + names[:shift]:
            if flush:
                clock.flush()
            pending.append((name, clock.time(functools.partial(candidates[name], round_number))))
        clock.synchronize()
        for name, read in pending:
            samples[name].append(read())
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def require_torch() -> Any:
    """Import torch and check that it sees a CUDA device.

    Returns
    -------
    module
        torch.

    Raises
    ------
    BenchError
        torch is not installed, or has no CUDA device.
    """
    try:
        import torch
    except ImportError as error:
        raise BenchError(
            "GPU timing uses torch's CUDA events and allocator, and torch is not installed; "
            "install it (see https://pytorch.org/get-started) and run again"
        ) from error
    if not torch.cuda.is_available():
        build = "built without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        raise BenchError(
            f"torch {torch.__version__} ({build}) finds no CUDA device; GPU timing needs an NVIDIA GPU, its "
            "driver, and a CUDA build of torch"
        )
    return torch


def cold_bytes(torch: Any) -> int:
    """Bytes after which nothing of what was there before is left in L2: four times its size, at least 512 MiB."""
    l2_bytes = int(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0))
    return max(4 * l2_bytes, 512 << 20)


class TorchClock:
    """:class:`Clock` of the current CUDA device and stream of torch.

    Parameters
    ----------
    torch : module
        As returned by :func:`require_torch`.
    flush_bytes : int, optional
        Size of the buffer that is written to evict L2. Default: :func:`cold_bytes` (at least 512 MiB: about 0.15 ms on
        an H200, longer than any Python call takes to enqueue its kernel).
    """

    def __init__(self, torch: Any, flush_bytes: int | None = None) -> None:
        self._torch = torch
        if flush_bytes is None:
            flush_bytes = cold_bytes(torch)
        self._buffer = torch.empty(flush_bytes, dtype=torch.int8, device="cuda")

    def flush(self) -> None:
        self._buffer.zero_()

    def time(self, call: Callable[[], object]) -> Callable[[], float]:
        start = self._torch.cuda.Event(enable_timing=True)
        end = self._torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        return lambda: float(start.elapsed_time(end)) * 1e3

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()
