"""Small tiles on mma.sync for short sequences with masks and softcap."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402

from .test_few_queries_gpu import _close, _masks, exact, tensors  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="rows from 9.0 on"
    ),
]
TILES = ["m16n16", "m64n64"]


def _row(head_dim: int, tile: str, dtype: str) -> str:
    short = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
    return f"attn_fwd_sm80_{short}_d{64 if head_dim <= 64 else 128}_{tile}_mods"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "form",
    [
        "softcap", "softcap, causal", "boolean", "boolean, causal", "boolean, softcap", "boolean of keys", "float32",
        "of keys", "io", "negative scale, sinks", "io, window",
    ],
)  # fmt: skip
def test_beside_float64(form: str, tile: str, head_dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile of rows and several; rows of a tile that do not exist; lists of a mask's tiles in parts."""
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(head_dim, tile, dtype))
    for batch, heads, seqlens in (
        (7, (4, 2), (16, 16)),
        (2, (4, 4), (5, 33)),
        (3, (2, 1), (64, 64)),
        (1, (6, 2), (197, 131)),
        (1, (1, 1), (150, 700)),
    ):
        q, k, v = tensors(batch, heads, seqlens, head_dim, dtype)
        call: dict[str, Any] = {"softcap": 5.0} if "softcap" in form else {}
        name = form.split(",")[0]
        if name in ("boolean", "boolean of keys", "float32", "of keys", "io"):
            call["mask"] = _masks(name, batch, heads[0], seqlens, q.dtype)
        if "causal" in form:
            call["causal"] = True
        if "window" in form:
            call["window"] = (9, 3)
        if "sinks" in form:
            call["sinks"] = torch.randn(heads[0], device="cuda")
        expected = exact(-q if "negative" in form else q, k, v, **call)
        if "negative" in form:
            call["softmax_scale"] = -(head_dim**-0.5)
        o, lse = oa.attention(q, k, v, return_lse=True, **call)
        assert _close(o, lse, *expected, dtype)
        assert torch.equal(oa.attention(q, k, v, **call), o)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("form", ["softcap", "boolean"])
def test_packed_sequences(form: str, head_dim: int, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence without queries, one without keys, rows of no sequence."""
    lengths = (3, 0, 40, 1, 16, 70), (30, 100, 0, 66, 16, 2)
    starts = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device="cuda") for n in lengths]
    q, _, _ = tensors(1, (4, 2), (sum(lengths[0]) + 5, 8), head_dim, "bfloat16")
    _, k, v = tensors(1, (4, 2), (8, sum(lengths[1]) + 7), head_dim, "bfloat16")
    q, k, v = q[0], k[0], v[0]
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(head_dim, tile, "bfloat16"))
    call: dict[str, Any] = {"softcap": 5.0}
    if form == "boolean":
        call = {"mask": torch.rand(6, 1, 70, 100, device="cuda") < 0.6}
    o, lse = oa.attention_varlen(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=70, max_seqlen_k=100, return_lse=True,
        **call,
    )  # fmt: skip
    for i, (sq, sk) in enumerate(zip(*lengths, strict=True)):
        rows, keys = (slice(int(s[i]), int(s[i]) + n) for s, n in zip(starts, (sq, sk), strict=True))
        own = {"mask": call["mask"][i : i + 1, :, :sq, :sk]} if "mask" in call else call
        if sq:
            expected = exact(q[rows][None], k[keys][None], v[keys][None], **own)
            assert _close(o[rows][None], lse[:, rows][None], *expected, "bfloat16")
    assert not o[sum(lengths[0]) :].any()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_with_a_score_mod_and_a_block_mask(head_dim: int, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(head_dim, tile, "bfloat16"))
    q, k, v = tensors(3, (4, 2), (130, 200), head_dim, "bfloat16")
    mod = oa.ScoreMod("score + 0.25f * (float)h", reference=lambda score, b, h, q, k: score + 0.25 * h)
    blocks = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool, device="cuda")
    o, lse = oa.attention(q, k, v, score_mod=mod, block_mask=blocks[None, None], block_size=128, return_lse=True)
    bias = 0.25 * torch.arange(4, device="cuda")[None, :, None, None].expand(3, 4, 130, 200)
    seen = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :200]
    assert _close(o, lse, *exact(q, k, v, mask=bias.masked_fill(~seen, -torch.inf)), "bfloat16")
