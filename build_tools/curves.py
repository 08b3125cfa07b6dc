"""Curves of errors over a share as plain SVG text, for light and dark pages: the same numbers give the same bytes.

Standard library only.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, PANEL_WIDTH, PANEL_HEIGHT, TOP, LEFT, GAP, BOTTOM = 900, 384, 300, 76, 56, 52, 44
#: Of each series on a light and on a dark page, distinguishable with the common forms of colour blindness.
_COLOURS = (
    ("#0072b2", "#56b4e9"), ("#d55e00", "#ff8f3f"), ("#009e73", "#2fd3a2"), ("#a0508a", "#e29ac8"),
    ("#6e7781", "#a8b1bb"),
)  # fmt: skip
_LIGHT, _DARK = ("#ffffff", "#24292f", "#d0d7de"), ("#0d1117", "#e6edf3", "#30363d")


@dataclass(frozen=True)
class Curve:
    """Points (share from 0 to 1, value) of a series by its number; dashed or not."""

    series: int
    points: tuple[tuple[float, float], ...]
    dashed: bool


@dataclass(frozen=True)
class Panel:
    """Curves over one logarithmic axis.

    Attributes
    ----------
    title : str
    curves : tuple of Curve
    least, most : int
        Powers of ten at the ends of the axis; what lies below is drawn at the lower end.
    labels : tuple of str
        Of each power of ten, from ``least`` on.
    """

    title: str
    curves: tuple[Curve, ...]
    least: int
    most: int
    labels: tuple[str, ...]


def curves(series: Sequence[str], axis: str, styles: tuple[str, str], panels: Sequence[Panel]) -> str:
    """Return an SVG of two panels beside each other.

    Parameters
    ----------
    series : sequence of str
        Names, at most five.
    axis : str
        What the share is of.
    styles : (str, str)
        What solid and dashed curves are.
    panels : sequence of Panel
    """
    height = TOP + PANEL_HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f"<style>{_style()}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
    ]
    for i, name in enumerate(series):
        x = LEFT + 168 * i
        parts += [_line(x, 16, x + 20, 16, f"curve s{i}"), _text(x + 26, 20, name)]
    for i, name in enumerate(styles):
        x = LEFT + 168 * i
        parts += [_line(x, 36, x + 20, 36, "curve plain" + " dashed" * i), _text(x + 26, 40, name)]
    for i, panel in enumerate(panels):
        parts += _panel(panel, LEFT + i * (PANEL_WIDTH + GAP), axis)
    return "\n".join([*parts, "</svg>", ""])


def _style() -> str:
    """Rules for a light page, and those that a dark one has in place of them."""

    def colours(dark: int, page: tuple[str, str, str]) -> str:
        own = "".join(f".s{i} {{ stroke: {both[dark]} }} " for i, both in enumerate(_COLOURS))
        return f".page {{ fill: {page[0]} }} text {{ fill: {page[1]} }} .plain {{ stroke: {page[1]} }} " + (
            f".grid {{ stroke: {page[2]} }} {own}"
        )

    common = (
        "text { font: 12px sans-serif } .title { font-weight: bold } .small { font-size: 10px } "
        ".curve { fill: none; stroke-width: 1.8 } .dashed { stroke-dasharray: 4 3 } "
    )
    return f"{common}{colours(0, _LIGHT)}@media (prefers-color-scheme: dark) {{ {colours(1, _DARK)}}}"


def _panel(panel: Panel, left: float, axis: str) -> list[str]:
    base = TOP + PANEL_HEIGHT

    def at(share: float, value: float) -> tuple[float, float]:
        power = math.log10(value) if value > 0 else panel.least
        power = min(max(power, panel.least), panel.most)
        return left + PANEL_WIDTH * share, base - PANEL_HEIGHT * (power - panel.least) / (panel.most - panel.least)

    parts = [_text(left, TOP - 10, panel.title, "title")]
    for power, label in zip(range(panel.least, panel.most + 1), panel.labels, strict=True):
        y = at(0, 10.0**power)[1]
        parts += [_line(left, y, left + PANEL_WIDTH, y, "grid"), _text(left - 6, y + 4, label, "small", "end")]
    for tenth in range(0, 11, 2):
        x = at(tenth / 10, 1.0)[0]
        parts += [_line(x, TOP, x, base, "grid"), _text(x, base + 15, f"{10 * tenth} %", "small", "middle")]
    parts.append(_text(left + PANEL_WIDTH / 2, base + 34, axis, "", "middle"))
    for curve in panel.curves:
        points = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in curve.points)
        style = f"curve s{curve.series}" + " dashed" * curve.dashed
        parts.append(f'<polyline class="{style}" points="{points}"/>')
    return parts


def _line(x: float, y: float, to_x: float, to_y: float, style: str) -> str:
    return f'<path class="{style}" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    class_ = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{class_} text-anchor="{anchor}">{html.escape(text)}</text>'
