"""Time of attention over a sequence that several GPUs share, beside one GPU and beside cuDNN.

python examples/context_parallel/bench.py                    # starts itself on two GPUs
torchrun --standalone --nproc-per-node 2 examples/context_parallel/bench.py --out times.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ring
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

from omniattn.bench.document import document, environment, write

KERNELS = ("cudnn", "omniattn")
#: What is timed: one GPU with the whole sequence; all of them; the calls of one GPU's part of the ring alone, without
#: communication and without merging.
ONE, CALLS = "one", "calls"
#: Relative error of all GPUs beside one, at most.
LARGEST_ERROR = 2e-2


@dataclass(frozen=True)
class Contender:
    """Kernels, and how: `ONE`, `CALLS`, or a rotate method of all GPUs."""

    kernels: str
    how: str


CONTENDERS = [Contender(kernels, how) for how in (ONE, *ring.ROTATE, CALLS) for kernels in KERNELS]


@contextmanager
def chosen(kernels: str) -> Iterator[None]:
    """SDPA by cuDNN or by omniattn."""
    if kernels == "cudnn":
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield
        return
    activate_flash_attention_impl("omniattn")
    try:
        yield
    finally:
        restore_flash_attention_impl()


def calls_of_ring(qkv: ring.Tensors, causal: bool, rank: int, size: int) -> None:
    """Forward calls of a device on its own rows, and on as many of each other device's."""
    q, k, v = qkv
    F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    half = q.shape[ring.SEQ] // 2
    for step in range(1, size):
        if not causal:
            F.scaled_dot_product_attention(q, k, v)
        elif step <= rank:
            F.scaled_dot_product_attention(q, k[:, :, :half], v[:, :, :half])
        else:
            F.scaled_dot_product_attention(q[:, :, half:], k, v)


def measure(
    mesh: Any, contender: Contender, inputs: ring.Tensors, causal: bool, calls: int, forward: bool
) -> tuple[float, float]:
    """Milliseconds on this device of a forward, and of a forward and backward; NaN: not measured."""
    with chosen(contender.kernels):
        if contender.how == CALLS:
            rows = inputs[0].shape[ring.SEQ] // mesh.size()
            qkv = [x[:, :, :rows].contiguous() for x in inputs[:3]]
            return _milliseconds(lambda: calls_of_ring(qkv, causal, mesh.get_rank(), mesh.size()), calls), float("nan")
        if contender.how == ONE:
            return _both(inputs, causal, calls, forward)
        with ring.sharded(mesh, inputs, causal, contender.how) as shards:
            return _both(shards, causal, calls, forward)


def _both(inputs: ring.Tensors, causal: bool, calls: int, forward: bool) -> tuple[float, float]:
    q, k, v = inputs[:3]
    first = _milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), calls)
    return first, float("nan") if forward else _milliseconds(lambda: ring.attend(inputs, causal), calls)


def _milliseconds(call: Callable[[], Any], calls: int) -> float:
    """Of one call among several that follow each other, from a point that all devices have reached."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def errors(mesh: Any, inputs: ring.Tensors, causal: bool) -> dict[str, float]:
    """Relative error of all GPUs beside one of output and gradients, by kernels and rotate method."""
    found = {}
    for kernels in KERNELS:
        with chosen(kernels):
            alone = ring.attend(inputs, causal)
            for rotate in ring.ROTATE:
                found[f"{kernels} {rotate}"] = ring.apart(ring.attend_on_all(mesh, inputs, causal, rotate), alone)
    return found


def rows_of(seqlen: int, size: int, times: torch.Tensor, calls: int) -> list[dict[str, Any]]:
    """Rows of the report from (contender, repeat, forward or both) times, the longest of all devices."""
    samples = {contender: times[i].T.tolist() for i, contender in enumerate(CONTENDERS)}
    medians = {contender: [statistics.median(x) for x in both] for contender, both in samples.items()}

    rows = []
    for contender in CONTENDERS:
        for what, name in enumerate(("forward", "forward + backward")):
            if medians[contender][what] != medians[contender][what]:
                continue  # not measured
            row = {"seqlen": seqlen, "kernels": contender.kernels, "how": contender.how, "what": name,
                   "gpus": 1 if contender.how == ONE else size, "median_ms": medians[contender][what],
                   "samples_ms": samples[contender][what], "calls": calls}  # fmt: skip
            cudnn, one = Contender("cudnn", contender.how), Contender(contender.kernels, ONE)
            row["time_over_cudnn"] = medians[contender][what] / medians[cudnn][what]
            row["speed_over_one"] = medians[one][what] / medians[contender][what]
            rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The report as text."""
    lines = [f"{'seqlen':>7} {'what':18} {'GPUs':>4} {'how':10} {'cuDNN ms':>9} {'ours ms':>9} "
             f"{'ours/cuDNN':>10} {'cuDNN over one':>15} {'ours over one':>14}"]  # fmt: skip
    for theirs, ours in _pairs(rows):
        lines.append(
            f"{ours['seqlen']:>7} {ours['what']:18} {ours['gpus']:>4} {ours['how']:10} {theirs['median_ms']:9.2f} "
            f"{ours['median_ms']:9.2f} {ours['time_over_cudnn']:10.3f} {theirs['speed_over_one']:15.2f} "
            f"{ours['speed_over_one']:14.2f}"
        )
    return "\n".join(lines)


def _pairs(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of cuDNN with those of omniattn."""
    found = {(row["seqlen"], row["what"], row["how"], row["kernels"]): row for row in rows}
    for (seqlen, what, how, kernels), row in found.items():
        if kernels == "omniattn":
            yield found[seqlen, what, how, "cudnn"], row


def work(given: argparse.Namespace) -> None:
    """One process of a GPU."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    causal, first = not given.full, dist.get_rank() == 0
    rows, wrong = [], {}
    for seqlen in given.seqlen:
        torch.manual_seed(0)
        shape = (1, given.heads, seqlen, given.head_dim)
        inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
        found = errors(mesh, inputs, causal)
        wrong.update({f"{name} s{seqlen}": error for name, error in found.items() if not error <= LARGEST_ERROR})
        # Short calls follow each other, so that the host's time for a first one is not counted as the GPU's.
        calls = max(1, min(8, round((65536 / seqlen) ** 2)))
        times = torch.tensor(
            [[measure(mesh, contender, inputs, causal, calls, given.forward) for contender in CONTENDERS]
             for _ in range(given.repeats + 1)][1:], device=device, dtype=torch.float64,
        )  # fmt: skip
        dist.all_reduce(times, dist.ReduceOp.MAX)
        rows += rows_of(seqlen, mesh.size(), times.transpose(0, 1).cpu(), calls)
        if first:
            print(table([row for row in rows if row["seqlen"] == seqlen]))
            print("relative error beside one GPU: " + ", ".join(f"{name} {x:.1e}" for name, x in found.items()))
    if first and given.out is not None:
        report = document(
            "context_parallel", protocol="context_parallel", command=given.command, environment=environment(torch),
            rows=rows, heads=given.heads, head_dim=given.head_dim, causal=causal, repeats=given.repeats,
        )  # fmt: skip
        write(report, given.out)
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(f"relative errors above {LARGEST_ERROR}: {wrong}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The program; without torchrun it starts that."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seqlen", type=int, nargs="+", default=[32768, 131072], help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--forward", action="store_true", help="no backward")
    parser.add_argument("--repeats", type=int, default=5, help="each contender in turn (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the times to this JSON file")
    given = parser.parse_args(words)
    if given.out is not None and not given.out.resolve().parent.is_dir():
        parser.error(f"--out: expected a file in an existing folder, received {given.out}")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from torch.distributed.run import main as torchrun

        torchrun(["--standalone", "--nproc-per-node", "2", str(Path(__file__).resolve()), *words])
        return
    options = [word for i, word in enumerate(words) if word != "--out" and words[i - 1 : i] != ["--out"]]
    given.command = " ".join(["python examples/context_parallel/bench.py", *options])
    work(given)


if __name__ == "__main__":
    main()
