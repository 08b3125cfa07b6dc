"""examples/diffusers_sparse: a pipeline with calibrated block-sparse attention, on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import omniattn as oa

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytestmark = pytest.mark.frameworks

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "diffusers_sparse"
#: 320 tokens: 3 by 5 blocks.
SIZE = ["--size", "17", "128", "128"]


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The program, whose name must not leak into other tests."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("sparse_video")
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("sparse_video", None)


def test_calibrated_and_run(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sparse.json"
    arguments = [*SIZE, "--steps", "2", "--calibration", "2", "--file", str(file)]
    errors = example.main(arguments)
    assert 0 < errors["int8"] < 0.01
    assert 0 < errors["int8, sparse"] < 0.05
    said = capsys.readouterr().out
    assert "topk of each head: at most 0.1 relative L1 (exact)" in said
    found = json.loads(file.read_text(encoding="utf-8"))["entries"]
    assert list(found) == ["blocks.0.attn1", "blocks.1.attn1"]
    assert all(one["num_heads"] == 2 and one["samples"] == 2 and one["seqlen_q"] == 320 for one in found.values())
    assert all(error <= 0.1 for one in found.values() for error in one["errors"])
    assert any(share < 1.0 for one in found.values() for share in one["shares"])
    # With a file that is there nothing is calibrated.
    monkeypatch.setattr(oa, "calibrate_sparse", None)
    assert example.main(arguments) == errors


def test_the_processor_is_that_of_diffusers(example: Any) -> None:
    pipeline = example.tiny_pipeline(torch.device("cpu"))
    want = example.latents_of(pipeline, 1, (9, 64, 64))
    example.use(pipeline.transformer, lambda _, q, k, v: oa.attention(q, k, v))
    torch.testing.assert_close(example.latents_of(pipeline, 1, (9, 64, 64)), want, rtol=0, atol=1e-5)
    pipeline.transformer.to(torch.bfloat16)
    made = example.latents_of(pipeline, 1, (9, 64, 64))
    assert float((made - want).abs().sum() / want.abs().sum()) < 0.02
    layer = example.self_attentions(pipeline.transformer)["blocks.0.attn1"]
    with pytest.raises(ValueError, match=r"blocks\.0\.attn1: self-attention"):
        layer.processor(layer, torch.zeros(1, 4, 128), torch.zeros(1, 4, 128))
