"""Calls in other tiles than long sequences take, beside float64: head_dims without small tiles of their own, single
sequences, packed sequences around a tile's rows, windows that hide nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402

from .ways import in_way  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="tiles of Hopper's kernel"
    ),
]


def random(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape))).to(dtype)


def exact(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
    """o and LSE of (batch, seqlen, heads, head_dim) in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return (p @ v).transpose(1, 2), lse


def check(found: Any, expected: Any, dtype: Any) -> None:
    unit = 2.0 ** (-11 if dtype == torch.float16 else -8)
    for (o, lse), (want, want_lse) in zip(found, expected, strict=True):
        bound = 2 * unit * (want.abs() + want.abs().max() / 4) + 1e-6
        assert bool(((o.double() - want).abs() <= bound).all())
        # Rows that see nothing have -inf on both sides.
        apart = (lse.double() - want_lse).abs().masked_fill(lse.isneginf() & want_lse.isneginf(), 0.0)
        assert bool((apart <= 2e-5 * (1 + want_lse.abs().nan_to_num(posinf=0.0))).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("extents", "tile"),
    [
        ((300, 16, 16, 16, 72), "d128_m16n16"),
        ((300, 16, 32, 32, 72), "d128_m64n32"),
        ((16, 16, 13, 16, 24), "d64_m16n16"),
        ((257, 16, 64, 64, 96), "d128_m64n"),
        ((2, 12, 197, 197, 80), "d128_m64n64"),
        ((1, 12, 577, 577, 88), "d128_m128n128"),
        ((1, 8, 1025, 1025, 64), "d64_m64n64"),
        ((1, 8, 2047, 2048, 128), "d128_m128n128"),
        ((1, 12, 1000, 4097, 56), "d64_m256n64"),
        ((1, 12, 1000, 4097, 48), "d64_m64n64"),
        ((8, 12, 448, 4097, 128), "d128_m128n128"),
    ],
    ids=str,
)
def test_dense(extents: tuple[int, int, int, int, int], tile: str, causal: bool, dtype: Any) -> None:
    b, h, sq, sk, d = extents
    q, k, v = random(b, sq, h, d, dtype=dtype), random(b, sk, h, d, dtype=dtype), random(b, sk, h, d, dtype=dtype)
    got = in_way(lambda way: tile in way.row.name, oa.attention, q, k, v, causal=causal, return_lse=True)
    check([tuple(got)], [exact(q, k, v, causal)], dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("least", "most", "count"), [(128, 256, 64), (1, 64, 200), (16, 16, 100), (100, 1500, 9)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_packed(head_dim: int, least: int, most: int, count: int, causal: bool) -> None:
    lengths = [least + i * 37 % (most - least + 1) for i in range(count)]
    starts = [0, *itertools.accumulate(lengths)]
    q = random(starts[-1], 4, head_dim)
    k, v = q.roll(1, 0), random(starts[-1] + 1, 4, head_dim)[1:]
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device="cuda")
    call: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "causal": causal}
    call |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    o, lse = oa.attention_varlen(q, k, v, return_lse=True, **call)
    for begin, end in list(itertools.pairwise(starts))[:: max(1, count // 16)]:
        want, want_lse = exact(*(x[None, begin:end] for x in (q, k, v)), causal)
        check([(o[None, begin:end], lse[None, :, begin:end])], [(want, want_lse)], torch.bfloat16)
    # A longest one that is given too large changes the tile at most.
    again = oa.attention_varlen(q, k, v, **{**call, "max_seqlen_q": 4 * most, "max_seqlen_k": 4 * most})
    assert float((again.float() - o.float()).abs().max()) <= 2.0**-6 * float(o.float().abs().max())


@pytest.mark.parametrize("causal", [False, True])
def test_few_packed_queries(causal: bool) -> None:
    q, k, v = random(8 * 32, 8, 128), random(8 * 4100, 8, 128), random(8 * 4100 + 1, 8, 128)[1:]
    starts = [torch.arange(0, 9 * n, n, dtype=torch.int32, device="cuda") for n in (32, 4100)]
    o, lse = oa.attention_varlen(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=32, max_seqlen_k=4100, causal=causal,
        return_lse=True,
    )  # fmt: skip
    for i in range(8):
        of_q, of_k = slice(32 * i, 32 * (i + 1)), slice(4100 * i, 4100 * (i + 1))
        want = exact(q[None, of_q], k[None, of_k], v[None, of_k], causal)
        check([(o[None, of_q], lse[None, :, of_q])], [want], torch.bfloat16)


@pytest.mark.parametrize(("causal", "window"), [(False, (299, 199)), (True, (299, -1)), (True, (1 << 20, 5))])
def test_windows_that_hide_nothing(causal: bool, window: tuple[int, int]) -> None:
    q, k, v = random(2, 200, 4, 64), random(2, 300, 4, 64), random(2, 300, 4, 64)
    with_window = oa.attention(q, k, v, causal=causal, window=window, return_lse=True)
    without = oa.attention(q, k, v, causal=causal, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(with_window, without, strict=True))
    assert oa.explain(q, k, v, causal=causal, window=window).kernel == oa.explain(q, k, v, causal=causal).kernel
