"""Pictures of the guide as plain SVG text, for light and dark pages: the same numbers give the same bytes.

Standard library only.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from pathlib import Path

from build_tools.page_parts import Part, Report, provenance

SPEED = Path("docs/guide/precisions.svg")
CHOICE = Path("docs/guide/choice.svg")

#: Contenders of a report of fp8, with what a reader calls them.
SERIES = (
    ("cudnn", "cuDNN bf16"), ("omniattn", '"exact"'), ("omniattn_int8", '"int8"'), ("omniattn_fp8", '"fp8"'),
    ("omniattn_fp8_arrays", "e4m3 arrays"),
)  # fmt: skip
_HEAD_DIMS = (128, 256)
_WIDTH, _PANEL, _HEIGHT, _LEFT, _TOP, _GAP = 900, 390, 260, 52, 72, 46
#: Of each series on a light and on a dark page, distinguishable with the common forms of colour blindness.
_COLOURS = (
    ("#6e7781", "#a8b1bb"), ("#0072b2", "#56b4e9"), ("#d55e00", "#ff8f3f"), ("#009e73", "#2fd3a2"),
    ("#a0508a", "#e29ac8"),
)  # fmt: skip


def _style(colours: bool) -> str:
    def page(dark: int, paper: str, ink: str, grid: str, box: str) -> str:
        own = "".join(
            f".s{i} {{ stroke: {both[dark]} }} .d{i} {{ fill: {both[dark]} }} " for i, both in enumerate(_COLOURS)
        )
        return (
            f".page {{ fill: {paper} }} text {{ fill: {ink} }} .grid {{ stroke: {grid} }} "
            f".box {{ fill: {box}; stroke: {grid} }} .arrow {{ stroke: {ink} }} {own if colours else ''}"
        )

    light, dark = (
        page(0, "#ffffff", "#24292f", "#d0d7de", "#f6f8fa"),
        page(1, "#0d1117", "#e6edf3", "#30363d", "#161b22"),
    )
    common = (
        "text { font: 12px sans-serif } .title { font-weight: bold } .small { font-size: 10px } .code { font: 12px "
        "monospace; font-weight: bold } .curve { fill: none; stroke-width: 2 } .arrow { fill: none } "
    )
    return f"<style>{common}{light}@media (prefers-color-scheme: dark) {{ {dark}}}</style>"


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    class_ = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{class_} text-anchor="{anchor}">{html.escape(text)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, style: str) -> str:
    return f'<path class="{style}" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'


def _page(width: int, height: int, colours: bool, parts: list[str]) -> str:
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    paper = f'<rect class="page" width="{width}" height="{height}"/>'
    return "\n".join([begin, _style(colours), paper, *parts, "</svg>", ""])


def speed(report: Report) -> str:
    """Speed of causal attention over its length, one curve a precision, quantization included; a panel a head_dim."""
    parts = [
        _text(_LEFT, 22, f"Causal attention, TFLOPS by length; {report['environment']['device']}, {report['date']}",
              "title"),
    ]  # fmt: skip
    for i, (_, name) in enumerate(SERIES):
        x = _LEFT + 150 * i
        parts += [_line(x, 42, x + 20, 42, f"curve s{i}"), _text(x + 26, 46, name)]
    for i, head_dim in enumerate(_HEAD_DIMS):
        found: dict[str, dict[int, float]] = {}
        for row in report["rows"]:
            if row["head_dim"] == head_dim and row["causal"] and row["tflops"] is not None:
                found.setdefault(row["contender"], {})[row["seqlen"]] = row["tflops"]
        parts += _panel(f"head_dim {head_dim}", found, _LEFT + i * (_PANEL + _GAP))
    return _page(_WIDTH, _TOP + _HEIGHT + 46, True, parts)


def _panel(title: str, found: Mapping[str, Mapping[int, float]], left: float) -> list[str]:
    lengths = sorted({length for points in found.values() for length in points})
    if not lengths:
        return []
    top = math.ceil(max(value for points in found.values() for value in points.values()) / 200) * 200
    base, width = _TOP + _HEIGHT, _PANEL - 20

    def at(length: int, value: float) -> tuple[float, float]:
        span = math.log2(lengths[-1] / lengths[0]) or 1.0
        return left + width * math.log2(length / lengths[0]) / span, base - _HEIGHT * value / top

    parts = [_text(left, _TOP - 6, title, "title")]
    for value in range(0, top + 1, 200):
        y = at(lengths[0], value)[1]
        parts += [_line(left, y, left + width, y, "grid"), _text(left - 6, y + 4, str(value), "small", "end")]
    for length in lengths:
        x = at(length, 0)[0]
        parts += [_line(x, _TOP, x, base, "grid"), _text(x, base + 15, f"{length // 1024}k", "small", "middle")]
    parts.append(_text(left + width / 2, base + 34, "tokens", "", "middle"))
    for i, (name, _) in enumerate(SERIES):
        points = [at(length, value) for length, value in sorted(found.get(name, {}).items())]
        if points:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="curve s{i}" points="{path}"/>')
            parts += [f'<circle class="d{i}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
    return parts


#: The questions of the decision picture, in order: (question, what to write where the answer is yes, why).
QUESTIONS = (
    ("Are q, k and v in e4m3 already?", "attention(q8, k8, v8, descale_q=...)", "nothing is left to quantize"),
    ("Do you train, or is any error too much?", 'precision="exact"', "the default; no rounding but the dtype's"),
    ("Do all calls have fewer than about 4k keys?", 'precision="exact"', "quantizing costs more than it gains"),
    ("Are there single large elements in q or k?", "precision=Int8(hadamard=True)", "rotated before rounding"),
    ("Do the lengths differ, or do you not know?", 'precision="auto"', "8 bits only where they are faster"),
)
_OTHERWISE = ('precision="int8"', "on long sequences the fastest; smallest error of 8 bits")


def choice() -> str:
    """Which precision to take: a ladder of questions."""
    row, box, answer = 62, 320, 430
    width, height = box + answer + 130, 56 + row * (len(QUESTIONS) + 1)
    parts = [
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="arrow" d="M1 1L7 4L1 7"/></marker></defs>',
        _text(20, 26, "Which precision", "title"),
    ]

    def rectangle(x: float, y: float, w: float) -> str:
        return f'<rect class="box" x="{x}" y="{y}" width="{w}" height="42" rx="6"/>'

    def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
        return f'<path class="arrow" marker-end="url(#a)" d="M{x} {y}L{to_x} {to_y}"/>'

    right = 20 + box + 70
    for i, (question, code, why) in enumerate(QUESTIONS):
        y = 44 + i * row
        parts += [
            rectangle(20, y, box), _text(20 + box / 2, y + 26, question, "", "middle"),
            arrow(20 + box, y + 21, right - 2, y + 21), _text(20 + box + 34, y + 16, "yes", "small", "middle"),
            rectangle(right, y, answer), _text(right + 14, y + 18, code, "code"),
            _text(right + 14, y + 34, why, "small"),
            arrow(20 + box / 2, y + 42, 20 + box / 2, y + row - 2), _text(20 + box / 2 + 8, y + 56, "no", "small"),
        ]  # fmt: skip
    y = 44 + len(QUESTIONS) * row
    parts += [
        rectangle(20, y, box),
        _text(34, y + 18, _OTHERWISE[0], "code"),
        _text(34, y + 34, _OTHERWISE[1], "small"),
    ]
    return _page(width, height, False, parts)


def shown(report: Report) -> str:
    """The figure of speeds, as a page shows it."""
    text = f"Speed of causal attention over its length on one {report['environment']['device']}"
    return f"![{text}]({SPEED.name})\n\n{provenance(report)}"


PARTS: dict[str, Part] = {"precisions_figure": Part(("fp8",), shown)}
