"""The tables of an engine's steps: reports of ``omniattn bench serve``."""

from __future__ import annotations

from build_tools.page_parts import Part, Report, Source, below, table
from omniattn.bench.serve import table_of

SOURCES: dict[str, Source] = {
    "serve": Source("omniattn bench serve --json", "serve", False),
    "serve_shared": Source("omniattn bench serve --case shared --case chunks --json", "serve", False),
}


def serve(report: Report) -> str:
    """One row a case, and what was not run."""
    notes = [f"Not run: {', '.join(report['missing'])}."] if report["missing"] else []
    return below(table(*table_of(report["rows"])), report, *notes)


PARTS: dict[str, Part] = {
    "serve": Part(("serve",), serve),
    "serve_shared": Part(("serve_shared",), serve),
}
