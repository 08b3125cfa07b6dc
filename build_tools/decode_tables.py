"""Tables of caches and of what moves bytes: reports of ``omniattn bench decode``, ``append`` and ``quantize``."""

from __future__ import annotations

from collections.abc import Iterable

from build_tools.page_parts import NOT_MEASURED, Report, Row, anchor, below, number, ratio, table, value_of

#: End of a format's name where the call is told of the prefix (`omniattn.bench.decode_report`).
_WITH_PREFIX = " shared_prefix"


def is_first(row: Row) -> bool:
    """8 query heads on one kv head, 8192 tokens, a contiguous cache."""
    shape = (row["heads_q"], row["heads_kv"], row["seqlen"], row["block_size"])
    return shape == (8, 1, 8192, 0) and not row["ragged"]


def decode(report: Report) -> str:
    """Microseconds, TB/s and relative time for each format: 8 query heads on one kv head, contiguous caches."""
    cells = {(row["format"], row["batch"]): row for row in report["rows"] if is_first(row)}
    batches = sorted({batch for _, batch in cells})
    formats = list(dict.fromkeys(name for name, _ in cells))
    lines = []
    for name in formats:
        lines.append([_format(name, report), *(_cell(cells.get((name, batch)), report) for batch in batches)])
    header = ["µs, TB/s, relative time", *(f"b{batch}" for batch in batches)]
    return below(table(header, lines), report)


def decode_others(report: Report) -> str:
    """The other shapes: many kv heads, long sequences, pages, unequal lengths."""
    cells = _shapes(row for row in report["rows"] if not is_first(row) and not row.get("prefix"))
    formats = list(dict.fromkeys(name for row in cells.values() for name in row))
    lines = [[shape, *(_cell(row.get(name), report) for name in formats)] for shape, row in cells.items()]
    header = ["µs, TB/s, relative time", *(_format(name, report) for name in formats)]
    return below(table(header, lines), report)


def decode_shared(report: Report) -> str:
    """Sequences that share a prefix: each format without and with ``shared_prefix``, and how much that gains."""
    cells = _shapes(row for row in report["rows"] if row.get("prefix"))
    if not cells:
        return NOT_MEASURED
    formats = [name for row in cells.values() for name in row if name + _WITH_PREFIX in row]
    formats = list(dict.fromkeys(formats))
    lines = []
    for shape, row in cells.items():
        line = [shape]
        for name in formats:
            without, told = (value_of(row.get(key), "median_us") for key in (name, name + _WITH_PREFIX))
            gain = None if without is None or told is None else without / told
            line.append(f"{number(without, 1)} → {number(told, 1)} ({ratio(gain)})")
        lines.append([*line, number(value_of(row.get(report["anchor"]), "median_us"), 1)])
    header = ["µs, without → with", *(_format(name, report) for name in formats), f"{anchor(report)}, no sharing"]
    return below(table(header, lines), report)


def _shapes(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Rows of a decode report by shape and format."""
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row["shape"], {})[row["format"]] = row
    return cells


def _format(name: str, report: Report) -> str:
    names = {
        "int4g32": "int4, groups of 32",
        "fbgemm": "int4, FBGEMM's rows",
        "fbgemm4": "int4, FBGEMM's rows in 4 groups",
        "int4w128": "int4, `recent_window=128`",
        "bf16det": "bf16, `deterministic=True`",
        "int4det": "int4, `deterministic=True`",
        report["anchor"]: anchor(report),
    }
    return names.get(name, name)


def _cell(row: Row | None, report: Report) -> str:
    if row is None or row["median_us"] is None:
        return "–"
    text = f"{number(row['median_us'], 1)}, {number(row['tb_per_s'], 2)}"
    relative = row["time_relative_to_anchor"]
    return text if row["format"] == report["anchor"] or relative is None else f"{text}, {relative:.2f}"


def beside_copy(report: Report) -> str:
    """Microseconds and the share of a copy's bandwidth: one row a case, one column a shape."""
    cells = {(row["case"], row["shape"]): row for row in report["rows"]}
    shapes = list(dict.fromkeys(shape for _, shape in cells))
    lines = []
    for case in dict.fromkeys(case for case, _ in cells):
        found = (cells.get((case, shape)) for shape in shapes)
        lines.append(
            [case, *(f"{number(value_of(x, 'median_us'), 1)}, {number(value_of(x, 'of_a_copy'), 2)}" for x in found)]
        )
    copy = f"A copy in the same run: {number(report['ceilings']['copy_tb_per_s'], 2)} TB/s."
    return below(table(["µs, share of a copy's bandwidth", *shapes], lines), report, copy)
