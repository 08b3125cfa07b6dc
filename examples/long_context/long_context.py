"""Train the GPT of examples/train_lm on long sequences whose tokens are divided among GPUs, and on one GPU; compare.

python examples/long_context/long_context.py            # starts itself on two GPUs, context 131072, 4 layers
torchrun --standalone --nproc-per-node 4 examples/long_context/long_context.py --layers 12 --checkpoint
python examples/long_context/long_context.py --small    # two processes on the CPU, seconds
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
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from omniattn.bench.document import write
from omniattn.distributed import ring_attention, shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train_lm"))

from model import Config, Gpt
from train import Run, precision, report_of, train

#: Nats a byte by which a step's losses may differ: products in bf16, whose sums have another order.
TOLERANCE = 0.02
#: The same where K and V travel in 8 bits.
TOLERANCE_LOW = 0.1
SMALL = Config(layers=2, heads=2, head_dim=16, context=96)


class Checkpointed(nn.Module):
    """A block that is computed again in the backward, so that its input is all that is kept of it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, width)."""
        return checkpoint(self.block, x, use_reentrant=False)


class Step:
    """A step of training of which each rank has its tokens, or on one rank all of them.

    Parameters
    ----------
    group : ProcessGroup or None
        Whose ranks divide the sequences; None: this process has them whole.
    wire : str
        The precision in which K and V travel: "exact", "int8" or "fp8".
    again : bool
        Compute blocks again in the backward.
    """

    def __init__(self, group: Any = None, wire: str = "exact", again: bool = False) -> None:
        self.group, self.wire, self.again = group, wire, again

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of this rank's queries over the keys of all ranks."""
        options = {"seqlen_q": self.seqlen, "seqlen_k": self.seqlen, "precision": self.wire}
        return ring_attention(q, k, v, group=self.group, causal=True, **options)

    def prepare(self, model: Gpt) -> None:
        """Give the blocks this attention; once."""
        for number, block in enumerate(model.blocks):
            if isinstance(block, Checkpointed):
                return
            if self.group is not None:
                block.attention = self.attend
            if self.again:
                model.blocks[number] = Checkpointed(block)

    def __call__(self, model: Gpt, tokens: Tensor) -> Tensor:
        """Mean loss of (batch, context + 1) tokens, whose gradients the weights get on each rank."""
        self.prepare(model)
        self.seqlen = tokens.shape[1] - 1
        positions = torch.arange(self.seqlen, device=tokens.device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self.group is not None:
            positions = shard(positions, 0, group=self.group)
            inputs, targets = (shard(x, 1, group=self.group) for x in (inputs, targets))
        with precision(inputs.device.type):
            logits = model(inputs, positions)
        # The mean over the tokens of all ranks, which may have different numbers of them.
        total = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        loss = total / (tokens.shape[0] * self.seqlen)
        loss.backward()
        if self.group is None:
            return loss.detach()
        gradients = [weights.grad for weights in model.parameters()]
        together = torch.cat([*(x.flatten() for x in gradients), loss.detach().view(1)])
        dist.all_reduce(together, group=self.group)
        for gradient, summed in zip(gradients, together[:-1].split([x.numel() for x in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))
        return together[-1].clone()


def compare(group: Any, config: Config, *, wire: str = "exact", again: bool = False, **how: Any) -> list[Run]:
    """A training on each rank alone, and one on all of them; ``how`` as in examples/train_lm's `train`."""
    kind, size = "GPU" if how["device"] != "cpu" else "process", dist.get_world_size(group)
    plural = f"{size} {kind}s" if kind == "GPU" else f"{size} processes"
    runs = [
        train("omniattn", config, **how, step_of=step) for step in (Step(None, again=again), Step(group, wire, again))
    ]
    return [dataclasses.replace(run, attention=name) for run, name in zip(runs, (f"1 {kind}", plural), strict=True)]


def difference(runs: Sequence[Run]) -> float:
    """Largest difference of a step's losses; NaN if one is."""
    return max((abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True)), key=lambda x: (x != x, x))


def summary(runs: Sequence[Run], allowed: float) -> str:
    """What the runs gave, a line each; and how far the losses are apart."""
    lines = [
        f"{run.attention:11} loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, {run.tokens_per_second:,.0f} tokens/s"
        for run in runs
    ]
    return "\n".join([*lines, f"losses differ by {difference(runs):.4f} at most, {allowed} allowed"])


def main(arguments: Sequence[str] | None = None) -> None:
    """The program; without torchrun it starts that."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU, in fp32")
    parser.add_argument("--context", type=int, help="of the whole sequence (131072 unless given; 96 with --small)")
    parser.add_argument("--layers", type=int, help="4 unless given; 2 with --small")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=6e-4, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--wire", choices=("exact", "int8", "fp8"), default="exact", help="how K and V travel")
    parser.add_argument("--checkpoint", action="store_true", help="compute blocks again in the backward: less memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write losses and speeds to this JSON file")
    given = parser.parse_args(words)
    if given.out is not None and not given.out.resolve().parent.is_dir():
        parser.error(f"--out: expected a file in an existing folder, received {given.out}")
    for name, least in (("context", 1), ("layers", 1), ("steps", 2), ("batch", 1)):
        value = getattr(given, name)
        if value is not None and value < least:
            parser.error(f"--{name}: expected a number from {least} on, received {value}")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from torch.distributed.run import main as torchrun

        torchrun(["--standalone", "--nproc-per-node", "2", str(Path(__file__).resolve()), *words])
        return
    device = "cpu" if given.small else "cuda"
    if given.small:
        dist.init_process_group("gloo")
    else:
        ordinal = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(ordinal)
        dist.init_process_group("nccl", device_id=torch.device("cuda", ordinal))
    config = SMALL if given.small else Config(layers=4)
    config = dataclasses.replace(config, context=given.context or (SMALL.context if given.small else 131072))
    config = dataclasses.replace(config, layers=given.layers or config.layers)
    runs = compare(
        dist.group.WORLD, config, wire=given.wire, again=given.checkpoint, steps=given.steps, batch=given.batch,
        device=device, highest=given.rate, seed=given.seed,
    )  # fmt: skip
    apart, first = difference(runs), dist.get_rank() == 0
    dist.destroy_process_group()
    if not first:
        return
    allowed = TOLERANCE if given.wire == "exact" else TOLERANCE_LOW
    print(summary(runs, allowed))
    if given.out is not None:
        command = "python examples/long_context/long_context.py"
        report = report_of(runs, config, given, on_gpu=not given.small, command=command)
        write({**report, "tolerance": allowed, "wire": given.wire}, given.out)
    if not apart <= allowed:
        raise SystemExit(f"losses differ by {apart}, {allowed} allowed")


if __name__ == "__main__":
    main()
