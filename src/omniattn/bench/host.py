"""Host-side costs: a warm call from Python call to return, the import, the first run-time compilation."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omniattn.bench.timing import BenchError, percentile, require_torch
from omniattn.plan import native

#: Calls between two synchronizations: few enough that the launch queue (1024 entries) never fills and blocks the host.
_CALLS_PER_BATCH = 100
_IMPORT_RUNS = 5
#: The call that others are compared with; those that compute gradients too, with the one behind it.
ANCHOR = "torch SDPA"
BY_PYTHON = ", by Python"
_GRADIENTS = ", forward + backward"

_IMPORT_PROGRAM = """
import builtins, sys, time
numpy_ms, load = 0.0, builtins.__import__
def timed(name, *rest):
    global numpy_ms
    if name.partition(".")[0] != "numpy" or "numpy" in sys.modules:
        return load(name, *rest)
    start = time.perf_counter()
    try:
        return load(name, *rest)
    finally:
        numpy_ms = (time.perf_counter() - start) * 1e3
builtins.__import__ = timed
start = time.perf_counter()
import omniattn
omniattn.attention
print(numpy_ms, (time.perf_counter() - start) * 1e3)
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

    def row(self, timings: Sequence[HostTiming]) -> dict[str, Any]:
        """Facts for JSON, with the time relative to those of torch's attention and of this package's."""
        medians = {timing.name: timing.median_us for timing in timings}
        anchor = ANCHOR + _GRADIENTS if self.name.endswith(_GRADIENTS) else ANCHOR
        return {
            **asdict(self),
            "ratio_to_sdpa": self.median_us / medians[anchor] if anchor in medians else None,
            "ratio_to_attention": self.median_us / medians["attention"] if "attention" in medians else None,
        }


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
    calls: Mapping[str, Callable[[], object]], synchronize: Callable[[], object], *, batches: int = 30
) -> list[HostTiming]:
    """Time calls on the host, side by side, without waiting for the device inside a batch.

    Parameters
    ----------
    calls : mapping of str to callable
        Each enqueues its work and returns.
    synchronize : callable
        Waits for the device; runs between batches, outside the timed part.
    batches : int
        Batches of 100 calls of each. All have one batch in every round, so that what disturbs the host falls on all.
    """
    for call in calls.values():
        for _ in range(_CALLS_PER_BATCH):
            call()
        synchronize()
    means: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(batches):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            for _ in range(_CALLS_PER_BATCH):
                call()
            means[name].append((time.perf_counter_ns() - start) * 1e-3 / _CALLS_PER_BATCH)
            synchronize()
    return [
        HostTiming(name, statistics.median(found), percentile(sorted(found), 0.1), percentile(sorted(found), 0.9))
        for name, found in means.items()
    ]


def warm_calls() -> list[HostTiming]:
    """Host time of a warm call of every operation on torch CUDA tensors, beside torch's own attention.

    The problems are so small (one or two heads, 64 tokens) that the device keeps up and never blocks the host.
    """
    torch = require_torch()
    calls = make_calls(torch)
    if native.module() is not None:
        own = [name for name in calls if not name.startswith(ANCHOR)]
        calls = {**{name + BY_PYTHON: by_python(calls[name]) for name in own}, **calls}
    return time_calls(calls, torch.cuda.synchronize)


def by_python(call: Callable[[], object]) -> Callable[[], object]:
    """The same call without the C module."""

    def by_python() -> object:
        run, run_as = native.run, native.run_as
        native.run = native.run_as = None
        try:
            return call()
        finally:
            if run is not None:
                native.run, native.run_as = run, run_as

    return by_python


def beside_python(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """Rows of a document, each with that of the same call by Python; None where the C module was not there."""
    by_name = {row["name"]: row for row in rows}
    return [(row, by_name.get(row["name"] + BY_PYTHON)) for row in rows if not row["name"].endswith(BY_PYTHON)]


def make_calls(torch: Any) -> dict[str, Callable[[], object]]:
    """Name to call, for every operation; torch's attention last."""
    import omniattn as oa

    generator = torch.Generator(device="cuda").manual_seed(7)

    def random(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)

    def int32(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    q, k, v = (random(1, 64, 1, 64) for _ in range(3))
    packed_q, packed_k, packed_v = (t[0] for t in (q, k, v))
    out = torch.empty_like(q)
    lse = torch.zeros((1, 1, 64), dtype=torch.float32, device="cuda")
    mask = torch.ones((1, 1, 64, 64), dtype=torch.bool, device="cuda")
    hnd = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    packed = {
        "cu_seqlens_q": int32(0, 32, 64),
        "cu_seqlens_k": int32(0, 32, 64),
        "max_seqlen_q": 32,
        "max_seqlen_k": 32,
    }
    stream = torch.cuda.current_stream().cuda_stream
    needing = [t.clone().requires_grad_() for t in (q, k, v)]
    needing_hnd = [t.clone().requires_grad_() for t in hnd]

    def gradients(function: Callable[..., Any], inputs: Sequence[Any], do: Any) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*inputs), inputs, do)

    sdpa = torch.nn.functional.scaled_dot_product_attention
    token, new_k, new_v = random(2, 1, 2, 64), random(2, 1, 1, 64), random(2, 1, 1, 64)
    cache = oa.KVCache(2, 64, 1, 64, like=q, k_dtype="bf16")
    paged = oa.PagedKVCache(8, 16, 1, 64, like=q, k_dtype="int8")
    lens = int32(64, 64)
    table = torch.arange(8, dtype=torch.int32, device="cuda").reshape(2, 4)
    pages = {"seq_lens": lens, "block_table": table}
    rows = {"cu_seqlens_q": packed["cu_seqlens_q"], "max_seqlen_q": 32}
    starts, tokens = int32(0, 64, 128), random(128, 1, 64)
    oa.append(cache, tokens, tokens, seq_lens=lens, cu_seqlens=starts)
    oa.append(paged, tokens, tokens, cu_seqlens=starts, **pages)
    return {
        "attention": lambda: oa.attention(q, k, v),
        "attention, causal": lambda: oa.attention(q, k, v, causal=True),
        "attention, mask": lambda: oa.attention(q, k, v, mask=mask),
        "attention, out= and stream=": lambda: oa.attention(q, k, v, out=out, stream=stream),
        "attention, return_lse=True": lambda: oa.attention(q, k, v, return_lse=True),
        "attention, int8": lambda: oa.attention(q, k, v, precision="int8"),
        "attention_varlen": lambda: oa.attention_varlen(packed_q, packed_k, packed_v, **packed),
        "decode": lambda: oa.decode(token, cache, seq_lens=lens),
        "decode, paged int8": lambda: oa.decode(token, paged, **pages),
        "attention_with_kvcache, prompts": lambda: oa.attention_with_kvcache(packed_q, cache, seq_lens=lens, **rows),
        "attention_with_kvcache, tokens": lambda: oa.attention_with_kvcache(token, cache, seq_lens=lens),
        "append": lambda: oa.append(cache, new_k, new_v, seq_lens=lens),
        "append, paged int8": lambda: oa.append(paged, new_k, new_v, **pages),
        "merge_states": lambda: oa.merge_states(q, lse, k, lse),
        "quantize_qk": lambda: oa.quantize_qk(q, k),
        "quantize_v": lambda: oa.quantize_v(v),
        "attention" + _GRADIENTS: gradients(oa.attention, needing, q),
        ANCHOR + _GRADIENTS: gradients(sdpa, needing_hnd, hnd[0]),
        ANCHOR: lambda: sdpa(*hnd),
    }


def import_time() -> ImportTiming:
    """Import time of omniattn and its functions, each run in a fresh interpreter."""
    numpy_ms, totals = [], []
    for _ in range(_IMPORT_RUNS):
        result = subprocess.run([sys.executable, "-c", _IMPORT_PROGRAM], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BenchError(f"importing omniattn in a fresh interpreter failed:\n{result.stderr.strip()}")
        numpy_part, total = (float(word) for word in result.stdout.split())
        numpy_ms.append(numpy_part)
        totals.append(total)
    return ImportTiming(total_ms=statistics.median(totals), numpy_ms=statistics.median(numpy_ms))
