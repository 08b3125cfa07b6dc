"""Stand-ins for torch on a GPU that the tests of ``omniattn bench`` share. torch itself is imported at first use."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any


class _NoDevice:
    """``torch.cuda`` of a machine whose GPU is its CPU."""

    def synchronize(self) -> None:
        return

    def empty_cache(self) -> None:
        return

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, _: int) -> Any:
        return type("Properties", (), {"name": "CPU", "major": 0, "minor": 0, "multi_processor_count": 1})

    def current_stream(self) -> Any:
        return type("Stream", (), {"cuda_stream": None})


class CpuTorch:
    """torch that puts onto the CPU what is asked for on a GPU."""

    cuda = _NoDevice()

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module("torch"), name)
        if name not in ("randn", "rand", "empty", "zeros", "ones", "arange", "tensor", "Generator"):
            return value

        def on_cpu(*arguments: Any, **options: Any) -> Any:
            options.pop("device", None)
            return value(*arguments, **options)

        return on_cpu


class WithMemory(_NoDevice):
    """With a memory of its own."""

    free = 1 << 40

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, self.free


class DecodeTorch(CpuTorch):
    """What the decode benchmark asks for besides."""

    cuda = WithMemory()

    def __getattr__(self, name: str) -> Any:
        if name == "randperm":
            torch = importlib.import_module("torch")
            return lambda n, **_: torch.randperm(n, generator=torch.Generator().manual_seed(1))
        return super().__getattr__(name)


class WithStream(_NoDevice):
    """With a stream that can be told from any default."""

    def current_stream(self) -> Any:
        return type("Stream", (), {"cuda_stream": 77})


class StreamTorch(CpuTorch):
    """torch whose current stream is number 77."""

    cuda = WithStream()


class WallClock:
    """The CPU's own clock."""

    def __init__(self, *_: object) -> None:
        pass

    def flush(self) -> None:
        return

    def time(self, call: Callable[[], object]) -> Callable[[], float]:
        start = time.perf_counter()
        call()
        elapsed = (time.perf_counter() - start) * 1e6
        return lambda: elapsed

    def synchronize(self) -> None:
        return
