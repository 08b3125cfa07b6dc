"""omniattn.compat.flash_mla on the CPU, beside attention written out in float64."""

from __future__ import annotations

from typing import Any

import pytest

from omniattn.errors import ArgumentError, ShapeError, UnsupportedError

torch = pytest.importorskip("torch")
from omniattn.compat import flash_mla  # noqa: E402

pytestmark = pytest.mark.frameworks

DIM, DIM_V = 576, 512


def pages(lengths: list[int], size: int, dim: int = DIM) -> tuple[Any, Any, list[Any]]:
    """A pool whose blocks lie in any order, its table, and the rows of each sequence; what no token has is NaN."""
    generator = torch.Generator().manual_seed(sum(lengths))
    counts = [-(-n // size) for n in lengths]
    order = iter(torch.randperm(sum(counts), generator=generator).tolist())
    pool = torch.full((sum(counts), size, 1, dim), torch.nan, dtype=torch.bfloat16)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    rows = []
    for b, n in enumerate(lengths):
        own = torch.randn(n, dim, generator=generator).bfloat16()
        rows.append(own)
        for i in range(counts[b]):
            table[b, i] = next(order)
            part = own[i * size : (i + 1) * size]
            pool[table[b, i], : len(part), 0] = part
    return pool, table, rows


def exact(q: Any, rows: Any, scale: float, dim_v: int, causal: bool) -> tuple[Any, Any]:
    """(s_q, heads, dim_v) and (heads, s_q) of (s_q, heads, dim) over (tokens, dim)."""
    s = torch.einsum("qhd,kd->hqk", q.double(), rows.double()) * scale
    if causal:
        new, keys = q.shape[0], rows.shape[0]
        s = s.masked_fill(torch.arange(keys) > torch.arange(new)[:, None] + keys - new, -torch.inf)
    lse = s.logsumexp(-1)
    return torch.einsum("hqk,kd->qhd", (s - lse[..., None]).exp(), rows[:, :dim_v].double()), lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "rows_q"), [(16, 1), (3, 2), (2, 5)])
@pytest.mark.parametrize("scale", [None, 0.02])
def test_decoding(heads: int, rows_q: int, causal: bool, scale: float | None) -> None:
    lengths = [70, 9, 64]
    pool, table, rows = pages(lengths, 64)
    q = torch.randn(3, rows_q, heads, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    metadata, splits = flash_mla.get_mla_metadata(torch.tensor(lengths), rows_q * heads, 1)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, pool, table, torch.tensor(lengths, dtype=torch.int32), DIM_V, metadata, splits, scale, causal
    )
    assert out.shape == (3, rows_q, heads, DIM_V)
    assert out.dtype == torch.bfloat16
    assert lse.shape == (3, heads, rows_q)
    assert lse.is_contiguous()
    for b, own in enumerate(rows):
        want, want_lse = exact(q[b], own, DIM**-0.5 if scale is None else scale, DIM_V, causal)
        assert torch.allclose(out[b].double(), want, atol=4e-3, rtol=8e-3)
        assert torch.allclose(lse[b].double(), want_lse, atol=1e-4)


def test_a_sequence_without_keys() -> None:
    pool, table, _ = pages([5, 3], 4)
    q = torch.randn(2, 2, 3, DIM).bfloat16()
    for causal in (False, True):
        out, lse = flash_mla.flash_mla_with_kvcache(
            q, pool, table, torch.tensor([5, 0], dtype=torch.int32), DIM_V, None, causal=causal
        )
        assert not out[1].any()
        assert (lse[1] == torch.inf).all()
        assert lse[0].isfinite().all()


def test_q_with_gaps_between_heads() -> None:
    pool, table, _ = pages([5, 7], 4)
    q = torch.randn(2, 2, 3, DIM).bfloat16()
    wide = torch.full((2, 2, 3, 2 * DIM), torch.nan, dtype=torch.bfloat16)
    wide[..., :DIM] = q
    lens = torch.tensor([5, 7], dtype=torch.int32)
    for causal in (False, True):
        a, b = (
            flash_mla.flash_mla_with_kvcache(x, pool, table, lens, DIM_V, None, causal=causal)
            for x in (q, wide[..., :DIM])
        )
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"indices": torch.zeros(1, 1, 4, dtype=torch.int32)}, UnsupportedError, "indices=a tensor"),
        ({"attn_sink": torch.zeros(2)}, UnsupportedError, "attn_sink=a tensor"),
        ({"topk_length": torch.zeros(1)}, UnsupportedError, "topk_length"),
        ({"extra_k_cache": torch.zeros(1)}, UnsupportedError, "extra_k_cache"),
        ({"extra_indices_in_kvcache": torch.zeros(1)}, UnsupportedError, "extra_indices_in_kvcache"),
        ({"extra_topk_length": torch.zeros(1)}, UnsupportedError, "extra_topk_length"),
        ({"is_fp8_kvcache": True}, UnsupportedError, "is_fp8_kvcache=True"),
        ({"num_splits": torch.zeros(2, dtype=torch.int32)}, ArgumentError, "num_splits"),
        ({"tile_scheduler_metadata": torch.zeros(2)}, ArgumentError, "tile_scheduler_metadata"),
        ({"block_table": None}, ArgumentError, "block_table"),
        ({"cache_seqlens": None}, ArgumentError, "cache_seqlens"),
        ({"head_dim_v": "512"}, ArgumentError, "head_dim_v"),
        ({"q": torch.zeros(1, 2, DIM)}, ShapeError, "'q'"),
        ({"q": torch.zeros(1, 1, 2, 512, dtype=torch.bfloat16)}, ShapeError, "'k_cache'"),
        ({"k_cache": torch.zeros(2, 4, DIM)}, ShapeError, "'k_cache'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_raises(options: dict[str, Any], error: type[Exception], words: str) -> None:
    pool, table, _ = pages([5], 4)
    call: dict[str, Any] = {
        "q": torch.zeros(1, 1, 2, DIM, dtype=torch.bfloat16), "k_cache": pool, "block_table": table,
        "cache_seqlens": torch.tensor([5], dtype=torch.int32), "head_dim_v": DIM_V, "tile_scheduler_metadata": None,
    }  # fmt: skip
    with pytest.raises(error, match=words):
        flash_mla.flash_mla_with_kvcache(**{**call, **options})


@pytest.mark.parametrize("causal", [False, True])
def test_packed_prompts(causal: bool) -> None:
    """Heads of 192 and 128, gradients, and the three ways to give them."""
    torch.manual_seed(3)
    lengths, heads, dim, dim_v = [5, 9], 2, 192, 128
    starts = torch.tensor([0, 5, 14], dtype=torch.int32)
    leaves = [torch.randn(14, heads, d, requires_grad=True) for d in (dim, dim, dim_v)]
    q, k, v = leaves
    out, lse = flash_mla.flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, causal=causal)
    assert out.shape == (14, heads, dim_v)
    assert lse.shape == (14, heads)
    do = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, do)
    outs, lses, at = [], [], 0
    for n in lengths:
        s = torch.einsum("qhd,khd->hqk", q[at : at + n], k[at : at + n]) * dim**-0.5
        if causal:
            s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), v[at : at + n]))
        lses.append(s.logsumexp(-1).T)
        at += n
    want = torch.cat(outs)
    assert torch.allclose(out, want, atol=1e-5)
    assert torch.allclose(lse, torch.cat(lses), atol=1e-5)
    for one, other in zip(found, torch.autograd.grad(want, leaves, do), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    with torch.no_grad():
        for again in (
            flash_mla.flash_attn_varlen_qkvpacked_func(torch.cat([q, k, v], -1), starts, 9, dim, causal=causal),
            flash_mla.flash_attn_varlen_kvpacked_func(
                q, torch.cat([k, v], -1), starts, starts, 9, 9, dim, causal=causal
            ),
        ):
            assert torch.equal(again[0], out)
            assert torch.equal(again[1], lse)
        with pytest.raises(ShapeError, match="more than 384 channels"):
            flash_mla.flash_attn_varlen_qkvpacked_func(q, starts, 9, dim)
        with pytest.raises(ArgumentError, match=r"head_dim_qk.*expected 192"):
            flash_mla.flash_attn_varlen_kvpacked_func(q, torch.cat([k, v], -1), starts, starts, 9, 9, 184)
        with pytest.raises(UnsupportedError, match="dropout_p"):
            flash_mla.flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, dropout_p=0.1)
