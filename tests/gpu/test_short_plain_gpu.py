"""The tile of one warp on mma.sync for short sequences without scores."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402

from .test_few_queries_gpu import _close, exact, tensors  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="rows from 9.0 on"
    ),
]


def _force(monkeypatch: pytest.MonkeyPatch, head_dim: int, dtype: str) -> None:
    short = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", f"attn_fwd_sm80_{short}_d{64 if head_dim <= 64 else 128}_m16n16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@pytest.mark.parametrize("form", ["full", "causal", "window", "sinks", "causal, sinks"])
def test_beside_float64(form: str, head_dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile of rows and several; rows of a tile that do not exist; rows that see no key."""
    _force(monkeypatch, head_dim, dtype)
    for batch, heads, seqlens in (
        (7, (4, 2), (16, 16)),
        (5, (3, 3), (1, 1)),
        (3, (8, 1), (8, 8)),
        (2, (4, 4), (5, 33)),
        (2, (4, 4), (33, 5)),
        (3, (2, 1), (64, 64)),
        (1, (6, 2), (197, 131)),
    ):
        q, k, v = tensors(batch, heads, seqlens, head_dim, dtype)
        call: dict[str, Any] = {"causal": "causal" in form}
        if form == "window":
            call["window"] = (9, 3)
        if "sinks" in form:
            call["sinks"] = torch.randn(heads[0], device="cuda")
        o, lse = oa.attention(q, k, v, return_lse=True, **call)
        assert _close(o, lse, *exact(q, k, v, **call), dtype)
        assert torch.equal(oa.attention(q, k, v, **call), o)


def test_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads before tokens, and K and V that are expanded over the batch."""
    _force(monkeypatch, 64, "bfloat16")
    q, k, v = tensors(5, (4, 4), (16, 24), 64, "bfloat16")
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k, v = (x[:1].expand(5, -1, -1, -1) for x in (k, v))
    o, lse = oa.attention(q, k, v, return_lse=True)
    assert _close(o, lse, *exact(q, k, v), "bfloat16")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(causal: bool, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence without queries, one without keys, rows of no sequence; more sequences than a warp has lanes."""
    lengths = (3, 0, 40, 1, 16, 70) * 99, (30, 100, 0, 66, 16, 2) * 99
    starts = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device="cuda") for n in lengths]
    q, _, _ = tensors(1, (4, 2), (sum(lengths[0]) + 5, 8), head_dim, "bfloat16")
    _, k, v = tensors(1, (4, 2), (8, sum(lengths[1]) + 7), head_dim, "bfloat16")
    q, k, v = q[0], k[0], v[0]
    _force(monkeypatch, head_dim, "bfloat16")
    o, lse = oa.attention_varlen(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=70, max_seqlen_k=100, return_lse=True,
        causal=causal,
    )  # fmt: skip
    for i, (sq, sk) in enumerate(zip(*lengths, strict=True)):
        if sq and (i < 9 or i % 37 == 0 or i > 580):
            rows, keys = (slice(int(s[i]), int(s[i]) + n) for s, n in zip(starts, (sq, sk), strict=True))
            expected = exact(q[rows][None], k[keys][None], v[keys][None], causal=causal)
            assert _close(o[rows][None], lse[:, rows][None], *expected, "bfloat16")
    assert not o[sum(lengths[0]) :].any()
