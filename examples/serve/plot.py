"""Draw what bench.py measured: python examples/serve/plot.py engine.json engine.svg"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, PANEL, LEFT, TOP, GAP, BOTTOM = 760, 260, 64, 58, 46, 44
COLOURS = ("#204a87", "#729fcf", "#4e9a06", "#8ae234", "#c4a000", "#cc0000", "#888888", "#75507b")
#: Panels: keys of a row, title. Of two keys the second is drawn in dashes.
PANELS = (
    (("tokens_per_second",), "tokens/s"),
    (("first_token_ms_p50", "first_token_ms_p99"), "time to the first token, ms: p50, dashed p99"),
    (("token_ms_p50", "token_ms_p99"), "time per token, ms: p50, dashed p99"),
)


def svg(report: dict[str, Any]) -> str:
    """A figure of three panels over the number of requests; all axes are logarithmic."""
    rows = report["rows"]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    requests = sorted({row["requests"] for row in rows})
    height = TOP + len(PANELS) * (PANEL + GAP) - GAP + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">', f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]  # fmt: skip
    for i, name in enumerate(names):
        x, y = LEFT + 174 * (i % 4), 14 + 18 * (i // 4)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 20}" y2="{y}" stroke="{COLOURS[i % 8]}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 25}" y="{y + 4}">{name}</text>')
    for i, (keys, title) in enumerate(PANELS):
        parts += panel(rows, names, requests, keys, title, TOP + i * (PANEL + GAP))
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{height - 8}" text-anchor="middle">requests at once</text></svg>')
    return "\n".join(parts) + "\n"


def panel(
    rows: Sequence[dict[str, Any]], names: Sequence[str], requests: Sequence[int], keys: Sequence[str], title: str,
    top: int,
) -> list[str]:  # fmt: skip
    """Lines of a panel whose upper edge is at ``top``."""
    values = [max(row[key], 1e-3) for row in rows for key in keys]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    high = max(high, low + 1)
    span = math.log(max(requests) / min(requests)) or 1.0

    def at(n: int, value: float) -> str:
        x = LEFT + 12 + (WIDTH - LEFT - 36) * math.log(n / min(requests)) / span
        return f"{x:.1f},{top + PANEL * (high - math.log10(max(value, 1e-3))) / (high - low):.1f}"

    parts = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>']
    for exponent in range(low, high + 1):
        y = top + PANEL * (high - exponent) / (high - low)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 12}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**exponent:g}</text>')
    for n in requests:
        x = at(n, 1.0).partition(",")[0]
        parts.append(f'<text x="{x}" y="{top + PANEL + 16}" text-anchor="middle">{n}</text>')
    for i, name in enumerate(names):
        own = sorted((row for row in rows if row["contender"] == name), key=lambda row: row["requests"])
        for key, dash in zip(keys, ("", ' stroke-dasharray="4 3"'), strict=False):
            points = " ".join(at(row["requests"], row[key]) for row in own)
            colour = COLOURS[i % len(COLOURS)]
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
    return parts


def main(arguments: Sequence[str]) -> None:
    """Read the first file, write the second."""
    source, target = map(Path, arguments)
    target.write_text(svg(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
