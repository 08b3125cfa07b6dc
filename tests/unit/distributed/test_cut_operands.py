"""Rows of quantized operands that a rank reads or sends: what kernels take, and the numbers of those rows."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.distributed import quantized  # noqa: E402

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("options", [{"dtype": "float8_e4m3", "granularity": "per_block"}, {}], ids=str)
def test_queries_begin_where_kernels_can_read(heads: int, options: dict[str, Any]) -> None:
    """At multiples of 16 bytes: a view of one head's scales is contiguous, and begins anywhere."""
    q, k = (torch.randn(1, 640, heads, 64) for _ in range(2))
    pair = oa.quantize_qk(q, k, smooth_k=False, **options)
    cut = quantized._cut_queries(pair, (128, 640))
    alone = oa.quantize_qk(q[:, 128:], k[:, 128:], smooth_k=False, **options)
    for name in ("q_int", "q_scale", "row_bias"):
        found, expected = getattr(cut, name), getattr(alone, name)
        assert (found is None) == (expected is None)
        if found is not None:
            assert found.is_contiguous()
            assert found.data_ptr() % 16 == 0
            assert torch.equal(found, expected)
    assert cut.problem.rows_q == 512
