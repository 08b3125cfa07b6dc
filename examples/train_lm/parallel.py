"""Train the GPT on several GPUs and on one GPU, from the same seed, and compare the losses.

python examples/train_lm/parallel.py                   # two GPUs share sequences of 4096 bytes
python examples/train_lm/parallel.py --fsdp            # two GPUs share the weights and the batch: FSDP2
python examples/train_lm/parallel.py --fsdp --small    # two processes on the CPU, with gloo, a tiny model in fp32
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import activate_flash_attention_impl
from train import SMALL, Run, check_folders, learn, precision, report_of, train

import omniattn.torch  # noqa: F401, it registers the implementation "omniattn"
from omniattn.bench.document import write

#: Nats a byte by which a step's losses may differ: products in bf16, whose sums have another order.
TOLERANCE = 0.02
#: A batch in two halves has sums in another order too, on one GPU and without FSDP2: at 80 steps such trainings are 0.1
#: apart, as any two of this length that differ in rounding.
FSDP_STEPS = 32


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


class Sharded:
    """A step of which each device has its sequences; the weights, their gradients and moments are divided by FSDP2.

    Parameters
    ----------
    mesh : DeviceMesh
        Of one dimension; its size has to divide the batch.
    """

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def prepare(self, model: Gpt) -> None:
        """Divide the weights: each block gathers its own when it runs."""
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)

    def __call__(self, model: Gpt, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of all devices' tokens; gradients are means over the devices."""
        rank, size = self.mesh.get_local_rank(), self.mesh.size()
        loss = learn(model, tokens.chunk(size)[rank])
        dist.all_reduce(loss, group=self.mesh.get_group())
        return loss / size


def compare_sharded(mesh: Any, config: Config, *, batch: int, **how: Any) -> list[Run]:
    """A training on each device alone, and one by FSDP2, both with omniattn's attention; ``how`` as in `train`."""
    size = mesh.size()
    if batch % size:
        raise ValueError(f"--batch: expected a number divisible by {size}, for {size} devices, received {batch}")
    step = Sharded(mesh)
    runs = [
        train("omniattn", config, batch=batch, **how),
        train("omniattn", config, batch=batch, **how, step_of=step, prepare=step.prepare),
    ]
    return named(runs, size, how["device"])


def named(runs: Sequence[Run], size: int, device: str) -> list[Run]:
    """A run on one device and one on several, by these names."""
    one, several = ("1 process", f"{size} processes") if device == "cpu" else ("1 GPU", f"{size} GPUs")
    return [dataclasses.replace(run, attention=name) for run, name in zip(runs, (one, several), strict=True)]


def compare(mesh: Any, config: Config, **how: Any) -> list[Run]:
    """A training on each device alone, and one on all of them, by SDPA; ``how`` as in `train`."""
    size = mesh.size()
    if config.context % (2 * size):
        raise ValueError(
            f"--context: expected a length divisible by {2 * size}, for {size} devices, received {config.context}"
        )
    return named(
        [train("sdpa", config, **how), train("sdpa", config, **how, step_of=Shared(mesh))], size, how["device"]
    )


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
    parser.add_argument("--fsdp", action="store_true", help="divide weights and batch, not sequences")
    parser.add_argument("--small", action="store_true", help="processes on the CPU, a tiny model; with --fsdp")
    parser.add_argument("--context", type=int, help="of the whole sequence: 4096 unless given, 64 with --small")
    parser.add_argument("--steps", type=int, help="80 unless given, 32 with --fsdp")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=6e-4, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write losses and speeds to this JSON file")
    given = parser.parse_args(words)
    given.steps = given.steps or (FSDP_STEPS if given.fsdp else 80)
    check_folders(parser, out=given.out)
    if given.small and not given.fsdp:
        parser.error("--small: expected --fsdp with it: torch's context_parallel has no operators for the CPU")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from torch.distributed.run import main as torchrun

        torchrun(["--standalone", "--nproc-per-node", "2", str(Path(__file__).resolve()), *words])
        return
    ordinal, device = int(os.environ["LOCAL_RANK"]), "cpu" if given.small else "cuda"
    if device == "cuda":
        torch.cuda.set_device(ordinal)
        dist.init_process_group("nccl", device_id=torch.device("cuda", ordinal))
        activate_flash_attention_impl("omniattn")
    else:
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    config = SMALL if given.small else Config(context=4096)
    config = dataclasses.replace(config, context=given.context or config.context)
    runs = (compare_sharded if given.fsdp else compare)(
        mesh, config, steps=given.steps, batch=given.batch, device=device, highest=given.rate, seed=given.seed
    )
    apart, first = difference(runs), dist.get_rank() == 0
    dist.destroy_process_group()
    if not first:
        return
    print(summary(runs))
    if given.out is not None:
        command = "python examples/train_lm/parallel.py" + " --fsdp" * given.fsdp + " --small" * given.small
        report = report_of(runs, config, given, on_gpu=device != "cpu", command=command)
        write({**report, "tolerance": TOLERANCE}, given.out)
    if not apart <= TOLERANCE:
        raise SystemExit(f"losses differ by {apart}, {TOLERANCE} allowed")


if __name__ == "__main__":
    main()
