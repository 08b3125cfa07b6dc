"""Pictures of the guide: well formed, for light and dark pages, of what the results hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import omniattn
from build_tools import guide_figures, pages, result_figures

ROOT = Path(__file__).resolve().parents[2]


def test_the_speed_of_precisions() -> None:
    report = json.loads((ROOT / pages.RESULTS / "fp8.json").read_text(encoding="utf-8"))
    (figure,) = guide_figures.FIGURES
    text = figure.make(report)
    ElementTree.fromstring(text)
    assert "prefers-color-scheme: dark" in text
    assert report["date"] in text
    assert text.count("<polyline") == 3 * len(result_figures.PRECISIONS)
    # Without the rows of a contender its curve is left out, not drawn at 0.
    report["rows"] = [row for row in report["rows"] if row["contender"] != "cudnn"]
    assert figure.make(report).count("<polyline") == 3 * (len(result_figures.PRECISIONS) - 1)


def test_the_choice_names_what_there_is() -> None:
    text = guide_figures.choice()
    ElementTree.fromstring(text)
    codes = [code for _, code, _ in guide_figures.QUESTIONS]
    quoted = {name for code in codes for name in re.findall(r'precision="(\w+)"', code)}
    assert quoted == {"exact", "auto"}
    assert quoted <= {*omniattn.PRECISIONS, "auto"}
    assert omniattn.Int8(hadamard=True)
