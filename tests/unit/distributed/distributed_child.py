"""Ring and head-parallel attention in several processes: ``python distributed_child.py STORE SIZE SUITES``.

STORE is a new file, SUITES are names with commas between them. Every process has the whole tensors, from one seed, and
compares its part with attention on one process.
"""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import omniattn as oa
from omniattn.distributed import plan, ring_attention, ring_attention_varlen, shard, steps, ulysses_attention, unshard
from omniattn.errors import ArgumentError, CommunicationError, ShapeError, UnsupportedError

sys.path.insert(0, str(Path(__file__).resolve().parent))

import parts_cases

#: Time-out of the group that loses a rank, in seconds.
LOST_S = 5
SEQ = {"NHD": 1, "HND": 2}


def say(text: str) -> None:
    """A line of this process, by one write."""
    sys.stdout.write(f"rank {dist.get_rank()}: {text}\n")
    sys.stdout.flush()


def inputs(
    rows_q: int, rows_k: int, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (16, 16), batch: int = 2,
    dtype: Any = torch.float32, layout: str = "NHD",
) -> list[Any]:  # fmt: skip
    """q, k, v and the gradient of o; the same on all ranks."""
    made = torch.Generator().manual_seed(rows_q * 31 + rows_k)
    shapes = [(rows_q, heads[0], dims[0]), (rows_k, heads[1], dims[0]), (rows_k, heads[1], dims[1])]
    shapes.append((rows_q, heads[0], dims[1]))
    found = [torch.randn(batch, *shape, generator=made).to(dtype) for shape in shapes]
    return [x.transpose(1, 2).contiguous() if layout == "HND" else x for x in found]


def near(name: str, found: Any, expected: Any, bound: float) -> None:
    """Equal within rounding, infinities where they belong. NaN fails."""
    assert found.shape == expected.shape, (name, found.shape, expected.shape)
    assert found.dtype == expected.dtype, (name, found.dtype, expected.dtype)
    if not found.numel():
        return
    assert torch.equal(torch.isinf(found), torch.isinf(expected)), name
    error = (found.double() - expected.double()).nan_to_num(nan=torch.inf if torch.isnan(found).any() else 0.0)
    assert float(error.abs().max()) <= bound, f"{name}: {float(error.abs().max()):.3e} > {bound:.3e}"


def alone(tensors: list[Any], sinks: Any, **options: Any) -> dict[str, Any]:
    """o, LSE and gradients of one process; the LSE has a gradient too."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    sinks = None if sinks is None else sinks.clone().requires_grad_()
    o, lse = oa.attention(q, k, v, sinks=sinks, return_lse=True, **options)
    return results(o, lse, tensors[3], q, k, v, sinks)


def results(o: Any, lse: Any, do: Any, q: Any, k: Any, v: Any, sinks: Any) -> dict[str, Any]:
    """By name, after a backward through o and the finite part of LSE."""
    ((o * do).sum() + 0.1 * torch.where(torch.isinf(lse), 0.0, lse).sum()).backward()
    found = {"o": o.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return found if sinks is None else {**found, "dsinks": sinks.grad}


def compare(found: dict[str, Any], expected: dict[str, Any], schedule: str, seq: int, bound: float) -> None:
    """Parts of this rank with those of the whole."""
    for name, x in found.items():
        if name == "dsinks":
            total = x.clone()
            dist.all_reduce(total)
            near(name, total, expected[name], bound * 8)
            continue
        dim = 2 if name == "lse" else seq
        near(name, x, shard(expected[name], dim, schedule=schedule), bound)


def case(name: str, rows: tuple[int, int], *, sinks: bool = False, bound: float = 2e-5, **said: Any) -> None:
    """Forward and backward of one call."""
    shape = {key: said.pop(key) for key in ("heads", "dims", "batch", "dtype") if key in said}
    layout, schedule = said.get("layout", "NHD"), said.pop("schedule", "zigzag")
    tensors = inputs(*rows, layout=layout, **shape)
    sink = torch.linspace(-1.0, 2.0, 4) if sinks else None
    expected = alone(tensors, sink, **said)
    seq = SEQ[layout]
    q, k, v, do = (shard(x, seq, schedule=schedule) for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sink = None if sink is None else sink.requires_grad_()
    o, lse = ring_attention(
        q, k, v, sinks=sink, schedule=schedule, seqlen_q=rows[0], seqlen_k=rows[1], return_lse=True, **said
    )
    compare(results(o, lse, do, q, k, v, sink), expected, schedule, seq, bound)
    say(name)


def ring() -> None:
    """Schedules, masks, heads, lengths that do not divide, ranks without a token."""
    for schedule in ("zigzag", "contiguous"):
        for causal in (True, False):
            case(f"{schedule} {causal} equal", (48, 48), causal=causal, schedule=schedule)
            case(f"{schedule} {causal} uneven", (45, 45), causal=causal, schedule=schedule, layout="HND")
            case(f"{schedule} {causal} few", (3, 3), causal=causal, schedule=schedule, sinks=True)
        case(f"{schedule} more keys", (21, 50), causal=True, schedule=schedule, sinks=True)
        case(f"{schedule} fewer keys", (50, 21), causal=True, schedule=schedule)
        case(f"{schedule} no queries", (0, 9), schedule=schedule)
        case(f"{schedule} no keys", (9, 0), schedule=schedule, sinks=True)
        case(f"{schedule} window", (64, 64), causal=True, window=(9, -1), schedule=schedule, sinks=True)
        case(f"{schedule} both sides", (61, 61), window=(5, 7), schedule=schedule, softcap=5.0)
        case(f"{schedule} dims", (32, 32), causal=True, schedule=schedule, heads=(4, 1), dims=(16, 24))
        # Of such heads a rank's own step of the backward is in two parts.
        own: dict[str, Any] = {"heads": (4, 4), "dims": (16, 24), "causal": True, "schedule": schedule}
        for rows in (40, 37):
            case(f"{schedule} own {rows}", (rows, rows), sinks=True, **own)
            case(f"{schedule} own bf16 {rows}", (rows, rows), dtype=torch.bfloat16, bound=0.06, **own)
        case(f"{schedule} bf16", (48, 48), causal=True, schedule=schedule, dtype=torch.bfloat16, bound=0.06)
    case("float64", (33, 33), causal=True, dtype=torch.float64, bound=5e-6, softmax_scale=0.3)


def documents(name: str, starts: list[int], schedule: str, sinks: bool = False, **said: Any) -> None:
    """Forward and backward of packed documents."""
    layout, bound = said.get("layout", "NHD"), said.pop("bound", 2e-5)
    tensors = [x[0] for x in inputs(starts[-1], starts[-1], batch=1, layout=layout)]
    seq = SEQ[layout] - 1
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    sink = torch.linspace(-1.0, 2.0, 4).requires_grad_() if sinks else None
    at = torch.tensor(starts, dtype=torch.int32)
    longest = max(b - a for a, b in itertools.pairwise(starts))
    o, lse = oa.attention_varlen(
        q, k, v, cu_seqlens_q=at, cu_seqlens_k=at, max_seqlen_q=longest, max_seqlen_k=longest, sinks=sink,
        return_lse=True, **said,
    )  # fmt: skip
    expected = results(o, lse, tensors[3], q, k, v, sink)
    q, k, v, do = (shard(x, seq, schedule=schedule) for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sink = None if sink is None else sink.detach().requires_grad_()
    cu = (starts, at, at.numpy())[len(starts) % 3]
    o, lse = ring_attention_varlen(q, k, v, cu_seqlens=cu, sinks=sink, schedule=schedule, return_lse=True, **said)
    found = results(o, lse, do, q, k, v, sink)
    for key, x in found.items():
        if key == "dsinks":
            dist.all_reduce(x)
            near(key, x, expected[key], bound * 8)
        else:
            near(f"{name} {key}", x, shard(expected[key], 1 if key == "lse" else seq, schedule=schedule), bound)
    say(name)


def varlen() -> None:
    """Documents of all lengths, cut by ranks and not."""
    for schedule in ("zigzag", "contiguous"):
        for layout in SEQ:
            name = f"{schedule} {layout}"
            documents(f"{name} causal", [0, 5, 5, 29, 30, 64], schedule, causal=True, layout=layout)
            documents(f"{name} full", [0, 17, 41], schedule, sinks=True, layout=layout)
        documents(f"{schedule} packed window", [0, 3, 40, 64], schedule, causal=True, window=(7, -1), sinks=True)
        documents(f"{schedule} one", [0, 33], schedule, causal=True, softcap=4.0)
        documents(f"{schedule} short", [0, 1, 2, 3], schedule, causal=True)
    q, k, v = (shard(x[0], 0) for x in inputs(32, 32, batch=1)[:3])
    for starts, text in (
        ([0, 64], "rows: rank"),
        ([0, 9, 4, 32], "argument 'cu_seqlens'"),
        ([0, 1.5, 32], "cu_seqlens"),
    ):
        with pytest.raises(ArgumentError, match=text):
            ring_attention_varlen(q, k, v, cu_seqlens=starts)
    say("documents refused")


def skipped() -> None:
    """Lengths by default, the same bits again, bytes as planned, a gradient of K alone, the whole tensor again."""
    tensors = inputs(32, 32)
    q, k, v = (shard(x, 1) for x in tensors[:3])
    facts = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "batch": 2, "dtype": "float32"}
    told = plan(32, dist.get_world_size(), causal=True, **facts).ranks[dist.get_rank()]
    watched = Watched()
    o = ring_attention(q, k, v, causal=True)
    kinds = {torch.float32} if dist.get_world_size() > 1 else set()
    assert (watched.received, watched.end()) == (sum(step.bytes_forward for step in told), kinds)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    total = ring_attention(q, k, v, causal=True).sum()
    watched = Watched()
    total.backward()
    assert (watched.received, watched.end()) == (sum(step.bytes_backward for step in told), kinds)
    q, k, v = (x.detach() for x in (q, k, v))
    assert not o.requires_grad
    whole = unshard(o, 1)
    near("whole", whole, oa.attention(*tensors[:3], causal=True), 2e-5)
    again = ring_attention(q, k, v, causal=True)
    assert torch.equal(o, again)
    k = k.requires_grad_()
    o = ring_attention(q, k, v, causal=True, deterministic=True)
    total = unshard(o, 1)
    (total * tensors[3]).sum().backward()
    leaf = tensors[1].clone().requires_grad_()
    (oa.attention(tensors[0], leaf, tensors[2], causal=True) * tensors[3]).sum().backward()
    near("dk", k.grad / dist.get_world_size(), shard(leaf.grad, 1), 2e-5)
    say("defaults and unshard")
    fused = torch.stack([shard(x, 1) for x in inputs(32, 32, heads=(4, 4))[:3]], 3).requires_grad_()
    o = ring_attention(*fused.unbind(3), causal=True)
    o.sum().backward()
    leaves = [x.requires_grad_() for x in inputs(32, 32, heads=(4, 4))[:3]]
    oa.attention(*leaves, causal=True).sum().backward()
    near("views of one tensor", fused.grad, torch.stack([shard(x.grad, 1) for x in leaves], 3), 2e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = ring_attention(q, k, v, causal=True, return_lse=True)
        whole, of_whole = oa.attention(*tensors[:3], causal=True, return_lse=True)
    near("autocast", o, shard(whole, 1), 0.05)
    near("autocast lse", lse, shard(of_whole, 2), 0.05)
    x = torch.arange(7.0).requires_grad_()
    back = unshard(shard(x, 0, schedule="contiguous"), -1, schedule="contiguous", seqlen=7)
    assert torch.equal(back, x)
    say("uneven unshard")


def errors() -> None:
    """Wrong arguments raise on every rank, and nobody waits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v, _ = (shard(x, 1) for x in inputs(32, 32))

    def raised(kind: type[Exception], text: str, *args: Any, **options: Any) -> None:
        with pytest.raises(kind, match=re.escape(text)):
            ring_attention(*args, **options)

    raised(ShapeError, "argument 'q': expected", q, k, v, seqlen_q=200 + size)
    raised(ArgumentError, "argument 'schedule'", q, k, v, schedule="striped")
    raised(ArgumentError, "argument 'precision'", q, k, v, precision="int4")
    raised(UnsupportedError, "a window with a low precision", q, k, v, precision="int8", window=(4, 0))
    raised(ArgumentError, "argument 'agree_first'", q, k, v, agree_first=1)
    raised(ArgumentError, "argument 'agree_first': expected True or False", q, k, v, agree_first=torch.ones(2))
    raised(ArgumentError, "argument 'v': expected a torch tensor", q, k, v.numpy())
    if size == 1:
        return
    # One rank alone is wrong.
    if rank == 0:
        raised(ArgumentError, "argument 'window'", q, k, v, window=(-5, 0))
    else:
        raised(CommunicationError, "rank 0 refused", q, k, v)
    raised(ArgumentError, "argument 'softcap': expected the same on all ranks", q, k, v, softcap=float(rank == 1))
    odd = [x[:, :-1] if rank == 0 else x for x in (q, k, v)]
    raised(ArgumentError, "argument 'seqlen_q': expected the same on all ranks", *odd, schedule="contiguous")
    # Refusals of what comes first: the other ranks are told, too.
    for wrong, said in (((None, k, v), {}), ((q.numpy(), k, v), {}), ((q, k, v), {"agree_first": "yes"})):
        if rank == 0:
            raised(ArgumentError, "argument ", *wrong, **said)
        else:
            raised(CommunicationError, "rank 0 refused", q, k, v)
    raised(ArgumentError, "ring_attention(): argument 'softcap'", q, k, v, softcap=1e-40)
    raised(ArgumentError, "'exact', 'int8', 'fp8', an Int8 or an Fp8, received 'int3'", q, k, v, precision="int3")
    if rank == 0:
        with torch.no_grad():
            ring_attention(q, k, v)
    else:
        ring_attention(q, k, v)  # no tensor has a gradient in either
    near("after errors", ring_attention(q, k, v), shard(oa.attention(*inputs(32, 32)[:3]), 1), 2e-5)
    say("errors")


def lost() -> None:
    """A rank that raises within a call: the others end with an error that says where, by the group's time-out."""
    q, k, v = (shard(x, 1) for x in inputs(32, 32)[:3])
    if dist.get_rank() == 0:
        steps.attention_beside = broken
    kind, text = (
        (ZeroDivisionError, "lost") if dist.get_rank() == 0 else (CommunicationError, "): step 1 of 1, K and V")
    )
    with pytest.raises(kind, match=re.escape(text)):
        thrice(q, k, v)
    say("lost")
    # The process stays until the others have seen that it does not answer.
    time.sleep(2 * LOST_S if dist.get_rank() == 0 else 0)


def thrice(q: Any, k: Any, v: Any) -> None:
    """A rank that raises has begun to send before: its own error comes in the first call, that of others later."""
    for _ in range(3):
        ring_attention(q, k, v, agree_first=False)


def broken(*args: Any, **options: Any) -> Any:
    """In place of `attention_beside`."""
    raise ZeroDivisionError("lost")


def heads(name: str, rows: tuple[int, int], mesh: Any = None, *, sinks: bool = False, **said: Any) -> None:
    """Forward and backward of one call of `ulysses_attention`; mesh: a ring beside it."""
    shape = {key: said.pop(key) for key in ("heads", "dims", "batch", "dtype") if key in said}
    layout, schedule, bound = said.get("layout", "NHD"), said.pop("schedule", "zigzag"), said.pop("bound", 2e-5)
    tensors = inputs(*rows, layout=layout, **shape)
    seq = SEQ[layout]
    sink = torch.linspace(-1.0, 2.0, 4) if sinks else None
    expected = alone(tensors, sink, **said)

    def part(x: Any, dim: int) -> Any:
        if mesh is None:
            return shard(x, dim, schedule="contiguous")
        return shard(
            shard(x, dim, group=mesh["ring"], schedule=schedule), dim, group=mesh["heads"], schedule="contiguous"
        )

    q, k, v, do = (part(x, seq) for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sink = None if sink is None else sink.requires_grad_()
    groups = (
        {} if mesh is None else {"group": mesh["heads"], "ring_group": mesh["ring"].get_group(), "schedule": schedule}
    )
    o, lse = ulysses_attention(
        q, k, v, sinks=sink, seqlen_q=rows[0], seqlen_k=rows[1], return_lse=True, **said, **groups
    )
    for key, x in results(o, lse, do, q, k, v, sink).items():
        if key == "dsinks":
            dist.all_reduce(x)
            near(key, x, expected[key], bound * 8)
        else:
            near(f"{name} {key}", x, part(expected[key], 2 if key == "lse" else seq), bound)
    say(name)


def ulysses() -> None:
    """Heads over ranks; with four of them also two by two, heads and ring."""
    size = dist.get_world_size()
    heads("equal", (32, 32), causal=True)
    heads("uneven", (33, 33), causal=True, layout="HND", sinks=True)
    heads("few", (3, 3), causal=True)
    heads("cross", (21, 40), causal=True, window=(9, -1), softcap=6.0)
    heads("one kv head", (32, 32), heads=(4, 1), dims=(16, 24), causal=True)
    heads("all kv heads", (32, 32), heads=(4, 4), batch=1, causal=True)
    heads("heads of bf16", (48, 48), causal=True, dtype=torch.bfloat16, bound=0.06)
    q, k, v = (shard(x, 1, schedule="contiguous") for x in inputs(128, 128, dims=(64, 64))[:3])
    o = ulysses_attention(q, k, v, precision="int8", causal=True)
    whole = oa.attention(*inputs(128, 128, dims=(64, 64))[:3], precision="int8", causal=True)
    assert torch.equal(o, shard(whole, 1, schedule="contiguous"))
    say("heads of int8")
    o = ulysses_attention(q, k, v, precision=oa.Int8(pv="exact"))
    whole = oa.attention(*inputs(128, 128, dims=(64, 64))[:3], precision=oa.Int8(pv="exact"))
    assert torch.equal(o, shard(whole, 1, schedule="contiguous"))
    if size > 1:
        with pytest.raises(ArgumentError, match="argument 'ring_group': expected a group that has no rank but this"):
            ulysses_attention(q, k, v, ring_group=dist.group.WORLD)
    for bad, text in (
        (q[:, :, :3], "argument 'q': expected a multiple"),
        (q[..., :12], "argument 'q': expected head_dim"),
    ):
        with pytest.raises(ShapeError, match=text):
            ulysses_attention(bad, k[:, :, :1], v[:, :, :1])
    for wrong in ({"schedule": "striped"}, {"schedule": torch.ones(2)}, {"agree_first": 1}, {"agree_first": "no"}):
        with pytest.raises(ArgumentError, match=rf"ulysses_attention\(\): argument '{next(iter(wrong))}'"):
            ulysses_attention(q, k, v, **wrong)
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
        for schedule in ("zigzag", "contiguous"):
            heads(f"mesh {schedule}", (48, 48), mesh, causal=True, schedule=schedule, sinks=True)
            heads(f"mesh {schedule} uneven", (45, 45), mesh, causal=True, schedule=schedule, window=(9, -1))
        with pytest.raises(
            ArgumentError if dist.get_rank() == 3 else CommunicationError, match=r"refused|argument 'window'"
        ):
            ulysses_attention(
                q, k, v, group=mesh["heads"], ring_group=mesh["ring"], window=(-3, 0) if dist.get_rank() == 3 else None
            )
        with pytest.raises(ArgumentError, match="a mesh of 2 dimensions"):
            ring_attention(q, k, v, group=mesh)
    say("heads refused")


def low(name: str, rows: int, precision: Any, *, sinks: bool = False, **said: Any) -> None:
    """Forward and backward with 8 bits on the wire: as near to exact attention as one process with the same knobs."""
    layout, schedule = said.get("layout", "NHD"), said.pop("schedule", "zigzag")
    tensors = inputs(rows, rows, dims=(64, 64), layout=layout)
    tensors[1] = tensors[1] + torch.linspace(-3.0, 3.0, 64)
    sink = torch.linspace(-1.0, 2.0, 4) if sinks else None
    exact, single = alone(tensors, sink, **said), alone(tensors, sink, precision=precision, **said)
    seq = SEQ[layout]
    q, k, v, do = (shard(x, seq, schedule=schedule) for x in tensors)
    watched = Watched()
    said |= {"precision": precision, "schedule": schedule, "seqlen_q": rows, "seqlen_k": rows}
    plain = ring_attention(q, k, v, sinks=sink, **said)
    kinds, received = watched.end(), watched.received
    size, rank = dist.get_world_size(), dist.get_rank()
    facts = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "batch": 2, "dtype": "float32"}
    told = plan(rows, size, causal=said.get("causal", False), precision=precision, schedule=schedule, **facts)
    assert received == sum(step.bytes_forward for step in told.ranks[rank])
    values = {torch.float16} if getattr(precision, "pv", "") == "fp16" else set()
    assert kinds <= {torch.int8, torch.uint8, torch.float32} | values, kinds
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sink = None if sink is None else sink.requires_grad_()
    o, lse = ring_attention(q, k, v, sinks=sink, return_lse=True, **said)
    assert torch.equal(plain, o)
    for key, x in results(o, lse, do, q, k, v, sink).items():
        if key == "dsinks":
            dist.all_reduce(x)
        whole = exact[key], single[key]
        here = whole if key == "dsinks" else [shard(y, 2 if key == "lse" else seq, schedule=schedule) for y in whole]
        error, bound = (float((y - here[0]).norm() / exact[key].norm()) for y in (x, here[1]))
        assert error <= 1.5 * bound + 2e-3, f"{name} {key}: {error:.3e}, of one process {bound:.3e}"
    say(name)


class Watched:
    """Element types of what travels, and bytes that come, until `end`."""

    def __init__(self) -> None:
        self.kinds: set[Any] = set()
        self.received = 0
        self.before = steps.exchange
        steps.exchange = self

    def __call__(self, group: Any, sends: Any, receives: Any, *others: Any) -> Any:
        """In place of `exchange`."""
        self.kinds |= {x.dtype for x, _ in (*sends, *receives)}
        self.received += sum(x.nbytes for x, _ in receives)
        return self.before(group, sends, receives, *others)

    def end(self) -> set[Any]:
        """The types seen."""
        steps.exchange = self.before
        return self.kinds


def eight_bits() -> None:
    """int8 and fp8, knobs, chunks with whole groups of scales, and lengths that no tile divides."""
    whole = 256 * dist.get_world_size()
    low("int8 whole groups", whole, "int8", causal=True, sinks=True)
    low("int8 whole groups, full", whole, oa.Int8(pv="fp16", granularity="per_token"))
    low("fp8 whole groups", whole, "fp8", causal=True, layout="HND")
    low("int8 full, odd", 301, "int8")
    low("int8 causal", 256, "int8", causal=True)
    low("int8 full", 300, "int8", schedule="contiguous")
    low("int8 sinks", 131, "int8", causal=True, sinks=True, layout="HND")
    low("int8 few", 3, "int8", causal=True)
    low("Int8 knobs", 200, oa.Int8(smooth_k=False, granularity="per_block", pv="fp16", hadamard=True), softcap=3.0)
    low("fp8 causal", 256, "fp8", causal=True)
    low("Fp8 knobs", 150, oa.Fp8(smooth_k=True, hadamard=False), schedule="contiguous", causal=True)
    q, k, v = (shard(x, 1) for x in inputs(64, 64)[:3])
    exact = ring_attention(q, k, v, causal=True)
    assert torch.equal(ring_attention(q, k, v, causal=True, precision=oa.Int8(min_seqlen=100)), exact)
    for said, text in (
        ({"precision": "int8", "softcap": 2.0}, "softcap with smooth_k"),
        ({"precision": oa.Int8(smooth_q=True)}, "smooth_q"),
        ({"precision": oa.Int8(pv="exact")}, "pv='exact'"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            ring_attention(q, k, v, **said)
    with pytest.raises(UnsupportedError, match="causal with 64 queries"):
        ring_attention(q, k[:, :1], v[:, :1], causal=True, precision="int8")
    with pytest.raises(ShapeError, match="argument 'v': expected head_dim 16"):
        ring_attention(q, k, v[..., :8], precision="int8")
    say("8 bits refused")


SUITES: dict[str, tuple[Callable[[], None], ...]] = {
    "ring": (ring, skipped, errors, partial(parts_cases.run, say)),
    "varlen": (varlen,),
    "ulysses": (ulysses,),
    "eight_bits": (eight_bits,),
    "lost": (lost,),
}


def work(rank: int, size: int, store: str, suite: str) -> None:
    """One process: all cases of some suites."""
    limit = timedelta(seconds=LOST_S if suite == "lost" else 120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    torch.set_num_threads(1)
    for part in (part for name in suite.split(",") for part in SUITES[name]):
        part()
    if suite != "lost":
        dist.barrier()
    dist.destroy_process_group()


def main(store: str, size: int, suite: str) -> int:
    """The exit status: 0 if all processes found the results of one, a signal's number if one ended by that."""
    faulthandler.enable()
    start = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    processes = [start.Process(target=work, args=(rank, size, store, suite)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
