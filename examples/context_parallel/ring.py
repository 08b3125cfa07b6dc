"""Attention over a sequence that several GPUs share: torch's context_parallel on omniattn's kernels.

torchrun --standalone --nproc-per-node 2 examples/context_parallel/ring.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as cp
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import activate_flash_attention_impl

import omniattn.torch  # noqa: F401, it registers the implementation "omniattn"

Tensors = list[torch.Tensor]
SEQ = 2  # dimension of (batch, heads, seq, head_dim) that is shared out
ROTATE = ("allgather", "alltoall")


def attend(inputs: Tensors, causal: bool) -> Tensors:
    """Output and gradients of q, k and v, from q, k, v and the gradient of the output, on this device."""
    *qkv, do = inputs
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


@contextmanager
def sharded(mesh: Any, inputs: Tensors, causal: bool, rotate: str, balance: bool | None = None) -> Iterator[Tensors]:
    """A context in which SDPA's sequences are those of all devices; it gives this device's rows of whole tensors.

    Parameters
    ----------
    mesh : DeviceMesh
    inputs : list of tensor, (batch, heads, seq, head_dim)
    causal : bool
    rotate : {"allgather", "alltoall"}
        How keys and values get from device to device.
    balance : bool, optional
        Rows from both ends of the sequence on each device; unless given, with causal attention, which alone has work
        to balance.

    Raises
    ------
    ValueError
        Full attention over a length that the devices cannot share equally: before anything is sent, on all of them.

    Notes
    -----
    torch's ring sends as many rows as a device has itself, so all have to have as many. Rows of zeros behind a causal
    sequence make it so: no query of the sequence sees them.
    """
    balance = causal if balance is None else balance
    length, multiple = inputs[0].shape[SEQ], mesh.size() * (2 if balance else 1)
    missing = -length % multiple
    if missing and not causal:
        raise ValueError(
            f"full attention on {mesh.size()} devices: expected a length divisible by {multiple}, received {length}"
        )
    cp.set_rotate_method(rotate)
    before, cp._cp_options.enable_load_balance = cp._cp_options.enable_load_balance, balance
    # context_parallel shards in place.
    buffers = [F.pad(x, (0, 0, 0, missing)) if missing else x.clone() for x in inputs]
    dims = [SEQ] * len(buffers)
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers)):
            yield buffers
    finally:
        cp._cp_options.enable_load_balance = before


def attend_on_all(mesh: Any, inputs: Tensors, causal: bool, rotate: str, balance: bool | None = None) -> Tensors:
    """`attend` from whole tensors, each device with its rows as in `sharded`; the results are whole again."""
    with sharded(mesh, inputs, causal, rotate, balance) as buffers:
        shards = attend(buffers, causal)
        whole = cp.context_parallel_unshard(mesh, shards, [SEQ] * len(shards))
    return [x.narrow(SEQ, 0, inputs[0].shape[SEQ]) for x in whole]


def apart(results: Tensors, expected: Tensors) -> float:
    """Largest relative error of the results, in the Frobenius norm."""
    pairs = zip(results, expected, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare all devices with one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seqlen", type=int, default=32768, help="of the whole sequence (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--rotate", choices=ROTATE, default="allgather")
    given = parser.parse_args(arguments)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    shape = (1, given.heads, given.seqlen, given.head_dim)
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
    activate_flash_attention_impl("omniattn")
    together = attend_on_all(mesh, inputs, not given.full, given.rotate)
    alone = attend(inputs, not given.full)
    names = ("o", "dq", "dk", "dv")
    errors = ", ".join(f"{name} {apart([a], [b]):.1e}" for name, a, b in zip(names, together, alone, strict=True))
    if dist.get_rank() == 0:
        print(f"{mesh.size()} GPUs beside one, relative error: {errors}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
