"""Bar charts as plain SVG text: the same numbers give the same bytes. Standard library only."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, PANEL, TOP, LEFT = 900, 190, 62, 44
_COLOURS = ("#2f6db5", "#e08a1e", "#5a9e4b")
_STYLE = (
    "text { font: 12px sans-serif; fill: #24292f } "
    ".title { font-size: 15px; font-weight: bold } .small { font-size: 10px } "
    ".bar { font-size: 10px; paint-order: stroke; stroke: #ffffff; stroke-width: 3px }"
)


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


def bars(title: str, series: Sequence[str], panels: Sequence[Panel]) -> str:
    """Return an SVG of the panels, one below the other, with a line at 1 that all bars are measured by."""
    values = [value for panel in panels for group in panel.groups for value in group.values if value is not None]
    top = max(2.0, math.ceil(max(values, default=1.0) * 4) / 4)
    height = TOP + len(panels) * PANEL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 24, title, "title"),
    ]
    for i, name in enumerate(series):
        x = LEFT + 220 * i
        parts.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{_COLOURS[i]}"/>')
        parts.append(_text(x + 18, 46, name))
    for i, panel in enumerate(panels):
        parts += _panel(panel, TOP + i * PANEL, top)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, y: int, top: float) -> list[str]:
    plot_top, plot_height = y + 22, PANEL - 66
    base = plot_top + plot_height

    def at(value: float) -> float:
        return base - plot_height * value / top

    parts = [_text(LEFT, y + 12, panel.name)]
    for step in range(int(top * 2) + 1):
        mark = step / 2
        colour = "#57606a" if mark == 1 else "#d0d7de"
        parts.append(f'<path d="M{LEFT} {at(mark):.1f}H{WIDTH - 10}" stroke="{colour}"/>')
        parts.append(_text(LEFT - 6, at(mark) + 4, f"{mark:g}×", "small", "end"))
    room = (WIDTH - 10 - LEFT) / max(1, len(panel.groups))
    for i, group in enumerate(panel.groups):
        middle = LEFT + room * (i + 0.5)
        width = min(34.0, 0.8 * room / max(1, len(group.values)))
        for j, value in enumerate(group.values):
            if value is None:
                continue
            x = middle + (j - len(group.values) / 2) * width
            parts.append(
                f'<rect x="{x + 1:.1f}" y="{at(value):.1f}" width="{width - 2:.1f}" height="{base - at(value):.1f}" '
                f'fill="{_COLOURS[j]}"/>'
            )
            parts.append(_text(x + width / 2, at(value) - 3, f"{value:.2f}", "bar", "middle"))
        for j, line in enumerate(group.lines):
            parts.append(_text(middle, base + 15 + 14 * j, line, "", "middle"))
    return parts


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    class_ = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{class_} text-anchor="{anchor}">{html.escape(text)}</text>'
