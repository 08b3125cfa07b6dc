"""Bar charts as SVG text. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from build_tools import svg

_PANEL, _TOP, _LEFT = 190, 62, 44
_COLOURS = (svg.BLUE, svg.ORANGE, svg.GREEN)


@dataclass(frozen=True)
class Group:
    """Bars that stand together: the lines of text below them, and a height for each series (None: no bar)."""

    lines: tuple[str, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Panel:
    """One row of groups with its name."""

    name: str
    groups: tuple[Group, ...]


def bars(title: str, series: Sequence[str], panels: Sequence[Panel], foot: str) -> str:
    """Return an SVG of the panels, one below the other, with a line at 1 that all bars are measured by.

    Parameters
    ----------
    title : str
    series : sequence of str
        Names, at most three.
    panels : sequence of Panel
    foot : str
        Where and when it was measured.
    """
    values = [value for panel in panels for group in panel.groups for value in group.values if value is not None]
    top = max(2.0, math.ceil(max(values, default=1.0) * 4) / 4)
    parts = [svg.text(_LEFT, 24, title, "title")]
    for colour, name, (x, _) in zip(_COLOURS, series, svg.flow(series, _LEFT)[0]):
        parts.append(f'<rect class="d{colour}" x="{x:.1f}" y="36" width="12" height="12"/>')
        parts.append(svg.text(x + 18, 46, name))
    for i, panel in enumerate(panels):
        parts += _panel(panel, _TOP + i * _PANEL, top)
    below, height = svg.foot(foot, _TOP + len(panels) * _PANEL + 12, _LEFT)
    return svg.page(svg.WIDTH, height, [*parts, *below])


def _panel(panel: Panel, y: int, top: float) -> list[str]:
    plot_top, plot_height = y + 22, _PANEL - 66
    base = plot_top + plot_height

    def at(value: float) -> float:
        return base - plot_height * value / top

    parts = [svg.text(_LEFT, y + 12, panel.name, "panel")]
    for step in range(int(top * 2) + 1):
        mark = step / 2
        parts.append(svg.line(_LEFT, at(mark), svg.WIDTH - 10, at(mark), "arrow" if mark == 1 else "grid"))
        parts.append(svg.text(_LEFT - 6, at(mark) + 4, f"{mark:g}×", "small", "end"))
    room = (svg.WIDTH - 10 - _LEFT) / max(1, len(panel.groups))
    for i, group in enumerate(panel.groups):
        middle = _LEFT + room * (i + 0.5)
        width = min(34.0, 0.8 * room / max(1, len(group.values)))
        for j, value in enumerate(group.values):
            if value is None:
                continue
            x = middle + (j - len(group.values) / 2) * width
            parts.append(
                f'<rect class="d{_COLOURS[j]}" x="{x + 1:.1f}" y="{at(value):.1f}" width="{width - 2:.1f}" '
                f'height="{base - at(value):.1f}"/>'
            )
            parts.append(svg.text(x + width / 2, at(value) + 12, f"{value:.2f}", "bar", "middle"))
        for j, line in enumerate(group.lines):
            parts.append(svg.text(middle, base + 15 + 14 * j, line, "", "middle"))
    return parts
