"""torch's context_parallel in two processes on the CPU: ``python context_parallel_child.py STORE``, a file that is not.

SDPA on CPU tensors has an operator of its own, which context_parallel does not know. Here it calls aten's operator of
flash attention instead, whose kernel for the CPU is this package's, put there in the way of the GPU's. All else is
torch's own: sharding, the ring of both rotate methods, the merge of LSEs, and the backward by autograd.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as cp
from torch.distributed.tensor.experimental import context_parallel

from omniattn.torch.flash import Active

SIZE = 2
MATH = F.scaled_dot_product_attention
CASES = [(rotate, causal) for rotate in ("allgather", "alltoall") for causal in (True, False)]


def scaled_dot_product_attention(query: Any, key: Any, value: Any, is_causal: bool = False) -> Any:
    """SDPA as torch has it on a GPU where flash attention is chosen."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]


def run(mesh: Any, rotate: str, causal: bool) -> None:
    """Output and gradients of the shards, against those of one process."""
    torch.manual_seed(3)
    heads, rows, dim = 2, 16, 8
    q, k, v, do = (torch.randn(2, heads, rows, dim) for _ in range(4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = MATH(*whole, is_causal=causal)
    expected.backward(do)
    cp.set_rotate_method(rotate)
    cp._cp_options.enable_load_balance = causal  # torch has it for causal attention only
    buffers = [q, k, v, do]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        assert q.shape[2] == rows // SIZE
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        out.backward(do)
        shards = [out.detach(), *(x.grad for x in leaves)]
        made = cp.context_parallel_unshard(mesh, shards, [2] * 4)
    for x, y in zip(made, [expected.detach(), *(x.grad for x in whole)], strict=True):
        assert x.abs().max() > 0
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    print(f"rank {dist.get_rank()}: {rotate} causal={causal}", flush=True)


def work(rank: int, store: str) -> None:
    """One process: all cases."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    F.scaled_dot_product_attention = scaled_dot_product_attention
    active = Active("CPU")
    mesh = init_device_mesh("cpu", (SIZE,))
    for rotate, causal in CASES:
        run(mesh, rotate, causal)
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
