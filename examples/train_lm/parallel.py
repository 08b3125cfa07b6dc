"""Train the GPT on sequences that several GPUs share, and on one GPU, from the same seed, and compare the losses.

python examples/train_lm/parallel.py                   # starts itself on two GPUs, context 4096
torchrun --standalone --nproc-per-node 2 examples/train_lm/parallel.py --context 16384 --batch 1
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import Config, Gpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import activate_flash_attention_impl
from train import Run, precision, report_of, train

import omniattn.torch  # noqa: F401, it registers the implementation "omniattn"
from omniattn.bench.document import write

#: Nats a byte by which a step's losses may differ: products in bf16, whose sums have another order.
TOLERANCE = 0.02


class Shared:
    """A step of which each device has its tokens: rows from both ends of every sequence, so that all have equal work.

    Parameters
    ----------
    mesh : DeviceMesh
        Sequences have to be divisible by twice its size.
    """

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __call__(self, model: Gpt, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of all devices' tokens, whose gradients the weights get on each of them."""
        inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        buffers = [inputs, targets, positions]
        # The backward is part of it: its attention passes keys and values around as well.
        with context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers=set(buffers)):
            with precision(inputs.device.type):
                logits = model(inputs, positions)
            loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss.backward()
        gradients = [weights.grad for weights in model.parameters()]
        together = torch.cat([*(x.flatten() for x in gradients), loss.detach().view(1)])
        dist.all_reduce(together, group=self.mesh.get_group())
        together /= self.mesh.size()
        for gradient, mean in zip(gradients, together[:-1].split([x.numel() for x in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        return together[-1].clone()


def compare(mesh: Any, config: Config, **how: Any) -> list[Run]:
    """A training on each device alone, and one on all of them, by SDPA; ``how`` as in `train`."""
    size, kind = mesh.size(), "GPU" if how["device"] != "cpu" else "process"
    if config.context % (2 * size):
        raise ValueError(
            f"--context: expected a length divisible by {2 * size}, for {size} devices, received {config.context}"
        )
    plural = f"{size} {kind}s" if kind == "GPU" else f"{size} processes"
    runs = [train("sdpa", config, **how), train("sdpa", config, **how, step_of=Shared(mesh))]
    return [dataclasses.replace(run, attention=name) for run, name in zip(runs, (f"1 {kind}", plural), strict=True)]


def difference(runs: Sequence[Run]) -> float:
    """Largest difference of a step's losses; NaN if one is."""
    return max((abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True)), key=lambda x: (x != x, x))


def summary(runs: Sequence[Run]) -> str:
    """What the runs gave, a line each; and how far the losses are apart."""
    lines = [
        f"{run.attention:11} loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, {run.tokens_per_second:,.0f} tokens/s"
        for run in runs
    ]
    return "\n".join([*lines, f"losses differ by {difference(runs):.4f} at most, {TOLERANCE} allowed"])


def main(arguments: Sequence[str] | None = None) -> None:
    """The program; without torchrun it starts that."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--context", type=int, default=4096, help="of the whole sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=80, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=6e-4, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write losses and speeds to this JSON file")
    given = parser.parse_args(words)
    if given.out is not None and not given.out.resolve().parent.is_dir():
        parser.error(f"--out: expected a file in an existing folder, received {given.out}")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from torch.distributed.run import main as torchrun

        torchrun(["--standalone", "--nproc-per-node", "2", str(Path(__file__).resolve()), *words])
        return
    ordinal = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(ordinal)
    dist.init_process_group("nccl", device_id=torch.device("cuda", ordinal))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    activate_flash_attention_impl("omniattn")
    config = Config(context=given.context)
    runs = compare(
        mesh, config, steps=given.steps, batch=given.batch, device="cuda", highest=given.rate, seed=given.seed
    )
    apart, first = difference(runs), dist.get_rank() == 0
    dist.destroy_process_group()
    if not first:
        return
    print(summary(runs))
    if given.out is not None:
        report = report_of(runs, config, given, on_gpu=True, command="python examples/train_lm/parallel.py")
        write({**report, "tolerance": TOLERANCE}, given.out)
    if not apart <= TOLERANCE:
        raise SystemExit(f"losses differ by {apart}, {TOLERANCE} allowed")


if __name__ == "__main__":
    main()
