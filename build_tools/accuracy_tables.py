"""Tables of errors in the documents: what the accuracy scripts of the tests have written, to Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from build_tools.page_parts import PageError, Part, Report, Row, Source, below, number, table

SOURCES: dict[str, Source] = {
    "ablations": Source("python -m tests.numerics.ablations --json", "ablations", False),
    "low_precision_accuracy": Source(
        "python -m tests.numerics.low_precision_accuracy --json", "low_precision_accuracy", False
    ),
    "kv_accuracy": Source("python -m tests.numerics.kv_accuracy --json", "kv_accuracy", False),
    "accuracy_gpu": Source("python -m tests.gpu.accuracy_table --json", "accuracy_gpu", False),
}

Cell = Callable[[Row | None], str]


def _short(value: float, digits: int) -> str:
    """Without the zero before the point."""
    return number(value, digits).removeprefix("0")


def _both(digits: int) -> Cell:
    """Cosine similarity / relative L1, the latter with so many digits."""
    return lambda row: "–" if row is None else f"{_short(row['cosine'], 5)} / {_short(row['rel_l1'], digits)}"


def _l1(row: Row | None) -> str:
    return "–" if row is None else _short(row["rel_l1"], 4)


def _rows(report: Report, name: str) -> list[Row]:
    """Rows of one table of a report, published figures included."""
    every = [*report.get("published", {}).get("rows", ()), *report["rows"]]
    found = [row for row in every if row["table"] == name]
    if not any(row["table"] == name for row in report["rows"]):
        raise PageError(f"results of {report['bench']!r} without a row of {name!r}: {report['command']}")
    return found


def errors(
    name: str, cell: Cell, variants: tuple[str, ...] = (), labels: Mapping[str, str] | None = None
) -> Callable[[Report], str]:
    """A line an input, a column a variant.

    Parameters
    ----------
    name : str
        Table of the report.
    cell : callable
        Row to text; of None where there is no row.
    variants : tuple of str
        Columns; default: all, in the report's order.
    labels : mapping of str to str, optional
        Headings that are not "input" or the variant.
    """

    def make(report: Report) -> str:
        cells = {(row["input"], row["variant"]): row for row in _rows(report, name)}
        columns = variants or tuple(dict.fromkeys(variant for _, variant in cells))
        lines = [
            [line, *(cell(cells.get((line, column))) for column in columns)]
            for line in dict.fromkeys(line for line, _ in cells)
        ]
        header = [(labels or {}).get(text, text) for text in ("input", *columns)]
        return below(table(header, lines), report)

    return make


def means(name: str, variants: tuple[str, ...]) -> Callable[[Report], str]:
    """A line a variant: the mean over all inputs of a table of the report, and the largest error."""

    def make(report: Report) -> str:
        rows = _rows(report, name)
        found = {v: [row["rel_l1"] for row in rows if row["variant"] == v] for v in variants}
        lines = [[f'`"{v}"`', _short(sum(x) / len(x), 4), _short(max(x), 4)] for v, x in found.items()]
        return below(table(["precision", "mean relative L1", "largest"], lines), report)

    return make


def kv_accuracy(report: Report) -> str:
    """A line a cache, with the bytes of a token; a column an input."""
    rows = _rows(report, "caches")
    cells = {(row["variant"], row["input"]): row for row in rows}
    size = {row["variant"]: row["token_bytes"] for row in rows}
    columns = tuple(dict.fromkeys(row["input"] for row in rows))
    lines = []
    for cache in size:
        found = (cells.get((cache, column)) for column in columns)
        texts = ("–" if row is None else f"{number(row['cosine'], 4)} / {number(row['rel_l1'], 3)}" for row in found)
        lines.append([cache, str(size[cache]), *texts])
    return below(table(["cache", "bytes", *columns], lines), report)


#: What the markers of the pages name.
PARTS: dict[str, Part] = {
    "accuracy": Part(("low_precision_accuracy",), errors("precisions", _both(3), ("int8", "int8, V as it is", "int4"))),
    "accuracy_precisions": Part(
        ("low_precision_accuracy",), errors("precisions", _both(3), labels={"int4": "int4 (Q+K smoothed)"})
    ),
    "accuracy_rotated": Part(("low_precision_accuracy",), errors("rotated", _both(3))),
    "accuracy_means": Part(("low_precision_accuracy",), means("rotated", ("int8", "fp8", "int4"))),
    "accuracy_granularity": Part(
        ("low_precision_accuracy",), errors("granularity", _l1, labels={"input": "V, grouping"})
    ),
    "accuracy_products": Part(("low_precision_accuracy",), errors("products", _both(3))),
    "accuracy_gpu": Part(
        ("accuracy_gpu",),
        errors(
            "precisions",
            _both(3),
            ("SageAttention2", "int8", "int8, smooth Q", "int4", "int4, smooth K", "int4, none"),
        ),
    ),
    "ablation_smoothing": Part(("ablations",), errors("smoothing", _both(4))),
    "ablation_granularity": Part(("ablations",), errors("granularity", _both(4))),
    "ablation_products": Part(("ablations",), errors("products", _both(4))),
    "ablation_products_keys": Part(("ablations",), errors("products by keys", _both(4))),
    "ablation_products_smooth_v": Part(("ablations",), errors("products, V smoothed", _both(4))),
    "kv_accuracy": Part(("kv_accuracy",), kv_accuracy),
}


def tables(report: Report) -> str:
    """Every table that a report alone fills."""
    return "\n\n".join(part.make(report) for part in PARTS.values() if part.sources == (report["bench"],))
