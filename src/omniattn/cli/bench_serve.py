"""``omniattn bench serve``, and what the benches share that take few options: refusals, files."""

from __future__ import annotations

import argparse
from typing import Any

from omniattn.bench import serve
from omniattn.bench.document import to_json, write
from omniattn.bench.report import markdown_table
from omniattn.cli import console
from omniattn.errors import ArgumentError


def run_serve(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    leave_out(arguments, "has cases of its own, and FlashAttention-3 to compare with")
    cases = serve.cases_of(arguments.case, quick=arguments.quick)
    with console.progress(len(cases) + 1, enabled=not arguments.json) as bar:
        report = serve.run_serve(cases, iters=arguments.iters, command=arguments.command_line, progress=bar.step)
    data = report.to_dict()
    if not written(arguments, data):
        header, rows = serve.table_of(data["rows"])
        facts = [
            ", ".join(f"{name} {value}" for name, value in report.environment.items()),
            f"Ceilings in this run: bf16 matrix product 8192³ {report.matmul_tflops:.0f} TFLOP/s, "
            f"copy {report.copy_tb_per_s:.2f} TB/s (read + written)",
            *report.notes(),
        ]
        if arguments.markdown:
            print(markdown_table(header, rows) + "\n\n" + "\n".join(f"- {fact}" for fact in facts))
        else:
            console.print_table("Steps of an engine on its own pages", header, rows, numeric=(1, 4, 5))
            for fact in facts:
                console.print_line(fact)
    return 1 if any(m.reason and m.contender != serve.FA3 for m in report.measurements) else 0


def leave_out(arguments: argparse.Namespace, reason: str) -> None:
    """Raise if an option is given that only attention and decoding have."""
    for option in ("shapes", "anchor", "only", "plot", "sustained"):
        if getattr(arguments, option):
            raise ArgumentError(f"--{option}", f"to be left out: 'bench {arguments.what}' {reason}", "a value")
    if arguments.precision != "exact":
        expected = f"'exact': 'bench {arguments.what}' has no other"
        raise ArgumentError("--precision", expected, repr(arguments.precision))


def written(arguments: argparse.Namespace, data: dict[str, Any]) -> bool:
    """Write a report to the file that ``--out`` names, or print it for ``--json``: then nothing else is printed."""
    if arguments.out is not None:
        write(data, arguments.out)
    if arguments.json:
        print(to_json(data))
    return bool(arguments.json)
