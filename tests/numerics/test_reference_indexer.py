"""The NumPy reference of the indexer against loops, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omniattn.errors import ArgumentError, ShapeError
from omniattn.reference import indexer


def _call(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "q": rng.normal(size=(3, 4, 8)), "k": rng.normal(size=(11, 8)), "weights": rng.normal(size=(3, 4)),
        "k_scale": rng.uniform(size=11), "starts": np.array([0, 5, 7]), "ends": np.array([11, 9, 7]),
    }  # fmt: skip


def test_logits_by_loops() -> None:
    call = _call()
    got = indexer.index_logits(**call, compute_dtype=np.float64)
    for t in range(3):
        for s in range(11):
            wanted = -np.inf
            if call["starts"][t] <= s < call["ends"][t]:
                heads = [max(call["q"][t, h] @ call["k"][s], 0.0) * call["weights"][t, h] for h in range(4)]
                wanted = sum(heads) * call["k_scale"][s]
            assert got[t, s] == pytest.approx(wanted, rel=1e-12)
    assert indexer.index_logits(**call).dtype == np.float32


def test_nan_of_a_product() -> None:
    call = _call()
    call["k"][2, 1] = np.nan
    got = indexer.index_logits(**call)
    assert np.isnan(got[0, 2])
    assert np.isnan(got).sum() == 1


@pytest.mark.parametrize("name", ["q", "k", "weights", "k_scale", "starts", "ends"])
def test_shapes(name: str) -> None:
    call = _call()
    call[name] = call[name][..., None]
    with pytest.raises(ShapeError, match=name):
        indexer.index_logits(**call)


def test_order_of_special_numbers() -> None:
    row = np.array([[1.0, np.nan, np.inf, -np.inf, 0.0, -0.0, np.inf, -np.nan]], np.float32)
    starts, lengths = np.array([0]), np.array([8])
    for k, wanted in enumerate(([1], [1, 7], [1, 2, 7], [1, 2, 6, 7], [0, 1, 2, 6, 7], [0, 1, 2, 4, 6, 7]), 1):
        np.testing.assert_array_equal(indexer.top_k(row, k, starts, lengths)[0], wanted)
    np.testing.assert_array_equal(indexer.top_k(row, 9, starts, lengths)[0], [0, 1, 2, 4, 5, 6, 7, -1, -1])
    np.testing.assert_array_equal(indexer.top_k(row, 2, starts + 3, lengths - 4)[0], [1, 3])


def test_rows_of_a_pool() -> None:
    positions = np.array([[0, 5, -1], [7, -1, -1]], np.int32)
    table = np.array([[9, 4], [1, 3]])
    np.testing.assert_array_equal(indexer.pool_rows(positions, table, 4), [[36, 17, -1], [15, -1, -1]])
    np.testing.assert_array_equal(indexer.pool_rows(positions * 0 - 1, table[:, :0], 4), np.full((2, 3), -1))


def test_refused() -> None:
    with pytest.raises(ArgumentError, match="'k': expected 1 or more"):
        indexer.top_k(np.zeros((1, 3)), 0, [0], [3])
    with pytest.raises(ArgumentError, match="'lengths'"):
        indexer.top_k(np.zeros((1, 3)), 1, [1], [3])
    with pytest.raises(ShapeError, match="'logits'"):
        indexer.top_k(np.zeros(3), 1, [0], [3])
