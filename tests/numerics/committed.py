"""The committed results of the accuracy scripts, and what they allow another machine."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from build_tools import accuracy_tables, sparse_tables

SOURCES = {**accuracy_tables.SOURCES, **sparse_tables.SOURCES}
RESULTS = Path(__file__).parents[2] / "docs/performance/results"


@functools.cache
def committed(bench: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Rows of a result file by table, input and variant."""
    report = json.loads((RESULTS / f"{bench}.json").read_text(encoding="utf-8"))
    return {(row["table"], row["input"], row["variant"]): row for row in report["rows"]}


def check(bench: str, table: str, label: str, variant: str, cosine: float, rel_l1: float) -> None:
    """Fail unless what was measured now is what is committed, up to the platform's last digits."""
    row = committed(bench)[table, label, variant]
    what = f"{table}, {label}, {variant}: renew {bench}.json with {SOURCES[bench].command}"
    assert rel_l1 == pytest.approx(row["rel_l1"], rel=0.03, abs=1e-6), what
    # The angle's square: twice the part by which the relative L1 may differ.
    assert 1 - cosine == pytest.approx(1 - row["cosine"], rel=0.06, abs=1e-6), what
