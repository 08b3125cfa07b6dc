"""Every way of running a call, whether it is ever chosen or not, gives the right result."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from omniattn.bench.candidates import run_candidates
from omniattn.bench.shape_cases import ShapeCase

pytestmark = pytest.mark.gpu


def _batch(head_dim: int, batch: int, heads: int, queries: int, keys: int, **more: object) -> ShapeCase:
    return ShapeCase(head_dim, heads, (queries,) * batch, (keys,) * batch, **more)  # type: ignore[arg-type]


#: One of each kind, with lengths that are no multiples of a tile.
CASES = (
    _batch(64, 2, 4, 577, 577), _batch(128, 2, 4, 300, 300, causal=True), _batch(128, 1, 3, 12000, 1300),
    _batch(72, 3, 4, 100, 100), _batch(256, 1, 4, 130, 700, causal=True), _batch(128, 1, 8, 1, 3001, group=4),
    _batch(64, 2, 8, 16, 2050, group=4, softcap=30.0), _batch(128, 1, 7, 1, 3001, group=7, mask="mixed"),
    _batch(128, 2, 4, 200, 333, mask="bias_heads"), _batch(64, 3, 4, 200, 200, mask="padding"),
    _batch(128, 1, 4, 900, 900, causal=True, window=(100, 0)), _batch(128, 2, 4, 300, 1111, precision="int8"),
    _batch(64, 1, 8, 16, 4000, precision="fp8", group=4), _batch(192, 1, 4, 300, 300, own_head_dim_v=128),
    ShapeCase(128, 8, (1, 300, 17, 64), (900, 300, 2000, 64), packed="four", group=2, causal=True),
    ShapeCase(64, 4, (1,) * 20, tuple(range(50, 2050, 100)), packed="twenty", group=4),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.long_name)
def test_all_ways(case: ShapeCase) -> None:
    (result,) = run_candidates([case], iters=1).results
    assert len(result.ways) > 1
    assert [f"{way.way}: {way.reason}" for way in result.ways if way.reason] == []
    assert result.regret is not None
