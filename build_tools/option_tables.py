"""Tables of the options of ``attention``: reports of ``omniattn bench options``."""

from __future__ import annotations

from build_tools.page_parts import Part, Report, Row, Source, below, number, ratio, table

SOURCES: dict[str, Source] = {
    "options": Source("omniattn bench options --json", "options", False),
    "options_int8": Source("omniattn bench options --precision int8 --json", "options", False),
}


def options(report: Report) -> str:
    """One row a case of a shape: speed, beside the plain call and beside the best other, and what is marked."""
    own = [row for row in report["rows"] if row["contender"] == "omniattn"]
    header = ["shape", "case", "µs", "TFLOP/s", "pairs", "over plain", "best other", "µs", "over it", "mark"]
    return below(table(header, (_line(row, report) for row in own)), report, *_notes(report))


def _line(row: Row, report: Report) -> list[str]:
    best, share = row["best_other"], row["share_of_plain_pairs"]
    return [
        row["shape"],
        row["case"],
        number(row["median_us"], 1),
        number(row["tflops"], 0),
        row["pairs"] if share == 1 else f"{row['pairs']}, {share:.2f}",
        ratio(row["ratio_to_plain"]),
        "–" if best is None else report["labels"].get(best, best),
        number(row["best_other_us"], 1),
        ratio(row["ratio_to_best"]),
        row["marks"],
    ]


def _notes(report: Report) -> list[str]:
    """What was left out of the whole run: a best other that it might have beaten."""
    labels, missing = report["labels"], report["missing"]
    return [f"Not run: {', '.join(labels.get(name, name) for name in missing)}."] if missing else []


PARTS: dict[str, Part] = {name: Part((name,), options) for name in SOURCES}
