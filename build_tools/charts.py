"""Curves and points over an axis, in panels beside and below each other, as SVG text. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from build_tools import svg

_LEFT, _RIGHT = 52, 22
_TITLE, _LEGEND_LINE, _PANEL_TITLE, _BELOW = 24, 18, 24, 38


@dataclass(frozen=True)
class Axis:
    """An edge of a panel, from its first to its last tick.

    Attributes
    ----------
    name : str
        What it shows, with its unit.
    ticks : tuple of float
    labels : tuple of str
    log : bool
        Equal ratios have equal lengths.
    """

    name: str
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1; what lies beyond an end is drawn at it."""
        first, last = self.ticks[0], self.ticks[-1]
        if first == last:
            return 0.5
        if not self.log:
            return min(max((value - first) / (last - first), 0.0), 1.0)
        value = min(max(value, first), last)
        return math.log(value / first) / math.log(last / first)


def tokens(name: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis with a tick at each of the values: 4096 is 4k."""
    ticks = tuple(sorted(set(values)))
    labels = tuple(f"{tick / 1024:g}k" if tick >= 1024 and tick % 1024 == 0 else f"{tick:g}" for tick in ticks)
    return Axis(name, ticks, labels, log=True)


def linear(name: str, values: Iterable[float], *, least: float = 0.0, unit: str = "") -> Axis:
    """An axis from ``least`` or below to above the largest value, with at most seven round ticks."""
    most = max((*values, least))
    step = 10.0 ** math.floor(math.log10(max(most - least, 1e-9) / 6))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if (most - least) / (step * factor) <= 6)
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    ticks = tuple(round(step * i, 12) for i in range(first, max(last, first + 1) + 1))
    return Axis(name, ticks, tuple(f"{tick:g}{unit}" for tick in ticks))


def powers(name: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis between powers of ten around the values."""
    known = [math.log10(value) for value in values if value > 0] or [0.0]
    first = math.floor(min(known))
    ticks = tuple(10.0**power for power in range(first, max(math.ceil(max(known)), first + 1) + 1))
    return Axis(name, ticks, tuple(f"{tick:g}" for tick in ticks), log=True)


@dataclass(frozen=True)
class Look:
    """How a series is drawn.

    Attributes
    ----------
    colour : int
        One of `build_tools.svg`.
    line : str
        ``"solid"``, ``"dashed"``, or none.
    mark : str
        At each point: ``"dot"``, ``"ring"``, or none.
    """

    colour: int = svg.INK
    line: str = "solid"
    mark: str = "dot"


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of a series, from left to right."""

    look: Look
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Panel:
    """Curves over the same axes."""

    title: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]


def chart(
    title: str,
    legend: Sequence[tuple[str, Look]],
    panels: Sequence[Panel],
    foot: str,
    *,
    columns: int = 3,
    height: int = 190,
) -> str:
    """Return an SVG of panels, row by row.

    Parameters
    ----------
    title : str
    legend : sequence of (str, Look)
    panels : sequence of Panel
    foot : str
        Where and when it was measured.
    columns : int
        Panels beside each other.
    height : int
        Of a panel's plot.
    """
    places, lines = svg.flow([name for name, _ in legend], _LEFT)
    parts = [svg.text(_LEFT, _TITLE, title, "title")]
    for (name, look), (x, row) in zip(legend, places, strict=True):
        middle = _TITLE + 18.0 + _LEGEND_LINE * row
        if look.line:
            parts.append(svg.line(x, middle, x + 20, middle, _style(look)))
        parts += [*_marks(look, [(x + 10, middle)]), svg.text(x + 26, middle + 4, name)]
    y = _TITLE + 12.0 + _LEGEND_LINE * lines
    gap = 48 if columns > 2 else 68
    width = (svg.WIDTH - _LEFT - _RIGHT - gap * (columns - 1)) / columns
    for i, panel in enumerate(panels):
        if i and i % columns == 0:
            y += _PANEL_TITLE + height + _BELOW
        parts += _panel(panel, _LEFT + (i % columns) * (width + gap), y + _PANEL_TITLE, width, height)
    below, end = svg.foot(foot, y + _PANEL_TITLE + height + _BELOW + 10, _LEFT)
    return svg.page(svg.WIDTH, end, [*parts, *below])


def _panel(panel: Panel, left: float, top: float, width: float, height: float) -> list[str]:
    base = top + height

    def at(x: float, y: float) -> tuple[float, float]:
        return left + width * panel.x.share(x), base - height * panel.y.share(y)

    parts = [svg.text(left, top - 7, panel.title, "panel")]
    for tick, label in zip(panel.y.ticks, panel.y.labels, strict=True):
        y = at(panel.x.ticks[0], tick)[1]
        parts += [svg.line(left, y, left + width, y, "grid"), svg.text(left - 6, y + 4, label, "small", "end")]
    for tick, label in zip(panel.x.ticks, panel.x.labels, strict=True):
        x = at(tick, panel.y.ticks[0])[0]
        parts += [svg.line(x, top, x, base, "grid"), svg.text(x, base + 14, label, "small", "middle")]
    parts.append(svg.text(left + width / 2, base + 29, panel.x.name, "small", "middle"))
    for curve in panel.curves:
        points = [at(*point) for point in curve.points]
        if curve.look.line and points:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="{_style(curve.look)}" points="{path}"/>')
        parts += _marks(curve.look, points)
    return parts


def _style(look: Look) -> str:
    return f"curve s{look.colour}" + " dashed" * (look.line == "dashed")


def _marks(look: Look, points: Iterable[tuple[float, float]]) -> list[str]:
    if not look.mark:
        return []
    style, radius = (f"ring s{look.colour}", 3.5) if look.mark == "ring" else (f"d{look.colour}", 3.0)
    return [f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>' for x, y in points]
