"""SM clock and power of the GPU while something runs on it, read by ``nvidia-smi`` beside the benchmark.

A process of its own reads them, because a thread in this one would compete with the host's calls. Without
``nvidia-smi``, or where it does not know the GPU, there are no readings: never an error.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

_INTERVAL_MS = 20
#: The first reading takes a second on a machine whose driver is not kept loaded.
_START_S = 5.0
#: Older drivers do not know the momentary power; theirs is a mean over a second.
_QUERIES = ("clocks.sm,power.draw.instant", "clocks.sm,power.draw")


@dataclass(frozen=True)
class PowerSample:
    """One reading; None for what the GPU does not tell.

    Attributes
    ----------
    at_s : float
        ``time.monotonic()`` of it.
    sm_mhz, watts : float or None
    """

    at_s: float
    sm_mhz: float | None
    watts: float | None


class Meter(Protocol):
    """Where readings come from."""

    def between(self, begin_s: float, end_s: float) -> list[PowerSample]:
        """Readings in an interval of ``time.monotonic()``."""


class NvidiaSmi:
    """:class:`Meter` that runs ``nvidia-smi`` while it is open (a context manager).

    Parameters
    ----------
    gpu : str or None
        What ``nvidia-smi --id`` takes. None: there is no telling which GPU it is, so there are no readings.
    """

    def __init__(self, gpu: str | None) -> None:
        self._gpu = gpu
        self._samples: list[PowerSample] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._first = threading.Event()

    def __enter__(self) -> NvidiaSmi:
        program = shutil.which("nvidia-smi")
        if program is None or self._gpu is None:
            return self
        for query in _QUERIES:
            self._start([program, f"--id={self._gpu}", f"--query-gpu={query}", f"-lms={_INTERVAL_MS}"])
            if self._samples:
                break
            self._stop()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def between(self, begin_s: float, end_s: float) -> list[PowerSample]:
        return [sample for sample in list(self._samples) if begin_s <= sample.at_s <= end_s]

    def _start(self, command: list[str]) -> None:
        self._first.clear()
        try:
            self._process = subprocess.Popen(
                [*command, "--format=csv,noheader,nounits"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        except OSError:
            return
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        self._first.wait(_START_S)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sample = parse(line, time.monotonic())
            if sample is not None:
                self._samples.append(sample)
                self._first.set()
        # It has ended: nobody needs to wait for a reading any more.
        self._first.set()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        if self._reader is not None:
            self._reader.join()
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        self._process = self._reader = None


def parse(line: str, at_s: float) -> PowerSample | None:
    """A line of ``nvidia-smi``: two numbers, or words where there is none; None if it is no reading at all."""
    fields = line.split(",")
    if len(fields) != len(_QUERIES[0].split(",")):
        return None
    sm_mhz, watts = (_number(text) for text in fields)
    return None if sm_mhz is None and watts is None else PowerSample(at_s, sm_mhz, watts)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def device_id(torch: Any) -> str | None:
    """What ``nvidia-smi --id`` calls torch's current CUDA device, or None if torch does not tell.

    Its number does not do: ``CUDA_VISIBLE_DEVICES`` renumbers torch's devices and not those of ``nvidia-smi``.
    """
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def limits(gpu: str | None) -> dict[str, str]:
    """Power limit and highest SM clock, for the head of a report; empty where ``nvidia-smi`` does not tell."""
    program = shutil.which("nvidia-smi")
    if program is None or gpu is None:
        return {}
    query = ["--query-gpu=clocks.max.sm,power.limit", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([program, f"--id={gpu}", *query], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    sample = parse(done.stdout.strip(), 0.0)
    if sample is None:
        return {}
    facts = {"max_sm_mhz": sample.sm_mhz, "power_limit_w": sample.watts}
    return {name: f"{value:g}" for name, value in facts.items() if value is not None}
