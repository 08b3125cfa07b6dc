"""Tables of calls of other shapes: reports of ``omniattn bench few``, ``short``, ``packed`` and ``windows``."""

from __future__ import annotations

from build_tools.page_parts import Part, Report, Row, Source, below, number, ratio, table, value_of

SOURCES: dict[str, Source] = {
    "few": Source("omniattn bench few --no-flex --json", "few", False),
    **{name: Source(f"omniattn bench {name} --json", name, False) for name in ("short", "packed", "windows")},
}
#: This package's kernels that a case was timed with besides.
_WAYS = ("wgmma", "mma.sync")


def shapes(report: Report) -> str:
    """One row a case: kernel, time, speed, beside the best other and FlashAttention-3, and what is marked."""
    cells: dict[str, dict[str, Row]] = {}
    for row in report["rows"]:
        cells.setdefault(row["shape"], {})[row["contender"]] = row
    ways = [way for way in _WAYS if any(value_of(case.get(way), "median_us") for case in cells.values())]
    header = ["case", "kernel", "µs", "speed", *(f"on {way}, µs" for way in ways), "best other", "µs", "over it",
              "over FA3 (scaled)", "mark"]  # fmt: skip
    lines = [_line(case, case["omniattn"], ways, report) for case in cells.values()]
    return below(table(header, lines), report, *_notes(report))


def _line(case: dict[str, Row], own: Row, ways: list[str], report: Report) -> list[str]:
    best = own["best_other"]
    return [
        own["shape"],
        f"`{own['kernel']}`" if own["kernel"] else "–",
        number(own["median_us"], 1),
        _speed(own),
        *(number(value_of(case.get(way), "median_us"), 1) for way in ways),
        "–" if best is None else report["labels"].get(best, best),
        number(own["best_other_us"], 1),
        ratio(own["ratio_to_best"]),
        ratio(own["ratio_to_fa3_scaled"]),
        own["marks"],
    ]


def _speed(row: Row) -> str:
    name, unit = ("gb_per_s", "GB/s") if row["decides"] == "bytes" else ("tflops", "TFLOP/s")
    return "–" if row[name] is None else f"{number(row[name], 0)} {unit}"


def _notes(report: Report) -> list[str]:
    """What was left out of the whole run: a best other that it might have beaten."""
    labels, missing = report["labels"], report["missing"]
    return [f"Not run: {', '.join(labels.get(name, name) for name in missing)}."] if missing else []


PARTS: dict[str, Part] = {name: Part((name,), shapes) for name in SOURCES}
