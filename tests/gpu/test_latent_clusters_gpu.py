"""Clusters of CTAs that merge their partial results of a list over a latent cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.problems.decode import DecodeSplit  # noqa: E402
from omniattn.select import decode_ways  # noqa: E402

from .latent_rows8 import stored  # noqa: E402

DIM, DIM_V = 576, 512

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="a kernel of Hopper"
    ),
]


@pytest.fixture(params=[(8, 8), (4, 4), (2, 4), (8, 16)], ids=["8", "4", "4 by 2", "16 by 8"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CTAs of a cluster, and of a list, in every call."""
    size, each = request.param
    monkeypatch.setattr(
        decode_ways, "latent_clusters", lambda one, _: DecodeSplit(one.problem.batch * each, 1, size)
    )  # fmt: skip
    PLANS.clear()
    yield
    PLANS.clear()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fmt", ["16", "656"])
@pytest.mark.parametrize(("batch", "heads", "topk"), [(1, 128, 2048), (2, 64, 2048), (3, 24, 2100)])
@pytest.mark.usefixtures("cluster")
def test_lists(batch: int, heads: int, topk: int, fmt: str, dtype: str) -> None:
    torch.manual_seed(0)
    io = getattr(torch, dtype)
    rows = torch.randn(1024, DIM, device="cuda")
    if fmt == "16":
        pool: Any = rows.to(io)
        exact = pool.double()
    else:
        pool, meaning = stored(rows, fmt, dtype)
        exact = meaning.exact
    cache = oa.PagedKVCache.from_arrays(pool.view(-1, 64, 1, pool.shape[-1]), head_dim_v=DIM_V)
    q = torch.randn(batch, 1, heads, DIM, device="cuda").to(io)
    indices = torch.randint(-300, 1024, (batch, 1, topk), device="cuda", dtype=torch.int32)
    indices[-1, 0, 300:] = -1  # most CTAs of the last list have no key
    assert oa.explain(oa.decode, q, cache, indices=indices).kernel.endswith("_clusters")
    sinks = torch.randn(heads, device="cuda") * 3
    for own in (None, sinks):
        out = torch.full((batch, 1, heads, DIM_V), math.nan, device="cuda", dtype=io)
        o, lse = oa.decode(q, cache, indices=indices, return_lse=True, sinks=own, out=out)
        assert torch.equal(o, oa.decode(q, cache, indices=indices, sinks=own))
        for b in range(batch):
            keys = exact[indices[b, 0][indices[b, 0] >= 0].long()]
            s = q[b, 0].double() @ keys.T * DIM**-0.5
            if own is not None:
                s = torch.cat([s, own.double()[:, None]], 1)
            want = s.softmax(-1)[:, : len(keys)] @ keys[:, :DIM_V]
            assert (o[b, 0].double() - want).norm() / want.norm() < 6e-3
            assert (lse.view(batch, heads)[b].double() - s.logsumexp(-1)).abs().max() < 5e-3
