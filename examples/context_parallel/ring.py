"""Attention over a sequence that several GPUs share: torch's context_parallel on omniattn's kernels.

torchrun --standalone --nproc-per-node 2 examples/context_parallel/ring.py
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as cp
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

import omniattn.torch  # noqa: F401, it registers the implementation "omniattn"

Tensors = list[torch.Tensor]
SEQ = 2  # dimension of (batch, heads, seq, head_dim) that is shared out


def attend(inputs: Tensors, causal: bool) -> Tensors:
    """Output and gradients of q, k and v, from q, k, v and the gradient of the output, on this device."""
    *qkv, do = inputs
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def attend_on_all(mesh: Any, inputs: Tensors, causal: bool, rotate: str) -> Tensors:
    """The same from whole tensors, each device with its rows; the results are whole again."""
    _choose(causal, rotate)
    buffers = [x.clone() for x in inputs]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[SEQ] * len(buffers)):
        shards = attend(buffers, causal)
        return cp.context_parallel_unshard(mesh, shards, [SEQ] * len(shards))


def time_on_all(mesh: Any, inputs: Tensors, causal: bool, rotate: str, repeats: int) -> tuple[float, float]:
    """Milliseconds of a forward, and of a forward and backward, with shards that stay where they are."""
    _choose(causal, rotate)
    buffers = [x.clone() for x in inputs]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[SEQ] * len(buffers)):
        return time_here(buffers, causal, repeats)


def time_here(inputs: Tensors, causal: bool, repeats: int) -> tuple[float, float]:
    """The same on this device alone."""
    q, k, v = (x.detach() for x in inputs[:3])
    forward = _median(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), repeats)
    return forward, _median(lambda: attend(inputs, causal), repeats)


def _choose(causal: bool, rotate: str) -> None:
    cp.set_rotate_method(rotate)
    # Rows from both ends of the sequence on each device: causal attention only has work to balance.
    cp._cp_options.enable_load_balance = causal


def _median(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare with one device, then measure beside cuDNN."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seqlen", type=int, default=32768, help="of the whole sequence (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--rotate", choices=["allgather", "alltoall"], default="allgather")
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args(arguments)
    causal, device = not given.full, torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    shape = (1, given.heads, given.seqlen, given.head_dim)
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
    lines = []
    for name in ("omniattn", "cuDNN"):
        if name == "omniattn":
            activate_flash_attention_impl("omniattn")
        with nullcontext() if name == "omniattn" else sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            alone, together = attend(inputs, causal), attend_on_all(mesh, inputs, causal, given.rotate)
            pairs = zip(together, alone, strict=True)
            apart = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
            one = time_here(inputs, causal, given.repeats)
            all_of_them = time_on_all(mesh, inputs, causal, given.rotate, given.repeats)
        if name == "omniattn":
            restore_flash_attention_impl()
        lines.append(
            f"{name:8} 1 GPU {one[0]:8.2f} ms, with backward {one[1]:8.2f}; "
            f"{mesh.size()} GPUs {all_of_them[0]:8.2f} ms, with backward {all_of_them[1]:8.2f}; "
            f"results {apart:.1e} apart"
        )
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
