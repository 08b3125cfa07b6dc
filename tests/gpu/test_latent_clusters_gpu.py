"""Clusters of CTAs that merge their partial results of one sequence over a latent cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa
from omniattn.plan.engine import PLANS
from omniattn.problems.decode import DecodeSplit
from omniattn.registry.decode import COMBINE_WARPS, RESULTS_OF_WARP
from omniattn.select import decode_ways

from .latent_rows8 import dressed, stored
from .test_latent_gpu import DIM, DIM_V, Filled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="a kernel of Hopper"
    ),
]


@pytest.fixture(params=[(2, 2), (8, 8), (4, 13), (8, 16)], ids=["2", "8", "13 by 4", "16 by 8"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """So many CTAs of a cluster, and workers of a sequence, in every call that clusters can serve."""
    size, each = request.param
    chosen = decode_ways.latent_clusters

    def clusters(one: Any, target: Any) -> DecodeSplit | None:
        if chosen(one, target) is None:
            return None
        count = each if one.problem.batch == 1 else max(each // size, 1) * size
        results = -(-count // size)
        warps = next(x for x in COMBINE_WARPS if results <= RESULTS_OF_WARP * x)
        return DecodeSplit(count * one.problem.batch, warps, size)

    monkeypatch.setattr(decode_ways, "CLUSTER_KEYS", 1 << 30)
    monkeypatch.setattr(decode_ways, "latent_clusters", clusters)
    PLANS.clear()
    yield size
    PLANS.clear()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("length", [5000, 2048, 1000, 129, 64, 3])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (128, 1), (5, 3), (1, 1)])
@pytest.mark.usefixtures("cluster")
def test_one_sequence(heads: int, q_len: int, length: int, dtype: str) -> None:
    case = Filled((length,), 64, heads, q_len, dtype, growth=0.001)
    said = oa.explain(oa.decode, case.q, case.cache, seq_lens=case.lens, **case.where)
    assert said.kernel.endswith("_clusters")
    sinks = torch.randn(heads, device="cuda") * 3
    for options in ({}, {"window": (700, 0)}, {"sinks": sinks}):
        o, lse = oa.decode(case.q, case.cache, seq_lens=case.lens, return_lse=True, **case.where, **options)
        known = {"window": options.get("window", (-1, 0))[0], "sinks": options.get("sinks")}
        case.check(o, lse, **known)
        again = oa.decode(case.q, case.cache, seq_lens=case.lens, **case.where, **options)
        assert torch.equal(again, o)


@pytest.mark.usefixtures("cluster")
def test_a_graph_is_replayed_with_other_lengths() -> None:
    case = Filled((3000,), 64, 32)
    lens = case.lens.clone()
    oa.decode(case.q, case.cache, seq_lens=lens, return_lse=True, **case.where)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = oa.decode(case.q, case.cache, seq_lens=lens, return_lse=True, **case.where)
    rows = case.rows[0]
    for length in (3000, 1, 0, 130, 1025, 2999):
        o.fill_(math.nan)
        lens.fill_(length)
        case.rows, case.lengths = [rows[:length]], (length,)
        graph.replay()
        case.check(o, lse)


@pytest.mark.parametrize("fmt", ["16", "656", "e4m3"])
@pytest.mark.parametrize(("batch", "heads", "topk"), [(1, 128, 2048), (2, 64, 2048), (3, 24, 900), (2, 5, 77)])
@pytest.mark.usefixtures("cluster")
def test_lists(batch: int, heads: int, topk: int, fmt: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(1024, DIM, device="cuda")
    if fmt == "16":
        pool: Any = rows.bfloat16()
        exact, options = pool.double(), {"head_dim_v": DIM_V}
    else:
        codes, meaning = stored(rows, fmt)
        exact = meaning.exact
        pool, options = dressed(codes, fmt)
    cache = oa.PagedKVCache.from_arrays(pool.view(-1, 64, 1, pool.shape[-1]), **options)
    q = torch.randn(batch, 1, heads, DIM, device="cuda").bfloat16()
    indices = torch.randint(-300, 1024, (batch, 1, topk), device="cuda", dtype=torch.int32)
    o, lse = oa.decode(q, cache, indices=indices, return_lse=True)
    for b in range(batch):
        keys = exact[indices[b, 0][indices[b, 0] >= 0].long()]
        s = q[b, 0].double() @ keys.T * DIM**-0.5
        want = s.softmax(-1) @ keys[:, :DIM_V]
        assert (o[b, 0].double() - want).norm() / want.norm() < 6e-3
        assert (lse.view(batch, heads)[b].double() - s.logsumexp(-1)).abs().max() < 5e-3
