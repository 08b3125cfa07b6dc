"""Draw the losses that train.py wrote: python examples/train_lm/plot.py losses.json losses.svg"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 360, 56, 40, 28, 12
#: Of the first run a broad pale line, of the second a thin dark one on it: where they are equal both can be seen.
STYLES = (("#f0b060", 5.0), ("#204a87", 1.2))
#: Of differences.
THIN = (("#888888", 1.2), ("#204a87", 1.2), ("#c04040", 1.2), ("#3a8a3a", 1.2), ("#8040a0", 1.2))
#: Steps of a mean, at most.
MEAN_STEPS = 50
#: Of a line of differences, about.
POINTS = 200


def svg(report: dict[str, Any]) -> str:
    """A figure of the losses of all runs over the steps."""
    lines = [
        Line(f"{run['attention']}: {run['losses'][-1]:.4f}, {run['tokens_per_second']:,.0f} tokens/s", run["losses"],
             *style)
        for run, style in zip(report["runs"], STYLES, strict=False)
    ]  # fmt: skip
    return figure(lines, "step; loss in nats a byte")


def svg_of_differences(report: dict[str, Any]) -> str:
    """A figure of how far the losses of all runs but the first are from its losses: means over some steps."""
    exact, *others = report["runs"]
    count = min(MEAN_STEPS, len(exact["losses"]) // 10 or 1)
    lines = []
    for run, style in zip(others, THIN, strict=False):
        apart = [a - b for a, b in zip(run["losses"], exact["losses"], strict=True)]
        sums = [0.0, *itertools.accumulate(apart)]
        means = [(b - a) / count for a, b in zip(sums, sums[count:], strict=False)]
        every = max(1, len(means) // POINTS)
        lines.append(Line(run["attention"], means[::every], *style, count - 1, every))
    axis = f"step; loss in nats a byte minus that of {exact['attention']}, mean of {count} steps"
    return figure(lines, axis, 4, len(exact["losses"]))


@dataclass(frozen=True)
class Line:
    """What is drawn of a run: values of the steps ``first``, ``first + every``, and so on."""

    label: str
    values: Sequence[float]
    colour: str
    width: float
    first: int = 0
    every: int = 1


def figure(lines: Sequence[Line], axis: str, digits: int = 2, steps: int = 0) -> str:
    """A figure of lines over so many steps, or as many as the longest has."""
    steps = steps or max(line.first + (len(line.values) - 1) * line.every for line in lines) + 1
    most = max(max(line.values) for line in lines)
    least = min(min(line.values) for line in lines)
    high, low = most + 0.05 * (most - least), least - 0.05 * (most - least)

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, steps - 1)
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]  # fmt: skip
    for i in range(6):
        value, step = low + (high - low) * i / 5, (steps - 1) * i / 5
        y, x = at(0, value)[1], at(step, low)[0]
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.{digits}f}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step:.0f}</text>')
    for i, line in enumerate(lines):
        points = " ".join(
            "{:.1f},{:.1f}".format(*at(line.first + j * line.every, x)) for j, x in enumerate(line.values)
        )
        stroke = f'stroke="{line.colour}" stroke-width="{line.width}"'
        parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        x = LEFT + 20 + (330 if len(lines) <= 2 else 600 / len(lines)) * i
        parts.append(f'<line x1="{x:.0f}" y1="14" x2="{x + 24:.0f}" y2="14" {stroke}/>')
        parts.append(f'<text x="{x + 30:.0f}" y="18">{line.label}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{axis}</text></svg>')
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Read the first file, write the second."""
    source, target = map(Path, arguments)
    target.write_text(svg(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
