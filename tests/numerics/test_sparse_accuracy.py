"""What docs/precision.md says of blocks that are left out: the committed result, and a part of it measured again."""

from __future__ import annotations

import pytest

from tests.numerics import sparse_accuracy as accuracy
from tests.numerics.ablations import LAYERS, layer_name, recorded
from tests.numerics.committed import check, committed

IMAGE, VIDEO, CUBES, NORMAL = "image, 64 × 64", "video, 12 × 20 × 20", "video, in cubes", "normal"


@pytest.mark.parametrize("index", LAYERS)
@pytest.mark.parametrize(("rule", "share"), [("topk", 0.6), ("cdf", 0.97)])
def test_what_is_committed_is_what_is_measured(index: int, rule: str, share: float) -> None:
    found = accuracy.error(recorded(index), (64, 64), "exact", **{rule: share})
    check("sparse_accuracy", rule, layer_name(index), f"{share:g}", found["cosine"], found["rel_l1"])
    assert found["kept"] == pytest.approx(committed("sparse_accuracy")[rule, layer_name(index), f"{share:g}"]["kept"])


def test_errors_fall_with_the_share() -> None:
    rows = committed("sparse_accuracy")
    for label in (IMAGE, VIDEO, CUBES, NORMAL):
        for rule, shares in (("topk", accuracy.TOPK), ("cdf", accuracy.CDF)):
            errors = [rows[rule, label, f"{share:g}"]["rel_l1"] for share in shares]
            kept = [rows[rule, label, f"{share:g}"]["kept"] for share in shares]
            assert errors == sorted(errors, reverse=True)
            assert kept == sorted(kept)


def test_inputs_by_what_they_lose() -> None:
    rows = committed("sparse_accuracy")
    for share in accuracy.TOPK[:5]:
        image, video, cubes, normal = (
            rows["topk", label, f"{share:g}"]["rel_l1"] for label in (IMAGE, VIDEO, CUBES, NORMAL)
        )
        assert image < cubes < video < normal
