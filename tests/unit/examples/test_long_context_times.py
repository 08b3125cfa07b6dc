"""examples/long_context/times.py on CPUs, and what the documents show of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from build_tools import context_parallel_tables

pytest.importorskip("torch")

from .test_long_context import run

pytestmark = pytest.mark.frameworks

PROGRAM = "times.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes on the CPU wrote."""
    out = tmp_path_factory.mktemp("times") / "times.json"
    done = run("--small", "--repeats", "2", "--out", str(out), program=PROGRAM)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sharded cache" in done.stdout
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_every_call_is_timed_and_right(report: dict[str, Any]) -> None:
    calls = {(row["what"], row["how"]) for row in report["rows"]}
    forward = {"one", "ring", "one, int8", "ring, int8", "heads", "DTensor, heads"}
    wanted = {("forward", how) for how in forward} | {("forward + backward", how) for how in ("one", "ring")}
    assert calls == wanted | {("decode", how) for how in ("one", "sharded cache")}
    for row in report["rows"]:
        assert len(row["samples_ms"]) == 2
        assert min(row["samples_ms"]) > 0
        assert 0 <= row["relative_l1"] <= (0.1 if "int8" in row["how"] else 1e-5)
        assert row["gpus"] == (1 if row["how"].startswith("one") else 2)


def test_a_line_each_shape(report: dict[str, Any]) -> None:
    rows = {(row["shape"], row["what"], row["how"]): row for row in report["rows"]}
    lines = context_parallel_tables.rings(report).splitlines()
    assert sum(line.startswith("| b") for line in lines) == 5
    one, ring = (rows["b1 h16/16 s64 d32", "forward", how]["median_ms"] for how in ("one", "ring"))
    assert any(line.startswith(f"| b1 h16/16 s64 d32, forward | {one:.3f} | {one / ring:.2f}× | – |") for line in lines)


def test_a_goal_stands_beside_its_ratio(report: dict[str, Any]) -> None:
    long = [{**row, "seqlen": 8192} for row in report["rows"]]
    assert "× (1.40)" in context_parallel_tables.rings({**report, "rows": long})
    assert "(" not in context_parallel_tables.rings({**report, "rows": long, "gpus": 4}).splitlines()[2]


@pytest.mark.parametrize("name", ["seqlen", "repeats", "gpus"])
def test_wrong_arguments(name: str) -> None:
    done = run("--small", f"--{name}", "0", program=PROGRAM)
    assert done.returncode == 2
    assert f"--{name}: expected a number from 1 on, received 0" in done.stderr


def test_a_folder_that_is_not_there() -> None:
    done = run("--small", "--out", str(Path("no") / "such" / "times.json"), program=PROGRAM)
    assert done.returncode == 2
    assert "--out: expected a file in an existing folder" in done.stderr
