"""Train a small GPT with omniattn and with torch's attention, from the same seed, and compare the losses.

python examples/train_lm/train.py                      # first CUDA device, 12 layers, context 2048
python examples/train_lm/train.py --out losses.json --plot losses.svg
python examples/train_lm/train.py --small              # CPU, seconds
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from model import ATTENTIONS, Config, Gpt, fa4_function
from plot import svg
from text import batches, read_text
from torch.nn import functional

from omniattn.bench.document import document, environment, reference_environment, write

SMALL = Config(layers=2, heads=2, head_dim=16, context=64)
#: Steps that are not timed: kernels are loaded, memory is found.
WARM_UP = 10


@dataclass(frozen=True)
class Run:
    """What a training gave.

    Attributes
    ----------
    attention : str
        Which attention it had.
    losses : list of float
        Nats a byte, of each step.
    tokens_per_second : float
        Of the steps after `WARM_UP`.
    peak_bytes : int or None
        Memory of torch's allocator, at most, in the steps after `WARM_UP`; None on the CPU.
    """

    attention: str
    losses: list[float]
    tokens_per_second: float
    peak_bytes: int | None = None


def rate(step: int, steps: int, highest: float) -> float:
    """Learning rate: up over the first tenth, then down to a tenth in half a cosine."""
    rising = max(1, steps // 10)
    if step < rising:
        return highest * (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return highest * (0.55 + 0.45 * float(torch.cos(torch.tensor(torch.pi * done))))


def precision(device: str) -> contextlib.AbstractContextManager[Any]:
    """Products and attention in bf16 on a GPU."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device != "cpu" else contextlib.nullcontext()


def learn(model: Gpt, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of a step's (batch, context + 1) tokens, whose gradients the weights get."""
    with precision(tokens.device.type):
        logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def train(
    name: str, config: Config, *, steps: int, batch: int, device: str, highest: float, seed: int,
    step_of: Callable[[Gpt, torch.Tensor], torch.Tensor] = learn, prepare: Callable[[Gpt], None] | None = None,
    by_compiler: bool = False,
) -> Run:  # fmt: skip
    """One training. Weights, moments and updates are fp32; on a GPU products and attention are bf16.

    prepare: what is done to the model before its optimizer is made. by_compiler: torch.compile compiles the model, its
    attention as well.
    """
    torch.manual_seed(seed)
    model = Gpt(config, ATTENTIONS[name]).to(device)
    if prepare is not None:
        prepare(model)
    on_gpu = device != "cpu"
    optimizer = torch.optim.AdamW(model.parameters(), lr=highest, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu)
    tokens = torch.from_numpy(batches(read_text(), steps, batch, config.context, seed))
    called: Any = torch.compile(model) if by_compiler else model
    losses: list[torch.Tensor] = []
    begin = time.perf_counter()
    warm_up = min(WARM_UP, steps - 1)
    for step in range(steps):
        if step == warm_up:
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, highest)
        optimizer.zero_grad(set_to_none=True)
        losses.append(step_of(called, tokens[step].to(device, non_blocking=True)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    values = [float(loss) for loss in losses]  # waits for the GPU
    seconds = time.perf_counter() - begin
    speed = (steps - warm_up) * batch * config.context / seconds
    return Run(name, values, speed, torch.cuda.max_memory_allocated() if on_gpu else None)


def summary(runs: Sequence[Run]) -> str:
    """What the runs gave, a line each; and how far the losses are apart."""
    lines = [
        f"{run.attention:9} loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, {run.tokens_per_second:,.0f} tokens/s"
        for run in runs
    ]
    if len(runs) == 2:
        apart = [abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True)]
        last = len(apart) // 10 or 1
        lines.append(f"losses differ by {max(apart):.4f} at most, by {sum(apart[-last:]) / last:.4f} at the end")
    return "\n".join(lines)


def report_of(
    runs: Sequence[Run], config: Config, given: argparse.Namespace, *, on_gpu: bool, command: str
) -> dict[str, Any]:
    """Losses and speeds in the form of ``omniattn bench``, from which the documents' table is made."""
    facts = environment(torch) if on_gpu else {**reference_environment(), "torch": torch.__version__}
    rows = [{"attention": run.attention, "steps": len(run.losses), "first_loss": run.losses[0],
             "last_loss": run.losses[-1], "tokens_per_second": run.tokens_per_second} for run in runs]  # fmt: skip
    return document(
        "train_lm", protocol="training", command=command, environment=facts, rows=rows, config=asdict(config),
        batch=given.batch, rate=given.rate, seed=given.seed, runs=[asdict(run) for run in runs],
    )  # fmt: skip


def check_folders(parser: argparse.ArgumentParser, **paths: Path | None) -> None:
    """Files that cannot be written are found before the training, not behind it."""
    for option, path in paths.items():
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"--{option}: expected a file in an existing folder, received {path}")


def check_attentions(parser: argparse.ArgumentParser, names: Sequence[str], device: str) -> None:
    """FlashAttention-4 has to be there, and has no code for the CPU."""
    if "fa4" not in names:
        return
    if device == "cpu":
        parser.error("--attention fa4: expected a GPU, received --small")
    try:
        fa4_function()
    except ImportError as error:
        parser.error(f"--attention {error}")


def main(arguments: Sequence[str] | None = None) -> list[Run]:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--attention", nargs="+", choices=tuple(ATTENTIONS), default=["omniattn", "sdpa"], metavar="NAME",
        help=f"one training for each of {', '.join(ATTENTIONS)} (default: omniattn sdpa)",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU, in fp32")
    parser.add_argument("--steps", type=int, help="300 unless given; 20 with --small")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=6e-4, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write losses and speeds to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw the losses into this SVG file")
    given = parser.parse_args(arguments)
    check_folders(parser, out=given.out, plot=given.plot)
    config, device = (SMALL, "cpu") if given.small else (Config(), "cuda")
    check_attentions(parser, given.attention, device)
    steps = given.steps or (20 if given.small else 300)
    runs = [
        train(name, config, steps=steps, batch=given.batch, device=device, highest=given.rate, seed=given.seed)
        for name in given.attention
    ]
    print(summary(runs))
    if given.out is not None or given.plot is not None:
        command = "python examples/train_lm/train.py" + (f" --plot {given.plot.as_posix()}" if given.plot else "")
        report = report_of(runs, config, given, on_gpu=device != "cpu", command=command)
        if given.out is not None:
            write(report, given.out)
        if given.plot is not None:
            given.plot.write_text(svg(report), encoding="utf-8")
    return runs


if __name__ == "__main__":
    main()
