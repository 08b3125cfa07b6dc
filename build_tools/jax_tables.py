"""Table of attention under jax.jit: the report of examples/train_jax/bench.py."""

from __future__ import annotations

from build_tools.page_parts import Part, Report, Row, Source, below, number, ratio, table, value_of

SOURCES: dict[str, Source] = {"jax": Source("python examples/train_jax/bench.py", "jax", False)}
_OTHERS = {"cudnn": "cuDNN", "xla": "XLA"}


def attention(report: Report) -> str:
    """Microseconds of a compiled call, and how many times as fast as the other implementations."""
    rows: dict[tuple[str, str], dict[str, Row]] = {}
    for row in report["rows"]:
        rows.setdefault((row["name"], row["what"]), {})[row["contender"]] = row
    lines = []
    for (name, what), found in rows.items():
        ours = found["omniattn"]
        line = [name, what, number(ours["median_us"], 0 if ours["median_us"] >= 100 else 1)]
        for other in _OTHERS:
            theirs = value_of(found.get(other), "median_us")
            line += [
                "–" if theirs is None else number(theirs, 0 if theirs >= 100 else 1),
                ratio(None if theirs is None else ours[f"speed_over_{other}"]),
            ]
        lines.append(line)
    header = ["bf16, causal", "what", "omniattn, µs"]
    for label in _OTHERS.values():
        header += [f"{label}, µs", f"over {label}"]
    versions = f"JAX {report['environment']['jax']}; wall time of compiled calls that follow each other."
    return below(table(header, lines), report, versions)


PARTS: dict[str, Part] = {"jax": Part(("jax",), attention)}
