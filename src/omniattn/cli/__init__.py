"""The command ``omniattn``: demo, info, verify, bench, tune, compile.

One module a command. Each has ``add_parser(subparsers)`` and ``run(arguments) -> int`` (the exit code). rich and
matplotlib are imported when something is drawn: ``omniattn --help`` and ``--json`` work in the barest installation.

Exit codes: 0 success; 1 the command ran and failed; 2 it cannot run here or was called wrongly.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

import omniattn
from omniattn.cli import bench, compile, demo, info, tune, verify
from omniattn.cli.console import CannotRunError
from omniattn.errors import ArgumentError, OmniattnError
from omniattn.select.choice import VARIABLE
from omniattn.testing.frameworks import NoGpuError

__all__ = ["build_parser", "main"]


def build_parser() -> argparse.ArgumentParser:
    """The argument parser of ``omniattn`` with all its commands."""
    parser = argparse.ArgumentParser(
        prog="omniattn",
        description="Attention kernels for every array framework and every NVIDIA GPU from Ampere on.",
    )
    parser.add_argument("--version", action="version", version=f"omniattn {omniattn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in (demo, info, verify, bench, tune, compile):
        module.add_parser(commands)
    return parser


def _command_line(words: Sequence[str]) -> str:
    """What reports say they were made by: forced kernels, and the command without the file that it writes to."""
    kept = [
        word
        for before, word in zip(["", *words], words)
        if before != "--out" and word != "--out" and not word.startswith("--out=")
    ]
    forced = os.environ.get(VARIABLE, "")
    return f"{VARIABLE}={shlex.quote(forced)} " * bool(forced) + shlex.join(["omniattn", *kept])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; default: the process's own.

    Returns
    -------
    int
        The exit code.
    """
    arguments = build_parser().parse_args(argv)
    arguments.command_line = _command_line(sys.argv[1:] if argv is None else argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CannotRunError, NoGpuError, ArgumentError) as error:
        print(f"omniattn {arguments.command}: {error}", file=sys.stderr)
        return 2
    except OmniattnError as error:
        print(f"omniattn {arguments.command}: {error}", file=sys.stderr)
        return 1
