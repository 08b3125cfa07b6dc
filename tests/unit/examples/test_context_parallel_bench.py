"""examples/context_parallel/bench.py and what the documents show of it; the benchmark itself needs two GPUs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from build_tools import context_parallel_tables

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "context_parallel"


@pytest.fixture(scope="module")
def bench() -> Any:
    """The program, which imports its neighbour by a bare name."""
    before = list(sys.path)
    sys.path[:0] = [str(FOLDER)]
    try:
        return importlib.import_module("bench")
    finally:
        sys.path[:] = before
        for name in ("bench", "ring"):
            sys.modules.pop(name, None)


@pytest.fixture
def rows(bench: Any) -> list[dict[str, Any]]:
    """Three repeats of (cuDNN, omniattn) by one GPU, both rotate methods, and the calls alone."""
    forward = [120.0, 100.0, 60.0, 50.0, 64.0, 54.0, 56.0, 46.0]
    both = [480.0, 400.0, 250.0, 200.0, 260.0, 210.0, float("nan"), float("nan")]
    times = torch.tensor([[[a + repeat, b + repeat] for repeat in (0, -1, 1)] for a, b in zip(forward, both)])
    return bench.rows_of(131072, 2, times.double(), 1)


def test_rows(bench: Any, rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 2 * len(bench.CONTENDERS) - 2
    found = {(row["kernels"], row["how"], row["what"]): row for row in rows}
    ours = found["omniattn", "allgather", "forward"]
    assert (ours["median_ms"], ours["samples_ms"], ours["gpus"]) == (50.0, [50.0, 49.0, 51.0], 2)
    assert ours["time_over_cudnn"] == pytest.approx(50 / 60)
    assert ours["speed_over_one"] == pytest.approx(2.0)
    assert found["cudnn", "alltoall", "forward + backward"]["speed_over_one"] == pytest.approx(480 / 260)
    assert found["omniattn", "one", "forward"]["gpus"] == 1
    assert found["omniattn", "calls", "forward"]["median_ms"] == 46.0
    assert ("omniattn", "calls", "forward + backward") not in found


def test_tables(bench: Any, rows: list[dict[str, Any]]) -> None:
    text = bench.table(rows).splitlines()
    assert len(text) == 1 + len(rows) // 2
    assert "131072 forward 2 alltoall 64.00 54.00 0.844 1.88 1.85" in [" ".join(line.split()) for line in text]
    facts = {"device": "NVIDIA Test", "driver": "580.1"}
    report = {"rows": rows, "heads": 16, "head_dim": 128, "causal": True, "environment": facts, "date": "2026-01-02",
              "protocol": "context_parallel", "command": "python examples/context_parallel/bench.py"}  # fmt: skip
    page = context_parallel_tables.attention(report)
    assert "| s131072, forward | 1 | – | 120.00 | 100.00 | 1.20× | – | – |" in page
    assert "| s131072, forward | 2 | allgather | 60.00 | 50.00 | 1.20× (1.15) | 2.00× | 2.00× (1.90) |" in page
    assert "| s131072, forward + backward | 2 | allgather | 250.00 | 200.00 | 1.25× | 1.92× | 2.00× |" in page
    assert "contenders in turn, the longest time of all GPUs" in " ".join(page.split())


def test_calls_of_the_ring(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many products on each device, and all of the whole sequence's."""
    found: list[int] = []

    def sdpa(q: Any, k: Any, v: Any, is_causal: bool = False) -> None:
        found.append(q.shape[2] * k.shape[2] // (2 if is_causal else 1))
        assert k.shape == v.shape

    monkeypatch.setattr(bench.F, "scaled_dot_product_attention", sdpa)
    qkv = [torch.zeros(1, 1, 8, 2) for _ in range(3)]
    for size in (2, 4):
        for causal in (True, False):
            for rank in range(size):
                bench.calls_of_ring(qkv, causal, rank, size)
                assert sum(found) == (8 * size) ** 2 // (2 if causal else 1) // size
                found.clear()


def test_a_folder_that_is_not_there(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--out", "no/such/folder/times.json"])
    assert "--out: expected a file in an existing folder" in capsys.readouterr().err
