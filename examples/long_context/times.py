"""Times of omniattn.distributed on the GPUs of a machine, beside one of them.

python examples/long_context/times.py                    # starts itself on all GPUs
python examples/long_context/times.py --gpus 2 --seqlen 8192 32768 --out times.json
python examples/long_context/times.py --small            # two processes on the CPU, tiny shapes, seconds
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import omniattn as oa
from omniattn.bench.document import document, environment, reference_environment, write
from omniattn.distributed import (
    append_sharded,
    decode_sharded,
    local_seqlen,
    local_tokens,
    ring_attention,
    shard,
    ulysses_attention,
    unshard,
)

#: Relative L1 of what all ranks give beside one of them, at most; of 8 bits beside exact attention of one.
LARGEST_ERROR, LARGEST_LOW_ERROR = 2e-2, 0.1
#: How long the GPUs are kept busy before the clock starts, so that launches are queued by then.
BUSY_MS = 25.0
FORWARD, TRAINING, DECODE = "forward", "forward + backward", "decode"


@dataclass(frozen=True)
class Shape:
    """Causal self-attention of batch 1, or a step of decoding from caches with ``seqlen`` tokens each."""

    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    batch: int = 1

    @property
    def name(self) -> str:
        """As tables call it."""
        return f"b{self.batch} h{self.heads}/{self.kv_heads} s{self.seqlen} d{self.head_dim}"


#: A call of this rank's part, and its result, as the whole tensor that one rank has.
Call = tuple[Callable[[], Any], Callable[[Any], Tensor]]


class Device:
    """The GPU of this process, or the CPU."""

    def __init__(self, small: bool) -> None:
        self.on_gpu = not small
        self.name = "cuda" if self.on_gpu else "cpu"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.mark = torch.zeros(1, device=self.name)

    def sync(self) -> None:
        """Wait for all that is queued."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def time(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Milliseconds of a call, from a point that all GPUs have reached, and of the host in it.

        The same call goes ahead: after a pause of some tens of milliseconds the first transfer takes 0.08 ms longer.
        """
        call()
        dist.barrier()
        self.sync()
        if not self.on_gpu:
            begin = time.perf_counter()
            call()
            return ((time.perf_counter() - begin) * 1e3,) * 2
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(BUSY_MS * 1e6 * 2))  # cycles, of at most 2 GHz
        # GPUs meet again: their clocks differ by some tenths of a percent, of that time a ring of 8,192 tokens.
        dist.all_reduce(self.mark)
        start.record()
        begin = time.perf_counter()
        call()
        host = time.perf_counter() - begin
        end.record()
        self.sync()
        return start.elapsed_time(end), host * 1e3

    def graph(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call, captured; it returns the tensors of the graph."""
        call()
        self.sync()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            held = call()

        def replay() -> Any:
            captured.replay()
            return held

        return replay


def inputs(shape: Shape, device: Device) -> list[Tensor]:
    """q, k, v and the gradient of o, the same on all ranks."""
    torch.manual_seed(shape.seqlen)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    return [
        torch.randn(shape.batch, shape.seqlen, h, shape.head_dim, device=device.name, dtype=device.dtype)
        for h in heads
    ]  # fmt: skip


def trained(attend: Callable[..., Tensor], qkv: Sequence[Tensor], do: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A forward and its backward; dq."""
    leaves = [x.detach().requires_grad_() for x in qkv]

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves), leaves, do)

    return call


def attentions(shape: Shape, device: Device, size: int) -> Iterator[tuple[str, str, Call]]:
    """What is timed over a sequence: forward or both, how, the call."""
    whole = inputs(shape, device)

    def part(x: Tensor) -> Tensor:
        return shard(x, 1).contiguous()

    def back(x: Tensor) -> Tensor:
        return unshard(x, 1)

    own = [part(x) for x in whole]
    for precision in ("exact", "int8"):
        low = "" if precision == "exact" else f", {precision}"

        def one(q: Tensor, k: Tensor, v: Tensor, precision: str = precision) -> Tensor:
            return oa.attention(q, k, v, causal=True, precision=precision)

        def ring(q: Tensor, k: Tensor, v: Tensor, precision: str = precision) -> Tensor:
            return ring_attention(q, k, v, causal=True, precision=precision)

        yield FORWARD, f"one{low}", ((lambda one=one: one(*whole[:3])), lambda x: x)
        yield FORWARD, f"ring{low}", ((lambda ring=ring: ring(*own[:3])), back)
        if device.on_gpu:
            yield FORWARD, f"ring{low}, graph", (device.graph(lambda ring=ring: ring(*own[:3])), back)
        if precision == "exact":
            yield TRAINING, "one", (trained(one, whole[:3], whole[3]), lambda x: x[0])
            yield TRAINING, "ring", (trained(ring, own[:3], own[3]), lambda x: back(x[0]))
    if shape.kv_heads % size == 0:
        flat = [shard(x, 1, schedule="contiguous").contiguous() for x in whole[:3]]
        yield FORWARD, "heads", (
            lambda: ulysses_attention(*flat, causal=True), lambda x: unshard(x, 1, schedule="contiguous")
        )  # fmt: skip
        mesh = init_device_mesh(device.name, (size,))
        divided = [distribute_tensor(x, mesh, [Shard(2)]) for x in whole[:3]]
        yield FORWARD, "DTensor, heads", (lambda: oa.attention(*divided, causal=True), lambda x: x.full_tensor())
    if size == 4:
        mesh = init_device_mesh(device.name, (2, 2), mesh_dim_names=("ring", "heads"))
        pieces = [
            shard(shard(x, 1, group=mesh["ring"]), 1, group=mesh["heads"], schedule="contiguous").contiguous()
            for x in whole[:3]
        ]
        groups = {"group": mesh["heads"], "ring_group": mesh["ring"].get_group()}
        yield FORWARD, "ring of 2 × heads of 2", (
            lambda: ulysses_attention(*pieces, causal=True, **groups),
            lambda x: unshard(unshard(x, 1, group=mesh["heads"], schedule="contiguous"), 1, group=mesh["ring"]),
        )  # fmt: skip


def decodings(shape: Shape, device: Device, size: int) -> Iterator[tuple[str, str, Call]]:
    """What is timed of a step of decoding: caches of one rank, and divided ones."""
    _, k, v, _ = inputs(shape, device)
    q = torch.randn(shape.batch, 1, shape.heads, shape.head_dim, device=device.name, dtype=device.dtype)
    dist.broadcast(q, 0)
    seq_lens = torch.full((shape.batch,), shape.seqlen, dtype=torch.int32, device=device.name)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=device.name) * shape.seqlen
    k, v = (x.flatten(0, 1) for x in (k, v))
    facts = {"like": k}
    whole = oa.KVCache(shape.batch, shape.seqlen, shape.kv_heads, shape.head_dim, **facts)
    most = -(-shape.seqlen // size) + 256
    part = oa.KVCache(shape.batch, max(most, local_seqlen(shape.seqlen)), shape.kv_heads, shape.head_dim, **facts)
    oa.append(whole, k, v, seq_lens=seq_lens, cu_seqlens=starts)
    append_sharded(part, k, v, seq_lens=seq_lens, cu_seqlens=starts)
    tokens = local_tokens(seq_lens)
    calls: Mapping[str, Callable[[], Tensor]] = {
        "one": lambda: oa.decode(q, whole, seq_lens=seq_lens),
        "sharded cache": lambda: decode_sharded(q, part, seq_lens=tokens),
    }
    for how, call in calls.items():
        yield DECODE, how, (call, lambda x: x)
        if device.on_gpu:
            yield DECODE, f"{how}, graph", (device.graph(call), lambda x: x)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative L1. NaN where one is."""
    difference = (found.float() - expected.float()).abs().sum(dtype=torch.float64)
    return float(difference / expected.float().abs().sum(dtype=torch.float64))


def rows_of(shape: Shape, calls: Sequence[tuple[str, str, Call]], device: Device, repeats: int) -> list[dict[str, Any]]:
    """A row of each call: the longest time of all ranks in each repeat, all calls in turn.

    Raises
    ------
    SystemExit
        A result is not that of one rank.
    """
    size = dist.get_world_size()
    wanted: dict[tuple[str, bool], Tensor] = {}
    errors = []
    for what, how, (call, whole) in calls:
        found = whole(call())
        if how == "one":
            wanted[what, False] = found
        error = relative_error(found, wanted[what, False])
        allowed = LARGEST_LOW_ERROR if "int8" in how else LARGEST_ERROR
        if not error <= allowed:
            raise SystemExit(f"{shape.name} {what} {how}: relative L1 {error}, {allowed} allowed")
        errors.append(error)
        del found
    times = torch.zeros(len(calls), repeats + 1, 2, dtype=torch.float64, device=device.name)
    for repeat in range(repeats + 1):
        for at in range(len(calls)):
            number = (at + repeat) % len(calls)
            times[number, repeat] = torch.tensor(device.time(calls[number][2][0]), dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    samples = times[:, 1:].cpu()  # the first round loads what is not loaded yet
    medians = {(what, how): statistics.median(samples[i, :, 0].tolist()) for i, (what, how, _) in enumerate(calls)}
    return [
        {"shape": shape.name, "seqlen": shape.seqlen, "heads": shape.heads, "kv_heads": shape.kv_heads, "what": what,
         "how": how, "gpus": 1 if how.startswith("one") else size, "median_ms": medians[what, how],
         "samples_ms": samples[i, :, 0].tolist(), "host_ms": statistics.median(samples[i, :, 1].tolist()),
         "speed_over_one": medians[what, "one"] / medians[what, how], "relative_l1": errors[i]}
        for i, (what, how, _) in enumerate(calls)
    ]  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The report as text."""
    lines = [f"{'shape':24} {'what':18} {'how':22} {'ms':>9} {'over one':>8} {'host ms':>8} {'error':>8}"]
    lines += [
        f"{row['shape']:24} {row['what']:18} {row['how']:22} {row['median_ms']:9.3f} {row['speed_over_one']:8.2f} "
        f"{row['host_ms']:8.2f} {row['relative_l1']:8.1e}"
        for row in rows
    ]
    return "\n".join(lines)


def work(given: argparse.Namespace) -> None:
    """One process of a GPU, or of the CPU."""
    if given.small:
        dist.init_process_group("gloo")
    else:
        ordinal = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(ordinal)
        dist.init_process_group("nccl", device_id=torch.device("cuda", ordinal))
    device, size = Device(given.small), dist.get_world_size()
    rows = []
    for heads, kv_heads in ((16, 16), (16, 4), (4, 4)):
        for seqlen in given.seqlen:
            if heads != kv_heads and seqlen != 32768:
                continue
            shape = Shape(seqlen, heads, kv_heads, 32 if given.small else 128)
            rows += rows_of(shape, list(attentions(shape, device, size)), device, given.repeats)
    step = Shape(max(given.seqlen), 32, 8, 32 if given.small else 128, batch=4)
    rows += rows_of(step, list(decodings(step, device, size)), device, given.repeats)
    if dist.get_rank() == 0:
        print(table(rows))
        if given.out is not None:
            facts = reference_environment() if given.small else environment(torch)
            report = document(
                "ring", protocol="context_parallel", command=given.command, environment=facts, rows=rows, gpus=size,
                repeats=given.repeats,
            )  # fmt: skip
            write(report, given.out)
    dist.barrier()  # gloo ends a process whose peer is gone, and rank 0 is still writing
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """The program; without torchrun it starts that."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="on the CPU, in fp32")
    parser.add_argument("--gpus", type=int, help="ranks (default: all GPUs; 2 with --small)")
    parser.add_argument("--seqlen", type=int, nargs="+", help="8192 32768 131072 unless given; 64 with --small")
    parser.add_argument("--repeats", type=int, default=9, help="each call in turn (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the times to this JSON file")
    given = parser.parse_args(words)
    given.seqlen = given.seqlen or ([64] if given.small else [8192, 32768, 131072])
    for name, value in (("seqlen", min(given.seqlen)), ("repeats", given.repeats), ("gpus", given.gpus)):
        if value is not None and value < 1:
            parser.error(f"--{name}: expected a number from 1 on, received {value}")
    if given.out is not None and not given.out.resolve().parent.is_dir():
        parser.error(f"--out: expected a file in an existing folder, received {given.out}")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from torch.distributed.run import main as torchrun

        count = given.gpus or (2 if given.small else torch.cuda.device_count())
        torchrun(["--standalone", "--nproc-per-node", str(count), str(Path(__file__).resolve()), *words])
        return
    options = [word for i, word in enumerate(words) if word != "--out" and words[i - 1 : i] != ["--out"]]
    given.command = " ".join(["python examples/long_context/times.py", *options])
    work(given)


if __name__ == "__main__":
    main()
