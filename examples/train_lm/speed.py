"""Tokens per second and memory of the GPT's training, by length of the sequences and by attention.

python examples/train_lm/speed.py                      # first CUDA device: 2048, 8192 and 32768, beside SDPA
python examples/train_lm/speed.py --attention omniattn sdpa fa4 --compile
python examples/train_lm/speed.py --small              # CPU, a tiny model: tries the program, its times mean nothing
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from model import ATTENTIONS, Config
from train import SMALL, check_attentions, check_folders, train

from omniattn.bench.document import document, environment, reference_environment, write


def rows_of(
    config: Config, contexts: Sequence[int], names: Sequence[str], *, tokens: int, device: str, **how: Any
) -> list[dict[str, Any]]:
    """A row for each length and attention; a batch has as many sequences as make ``tokens`` tokens a step."""
    rows = []
    for context in contexts:
        of_length = dataclasses.replace(config, context=context)
        for name in names:
            run = train(name, of_length, batch=tokens // context, device=device, **how)
            memory = None if run.peak_bytes is None else run.peak_bytes / 2**30
            rows.append({
                "attention": name, "context": context, "batch": tokens // context, "steps": len(run.losses),
                "tokens_per_second": run.tokens_per_second, "peak_gib": memory, "last_loss": run.losses[-1],
            })  # fmt: skip
            print(line_of(rows[-1]), flush=True)
    return rows


def line_of(row: Mapping[str, Any]) -> str:
    """What a training gave."""
    memory = "" if row["peak_gib"] is None else f", {row['peak_gib']:.1f} GiB"
    return f"s{row['context']:<6} {row['attention']:9} {row['tokens_per_second']:,.0f} tokens/s{memory}"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--attention", nargs="+", choices=tuple(ATTENTIONS), default=["omniattn", "sdpa"], metavar="NAME",
        help=f"of {', '.join(ATTENTIONS)} (default: omniattn sdpa)",
    )  # fmt: skip
    parser.add_argument("--context", type=int, nargs="+", help="lengths: 2048 8192 32768, or 32 64 with --small")
    parser.add_argument("--tokens", type=int, help="of a step: 32768 unless given, 128 with --small")
    parser.add_argument("--steps", type=int, help="30 unless given, 12 with --small; the first 10 are not timed")
    parser.add_argument("--compile", action="store_true", help="the model by torch.compile")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU, in fp32")
    parser.add_argument("--rate", type=float, default=6e-4, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    given = parser.parse_args(arguments)
    check_folders(parser, out=given.out)
    config, device = (SMALL, "cpu") if given.small else (Config(), "cuda")
    check_attentions(parser, given.attention, device)
    contexts = given.context or ([32, 64] if given.small else [2048, 8192, 32768])
    tokens = given.tokens or (128 if given.small else 32768)
    if any(context < 1 or tokens % context for context in contexts):
        parser.error(f"--tokens: expected a multiple of each --context, {contexts}, received {tokens}")
    rows = rows_of(
        config, contexts, given.attention, tokens=tokens, device=device,
        steps=given.steps or (12 if given.small else 30),
        highest=given.rate, seed=given.seed, by_compiler=given.compile,
    )  # fmt: skip
    facts = {**reference_environment(), "torch": torch.__version__} if device == "cpu" else environment(torch)
    words = ["python examples/train_lm/speed.py", "--attention", *given.attention]
    report = document(
        "train_lm_speed", protocol="training", command=" ".join([*words, *["--compile"] * given.compile]),
        environment=facts, rows=rows, config=dataclasses.asdict(config), tokens=tokens, compiled=given.compile,
        seed=given.seed,
    )  # fmt: skip
    if given.out is not None:
        write(report, given.out)
    return report


if __name__ == "__main__":
    main()
