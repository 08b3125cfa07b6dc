"""Draw the losses that train.py wrote: python examples/train_lm/plot.py losses.json losses.svg"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 360, 56, 40, 28, 12
#: Of the first run a broad pale line, of the second a thin dark one on it: where they are equal both can be seen.
STYLES = (("#f0b060", 5.0), ("#204a87", 1.2))


def svg(report: dict[str, Any]) -> str:
    """A figure of the losses of all runs over the steps."""
    runs = report["runs"]
    steps = max(len(run["losses"]) for run in runs)
    most = max(max(run["losses"]) for run in runs)
    least = min(min(run["losses"]) for run in runs)
    high, low = most + 0.05 * (most - least), least - 0.05 * (most - least)

    def at(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, steps - 1)
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]  # fmt: skip
    for i in range(6):
        loss, step = low + (high - low) * i / 5, (steps - 1) * i / 5
        y, x = at(0, loss)[1], at(step, low)[0]
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step:.0f}</text>')
    for i, (run, (colour, width)) in enumerate(zip(runs, STYLES, strict=False)):
        points = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in enumerate(run["losses"]))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        x = LEFT + 20 + 330 * i
        parts.append(f'<line x1="{x}" y1="14" x2="{x + 24}" y2="14" stroke="{colour}" stroke-width="{width}"/>')
        label = f"{run['attention']}: {run['losses'][-1]:.4f}, {run['tokens_per_second']:,.0f} tokens/s"
        parts.append(f'<text x="{x + 30}" y="18">{label}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">step; loss in nats a byte</text></svg>')
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Read the first file, write the second."""
    source, target = map(Path, arguments)
    target.write_text(svg(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
