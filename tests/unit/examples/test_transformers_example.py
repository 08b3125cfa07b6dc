"""examples/transformers_model: one model, several attentions, the same results, on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omniattn.bench import document

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.frameworks

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "transformers_model"


@pytest.fixture
def compare() -> Iterator[Any]:
    """The program, whose name must not leak into other tests."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("compare")
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("compare", None)


def test_a_small_model_is_measured_with_each(compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    rows = compare.main(["--small", "--attentions", "eager,omniattn", "--out", str(out)])
    assert [row.attention for row in rows] == ["eager", "omniattn"]
    assert all(min(row.prefill_ms, row.training_ms, row.tokens_per_second) > 0 and not row.notes for row in rows)
    made = json.loads(out.read_text(encoding="utf-8"))
    assert len(made["rows"]) == 2
    assert out.read_text(encoding="utf-8") == document.to_json(made) + "\n"
    assert "| omniattn |" in capsys.readouterr().out


def test_batches_are_measured_with_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(FOLDER))
    try:
        batches = importlib.import_module("batches")
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("batches", None)
    out = tmp_path / "rows.json"
    rows = batches.main(["--small", "--out", str(out), "--attentions", "omniattn,none_of_these"])
    assert [row.attention for row in rows] == ["omniattn", "none_of_these"]
    assert min(rows[0].seconds, rows[0].without_graphs, rows[0].kept) > 0
    assert rows[0].same_requests == 1
    assert "none_of_these" in rows[1].notes["error"]
    assert rows[1].seconds is None
    made = json.loads(out.read_text(encoding="utf-8"))
    assert out.read_text(encoding="utf-8") == document.to_json(made) + "\n"
    assert "| omniattn |" in capsys.readouterr().out


def test_results_are_judged_beside_eager(compare: Any) -> None:
    import torch

    class Words:
        def __call__(self, text: str, return_tensors: str) -> Any:
            words = [3 + len(word) % 90 for word in text.split()]
            return type("Encoding", (), {"input_ids": torch.tensor([words])})()

    model = compare.random_model(True, "cpu")
    compare.omniattn_transformers.register()
    rows = [compare.Row("eager"), compare.Row("omniattn")]
    compare.judge(model, Words(), rows, "cpu", 120)
    assert rows[1].perplexity == pytest.approx(rows[0].perplexity, rel=1e-4)
    assert rows[1].same_tokens == 1.0
