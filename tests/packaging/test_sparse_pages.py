"""Table and figure of block-sparse attention: what precision.md shows is what the committed result says."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from build_tools import pages, sparse_tables
from build_tools.page_parts import PageError

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def report() -> dict[str, Any]:
    """A result of three inputs; the numbers are made up."""
    rows = [
        {"table": table, "input": label, "variant": variant, "cosine": 1 - error**2, "rel_l1": error, "kept": kept}
        for label, error in (("video", 0.1), ("SmolLM2 layer 0", 0.01), ("SmolLM2 layer 1", 0.03))
        for table, variant, kept in (
            ("topk", "0.3", 0.29), ("topk", "0.5", 0.5), ("cdf", "0.9", 0.7), ("topk, int8", "0.5", 0.5),
        )
    ]  # fmt: skip
    return {
        "schema": 1, "bench": "sparse_accuracy", "protocol": "accuracy", "command": "python -m x", "date": "2026-01-02",
        "environment": {"date": "2026-01-02", "device": "CPU", "python": "3.12.1", "omniattn": "1", "numpy": "2.5"},
        "rows": rows,
    }  # fmt: skip


def test_a_line_an_input() -> None:
    made = sparse_tables.accuracy(report())
    head, _, video, *_ = made.splitlines()
    assert head == "| input | `topk=0.3` | `topk=0.5` | int8, `topk=0.5` | `topk=0.7` | `cdf=0.9` | `cdf=0.97` |"
    assert (
        video
        == "| video | 29 %: .99000 / .100 | 50 %: .99000 / .100 | 50 %: .99000 / .100 | – | 70 %: .99000 / .100 | – |"
    )
    assert made.replace("\n", " ").endswith("Measured by `python -m x`.</sub>")


def test_the_figure_has_a_curve_for_each_input_and_rule() -> None:
    svg = sparse_tables.figure(report())
    assert svg == sparse_tables.figure(report())
    root = ElementTree.fromstring(svg)
    lines = [node.attrib for node in root.iter(f"{SVG}polyline")]
    # Two panels, two series (all layers are one), two rules.
    assert len(lines) == 8
    assert sum("dashed" in line["class"] for line in lines) == 4
    assert {line["class"].split()[1] for line in lines} == {"s1", "s2"}
    texts = [node.text for node in root.iter(f"{SVG}text")]
    assert "SmolLM2, mean of layers" in texts
    assert {"relative L1", "cosine similarity", "topk", "cdf", "0.99"} <= set(texts)
    assert "prefers-color-scheme: dark" in svg
    assert {"CPU, NumPy 2.5, Python 3.12.1; 2026-01-02; errors against double precision"} <= set(texts)
    # 0.1 is half way up from 0.001 to 10.
    y = float(lines[0]["points"].split()[0].split(",")[1])
    grid = [node.attrib["d"] for node in root.iter(f"{SVG}path") if node.attrib["class"] == "grid"]
    levels = [float(path.split("L")[0].split()[1]) for path in grid[:5]]
    assert y == pytest.approx((levels[0] + levels[4]) / 2, abs=0.1)
    short = report()
    short["rows"] = [row for row in short["rows"] if row["table"] != "cdf"]
    with pytest.raises(PageError, match="without 'cdf' of 'video'"):
        sparse_tables.figure(short)


def test_the_committed_figure_is_that_of_the_committed_result() -> None:
    found = pages.results(ROOT)["sparse_accuracy"]
    assert (ROOT / sparse_tables.FIGURE).read_text(encoding="utf-8") == sparse_tables.figure(found)
    assert "–" not in sparse_tables.accuracy(found)
