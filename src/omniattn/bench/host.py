"""Host-side costs: a warm call from Python call to return, the import, the first run-time compilation."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omniattn.bench.timing import BenchError, percentile, require_torch

#: Calls between two synchronizations: few enough that the launch queue (1024 entries) never fills and blocks the host.
_CALLS_PER_BATCH = 100
_IMPORT_RUNS = 5

_IMPORT_PROGRAM = """
import sys, time
start = time.perf_counter()
import numpy
numpy_done = time.perf_counter()
import omniattn
done = time.perf_counter()
print((numpy_done - start) * 1e3, (done - numpy_done) * 1e3)
"""


@dataclass(frozen=True)
class HostTiming:
    """Host time of one kind of call.

    Attributes
    ----------
    name : str
    median_us : float
        Median over batches of the mean time a call.
    p10_us, p90_us : float
    """

    name: str
    median_us: float
    p10_us: float
    p90_us: float


@dataclass(frozen=True)
class ImportTiming:
    """Import time in a fresh interpreter, milliseconds, medians of several processes.

    Attributes
    ----------
    total_ms : float
        NumPy and omniattn.
    numpy_ms : float
        The part that is NumPy.
    """

    total_ms: float
    numpy_ms: float


def time_calls(
    name: str, call: Callable[[], object], synchronize: Callable[[], object], *, batches: int = 30
) -> HostTiming:
    """Time ``call`` on the host, without waiting for the device inside a batch.

    Parameters
    ----------
    name : str
    call : callable
        Enqueues its work and returns.
    synchronize : callable
        Waits for the device; runs between batches, outside the timed part.
    batches : int
        Batches of 100 calls each.
    """
    for _ in range(_CALLS_PER_BATCH):
        call()
    synchronize()
    means = []
    for _ in range(batches):
        start = time.perf_counter_ns()
        for _ in range(_CALLS_PER_BATCH):
            call()
        means.append((time.perf_counter_ns() - start) * 1e-3 / _CALLS_PER_BATCH)
        synchronize()
    means.sort()
    return HostTiming(name, statistics.median(means), percentile(means, 0.1), percentile(means, 0.9))


def warm_calls() -> list[HostTiming]:
    """Host time of warm calls on torch CUDA tensors, with torch's own attention beside them.

    The problem is so small (1 head, 64 tokens) that the device keeps up and never blocks the host.
    """
    torch = require_torch()
    import omniattn

    generator = torch.Generator(device="cuda").manual_seed(7)

    def random(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)

    q, k, v = (random(1, 64, 1, 64) for _ in range(3))
    out = torch.empty_like(q)
    starts = torch.tensor([0, 32, 64], dtype=torch.int32, device="cuda")
    packed_q, packed_k, packed_v = (t[0] for t in (q, k, v))
    lse = torch.zeros((1, 1, 64), dtype=torch.float32, device="cuda")
    hnd = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    stream = torch.cuda.current_stream().cuda_stream
    calls: dict[str, Callable[[], object]] = {
        "attention": lambda: omniattn.attention(q, k, v),
        "attention, causal": lambda: omniattn.attention(q, k, v, causal=True),
        "attention, out= and stream=": lambda: omniattn.attention(q, k, v, out=out, stream=stream),
        "attention, return_lse=True": lambda: omniattn.attention(q, k, v, return_lse=True),
        "attention_varlen": lambda: omniattn.attention_varlen(
            packed_q, packed_k, packed_v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=32, max_seqlen_k=32
        ),
        "merge_states": lambda: omniattn.merge_states(q, lse, k, lse),
        "torch SDPA (anchor)": lambda: torch.nn.functional.scaled_dot_product_attention(*hnd),
    }
    return [time_calls(name, call, torch.cuda.synchronize) for name, call in calls.items()]


def import_time() -> ImportTiming:
    """Import time of omniattn, each run in a fresh interpreter."""
    numpy_ms, own_ms = [], []
    for _ in range(_IMPORT_RUNS):
        result = subprocess.run([sys.executable, "-c", _IMPORT_PROGRAM], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BenchError(f"importing omniattn in a fresh interpreter failed:\n{result.stderr.strip()}")
        numpy_part, own_part = (float(word) for word in result.stdout.split())
        numpy_ms.append(numpy_part)
        own_ms.append(own_part)
    totals = [a + b for a, b in zip(numpy_ms, own_ms, strict=True)]
    return ImportTiming(total_ms=statistics.median(totals), numpy_ms=statistics.median(numpy_ms))
