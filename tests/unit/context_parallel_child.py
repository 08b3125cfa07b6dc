"""torch's context_parallel in two processes on the CPU: ``python context_parallel_child.py STORE``, a file that is not.

SDPA on CPU tensors has an operator of its own, which context_parallel does not know. Here it calls the operators of
GPUs, flash attention's and cuDNN's, whose kernels for the CPU are this package's, put into the dispatcher in the way of
those for GPUs. All else is torch's own: sharding, the ring of both rotate methods, the merge of LSEs, autograd.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from omniattn.torch.flash import Active

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "context_parallel"))

import ring

SIZE = 2
MATH = F.scaled_dot_product_attention
CASES = [
    (operator, rotate, causal)
    for operator in ("flash", "cudnn") for rotate in ("allgather", "alltoall") for causal in (True, False)
]  # fmt: skip


def sdpa_by(operator: str) -> Any:
    """SDPA as torch has it on a GPU where flash attention or cuDNN is chosen."""

    def scaled_dot_product_attention(query: Any, key: Any, value: Any, is_causal: bool = False) -> Any:
        if operator == "flash":
            return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]
        return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, is_causal)[0]

    return scaled_dot_product_attention


def run(mesh: Any, operator: str, rotate: str, causal: bool) -> None:
    """Output and gradients of the example's shards, against those of one process."""
    torch.manual_seed(3)
    F.scaled_dot_product_attention = sdpa_by(operator)
    *qkv, do = inputs = [torch.randn(2, 2, 16, 8) for _ in range(4)]
    whole = [x.clone().requires_grad_() for x in qkv]
    expected = MATH(*whole, is_causal=causal)
    expected.backward(do)
    for x, y in zip(
        ring.attend_on_all(mesh, inputs, causal, rotate), [expected.detach(), *(x.grad for x in whole)], strict=True
    ):
        assert x.abs().max() > 0
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    # One write, which lines of the other process do not break.
    sys.stdout.write(f"rank {dist.get_rank()}: {operator} {rotate} causal={causal}\n")
    sys.stdout.flush()


def work(rank: int, store: str) -> None:
    """One process: all cases."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    active = Active("CPU")
    mesh = init_device_mesh("cpu", (SIZE,))
    for case in CASES:
        run(mesh, *case)
    active.remove()
    dist.destroy_process_group()


def main(store: str) -> int:
    """The exit status: 0 if both processes found the results of one."""
    # A fork has what this process has imported.
    start = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    processes = [start.Process(target=work, args=(rank, store)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
