"""Few queries on many keys with a ``score_mod`` or ``block_mask``, split over CTAs by force, beside float64."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402

from .plans import split_rows_with_scores  # noqa: E402

pytestmark = pytest.mark.gpu

MASK = "(q + k + h) % 3 != 0 && !(k >= 256 && k < 900)"
#: The same for all heads, which then share tiles.
SAME_MASK = MASK.replace(" + h", "")


def _expected(
    q: Any, k: Any, v: Any, *, slopes: Any, mask: str | None, blocks: Any, softcap: float, causal: bool
) -> tuple[Any, Any]:
    """o and LSE in float64; slopes, blocks: of ALiBi and of the block mask, or None."""
    sq, sk, heads = q.shape[1], k.shape[1], q.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    i, j = torch.arange(sq, device="cuda")[:, None], torch.arange(sk, device="cuda")[None]
    h = torch.arange(heads, device="cuda")[:, None, None]
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * (j - i)
    if mask is not None:
        h = h * (mask == MASK)
        scores = scores.masked_fill(((i + j + h) % 3 == 0) | ((j >= 256) & (j < 900)), -torch.inf)
    if blocks is not None:
        shown = blocks.repeat_interleave(64, 2).repeat_interleave(128, 3)[:, :, :sq, :sk]
        scores = scores.masked_fill(~shown, -torch.inf)
    if causal:
        scores = scores.masked_fill(j > i + sk - sq, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return (p @ v).transpose(1, 2), lse


def _close(o: Any, lse: Any, want: Any, want_lse: Any) -> bool:
    error = (o.double() - want).norm() <= 1.5 * 2.0**-8 * want.norm() + 1e-6
    seen = want_lse != -torch.inf
    same = torch.equal(lse == -torch.inf, ~seen)
    return bool(error) and same and bool(((lse.double() - want_lse)[seen].abs() <= 4e-3).all())


@pytest.mark.parametrize("family", ["mma.sync", "wgmma"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [1000, 32768])
@pytest.mark.parametrize("queries", [1, 16, 64, 100])
@pytest.mark.parametrize(
    "form",
    [
        "score_mod", "mask", "block_mask", "score_mod, mask", "score_mod, block_mask", "score_mod, softcap",
        "score_mod, mask, causal", "block_mask, causal", "score_mod, same mask, causal", "same block_mask",
    ],
)  # fmt: skip
def test_beside_float64(
    form: str, queries: int, keys: int, head_dim: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of a group and alone; splits of lists with fewer tiles than splits, and rows that see nothing."""
    if family == "wgmma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("rows of Hopper")
    rows = (
        split_rows_with_scores(head_dim, "bfloat16")
        if family == "wgmma"
        else f"attn_fwd_sm80_bf16_d{head_dim}_split_mods"
    )
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", rows)
    torch.manual_seed(keys + queries)
    for batch, heads, kv_heads in ((1, 8, 2), (2, 3, 3)):
        q = torch.randn(batch, queries, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, keys, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        slopes = torch.tensor([0.02 / (h + 1) for h in range(heads)], device="cuda") if "score_mod" in form else None
        mod = {} if slopes is None else {"slopes": slopes}
        causal, softcap = "causal" in form, 5.0 if "softcap" in form else 0.0
        mask = MASK if "mask" in form.split(", ") else SAME_MASK if "same mask" in form else None
        call: dict[str, Any] = {"causal": causal, "softcap": softcap}
        blocks = None
        if mod or mask is not None:
            text = "score + slopes[h] * (k - q)" if mod else "score"
            call["score_mod"] = oa.ScoreMod(text, mask=mask, **mod)
        if "block_mask" in form:
            blocks = torch.rand(batch, heads, -(-queries // 64), -(-keys // 128), device="cuda") < 0.4
            blocks[0, 0] = False  # rows that see nothing
            blocks = blocks[:, :1] if "same block_mask" in form else blocks
            call |= {"block_mask": blocks, "block_size": (64, 128)}
        assert "_split" in oa.explain(q, k, v, **call).kernel
        o, lse = oa.attention(q, k, v, return_lse=True, **call)
        want = _expected(q, k, v, slopes=slopes, mask=mask, blocks=blocks, softcap=softcap, causal=causal)
        assert _close(o, lse, *want)
        assert torch.equal(oa.attention(q, k, v, **call), o)


def test_a_graph_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "attn_fwd_sm80_bf16_d128_split_mods")
    q, k = (torch.randn(1, n, h, 128, device="cuda", dtype=torch.bfloat16) for n, h in ((16, 8), (9000, 2)))
    mod, out = oa.ScoreMod("score + 0.001f * (k - q)", mask=MASK), torch.empty_like(q)
    expected = oa.attention(q, k, k, score_mod=mod)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        oa.attention(q, k, k, score_mod=mod, out=out)
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
