"""Figures of speed and error: every curve is what the result files say, on light and dark pages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from build_tools import charts, page_tables, pages, result_figures, svg
from build_tools.charts import Axis, Curve, Look, Panel

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def report(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / pages.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def curves(text: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """Class and points of each curve."""
    return [
        (node.attrib["class"], [tuple(map(float, point.split(","))) for point in node.attrib["points"].split()])
        for node in ElementTree.fromstring(text).iter(f"{SVG}polyline")
    ]  # type: ignore[misc]


def words(text: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(text).iter(f"{SVG}text")]


def spread(text: str) -> Iterator[tuple[float, float, float, float]]:
    """Box of every text, with letters as broad as those of a broad font."""
    sizes = {"title": 15, "small": 10, "bar": 10}
    for node in ElementTree.fromstring(text).iter(f"{SVG}text"):
        size = sizes.get(node.attrib.get("class", ""), 12)
        x, y, wide = float(node.attrib["x"]), float(node.attrib["y"]), 0.56 * size * len(node.text or "")
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[node.attrib["text-anchor"]]
        yield left, y - 0.8 * size, left + wide, y


@pytest.mark.parametrize("figure", page_tables.FIGURES, ids=lambda figure: figure.path.stem)
def test_every_figure(figure: Any) -> None:
    """Well formed, for both kinds of pages, with the device and the date of each of its runs, no text cut off."""
    reports = [report(name) for name in figure.sources]
    text = figure.make(*reports)
    assert text == figure.make(*reports) == (ROOT / figure.path).read_text(encoding="utf-8")
    size = ElementTree.fromstring(text).attrib
    assert "@media (prefers-color-scheme: dark)" in text
    said = " ".join(words(text))
    for one in reports:
        assert one["environment"]["device"] in said
        assert one["date"] in said
    boxes = list(spread(text))
    assert all(left >= 0 and right <= float(size["width"]) for left, _, right, _ in boxes)
    assert all(top >= 0 and bottom <= float(size["height"]) for _, top, _, bottom in boxes)
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert not [
            other
            for other in boxes[:i]
            if left < other[2] and other[0] < right and top < other[3] and other[1] < bottom
        ], words(text)[i]


def test_every_figure_is_on_a_page() -> None:
    texts = [path.read_text(encoding="utf-8") for path in [*ROOT.glob("*.md"), *ROOT.glob("[de]*/**/*.md")]]
    for figure in page_tables.FIGURES:
        assert any(f"/{figure.path.name})" in text or f"({figure.path.name})" in text for text in texts), figure.path


@pytest.mark.parametrize(
    ("figure", "name", "what"), [("forward", "forward", None), ("backward", "backward", "backward")]
)
def test_a_curve_has_the_speeds_of_its_contender(figure: str, name: str, what: str | None) -> None:
    """Of the first panel, causal with head_dim 64: higher is faster, and as much as the numbers say."""
    found = report(name)
    drawn = curves(getattr(result_figures, figure)(found))
    series = {"forward": result_figures._FORWARD, "backward": result_figures._BACKWARD}[figure]
    series = result_figures.measured(series, found["rows"])
    assert len(drawn) == 6 * len(series)
    speeds: dict[tuple[str, int], float] = {}
    for row in found["rows"]:
        own = what is None or (row["what"] == what and row["headline"] and row["best_layout"])
        own = own and row["contender"] in {name for name, _, _ in series}
        if own and row["head_dim"] == 64 and row["causal"]:
            speeds[row["contender"], row["seqlen"]] = row["tflops"]
    assert len(speeds) == 3 * len(series)
    base, scale = None, None
    for (contender, _, look), (style, points) in zip(series, drawn):
        assert f"s{look.colour}" in style.split()
        assert ("dashed" in style.split()) == (look.line == "dashed")
        for (_, y), seqlen in zip(points, (1024, 4096, 16384), strict=True):
            value = speeds[contender, seqlen]
            if base is None:
                base = (value, y)
            elif scale is None:
                scale = (y - base[1]) / (value - base[0])
                assert scale < 0
            else:
                assert y == pytest.approx(base[1] + scale * (value - base[0]), abs=0.6)


def test_what_was_not_measured_is_left_out() -> None:
    found = report("backward")
    row = next(row for row in found["rows"] if row["contender"] == "fa2" and row["headline"] and row["best_layout"])
    row["tflops"] = None
    before, after = curves(result_figures.backward(report("backward"))), curves(result_figures.backward(found))
    assert sum(len(points) for _, points in after) == sum(len(points) for _, points in before) - 1
    found["rows"] = [row for row in found["rows"] if row["contender"] != "fa2"]
    assert len(curves(result_figures.backward(found))) == len(before) - 6


def test_other_shapes_have_every_case_that_a_panel_names() -> None:
    few, short, windows = (report(name) for name in ("few", "short", "windows"))
    drawn = curves(result_figures.shapes(few, short, windows))
    # omniattn, cuDNN, FlashAttention-2 and -3 on 32768 keys; without the latter; with FlexAttention.
    assert [len(points) for _, points in drawn] == [5, 5, 5, 4, 3, 3, 3, 3, 3, 3, 3, 3]
    # Without the scaled times the ratio to them is nowhere drawn; with them it is the files' own.
    ours, fa3 = drawn[7][1], drawn[11][1]
    row = next(row for row in windows["rows"] if row["shape"].endswith("causal window4096"))
    base = max(float(node.attrib["d"].split("V")[0].split()[1].split("L")[0]) for node in
               ElementTree.fromstring(result_figures.shapes(few, short, windows)).iter(f"{SVG}path")
               if node.attrib["class"] == "grid")  # fmt: skip
    assert (base - ours[-1][1]) / (base - fa3[-1][1]) == pytest.approx(row["ratio_to_fa3_scaled"], abs=0.01)


def test_serving_has_every_case_that_a_panel_names() -> None:
    """A case that is renamed or gone would leave a hole without a word."""
    drawn = curves(result_figures.serving(report("serve"), report("serve_shared")))
    assert [len(points) for _, points in drawn] == [5, 5, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 3, 3, 3]


def test_the_front_is_the_least_error_at_a_speed() -> None:
    assert result_figures.front([]) == ()
    assert result_figures.front([(1.0, 0.3)]) == ((1.0, 0.3),)
    # (1, 0.5) is slower and less exact than (2, 0.1).
    assert result_figures.front([(3.0, 0.4), (1.0, 0.5), (2.0, 0.1)]) == ((2.0, 0.1), (2.0, 0.4), (3.0, 0.4))
    # As fast: the more exact of both.
    assert result_figures.front([(2.0, 0.4), (2.0, 0.1), (1.0, 0.0)]) == ((1.0, 0.0), (1.0, 0.1), (2.0, 0.1))


def test_errors_over_speed_are_of_the_timed_calls_and_of_layers() -> None:
    reports = [report(name) for name in ("fp8", "low_precision_accuracy", "decode", "kv_accuracy")]
    text = result_figures.pareto(*reports)
    marks = [node.attrib["class"].split()[0] for node in ElementTree.fromstring(text).iter(f"{SVG}circle")]
    legend = 9  # a mark each, but for the front
    dots = 2 * len(result_figures.PRECISIONS) + len(result_figures._CACHES)
    rings = 2 * 2 + 4
    assert len(marks) == legend + dots + rings
    assert marks.count("ring") == 1 + rings
    # Without layers of the model only what was measured stays.
    reports[1]["rows"] = [row for row in reports[1]["rows"] if "layer" not in row["input"]]
    assert result_figures.pareto(*reports).count('class="ring ') == 1 + 4


# --------------------------------------------------------------------------------------------------------------- Axes


def test_axes() -> None:
    axis = charts.tokens("n", [16384, 1024, 4096, 1024, 100])
    assert axis.labels == ("100", "1k", "4k", "16k")
    assert axis.share(100) == 0.0
    assert axis.share(16384) == 1.0
    assert axis.share(4096) - axis.share(1024) == pytest.approx(axis.share(16384) - axis.share(4096))
    assert charts.tokens("n", [7]).share(7) == 0.5
    assert charts.linear("y", [831.0, 3.0]).labels == ("0", "200", "400", "600", "800", "1000")
    assert charts.linear("y", [1200.0]).ticks[-1] == 1200
    assert charts.linear("y", [2.9], unit="×").labels == ("0×", "0.5×", "1×", "1.5×", "2×", "2.5×", "3×")
    assert charts.linear("y", [1094.0], least=541.0).ticks == (500.0, 600.0, 700.0, 800.0, 900.0, 1000.0, 1100.0)
    assert charts.linear("y", []).ticks[0] == 0.0
    assert charts.powers("y", [13.0, 484.0]).ticks == (10.0, 100.0, 1000.0)
    assert charts.powers("y", [0.0, 5.0]).labels == ("1", "10")
    for most in (0.04, 0.7, 1.0, 3.3, 97.0, 5432.0):
        ticks = charts.linear("y", [most]).ticks
        assert ticks[-2] < most <= ticks[-1]
        assert len(ticks) <= 7


def test_values_beyond_the_axis_are_drawn_at_its_ends() -> None:
    axis = Axis("a & b", (0.1, 1.0), ("0.1", "1"), log=True)
    panel = Panel(
        "p", Axis("x", (0.0, 1.0), ("0", "1")), axis, (Curve(Look(), ((0.0, 0.0), (0.5, 1e-9), (1.0, 50.0))),)
    )
    text = charts.chart("t < u", [("s", Look(mark="ring"))], [panel], "here", height=100)
    ((_, points),) = curves(text)
    assert points[0][1] == points[1][1] == points[2][1] + 100
    assert {"t < u", "s", "p", "here"} <= set(words(text))


def test_colours_differ_on_both_pages() -> None:
    for paper, of_page in zip(("#ffffff", "#0d1117"), zip(*svg.COLOURS, strict=True), strict=True):
        assert len(set(of_page)) == len(svg.COLOURS)

        def luminance(colour: str) -> float:
            parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
            linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
            return math.fsum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear))

        for colour in of_page:
            bright, dark = sorted((luminance(colour), luminance(paper)), reverse=True)
            assert (bright + 0.05) / (dark + 0.05) >= 3, colour  # WCAG 2.1, contrast of what is not text


def test_a_legend_that_is_too_long_goes_on_in_the_next_line() -> None:
    places, lines = svg.flow(["a long name of a series"] * 7, 52)
    assert lines == 2
    assert places[0] == (52, 0)
    assert [row for _, row in places] == sorted(row for _, row in places)
    assert svg.flow([], 52) == ([], 0)
