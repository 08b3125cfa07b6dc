"""Host time of repeated calls by Python and by the C module, without a GPU: ``python tests/native/host_times.py``.

On torch's tensors and a stand-in for libcuda, whose launches take no time. Beside them: what torch takes for a result,
and for a function of its autograd that does nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = (
    "plain", "mask, bool", "int8", "varlen", "varlen, pages", "operands", "merge", "decode, prefix",
    "append and decode, bf16", "with cache, tokens", "with cache, packed", "with cache, batch", "quantize_v",
    "backward", "gradients", "gradients, packed",
)  # fmt: skip


def nanoseconds(call: Callable[[], Any], count: int) -> float:
    """Of one call: the fastest of seven batches."""
    batches = []
    for _ in range(7):
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        batches.append((time.perf_counter_ns() - start) / count)
    return min(batches)


def measure(folder: Path, count: int) -> None:
    """Print a table."""
    import torch

    from omniattn.bench.host import by_python
    from omniattn.plan import native
    from tests.native.cpu_as_gpu import Machine
    from tests.repeated_calls import gradient_calls, plain_calls

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            ctx.save_for_backward(q, k, v)
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx: Any, do: Any) -> Any:
            return do, *ctx.saved_tensors[1:]

    machine = Machine(folder)
    native.RUNS_GRADIENTS = True
    calls = {**plain_calls("cpu", machine.stream), **gradient_calls("cpu")}
    leaves = [torch.randn(1, 64, 1, 64).bfloat16().requires_grad_() for _ in range(3)]
    x = leaves[0].detach()
    print(f"{'µs, the fastest of seven':34}  Python  native")
    for name in NAMES:
        for _ in range(4):
            calls[name]()
        times = [nanoseconds(call, count) * 1e-3 for call in (by_python(calls[name]), calls[name])]
        print(f"{name:34}{times[0]:8.2f}{times[1]:8.2f}")
    own: dict[str, Callable[[], Any]] = {
        "torch.empty_like": lambda: torch.empty_like(x),
        "an empty autograd.Function": lambda: torch.autograd.grad(Nothing.apply(*leaves), leaves, x),
    }
    for name, call in own.items():
        print(f"{name:34}{nanoseconds(call, count) * 1e-3:16.2f}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(Path(sys.argv[1]), int(sys.argv[2]))
        sys.exit()
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "src"), str(root)]
    from tests.native.building import build

    with tempfile.TemporaryDirectory() as made:
        build(Path(made))
        paths = f"{root / 'src'}{os.pathsep}{root}"
        environment = os.environ | {"LD_LIBRARY_PATH": made, "PYTHONPATH": paths}
        sys.exit(subprocess.run([sys.executable, __file__, made, "3000"], env=environment).returncode)
