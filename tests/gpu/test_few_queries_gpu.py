"""Few queries on many keys, which Hopper's kernels split over CTAs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the Hopper kernel's"
    ),
]


def tensors(batch: int, heads: tuple[int, int], seqlens: tuple[int, int], head_dim: int, dtype: str) -> tuple[Any, ...]:
    torch.manual_seed(seqlens[1])
    kind = getattr(torch, dtype)
    shapes = [(batch, seqlens[0], heads[0], head_dim), *[(batch, seqlens[1], heads[1], head_dim)] * 2]
    return tuple(torch.randn(shape, device="cuda", dtype=kind) for shape in shapes)


def exact(q: Any, k: Any, v: Any, causal: bool, window: tuple[int, int] | None, sinks: Any) -> tuple[Any, Any]:
    """o and LSE in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    i = torch.arange(q.shape[2], device="cuda")[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device="cuda")[None]
    left, right = window or (-1, -1)
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device="cuda")
    if causal or right >= 0:
        hidden |= j > i + max(right, 0) * (not causal)
    if left >= 0:
        hidden |= j < i - left
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()[..., : k.shape[2]]
    return (p @ v.repeat_interleave(group, 1)).transpose(1, 2), lse


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 112, 128, 256])
@pytest.mark.parametrize(
    ("batch", "heads", "seqlens", "options"),
    [
        (1, (32, 8), (16, 8192), {}),
        (2, (6, 2), (77, 7003), {"causal": True}),
        (1, (8, 8), (33, 9000), {"window": (8500, 20)}),
        (1, (12, 1), (1, 5001), {"causal": True, "sinks": True}),
        (1, (14, 2), (300, 20000), {"causal": True}),
        (1, (1, 1), (1, 100000), {}),
    ],
    ids=str,
)
def test_beside_float64(
    batch: int, heads: tuple[int, int], seqlens: tuple[int, int], options: dict[str, Any], head_dim: int, dtype: str
) -> None:
    q, k, v = tensors(batch, heads, seqlens, head_dim, dtype)
    options = dict(options)
    sinks = torch.randn(heads[0], device="cuda") if options.pop("sinks", False) else None
    call: dict[str, Any] = {**options, "sinks": sinks}
    assert "_split" in oa.explain(q, k, v, **call).kernel
    o, lse = oa.attention(q, k, v, return_lse=True, **call)
    want, want_lse = exact(q, k, v, options.get("causal", False), options.get("window"), sinks)
    unit = 2.0 ** (-11 if dtype == "float16" else -8)
    # A rounding of the result, and of the probabilities that it sums.
    bound = 1.5 * unit * (want.abs() + v.double().abs().max() / 16) + 1e-6
    assert bool(((o.double() - want).abs() <= bound).all())
    assert torch.allclose(lse.double(), want_lse, atol=2e-3)
    for _ in range(3):
        assert torch.equal(oa.attention(q, k, v, **call), o)


def test_graph_replays() -> None:
    q, k, v = tensors(1, (32, 8), (16, 8192), 128, "bfloat16")
    expected = oa.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    out = torch.empty_like(q)
    with torch.cuda.graph(graph):
        oa.attention(q, k, v, out=out)
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
