"""Table and figure of the errors of block-sparse attention: what ``tests.numerics.sparse_accuracy`` has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from build_tools import charts, svg
from build_tools.page_parts import (
    COLUMNS,
    Figure,
    PageError,
    Part,
    Report,
    Row,
    Source,
    below,
    conditions,
    table,
)

#: Below the checkout.
FIGURE = Path("docs/sparse.svg")

SOURCES: dict[str, Source] = {
    "sparse_accuracy": Source("python -m tests.numerics.sparse_accuracy --json", "sparse_accuracy", False),
}

#: Columns of the table: table and variant of the report.
_COLUMNS = (
    ("topk", "0.3"), ("topk", "0.5"), ("topk, int8", "0.5"), ("topk", "0.7"), ("cdf", "0.9"), ("cdf", "0.97"),
)  # fmt: skip
_MODEL = "SmolLM2"
#: Of the axes of the figure, from below: a power of ten each, of 1 - cosine too.
_ERRORS = ("0.001", "0.01", "0.1", "1", "10")
_COSINES = ("0.999999", "0.99999", "0.9999", "0.999", "0.99", "0.9", "0")
#: How the rules are drawn.
_RULES = (("topk", "solid"), ("cdf", "dashed"))


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    cosine, rel_l1 = (f"{row[key]:.{digits}f}".removeprefix("0") for key, digits in (("cosine", 5), ("rel_l1", 3)))
    return f"{100 * row['kept']:.0f} %: {cosine} / {rel_l1}"


def accuracy(report: Report) -> str:
    """A line an input: of some shares the blocks that are kept, cosine and relative L1."""
    cells = {(row["input"], row["table"], row["variant"]): row for row in report["rows"]}
    header = ["input", *(f"{name}, `topk={x}`".removeprefix("topk, ") if "topk" in name else f"`cdf={x}`"
                         for name, x in _COLUMNS)]  # fmt: skip
    lines = [
        [label, *(_cell(cells.get((label, *column))) for column in _COLUMNS)]
        for label in dict.fromkeys(row["input"] for row in report["rows"])
    ]
    return below(table(header, lines), report)


def _series(report: Report) -> tuple[str, ...]:
    """Names of the curves: inputs, and one for all layers of the model."""
    labels = dict.fromkeys(row["input"] for row in report["rows"])
    return tuple(dict.fromkeys(f"{_MODEL}, mean of layers" if x.startswith(_MODEL) else x for x in labels))


def _curve(report: Report, look: charts.Look, name: str, rule: str, value: Callable[[Row], float]) -> charts.Curve:
    own = [row for row in report["rows"] if row["table"] == rule and row["input"].startswith(name.partition(", m")[0])]
    points = []
    for variant in dict.fromkeys(row["variant"] for row in own):
        of = [row for row in own if row["variant"] == variant]
        points.append((sum(row["kept"] for row in of) / len(of), sum(map(value, of)) / len(of)))
    if not points:
        raise PageError(f"results of {report['bench']!r} without {rule!r} of {name!r}: {report['command']}")
    return charts.Curve(look, tuple(points))


def figure(report: Report) -> str:
    """Relative L1 and cosine over the share of blocks that is kept."""
    names = _series(report)
    colours = (svg.BLUE, svg.ORANGE, svg.GREEN, svg.MAGENTA, svg.GREY)
    kept = charts.Axis(
        "visible blocks that are kept",
        tuple(fifth / 5 for fifth in range(6)),
        tuple(f"{20 * fifth} %" for fifth in range(6)),
    )
    panels = []
    for title, most, value, labels in (
        ("relative L1", 1, lambda row: row["rel_l1"], _ERRORS),
        ("cosine similarity", 0, lambda row: 1.0 - row["cosine"], _COSINES),
    ):
        drawn = tuple(
            _curve(report, charts.Look(colour, line, ""), name, rule, value)
            for name, colour in zip(names, colours, strict=False)
            for rule, line in _RULES
        )
        least = most + 1 - len(labels)
        axis = charts.Axis(title, tuple(10.0**power for power in range(least, most + 1)), labels, log=True)
        panels.append(charts.Panel(title, kept, axis, drawn))
    legend = [(name, charts.Look(colour, mark="")) for name, colour in zip(names, colours, strict=False)]
    legend += [(rule, charts.Look(line=line, mark="")) for rule, line in _RULES]
    title = "Errors of block-sparse attention"
    return charts.chart(title, legend, panels, conditions(report), columns=2, height=280)


def shown(report: Report) -> str:
    """The figure, as a page shows it."""
    del report
    text = f"![Relative L1 and cosine over the share of blocks that is kept]({FIGURE.name})"
    assert len(text) <= COLUMNS
    return text


FIGURES = (Figure(FIGURE, ("sparse_accuracy",), figure),)
#: What the markers of the pages name.
PARTS: dict[str, Part] = {
    "accuracy_sparse": Part(("sparse_accuracy",), accuracy),
    "accuracy_sparse_figure": Part(("sparse_accuracy",), shown),
}
