"""`omniattn.attention` on DTensors in several processes: ``python dtensor_child.py STORE SIZE SUITES``.

Every process has the whole tensors, from one seed, and compares the whole results with attention on one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import omniattn as oa
from omniattn.errors import ArgumentError, ShapeError, UnsupportedError

sys.path.insert(0, str(Path(__file__).resolve().parent))

import distributed_child as common
from distributed_child import alone, inputs, near, say

DIMS = {"NHD": {"b": 0, "s": 1, "h": 2, "d": 3}, "HND": {"b": 0, "h": 1, "s": 2, "d": 3}}


def places(text: str, layout: str = "NHD") -> list[Any]:
    """Placements by letters, one for each dimension of the mesh; "r" is replicated."""
    return [Replicate() if letter == "r" else Shard(DIMS[layout][letter]) for letter in text]


def case(
    name: str, mesh: Any, of_q: str, of_k: str | None = None, *, rows: tuple[int, int] = (16, 16), mask: Any = None,
    mask_places: Any = None, sinks: bool = False, bound: float = 2e-5, grads: bool = True, **said: Any,
) -> None:  # fmt: skip
    """Forward and gradients of one call; those of every argument."""
    shape = {key: said.pop(key) for key in ("heads", "dims", "batch", "dtype") if key in said}
    layout = said.get("layout", "NHD")
    tensors = inputs(*rows, layout=layout, **({"batch": 4, "heads": (8, 4)} | shape))
    sink = torch.linspace(-1.0, 2.0, tensors[0].shape[DIMS[layout]["h"]]) if sinks else None
    if mask is not None:
        said["mask"] = mask.clone().requires_grad_(mask.is_floating_point() and grads)
    expected = alone(tensors, sink, **said)
    if mask is not None and mask.is_floating_point():
        expected["dmask"] = said["mask"].grad
    q, k, v, do = (
        distribute_tensor(x, mesh, places(text, layout))
        for x, text in zip(tensors, (of_q, of_k or of_q, of_k or of_q, of_q), strict=True)
    )
    leaves = [x.requires_grad_(grads) for x in (q, k, v)]
    if sink is not None:
        sink = distribute_tensor(sink, mesh, [Replicate()] * mesh.ndim).requires_grad_(grads)
    if mask is not None:
        said["mask"] = distribute_tensor(mask, mesh, mask_places or [Replicate()] * mesh.ndim)
        said["mask"].requires_grad_(mask.is_floating_point() and grads)
    o, lse = oa.attention(*leaves, sinks=sink, return_lse=True, **said)
    assert tuple(o.placements) == tuple(q.placements), (name, o.placements)
    assert (o.shape, lse.shape) == (expected["o"].shape, expected["lse"].shape), name
    found = {"o": o, "lse": lse}
    if grads:
        local = lse.full_tensor()
        ((o * do).sum().full_tensor() + 0.1 * torch.where(torch.isinf(local), 0.0, local).sum()).backward()
        found |= {"dq": q.grad, "dk": k.grad, "dv": v.grad}
        for key, x in (("dsinks", sink), ("dmask", said.get("mask"))):
            if x is not None and x.requires_grad:
                found[key] = x.grad
    for key, x in found.items():
        near(f"{name} {key}", x.full_tensor().detach(), expected[key].detach(), bound * (8 if key == "dsinks" else 1))
    say(name)


def calls() -> None:
    """Batch, heads, sequence, both on a mesh of two dimensions; masks, sinks, layouts, precision."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    case("batch", mesh, "b", causal=True)
    case("batch, uneven", mesh, "b", batch=3)
    case("batch, keys replicated", mesh, "b", "r", causal=True)
    case("heads", mesh, "h", causal=True, layout="HND", sinks=True)
    case("heads, keys replicated", mesh, "h", "r", window=(4, 3), softcap=4.0)
    case("heads, fewer kv heads", mesh, "h", "r", heads=(8, 1), causal=True)
    case("replicated", mesh, "r", sinks=True)
    case("sequence", mesh, "s", causal=True, sinks=True)
    case("sequence, HND", mesh, "s", rows=(16, 32), causal=True, layout="HND")
    case("sequence, window", mesh, "s", rows=(32, 32), window=(5, 0), dims=(16, 24))
    case("sequence, int8", mesh, "s", rows=(64, 64), causal=True, precision="int8", grads=False, bound=0.3)
    case("heads, int8", mesh, "h", rows=(64, 64), precision="int8", grads=False, bound=1e-6)
    additive = torch.linspace(-2.0, 2.0, 8 * 16 * 16).reshape(1, 8, 16, 16)
    case("mask of heads", mesh, "h", mask=additive)
    case("mask of heads, divided", mesh, "h", mask=additive, mask_places=[Shard(1)])
    case("mask for all of the batch", mesh, "b", mask=additive)
    case("mask of pairs", mesh, "h", mask=torch.ones(16, 16, dtype=torch.bool).tril())
    case("replicated, mask", mesh, "r", mask=additive)
    case("replicated, mask of pairs", mesh, "r", rows=(4, size), mask=torch.linspace(0, 1, 4 * size).reshape(4, size))
    case("mask of the batch", mesh, "b", mask=torch.arange(4 * 16).reshape(4, 1, 1, 16) % 5 > 0)
    if size == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        case("batch and heads", square, "bh", causal=True, sinks=True)
        case("sequence and heads", square, "sh", causal=True)
        case("batch and sequence", square, "bs", causal=True, sinks=True)
        case("replicated and heads", square, "rh", sinks=True, mask=additive)
        case("batch and replicated", square, "br", mask=additive)
        case("heads twice", square, "hh", causal=True)


def asynchronous() -> None:
    """What a tensor parallel layer gives: its redistribution is still under way."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = inputs(16, 16, batch=4, heads=(8, 4))
    q, k, v = (distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in tensors[:3])
    moved = [x.redistribute(placements=[Shard(2)], async_op=True) for x in (q, k, v)]
    o = oa.attention(*moved, causal=True)
    (o * distribute_tensor(tensors[3], mesh, [Shard(2)])).sum().backward()
    wanted = [x.clone().requires_grad_() for x in tensors[:3]]
    expected = oa.attention(*wanted, causal=True)
    (expected * tensors[3]).sum().backward()
    near("asynchronous o", o.full_tensor().detach(), expected.detach(), 2e-5)
    near("asynchronous dk", k.grad.full_tensor(), wanted[1].grad, 2e-5)
    say("asynchronous")


def packed() -> None:
    """Packed sequences, heads divided."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [x[0] for x in inputs(16, 16, batch=1, heads=(8, 4))]
    starts = torch.tensor([0, 5, 16], dtype=torch.int32)
    options: dict[str, Any] = {"max_seqlen_q": 11, "max_seqlen_k": 11, "causal": True}
    expected = oa.attention_varlen(*tensors[:3], cu_seqlens_q=starts, cu_seqlens_k=starts, **options)
    q, k, v = (distribute_tensor(x, mesh, [Shard(1)]) for x in tensors[:3])
    at = distribute_tensor(starts, mesh, [Replicate()])
    found = oa.attention_varlen(q, k, v, cu_seqlens_q=at, cu_seqlens_k=at, **options)
    near("packed", found.full_tensor(), expected, 1e-6)
    rows = distribute_tensor(tensors[0], mesh, [Shard(0)])
    with pytest.raises(ArgumentError, match=r"argument 'q'.*its rows.*ring_attention_varlen"):
        oa.attention_varlen(rows, k, v, cu_seqlens_q=at, cu_seqlens_k=at, **options)
    say("packed")


def refused() -> None:
    """What cannot be raises on every rank and says what to do."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    tensors = inputs(16, 16, batch=4, heads=(8, 4))
    plain = tensors[0]

    def of(text: str, x: Any = plain) -> Any:
        return distribute_tensor(x, mesh, places(text))

    q, k, v = (of("h", x) for x in tensors[:3])
    whole = [of("r", x) for x in tensors[:3]]
    sequence = [of("s", x) for x in tensors[:3]]
    partial = DTensor.from_local(plain, mesh, [Partial()])
    odd = distribute_tensor(torch.zeros(1, 4 * size + 1, 8, 16), mesh, [Shard(1)])
    mod = oa.ScoreMod("score + 1", reference=lambda score, b, h, q, k: score + 1)
    mask = distribute_tensor(torch.ones(16, 16), mesh, [Replicate()])
    for call, error, text in (
        (lambda: oa.attention(q, tensors[1], v), ArgumentError, "argument 'k': expected a DTensor"),
        (lambda: oa.attention(plain, k, v), ArgumentError, "argument 'q': expected a DTensor"),
        (lambda: oa.attention(q, k, v, sinks=torch.zeros(8)), ArgumentError, "argument 'sinks': expected a DTensor"),
        (lambda: oa.attention(of("d"), *whole[1:]), ArgumentError, "argument 'q'.*its head_dim"),
        (lambda: oa.attention(partial, *whole[1:]), ArgumentError, "argument 'q'.*Partial"),
        (lambda: oa.attention(q, of("s", tensors[1]), v), ArgumentError, "argument 'k'.*redistribute"),
        (lambda: oa.attention(sequence[0], *whole[1:]), ArgumentError, "argument 'k'.*redistribute"),
        (lambda: oa.attention(whole[0], k, v), ArgumentError, "argument 'k'"),
        (lambda: oa.attention(odd, odd, odd), ShapeError, "argument 'q': expected a length"),
        (lambda: oa.attention(q, k, v, out=q), UnsupportedError, "out with DTensors"),
        (lambda: oa.attention(q, k, v, score_mod=mod), UnsupportedError, "score_mod|ScoreMod"),
        (lambda: oa.attention(q, k, v, dropout_p=0.1, dropout_rng=(1, 2)), UnsupportedError, "dropout_rng"),
        (lambda: oa.attention(*sequence, mask=mask), UnsupportedError, "a mask over a sequence"),
        (lambda: oa.attention(*sequence, stream=1), ArgumentError, "argument 'stream'"),
        (lambda: oa.attention(*sequence, precision="int4"), ArgumentError, "argument 'precision'"),
        (lambda: oa.attention(q[0], k, v), ShapeError, "argument 'q'"),
        (lambda: oa.attention(q, k, v, layout="DHN"), ArgumentError, "argument 'layout'"),
        (lambda: oa.merge_states(q, q, q, q), UnsupportedError, "to_local"),
    ):
        with pytest.raises(error, match=text):
            call()
    three = distribute_tensor(torch.zeros(1, 4, 3, 16), mesh, [Replicate()])
    with pytest.raises(ShapeError, match=r"argument '[qk]': expected a multiple"):
        oa.attention(distribute_tensor(torch.zeros(1, 4, 6, 16), mesh, [Shard(2)]), three, three)
    say("refused")


SUITES: dict[str, tuple[Callable[[], None], ...]] = {"dtensor": (calls, asynchronous, packed, refused)}

if __name__ == "__main__":
    common.SUITES.update(SUITES)
    raise SystemExit(common.main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
