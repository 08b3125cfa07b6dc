"""Tiles that do not fill a round, whose keys are split: beside all tiles in one kernel, and beside float64."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.problems.split import TailSplit  # noqa: E402

from .test_few_queries_gpu import exact, tensors  # noqa: E402
from .test_low_precision_split_gpu import FORCE, far, forced  # noqa: E402
from .ways import in_way  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the Hopper kernel's"
    ),
]

#: Calls with a tail: (batch, heads, (queries, keys), head_dim).
CALLS = [
    (1, (24, 24), (4608, 4608), 128),
    (5, (12, 4), (2300, 9000), 128),
    (1, (18, 18), (4096, 6001), 256),
    (1, (20, 5), (3000, 8000), 192),
    (1, (16, 4), (3333, 12000), 112),
    (1, (21, 7), (8000, 9001), 64),
]
#: Their e4m3 and int8 tiles are larger at head_dim 64.
LOW_CALLS = [*CALLS[:2], (2, (10, 5), (4090, 4099), 64)]
E4M3 = torch.float8_e4m3fn


def with_tail(*arrays: Any, **call: Any) -> tuple[Any, str]:
    """Results of the call with its last tiles split, and the kernel of the others."""
    rows: list[str] = []

    def has_tail(way: Any) -> bool:
        rows[:] = [way.row.name]
        return isinstance(way.schedule, TailSplit)

    found = in_way(has_tail, oa.attention, *arrays, **call)
    return (found if len(found) > 1 else found[0]), rows[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_beside_all_tiles_in_one_kernel(call: tuple[Any, ...], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, heads, seqlens, head_dim = call
    q, k, v = tensors(batch, heads, seqlens, head_dim, dtype)
    sinks = torch.randn(heads[0], device="cuda")
    for options in ({}, {"sinks": sinks}):
        monkeypatch.delenv(FORCE, raising=False)
        (o, lse), row = with_tail(q, k, v, return_lse=True, **options)
        assert torch.equal(with_tail(q, k, v, **options)[0], o)
        whole, whole_lse = forced(monkeypatch, row, q, k, v, return_lse=True, **options)
        assert far(o, whole) <= 4e-3
        assert bool(((lse - whole_lse).abs() <= 2e-5).all())
        # Most tiles are computed by the same kernel as before.
        assert torch.equal(o[:1, -64:, :1], whole[:1, -64:, :1])


def test_beside_float64() -> None:
    """The last heads, which the tail has rows of."""
    q, k, v = tensors(1, (24, 24), (4608, 4608), 128, "bfloat16")
    (o, lse), _ = with_tail(q, k, v, return_lse=True)
    want, want_lse = exact(q[:, :, -3:], k[:, :, -3:], v[:, :, -3:])
    assert far(o[:, :, -3:], want) <= 4e-3
    assert torch.allclose(lse[:, -3:].double(), want_lse, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("precision", ["int8", "fp8", "arrays", "operands"])
@pytest.mark.parametrize("call", LOW_CALLS, ids=str)
def test_low_precision(call: tuple[Any, ...], precision: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, heads, seqlens, head_dim = call
    q, k, v = tensors(batch, heads, seqlens, head_dim, dtype)
    v[..., :3] += 2.0
    options: dict[str, Any] = {"precision": precision}
    if precision == "arrays":
        q, k, v = (x.to(E4M3) for x in (q, k, v))
        options = {"out_dtype": getattr(torch, dtype)}
    elif precision == "operands":
        made = oa.quantize_qk(q, k, with_bias=True)
        q, k, v, options = made.q, made.k, oa.quantize_v(v), {}
    for lse in (False, True):
        monkeypatch.delenv(FORCE, raising=False)
        found, row = with_tail(q, k, v, return_lse=lse, **options)
        whole = forced(monkeypatch, row, q, k, v, return_lse=lse, **options)
        if lse:
            assert bool(((found[1] - whole[1]).abs() <= 1e-3).all())
            found, whole = found[0], whole[0]
        assert far(found, whole) <= 0.02


def test_a_graph_gives_the_same_bits() -> None:
    q, k, v = tensors(1, (24, 24), (4608, 4608), 128, "bfloat16")
    want, _ = with_tail(q, k, v)
    out = torch.empty_like(want)
    with_tail(q, k, v, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with_tail(q, k, v, out=out)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


def test_nan_in_the_tail_stays_in_its_row() -> None:
    q, k, v = tensors(1, (24, 24), (4608, 4608), 128, "bfloat16")
    q[0, 5, -1] = torch.nan
    o, _ = with_tail(q, k, v)
    assert o[0, 5, -1].isnan().all()
    o[0, 5, -1] = 0
    assert o.isfinite().all()
