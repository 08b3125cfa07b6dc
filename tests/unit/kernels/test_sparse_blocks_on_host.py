"""``sparse_blocks`` by its kernels run on the CPU (tests/host_kernels.py), against NumPy's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import omniattn as oa
from tests.host_kernels import HostKernels


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernels]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield HostKernels(Path(tmp_path_factory.mktemp("kernels")), monkeypatch, cc=(8, 0), sm_count=108)


def arrays(rows_q: int, rows_k: int, heads: int, heads_kv: int, head_dim: int, dtype: Any) -> list[Any]:
    rng = np.random.default_rng(head_dim)
    made = [rng.standard_normal((2, n, h, head_dim)) for n, h in ((rows_q, heads), (rows_k, heads_kv))]
    made[1] += rng.standard_normal((2, -(-rows_k // 64), heads_kv, head_dim)).repeat(64, axis=1)[:, :rows_k]
    return [x.astype(dtype) for x in made]


@pytest.mark.parametrize(
    "options",
    [
        {"topk": 0.5}, {"topk": 0.01}, {"cdf": 0.9}, {"cdf": 0.05}, {"topk": 0.3, "causal": True},
        {"topk": 0.3, "similarity": 0.4}, {"cdf": 0.5, "keep_first": 2}, {"cdf": 0.5, "block_size": 64, "causal": True},
        {"topk": 1.0, "block_size": (192, 128)},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    ("head_dim", "shape"),
    [(64, (300, 700, 4, 2)), (128, (129, 1000, 2, 2)), (40, (500, 90, 3, 1)), (256, (64, 3000, 2, 1))],
)
def test_blocks(kernels: HostKernels, head_dim: int, shape: tuple[int, int, int, int], options: dict[str, Any]) -> None:
    q, k = arrays(*shape, head_dim, ml_dtypes.bfloat16 if head_dim != 64 else np.float16)
    (got,) = kernels(oa.sparse_blocks, q, k, **options)
    np.testing.assert_array_equal(got, oa.sparse_blocks(q, k, **options))


def test_a_share_of_each_head(kernels: HostKernels) -> None:
    q, k = arrays(300, 700, 6, 2, 64, np.float16)
    shares = (0.05, 0.2, 0.5, 0.7, 0.9, 1.0)
    for options in ({"topk": shares}, {"cdf": shares, "causal": True}):
        (got,) = kernels(oa.sparse_blocks, q, k, **options)
        np.testing.assert_array_equal(got, oa.sparse_blocks(q, k, **options))


def test_equal_scores_nan_and_zeros(kernels: HostKernels) -> None:
    q, k = (np.zeros((1, n, 1, 64), np.float16) for n in (256, 640))
    for options in ({"topk": 0.35}, {"cdf": 0.35}, {"topk": 0.05}, {"cdf": 0.05}, {"topk": 0.3, "similarity": 0.0}):
        (got,) = kernels(oa.sparse_blocks, q, k, **options)
        np.testing.assert_array_equal(got, oa.sparse_blocks(q, k, **options))
    q, k = arrays(384, 640, 1, 1, 64, np.float16)
    q[0, 130], k[0, 70], k[0, 200, 0, 3], k[0, 320:384] = np.nan, np.nan, np.inf, 0
    (got,) = kernels(oa.sparse_blocks, q, k, topk=0.1)
    np.testing.assert_array_equal(got, oa.sparse_blocks(q, k, topk=0.1))


def test_one_row_at_a_time(kernels: HostKernels) -> None:
    q, k = arrays(300, 64 * 6200, 1, 1, 8, np.float16)
    for options in ({"topk": 0.01}, {"cdf": 0.3}):
        (got,) = kernels(oa.sparse_blocks, q[:1], k[:1], **options)
        assert (got != oa.sparse_blocks(q[:1], k[:1], **options)).mean() < 1e-3
