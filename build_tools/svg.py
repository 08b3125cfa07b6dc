"""What every figure of the documents is made of: SVG text for light and dark pages, the same bytes from the same input.

Standard library only.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence

WIDTH = 900
#: Colours of series on a light and on a dark page, distinguishable with the common forms of colour blindness.
GREY, BLUE, ORANGE, GREEN, MAGENTA, YELLOW, BROWN, INK = range(8)
COLOURS = (
    ("#6e7781", "#a8b1bb"), ("#0072b2", "#56b4e9"), ("#d55e00", "#ff8f3f"), ("#009e73", "#2fd3a2"),
    ("#a0508a", "#e29ac8"), ("#b08800", "#f0d442"), ("#7a4a2b", "#c99b7a"), ("#24292f", "#e6edf3"),
)  # fmt: skip
#: Of a letter of the usual size, about.
_LETTER = 6.8
_FOOT_COLUMNS = 150
_FOOT_LINE = 14


def _rules(dark: int, paper: str, grid: str, box: str) -> str:
    ink = COLOURS[INK][dark]
    own = "".join(f".s{i} {{ stroke: {both[dark]} }} .d{i} {{ fill: {both[dark]} }} " for i, both in enumerate(COLOURS))
    return (
        f".page {{ fill: {paper} }} text {{ fill: {ink} }} .grid {{ stroke: {grid} }} .box {{ fill: {box}; stroke: "
        f"{grid} }} .arrow {{ stroke: {ink} }} text.bar {{ fill: {paper} }} {own}"
    )


def _style() -> str:
    """Rules of a light page, and those that a dark one has in place of them."""
    common = (
        "text { font: 12px sans-serif } .title { font-size: 15px; font-weight: bold } .panel { font-weight: bold } "
        ".small { font-size: 10px } .code { font: bold 12px monospace } .arrow { fill: none } "
        ".bar { font-size: 10px } "
        ".curve { fill: none; stroke-width: 2 } .dashed { stroke-dasharray: 4 3 } "
        ".ring { fill: none; stroke-width: 1.5 } "
    )
    light, dark = _rules(0, "#ffffff", "#d0d7de", "#f6f8fa"), _rules(1, "#0d1117", "#30363d", "#161b22")
    return f"<style>{common}{light}@media (prefers-color-scheme: dark) {{ {dark}}}</style>"


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    """Words at a point of their base line."""
    class_ = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{class_} text-anchor="{anchor}">{html.escape(words)}</text>'


def line(x: float, y: float, to_x: float, to_y: float, style: str) -> str:
    """A straight line."""
    return f'<path class="{style}" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'


def flow(names: Sequence[str], left: float, mark: float = 26) -> tuple[list[tuple[float, int]], int]:
    """Places of a legend's entries, and how many lines they take.

    Parameters
    ----------
    names : sequence of str
    left : float
        Where lines begin.
    mark : float
        Width of what stands before a name.

    Returns
    -------
    places : list of (float, int)
        Of each entry, where it begins and its line.
    lines : int
    """
    places: list[tuple[float, int]] = []
    x, row = left, 0
    for name in names:
        wide = mark + _LETTER * len(name) + 18
        if places and x + wide > WIDTH:
            x, row = left, row + 1
        places.append((x, row))
        x += wide
    return places, row + 1 if names else 0


def foot(words: str, y: float, left: float) -> tuple[list[str], float]:
    """Small text from ``y`` on, and where it ends."""
    lines = textwrap.wrap(words, _FOOT_COLUMNS)
    made = [text(left, y + _FOOT_LINE * i, one, "small") for i, one in enumerate(lines)]
    return made, y + _FOOT_LINE * len(lines)


def page(width: float, height: float, parts: Sequence[str]) -> str:
    """The whole figure."""
    size = f'width="{width:g}" height="{height:g}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:g} {height:g}">'
    return "\n".join([begin, _style(), f'<rect class="page" {size}/>', *parts, "</svg>", ""])
