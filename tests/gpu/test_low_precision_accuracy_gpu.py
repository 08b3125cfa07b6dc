"""INT8 and INT4 attention on a GPU against double precision: synthetic inputs, a real model, long context."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import data, testing  # noqa: E402
from tests.numerics.low_precision_accuracy import PUBLISHED  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the figures of attn_int8_sm90; test_low_precision_sm80_gpu.py has the other kernels",
    ),
]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    """In double precision, (batch, seq, heads, head_dim)."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        n, m = scores.shape[2:]
        scores = scores.masked_fill(torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1), -torch.inf)
    return (torch.softmax(scores, 3) @ v).transpose(1, 2)


def figures(o: torch.Tensor, ref: torch.Tensor) -> tuple[float, float]:
    """(cosine similarity, relative L1)."""
    o, ref = o.double(), ref.double()
    cosine = (o * ref).sum() / (o.norm() * ref.norm())
    return float(cosine), float((o - ref).abs().sum() / ref.abs().sum())


def draw(kind: str, seed: int, **shape: Any) -> list[torch.Tensor]:
    made = testing.make_qkv(kind, seed=seed, **shape)
    return [torch.from_numpy(np.asarray(x, dtype=np.float32)).to(torch.bfloat16).cuda() for x in made]


def of_kind(kind: str) -> tuple[float, float]:
    """Mean figures of int8 over four draws."""
    found = []
    for seed in range(4):
        q, k, v = draw(kind, seed, seqlen_q=4096, heads_q=2, head_dim=128)
        found.append(figures(oa.attention(q, k, v, precision="int8"), exact(q, k, v)))
    return float(np.mean([x[0] for x in found])), float(np.mean([x[1] for x in found]))


@pytest.mark.parametrize("kind", PUBLISHED)
def test_accuracy_of_int8(kind: str) -> None:
    cosine, l1 = of_kind(kind)
    least, most = PUBLISHED[kind]
    # The cosine of the mean of four draws moves by 1e-5; the L1 is given with three digits.
    assert cosine >= least - 1e-5
    assert l1 <= most + 5e-4


@pytest.mark.parametrize("layer", range(4))
def test_a_real_model(layer: int) -> None:
    x = data.load_activations()[layer]
    q, k, v = (torch.from_numpy(t).to(torch.bfloat16).cuda() for t in (x.q, x.k, x.v))
    ref = exact(q, k, v, causal=True)

    def of(precision: oa.Int8) -> tuple[float, float]:
        return figures(oa.attention(q, k, v, causal=True, precision=precision), ref)

    cosine, l1 = of(oa.Int8())
    assert cosine >= 0.999
    assert l1 <= 0.04
    none, only_k, both = (
        of(oa.Int4(smooth_k=smooth_k, smooth_q=smooth_q))[1]
        for smooth_k, smooth_q in ((False, False), (True, False), (True, True))
    )
    assert both < only_k < none
    assert both <= 0.21


def test_order_of_the_ablations() -> None:
    q, k, v = draw("channel_bias", 0, seqlen_q=1024, heads_q=4, head_dim=128)
    ref = exact(q, k, v)

    def of(**knobs: Any) -> float:
        return figures(oa.attention(q, k, v, precision=oa.Int4(**knobs)), ref)[1]

    both, only_k, none = of(), of(smooth_q=False), of(smooth_q=False, smooth_k=False)
    assert both < 0.5 * only_k < 0.5 * none
    assert both < of(granularity="per_block") < of(granularity="per_tensor")


@pytest.mark.parametrize("precision", [oa.Int8(), oa.Int8(smooth_v=False)], ids=["smooth_v", "plain"])
def test_error_does_not_grow_with_length(precision: oa.Int8) -> None:
    """One causal head of 131072 tokens: rows with all keys against rows with a 32nd of them, and the exact kernel."""
    length, band = 131072, 128
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    # Values that do not cancel: sums of 131072 of them lose what 13 bits cannot hold.
    v = v + 1
    low, full = (oa.attention(q, k, v, causal=True, precision=p) for p in (precision, "exact"))
    errors = {}
    for end in (4096, 32768, length):
        rows = slice(end - band, end)
        ref = exact(q[:, rows], k[:, :end], v[:, :end], causal=True)
        errors[end] = figures(low[:, rows], ref)[1]
        assert figures(full[:, rows], ref)[1] <= 4e-3
        # Tensor cores round each product towards 0, at 13 bits of the sum so far: over 256 keys 0.4 per cent, and
        # nothing where V has no mean.
        mean = (low[:, rows].double().mean() / ref.mean()).item()
        assert (-1e-3 if precision.smooth_v else -6e-3) <= mean - 1 <= 1e-3, (end, mean)
    assert errors[length] <= errors[32768] * 1.1 <= errors[4096] * 1.1**2, errors
    # All rows, with the exact kernel as reference.
    cosine, l1 = figures(low, full)
    assert cosine >= 0.9999
    assert l1 <= errors[4096]
