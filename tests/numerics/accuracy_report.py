"""What the accuracy scripts have in common: a row of a result, the command line, the JSON of docs/performance/results.

A script prints its tables as the documents show them; ``--json`` prints its rows, ``--out FILE`` writes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from build_tools.accuracy_tables import tables
from omniattn.bench.document import document, to_json, write

Row = dict[str, Any]


def row(table: str, label: str, variant: str, cosine: float, rel_l1: float, **more: Any) -> Row:
    """One measurement: what was measured (``variant``) on which input (``label``), and the error."""
    return {"table": table, "input": label, "variant": variant, "cosine": cosine, "rel_l1": rel_l1, **more}


def run(
    bench: str,
    command: str,
    environment: Callable[[], Mapping[str, str]],
    measure: Callable[[], Iterable[Row]],
    arguments: Sequence[str] | None = None,
    show: Callable[[Mapping[str, Any]], str] = tables,
    **more: Any,
) -> None:
    """Measure and show.

    Parameters
    ----------
    bench : str
        Name of the result.
    command : str
        What runs the script.
    environment, measure : callable
        Give the head of the report and its rows.
    arguments : sequence of str, optional
        Of the command line; default: the process's own.
    show : callable
        Report to the text that is printed without ``--json``.
    **more
        Whatever else the report has to say.
    """
    parser = argparse.ArgumentParser(prog=command, description=f"Errors against double precision: {bench}.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON to a file, whatever is printed")
    options = parser.parse_args(arguments)
    if options.out is not None and not options.out.resolve().parent.is_dir():
        parser.error(f"--out: expected a file in an existing folder, received '{options.out}'")
    report = document(
        bench,
        protocol="accuracy",
        command=f"{command} --json" if options.json else command,
        environment=environment(),
        rows=list(measure()),
        **more,
    )
    if options.out is not None:
        write(report, options.out)
    print(to_json(report) if options.json else show(report))
