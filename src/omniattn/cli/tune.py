"""``omniattn tune``: measure the ways of running attention on this GPU, and write what they cost to a file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from omniattn import runtime
from omniattn.bench.document import write
from omniattn.bench.shape_cases import ShapeCase, chosen_cases
from omniattn.bench.timing import BenchError, require_torch
from omniattn.bench.way_cases import cases_of
from omniattn.cli import console
from omniattn.errors import ArgumentError
from omniattn.plan.tuning import VARIABLE
from omniattn.problems.costs import COSTS
from omniattn.runtime import env

_DESCRIPTION = """\
A call of attention can be run in several ways: tiles of several sizes, query heads that share them, keys divided among
CTAs; and so can gradients, decode and quantizers. Which one is the fastest was measured on few GPUs. This command
checks and times all ways of some 450 calls on yours (minutes; --quick: a fifth of them), fits the coefficients of the
model that chooses, and writes them to a file.
It says how much longer than the fastest way the chosen ones take, in each class of calls: before, and with the file, by
coefficients that were fitted to other calls than those that are judged.
The file is used where the environment variable OMNIATTN_TUNING names it: by every process, all ranks of a job too.
"""
#: Timed rounds a call.
_ITERS = 12
_FILE = Path("omniattn-tuning.json")


def add_parser(commands: Any) -> None:
    """Add ``tune`` to the commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune", help="measure on this GPU which ways of running attention are fastest", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a fifth of the calls")
    parser.add_argument("--out", type=Path, default=_FILE, metavar="FILE", help=f"file to write (default: {_FILE})")
    parser.add_argument("--iters", type=int, default=_ITERS, help=f"timed rounds a call (default: {_ITERS})")
    parser.add_argument(
        "--shapes", action="append", default=[], metavar="WORDS",
        help='calls whose name has all these words, e.g. "d128 causal"; may be repeated (default: all). d128: head_dim '
        "(d192/128: of q and v); b4: batch; h32/8: query and kv heads; s4096, or sq16 sk8192: queries and keys; full, "
        "causal, window1024; packed; int8, fp8; bool-mask, key-padding, bf16-bias, softcap50",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    from omniattn.tune.run import FEWEST, QUICK, tune

    if arguments.iters < 1:
        raise ArgumentError("--iters", "an integer >= 1", arguments.iters)
    folder = arguments.out.resolve().parent
    if not folder.is_dir() or arguments.out.is_dir() or not os.access(folder, os.W_OK):
        raise ArgumentError("--out", "a file in a folder that exists and can be written", repr(str(arguments.out)))
    console.require_rich()
    cases = chosen_cases(cases_of(("attention", *COSTS)), arguments.shapes, [])
    cases = cases[:: QUICK if arguments.quick else 1]
    if (number := sum(isinstance(case, ShapeCase) for case in cases)) < FEWEST:
        raise ArgumentError("--shapes", f"words that {FEWEST} calls of attention have, or more", f"{number} calls")
    if env.get(VARIABLE) is not None:
        raise ArgumentError(VARIABLE, "to be unset: 'omniattn tune' compares with what is chosen without it", "a file")
    try:
        torch = require_torch()
        device = runtime.device_info(torch.cuda.current_device())
        with console.progress(len(cases) + 1, enabled=True) as bar:
            found = tune(cases, device, iters=arguments.iters, command=arguments.command_line, progress=bar.step)
    except BenchError as error:
        raise console.CannotRunError(str(error)) from error
    write(found.to_dict(device), arguments.out)
    rows = []
    for name, gain in found.gains_of_all.items():
        figures = gain.before, gain.worst_before, gain.after, gain.worst_after
        rows.append([name, str(gain.calls), *(f"{100 * x:.1f}" for x in figures)])
    header = ["calls", "number", "before, %", "worst", "with the file, %", "worst"]
    console.print_table(f"Slower than the fastest way, {device.name}", header, rows, numeric=range(1, len(header)))
    for line in found.report.summary()[2:]:
        console.print_line(line)
    console.print_line(f"Median error of the model: {100 * found.error:.1f} %")
    console.print_line(f"{arguments.out} is used where {VARIABLE}={arguments.out} is set")
    return 0
