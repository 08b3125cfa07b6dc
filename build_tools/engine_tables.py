"""Tables of the engine that one can read: reports of examples/serve/bench.py."""

from __future__ import annotations

from build_tools.page_parts import Part, Report, Source, below, table

SOURCES: dict[str, Source] = {
    "engine": Source("python examples/serve/bench.py --plot docs/engine.svg", "engine", False),
}


def engine(report: Report) -> str:
    """Tokens a second, and the latencies of the first token and of each one behind it, over the requests at once."""
    names = list(dict.fromkeys(row["contender"] for row in report["rows"]))
    rows = {(row["contender"], row["requests"]): row for row in report["rows"]}
    requests = sorted({n for _, n in rows})

    def lines(cell: str) -> list[list[str]]:
        return [
            [name, *(cell.format(**rows[name, n]) if (name, n) in rows else "–" for n in requests)] for name in names
        ]

    tables = [
        table([f"{title}; requests at once:", *map(str, requests)], lines(cell))
        for title, cell in (
            ("tokens/s", "{tokens_per_second:,.0f}"),
            ("first token, ms, p50 / p99", "{first_token_ms_p50:.1f} / {first_token_ms_p99:.1f}"),
            ("time per token, ms, p50 / p99", "{token_ms_p50:.1f} / {token_ms_p99:.1f}"),
            ("same tokens as the first line", "{same_tokens:.0%}"),
        )
    ]
    missing = [f"Not run: {name}, {reason}." for name, reason in report["missing"].items()]
    return below("\n\n".join(tables), report, *missing)


def engine_figure(_: Report) -> str:
    """The figure, as a page shows it."""
    return "![Tokens a second and latencies over the number of requests](../../docs/engine.svg)"


PARTS: dict[str, Part] = {
    "engine": Part(("engine",), engine),
    "engine_figure": Part(("engine",), engine_figure),
}
