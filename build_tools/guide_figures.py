"""Pictures of the guide as SVG text. Standard library only."""

from __future__ import annotations

from pathlib import Path

from build_tools import result_figures, svg
from build_tools.page_parts import Figure, Part, Report, provenance

SPEED = Path("docs/guide/precisions.svg")
CHOICE = Path("docs/guide/choice.svg")

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
        svg.text(20, 26, "Which precision", "title"),
    ]

    def rectangle(x: float, y: float, w: float) -> str:
        return f'<rect class="box" x="{x}" y="{y}" width="{w}" height="42" rx="6"/>'

    def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
        return f'<path class="arrow" marker-end="url(#a)" d="M{x} {y}L{to_x} {to_y}"/>'

    right = 20 + box + 70
    for i, (question, code, why) in enumerate(QUESTIONS):
        y = 44 + i * row
        parts += [
            rectangle(20, y, box), svg.text(20 + box / 2, y + 26, question, "", "middle"),
            arrow(20 + box, y + 21, right - 2, y + 21), svg.text(20 + box + 34, y + 16, "yes", "small", "middle"),
            rectangle(right, y, answer), svg.text(right + 14, y + 18, code, "code"),
            svg.text(right + 14, y + 34, why, "small"),
            arrow(20 + box / 2, y + 42, 20 + box / 2, y + row - 2), svg.text(20 + box / 2 + 8, y + 56, "no", "small"),
        ]  # fmt: skip
    y = 44 + len(QUESTIONS) * row
    parts += [
        rectangle(20, y, box),
        svg.text(34, y + 18, _OTHERWISE[0], "code"),
        svg.text(34, y + 34, _OTHERWISE[1], "small"),
    ]
    return svg.page(width, height, parts)


def shown(report: Report) -> str:
    """The figure of speeds, as a page shows it."""
    text = f"Speed of causal attention over its length on one {report['environment']['device']}"
    return f"![{text}]({SPEED.name})\n\n{provenance(report)}"


FIGURES = (Figure(SPEED, ("fp8",), result_figures.causal_precisions),)
PARTS: dict[str, Part] = {"precisions_figure": Part(("fp8",), shown)}
