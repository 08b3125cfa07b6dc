"""Train the GPT with forwards in 8 bits and exactly, from the same seed, and compare the losses.

python examples/train_lm/precisions.py                 # first CUDA device, 12 layers, context 2048, 2000 steps
python examples/train_lm/precisions.py --small         # CPU, by the NumPy reference, a small model in fp32
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from model import Config
from plot import svg_of_differences
from train import Run, check_folders, report_of, train

from omniattn.bench.document import write

#: Large enough for a tile of the kernels: heads of 64, 128 keys.
SMALL = Config(layers=2, heads=2, head_dim=64, context=128)
#: The first is what the others are compared with; SDPA shows what another order of sums does.
NAMES = ("omniattn", "sdpa", "int8", "fp8", "fp8_smooth_k", "fp8_exact_gradients")


def known(path: Path, report: Mapping[str, Any], steps: int) -> dict[str, Run]:
    """Trainings of an earlier report, by attention.

    Raises
    ------
    ValueError
        They had other settings, or other software, than ``report`` has.
    """
    earlier = json.loads(path.read_text(encoding="utf-8"))
    expected, received = (
        {name: x[name] for name in ("config", "batch", "rate", "seed")}
        | {name: x["environment"].get(name) for name in ("device", "python", "numpy", "torch", "omniattn")}
        for x in (report, earlier)
    )
    expected["steps"], received["steps"] = steps, len(earlier["runs"][0]["losses"])
    if expected != received:
        raise ValueError(f"expected {expected}, received {received}")
    return {run["attention"]: Run(**run) for run in earlier["runs"]}


def cost(losses: Sequence[float], exact: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of the differences of a step's losses, in the last tenth of the steps."""
    last = len(exact) // 10 or 1
    apart = [a - b for a, b in zip(losses[-last:], exact[-last:], strict=True)]
    mean = sum(apart) / last
    return mean, (sum((x - mean) ** 2 for x in apart) / last) ** 0.5


def with_costs(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report, whose rows say what the last tenth of the steps lost."""
    losses = {run["attention"]: run["losses"] for run in report["runs"]}
    rows = []
    for row in report["rows"]:
        own = losses[row["attention"]]
        last = len(own) // 10 or 1
        mean, deviation = cost(own, losses[NAMES[0]])
        rows.append({**row, "last_tenth_loss": sum(own[-last:]) / last, "cost": mean, "cost_deviation": deviation})
    return {**report, "rows": rows}


def summary(report: Mapping[str, Any]) -> str:
    """What the trainings gave, a line each."""
    return "\n".join(
        f"{row['attention']:9} loss {row['first_loss']:.4f} -> {row['last_tenth_loss']:.4f}, "
        f"{row['cost']:+.4f} beside {NAMES[0]}"
        for row in report["rows"]
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a small model on the CPU, in fp32")
    parser.add_argument("--steps", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--batch", type=int, help="sequences of a step: 8 unless given, 4 with --small")
    parser.add_argument("--rate", type=float, help="highest learning rate: 6e-4 unless given, 2e-3 with --small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="take trainings of this JSON file, of the same settings, from it")
    parser.add_argument("--out", type=Path, help="write the losses to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw the differences of the losses into this SVG file")
    given = parser.parse_args(arguments)
    check_folders(parser, out=given.out, plot=given.plot)
    if not given.small and not torch.cuda.is_available():
        parser.error("expected a CUDA device, or --small")
    config, device = (SMALL, "cpu") if given.small else (Config(), "cuda")
    given.batch = given.batch or (4 if given.small else 8)
    given.rate = given.rate or (2e-3 if given.small else 6e-4)
    command = "python examples/train_lm/precisions.py" + (" --small" if given.small else "")
    command += f" --plot {given.plot.as_posix()}" if given.plot else ""
    there: dict[str, Run] = {}
    if given.resume is not None:
        none = report_of([], config, given, on_gpu=device != "cpu", command=command)
        try:
            there = known(given.resume, none, given.steps)
        except (OSError, KeyError, TypeError, ValueError) as error:
            parser.error(f"--resume: {type(error).__name__}: {error}")
    how = {"steps": given.steps, "batch": given.batch, "device": device, "highest": given.rate, "seed": given.seed}
    runs = []
    for name in NAMES:
        runs.append(there[name] if name in there else train(name, config, **how))
        print(f"{name}: {runs[-1].losses[-1]:.4f} after {given.steps} steps", flush=True)
    report = with_costs(report_of(runs, config, given, on_gpu=device != "cpu", command=command))
    print(summary(report))
    if given.out is not None:
        write(report, given.out)
    if given.plot is not None:
        given.plot.write_text(svg_of_differences(json.loads(json.dumps(report))), encoding="utf-8")
    return report


if __name__ == "__main__":
    main()
