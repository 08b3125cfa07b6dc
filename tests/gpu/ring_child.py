"""Ring and head-parallel attention by NCCL: ``torchrun --nproc-per-node N ring_child.py``.

Every rank has the whole tensors, from one seed, and compares its part with attention on its own GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import omniattn as oa
from omniattn.distributed import (
    append_sharded,
    decode_sharded,
    local_seqlen,
    local_tokens,
    ring_attention,
    ring_attention_varlen,
    shard,
    ulysses_attention,
    unshard,
)

#: Largest difference of bf16 results, beside a rounding of each.
BOUNDS = {"o": 2e-2, "lse": 2e-3, "dq": 6e-2, "dk": 6e-2, "dv": 6e-2}
#: Largest relative L1 of a low precision, beside exact attention.
LOW_ERROR = 0.1


def say(text: str) -> None:
    """A line of this process, by one write."""
    os.write(1, f"rank {dist.get_rank()}: {text}\n".encode())


def near(name: str, found: Any, expected: Any, bound: float) -> None:
    """Equal within rounding, infinities where they belong. NaN fails."""
    assert found.shape == expected.shape, (name, found.shape, expected.shape)
    assert found.dtype == expected.dtype, (name, found.dtype, expected.dtype)
    if not found.numel():
        return
    assert torch.equal(torch.isinf(found), torch.isinf(expected)), name
    error = (found.double() - expected.double()).abs() - expected.double().abs() / 128
    worst = float(torch.where(torch.isinf(expected), 0.0, error).max())
    assert worst <= bound, f"{name}: {worst:.3e} > {bound:.3e}"


def relative_l1(found: Any, expected: Any) -> float:
    """Sum of all errors over that of all numbers."""
    return float((found.double() - expected.double()).abs().sum() / expected.double().abs().sum())


def like(name: str, found: Any, expected: Any, bound: float) -> None:
    """A relative L1 error within bounds. NaN fails."""
    error = relative_l1(found, expected)
    assert error <= bound, f"{name}: relative L1 {error:.3e} > {bound:.3e}"


def inputs(rows: int, heads: tuple[int, int], head_dim: int, batch: int = 2) -> list[Any]:
    """q, k, v and the gradient of o, the same on all ranks."""
    made = torch.Generator().manual_seed(rows)
    found = [torch.randn(batch, rows, h, head_dim, generator=made) for h in (heads[0], heads[1], heads[1], heads[0])]
    return [x.to("cuda", torch.bfloat16) for x in found]


def results(o: Any, lse: Any, do: Any, *leaves: Any) -> dict[str, Any]:
    """By name, after a backward through o."""
    (o * do).sum().backward()
    dq, dk, dv = (x.grad for x in leaves)
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def ring(
    name: str, rows: int, schedule: str, *, precision: str = "exact", head_dim: int = 128, batch: int = 2,
    heads: tuple[int, int] = (8, 2), **said: Any,
) -> None:  # fmt: skip
    """Forward, and for exact attention backward, of one call; twice, with the same bits."""
    tensors = inputs(rows, heads, head_dim, batch)
    wanted = [x.clone().requires_grad_() for x in tensors[:3]]
    expected = results(*oa.attention(*wanted, return_lse=True, **said), tensors[3], *wanted)
    found = []
    for _ in range(2):
        q, k, v = (shard(x, 1, schedule=schedule).requires_grad_() for x in tensors[:3])
        o, lse = ring_attention(
            q, k, v, schedule=schedule, seqlen_q=rows, seqlen_k=rows, return_lse=True, precision=precision,
            deterministic=True, **said,
        )  # fmt: skip
        found.append(results(o, lse, shard(tensors[3], 1, schedule=schedule), q, k, v))
    for key, x in found[0].items():
        assert torch.equal(x, found[1][key]), (name, key, "other bits at the second run")
        part = shard(expected[key], 2 if key == "lse" else 1, schedule=schedule)
        if precision == "exact":
            near(f"{name} {key}", x, part, BOUNDS[key])
        else:
            like(f"{name} {key}", x, part, LOW_ERROR)
    say(name)


def documents() -> None:
    """Packed documents of all lengths, some cut by ranks."""
    starts = [0, 70, 71, 900, 1500, 1536]
    tensors = [x[0] for x in inputs(starts[-1], (8, 2), 64, batch=1)]
    at = torch.tensor(starts, dtype=torch.int32, device="cuda")
    sizes = {"cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": 829, "max_seqlen_k": 829}
    wanted = [x.clone().requires_grad_() for x in tensors[:3]]
    expected = results(*oa.attention_varlen(*wanted, causal=True, return_lse=True, **sizes), tensors[3], *wanted)
    q, k, v = (shard(x, 0).requires_grad_() for x in tensors[:3])
    o, lse = ring_attention_varlen(q, k, v, cu_seqlens=starts, causal=True, return_lse=True)
    for key, x in results(o, lse, shard(tensors[3], 0), q, k, v).items():
        near(f"documents {key}", x, shard(expected[key], 1 if key == "lse" else 0), BOUNDS[key])
    say("documents")


def heads() -> None:
    """All-to-all over heads: what one rank has, of a low precision as near to exact attention."""
    size = dist.get_world_size()
    for precision in ("exact", "int8", "fp8"):
        tensors = inputs(1024, (8, size), 128)
        q, k, v = (shard(x, 1, schedule="contiguous") for x in tensors[:3])
        o = unshard(ulysses_attention(q, k, v, causal=True, precision=precision), 1, schedule="contiguous")
        expected = oa.attention(*tensors[:3], causal=True)
        bound = 5e-3
        if precision != "exact":
            # Of fewer heads another kernel may be the fastest, which rounds Q or P otherwise.
            alone = oa.attention(*tensors[:3], causal=True, precision=precision)
            bound = 1.2 * relative_l1(alone, expected)
        like(f"heads {precision}", o, expected, bound)
    say("heads")


def streams() -> None:
    """A call on a stream of the caller's, whose inputs are changed right after it: the stream orders both."""
    tensors = inputs(2048, (8, 2), 128)
    expected = shard(oa.attention(*tensors[:3], causal=True), 1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            q, k, v = (shard(x, 1).clone() for x in tensors[:3])
            o = ring_attention(q, k, v, causal=True)
            for x in (q, k, v):
                x.fill_(float("nan"))
    stream.synchronize()
    near("streams", o, expected, BOUNDS["o"])
    say("streams")


def queued() -> None:
    """Calls behind each other, of changing lengths, on two streams in turn: each reads what was sent then."""
    sizes = [(1024, 4096, 2048, 6144)[i % 4] + i % 3 * 2 for i in range(20)]
    wanted, sent, streams = [], [], [torch.cuda.Stream() for _ in range(2)]
    for rows in sizes:
        tensors = inputs(rows, (4, 2), 64)
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        wanted.append(results(*oa.attention(*leaves, causal=True, return_lse=True), tensors[3], *leaves))
        sent.append([shard(x, 1) for x in tensors])
    torch.cuda.synchronize()
    found = []
    for i, (q, k, v, do) in enumerate(sent):
        with torch.cuda.stream(streams[i // 3 % 2]):
            leaves = [x.requires_grad_() for x in (q, k, v)]
            said = {"seqlen_q": sizes[i], "seqlen_k": sizes[i], "causal": True}
            found.append(results(*ring_attention(*leaves, return_lse=True, **said), do, *leaves))
            with torch.no_grad():
                found[-1]["int8"] = ring_attention(q, k, v, precision="int8", **said)
    torch.cuda.synchronize()
    for rows, expected, here in zip(sizes, wanted, found, strict=True):
        like(f"queued int8 {rows}", here.pop("int8"), shard(expected["o"], 1), LOW_ERROR)
        for key, x in here.items():
            near(f"queued {rows} {key}", x, shard(expected[key], 2 if key == "lse" else 1), BOUNDS[key])
    say("queued")


def graph() -> None:
    """A ring captured in a CUDA graph, replayed with other inputs; the same bits as without it."""
    for precision in ("exact", "int8"):
        held = [shard(x, 1) for x in inputs(1024, (8, 2), 128)[:3]]
        ring_attention(*held, causal=True, precision=precision)  # kernels are loaded, and ranks have met
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            o = ring_attention(*held, causal=True, precision=precision)
        for rows in (1024, 1026):
            fresh = [shard(x[:, :1024], 1) for x in inputs(rows, (8, 2), 128)[:3]]
            for old, new in zip(held, fresh, strict=True):
                old.copy_(new)
            captured.replay()
            expected = ring_attention(*fresh, causal=True, precision=precision)
            assert torch.equal(o, expected), (precision, rows)
    say("graph")


def destroyed() -> None:
    """A group that is destroyed while its calls are queued: they end, with their results; others work on."""
    tensors = inputs(2048, (8, 2), 128)
    expected = shard(oa.attention(*tensors[:3], causal=True), 1)
    q, k, v = (shard(x, 1) for x in tensors[:3])
    for number in range(3):
        group = dist.new_group()
        ring_attention(q, k, v, causal=True, group=group)  # ranks have met
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)  # 25 ms
        o = ring_attention(q, k, v, causal=True, group=group)
        dist.destroy_process_group(group)
        torch.cuda.synchronize()
        near(f"destroyed {number}", o, expected, BOUNDS["o"])
        near(f"destroyed, another {number}", ring_attention(q, k, v, causal=True), expected, BOUNDS["o"])
    say("destroyed")


def caches() -> None:
    """Sharded caches: pages and contiguous memory, one and three queries, within a CUDA graph; beside one cache."""
    lengths = [700, 3, 1, 2047]
    batch, size = len(lengths), dist.get_world_size()
    made = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> Any:
        return torch.randn(*shape, generator=made).to("cuda", torch.bfloat16)

    def int32(*values: Any) -> Any:
        return torch.tensor(*values, dtype=torch.int32, device="cuda")

    starts = int32([0, *torch.tensor(lengths).cumsum(0).tolist()])
    k, v = (numbers(int(sum(lengths)), 2, 128) for _ in range(2))
    for paged, q_len, heads in ((True, 1, "all"), (True, 3, "own"), (False, 1, "own"), (False, 2, "all")):
        blocks, block = -(-2200 // 16), 16
        whole = oa.KVCache(batch, 2200, 2, 128, like=k)
        table = {}
        if paged:
            part = oa.PagedKVCache(batch * blocks, block, 2, 128, like=k)
            table["block_table"] = int32(range(batch * blocks)).view(batch, blocks).flip(0).contiguous()
        else:
            part = oa.KVCache(batch, 2200, 2, 128, like=k)
        seq_lens = int32(lengths)
        oa.append(whole, k, v, seq_lens=seq_lens, cu_seqlens=starts)
        append_sharded(part, k, v, seq_lens=seq_lens, cu_seqlens=starts, **table)
        fresh, q = numbers(batch, q_len, 2, 128), numbers(batch, q_len, 8, 128)
        newest = fresh.flip(0).contiguous()

        def step() -> Any:
            tokens = local_tokens(seq_lens, q_len=q_len)  # noqa: B023
            append_sharded(part, fresh, newest, seq_lens=tokens, **table)  # noqa: B023
            return decode_sharded(
                q, part, seq_lens=tokens, heads=heads, return_lse=True, **table  # noqa: B023
            )  # fmt: skip

        own = slice(None) if heads == "all" else slice(dist.get_rank() * 8 // size, (dist.get_rank() + 1) * 8 // size)
        captured, found = None, None
        for number in range(3):
            seq_lens += q_len
            oa.append(whole, fresh, newest, seq_lens=seq_lens)
            if captured is not None:
                captured.replay()
            else:
                found = step()
            o, lse = oa.decode(q, whole, seq_lens=seq_lens, return_lse=True)
            near(f"caches {paged} {q_len} {number} o", found[0], o[:, :, own], BOUNDS["o"])
            near(f"caches {paged} {q_len} {number} lse", found[1], lse[:, own], BOUNDS["lse"])
            if captured is None:
                captured = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                    found = step()
    latent, part = (oa.KVCache(2, 600, 1, 576, like=k, head_dim_v=512) for _ in range(2))
    seq_lens, rows, q = int32([600, 77]), numbers(2, 77, 1, 576), numbers(2, 1, 16, 576)
    for cache, add in ((latent, oa.append), (part, append_sharded)):
        add(cache, rows, seq_lens=int32([77, 77]))
        add(cache, numbers_of(q, 523), seq_lens=seq_lens, cu_seqlens=int32([0, 523, 523]))
    for heads in ("all", "own"):
        own = slice(None) if heads == "all" else slice(dist.get_rank() * 16 // size, (dist.get_rank() + 1) * 16 // size)
        found = decode_sharded(q, part, seq_lens=seq_lens, heads=heads)
        near(f"caches latent {heads}", found, oa.decode(q, latent, seq_lens=seq_lens)[:, :, own], BOUNDS["o"])
    assert local_seqlen(7) in (7 // size, -(-7 // size))
    say("caches")


def numbers_of(like: Any, rows: int) -> Any:
    """Latent rows, the same for equal q."""
    return like[:1, 0, :1].expand(rows, 1, -1) * torch.linspace(-1.0, 1.0, rows, device="cuda")[:, None, None].to(like)


def dtensors() -> None:
    """DTensors: batch, heads or sequence divided."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    tensors = inputs(512, (8, 4), 128, batch=4)
    wanted = [x.clone().requires_grad_() for x in tensors[:3]]
    expected = results(*oa.attention(*wanted, causal=True, return_lse=True), tensors[3], *wanted)
    for dim in (0, 1, 2):
        q, k, v, do = (distribute_tensor(x, mesh, [Shard(dim)]) for x in tensors)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        o, lse = oa.attention(q, k, v, causal=True, return_lse=True)
        (o * do).sum().full_tensor().backward()
        found = {"o": o.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
        for key, x in found.items():
            near(f"dtensors {dim} {key}", x.full_tensor(), expected[key], BOUNDS[key])
    say("dtensors")


def meshes() -> None:
    """Two dimensions: heads over one and a ring over the other; DTensors whose dimensions both are divided."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("ring", "heads"))
    for schedule, rows in (("zigzag", 1024), ("contiguous", 777)):
        tensors = inputs(rows, (8, 2), 128)
        wanted = [x.clone().requires_grad_() for x in tensors[:3]]
        expected = results(*oa.attention(*wanted, causal=True, return_lse=True), tensors[3], *wanted)

        def part(x: Any, dim: int = 1, schedule: str = schedule) -> Any:
            rows_of_ring = shard(x, dim, group=mesh["ring"], schedule=schedule)
            return shard(rows_of_ring, dim, group=mesh["heads"], schedule="contiguous")

        q, k, v = (part(x).requires_grad_() for x in tensors[:3])
        o, lse = ulysses_attention(
            q, k, v, group=mesh["heads"], ring_group=mesh["ring"].get_group(), schedule=schedule, seqlen_q=rows,
            seqlen_k=rows, causal=True, return_lse=True,
        )  # fmt: skip
        for key, x in results(o, lse, part(tensors[3]), q, k, v).items():
            near(f"meshes {schedule} {key}", x, part(expected[key], 2 if key == "lse" else 1), BOUNDS[key])
    tensors = inputs(512, (8, 4), 128, batch=4)
    wanted = [x.clone().requires_grad_() for x in tensors[:3]]
    expected = results(*oa.attention(*wanted, causal=True, return_lse=True), tensors[3], *wanted)
    for places in ([Shard(0), Shard(2)], [Shard(1), Shard(2)], [Shard(0), Shard(1)], [Replicate(), Shard(2)]):
        q, k, v, do = (distribute_tensor(x, mesh, places) for x in tensors)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        o, lse = oa.attention(q, k, v, causal=True, return_lse=True)
        (o * do).sum().full_tensor().backward()
        found = {"o": o.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
        for key, x in found.items():
            near(f"meshes {places} {key}", x.full_tensor(), expected[key], BOUNDS[key])
    say("meshes")


def main() -> None:
    """Every case once."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=device)
    for schedule in ("zigzag", "contiguous"):
        for causal in (True, False):
            ring(f"{schedule} causal={causal} 1024", 1024, schedule, causal=causal)
            ring(f"{schedule} causal={causal} 777", 777, schedule, causal=causal, head_dim=64)
        ring(f"{schedule} window", 1024, schedule, causal=True, window=(300, -1))
        ring(f"{schedule} softcap", 512, schedule, causal=True, softcap=20.0)
        for precision in ("int8", "fp8"):
            ring(f"{schedule} {precision}", 1024, schedule, causal=True, precision=precision)
            ring(f"{schedule} {precision} 777", 777, schedule, causal=True, precision=precision)
            # A view of one head's scales may begin anywhere.
            one = {"precision": precision, "batch": 1, "heads": (1, 1), "causal": True}
            ring(f"{schedule} {precision} one head", 256 * dist.get_world_size(), schedule, **one)
    ring("three rows", 3, "zigzag", causal=True)
    ring("own keys in two parts", 2304 * dist.get_world_size(), "zigzag", causal=True, batch=1, heads=(16, 16))
    parts: tuple[Callable[[], None], ...] = (documents, heads, streams, queued, destroyed, caches, dtensors, graph)
    for part in (*parts, *((meshes,) if dist.get_world_size() == 4 else ())):
        part()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
