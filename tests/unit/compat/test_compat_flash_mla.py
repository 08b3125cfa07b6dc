"""omniattn.compat.flash_mla on the CPU, beside attention written out in float64."""

from __future__ import annotations

from typing import Any

import pytest

from omniattn.errors import ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError

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


def stored_656(rows: Any) -> tuple[Any, Any]:
    """Rows (n, 576) as bytes (n, 656), and what these stand for."""
    groups = rows[:, :512].float().reshape(-1, 4, 128)
    scales = groups.abs().amax(-1).clamp_min(1e-6) / 448
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    rest = rows[:, 512:].bfloat16()
    parts = (codes.reshape(-1, 512), scales, rest.contiguous())
    meant = torch.cat([(codes.float() * scales[..., None]).reshape(-1, 512), rest.float()], 1)
    return torch.cat([part.view(torch.uint8) for part in parts], 1), meant


def listed(q: Any, rows: Any, indices: Any, scale: float, sink: Any = None) -> tuple[Any, Any, Any]:
    """Output, largest score and LSE of (heads, dim) over the rows that a list names, as FlashMLA defines them."""
    keys = rows[indices[(indices >= 0) & (indices < len(rows))].long()].double()
    s = q.double() @ keys.T * scale
    lse = s.logsumexp(-1)
    if not len(keys):
        nothing = torch.full((len(q),), torch.inf)
        return torch.zeros(len(q), DIM_V), -nothing, nothing
    part = torch.ones(len(q)) if sink is None else 1 / (1 + torch.exp(sink.double() - lse))
    return (s - lse[:, None]).exp() @ keys[:, :DIM_V] * part[:, None], s.amax(-1), lse


def lists(tokens: int, topk: int, rows: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, rows, (tokens, topk), generator=generator, dtype=torch.int32)
    found[torch.rand(tokens, topk, generator=generator) < 0.2] = -1
    found[torch.rand(tokens, topk, generator=generator) < 0.05] = rows + 1
    found[-1] = -1
    return found


def near(out: Any, want: Any) -> bool:
    return bool(torch.allclose(out.double(), want.double(), atol=4e-3, rtol=1.2e-2))


SINKS = torch.tensor([0.5, -torch.inf, torch.inf, 30.0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "uint8", "int8", "e4m3 rows"])
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("short", [False, True])
def test_sparse_decoding(short: bool, sinks: Any, dtype: str) -> None:
    torch.manual_seed(1)
    batch, tokens, heads, topk = 2, 3, 4, 9
    rows = torch.randn(4 * 8, DIM)
    if dtype == "bfloat16":
        stored, meant = rows.bfloat16(), rows.bfloat16()
    elif dtype == "e4m3 rows":
        stored = rows.to(torch.float8_e4m3fn)
        meant = stored.float()
    else:
        stored, meant = stored_656(rows)
        stored = stored.view(getattr(torch, dtype))
    cache = stored.view(4, 8, 1, -1)
    q = torch.randn(batch, tokens, heads, DIM).bfloat16()
    indices = lists(batch * tokens, topk, 32).view(batch, tokens, topk)
    length = torch.tensor([5, 9], dtype=torch.int32) if short else None
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, DIM_V, flash_mla.get_mla_metadata()[0], softmax_scale=0.07,
        is_fp8_kvcache=dtype != "bfloat16", indices=indices, attn_sink=sinks, topk_length=length,
    )  # fmt: skip
    assert out.shape == (batch, tokens, heads, DIM_V)
    assert lse.shape == (batch, heads, tokens)
    assert lse.is_contiguous()
    for b in range(batch):
        for i in range(tokens):
            own = indices[b, i] if length is None else indices[b, i, : int(length[b])]
            want, _, want_lse = listed(q[b, i], meant, own, 0.07, sinks)
            assert near(out[b, i], want)
            assert torch.allclose(lse[b, :, i].double(), want_lse.double(), atol=1e-4)
    assert torch.isposinf(lse[-1, :, -1]).all()
    if sinks is not None:
        assert not out[:, :, 2].any()


def test_sparse_decoding_of_strided_queries_ignores_the_table() -> None:
    rows, q = torch.randn(16, 1, 1, DIM).bfloat16(), torch.randn(2, 3, 4, 2 * DIM).bfloat16()[..., :DIM]
    q = q.transpose(0, 1)
    indices = lists(6, 5, 16).view(3, 2, 5).repeat(1, 1, 2)[..., :5]
    some = torch.full((1, 1), 7, dtype=torch.int32)
    a = flash_mla.flash_mla_with_kvcache(q, rows, None, None, DIM_V, None, indices=indices)
    b = flash_mla.flash_mla_with_kvcache(q.contiguous(), rows, some, some, DIM_V, None, indices=indices.contiguous())
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("short", [False, True])
def test_sparse_prefill(short: bool, sinks: Any) -> None:
    torch.manual_seed(2)
    q, kv = torch.randn(7, 4, DIM).bfloat16(), torch.randn(50, 1, DIM).bfloat16()
    indices = lists(7, 20, 50)
    length = torch.tensor([20, 0, 1, 7, 20, 19, 20], dtype=torch.int32) if short else None
    out, most, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices[:, None], 0.05, DIM_V, sinks, length)
    assert out.shape == (7, 4, DIM_V)
    assert most.dtype == lse.dtype == torch.float32
    for i in range(7):
        own = indices[i] if length is None else indices[i, : int(length[i])]
        want, want_most, want_lse = listed(q[i], kv[:, 0], own, 0.05, sinks)
        assert near(out[i], want)
        assert torch.allclose(most[i].double(), want_most.double(), atol=1e-4)
        assert torch.allclose(lse[i].double(), want_lse.double(), atol=1e-4)
    assert torch.isposinf(lse[-1]).all()
    assert torch.isneginf(most[-1]).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["656", "e4m3"])
def test_dense_decoding_over_8_bits(kind: str, causal: bool) -> None:
    torch.manual_seed(3)
    lengths, size = [11, 5], 4
    rows = torch.randn(24, DIM)
    stored, meant = stored_656(rows)
    if kind == "e4m3":
        stored = rows.to(torch.float8_e4m3fn)
        meant = stored.float()
    table = torch.tensor([[4, 0, 5], [2, 1, 3]], dtype=torch.int32)
    q = torch.randn(2, 2, 3, DIM).bfloat16()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, stored.view(6, size, 1, -1), table, torch.tensor(lengths, dtype=torch.int32), DIM_V, None, causal=causal,
        is_fp8_kvcache=True,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        own = meant.view(6, size, DIM)[table[b].long()].reshape(-1, DIM)[:n]
        want, want_lse = exact(q[b], own, DIM**-0.5, DIM_V, causal)
        assert near(out[b], want)
        assert torch.allclose(lse[b].double(), want_lse, atol=1e-4)


INDICES = torch.zeros(1, 1, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"attn_sink": torch.zeros(2)}, ArgumentError, "'attn_sink': expected None without indices"),
        ({"topk_length": torch.zeros(1)}, ArgumentError, "'topk_length': expected None without indices"),
        ({"extra_k_cache": torch.zeros(1)}, UnsupportedError, "extra_k_cache"),
        ({"extra_indices_in_kvcache": torch.zeros(1)}, UnsupportedError, "extra_indices_in_kvcache"),
        ({"extra_topk_length": torch.zeros(1)}, UnsupportedError, "extra_topk_length"),
        ({"is_fp8_kvcache": True}, ArgumentError, "'is_fp8_kvcache': expected False with a k_cache of bfloat16"),
        ({"k_cache": torch.zeros(2, 4, 1, 656, dtype=torch.uint8)}, ArgumentError, "'is_fp8_kvcache': expected True"),
        ({"num_splits": torch.zeros(2, dtype=torch.int32)}, ArgumentError, "num_splits"),
        ({"tile_scheduler_metadata": torch.zeros(2)}, ArgumentError, "tile_scheduler_metadata"),
        ({"block_table": None}, ArgumentError, "block_table"),
        ({"cache_seqlens": None}, ArgumentError, "cache_seqlens"),
        ({"cache_seqlens": torch.tensor([5])}, DtypeError, "'cache_seqlens': expected int32, received int64"),
        ({"cache_seqlens": torch.tensor([50], dtype=torch.int32)}, ArgumentError, "'cache_seqlens': .*50 at 0"),
        ({"head_dim_v": "512"}, ArgumentError, "head_dim_v"),
        ({"head_dim_v": None}, ArgumentError, "'head_dim_v': expected an integer"),
        ({"k_cache": torch.zeros(2, 4, 2, DIM).bfloat16()}, ShapeError, "'k_cache': expected one head"),
        (
            {"k_cache": torch.zeros(2, 4, 1, 2 * DIM).bfloat16()[..., ::2]}, StrideError,
            "'k_cache': expected a contiguous last dimension",
        ),
        ({"q": torch.zeros(1, 17, 2, DIM).bfloat16(), "causal": True}, ShapeError, "'q': expected q_len from 1 to 16"),
        ({"q": torch.zeros(1, 0, 2, DIM).bfloat16()}, ShapeError, "'q': expected q_len from 1"),
        ({"q": torch.zeros(1, 0, 2, DIM).bfloat16(), "indices": INDICES[:, :0]}, ShapeError, "'q': .* q_len of 1 or"),
        ({"q": torch.zeros(1, 2, DIM)}, ShapeError, "'q'"),
        ({"q": torch.zeros(1, 1, 2, 512, dtype=torch.bfloat16)}, ShapeError, "'k_cache'"),
        ({"k_cache": torch.zeros(2, 4, DIM)}, ShapeError, "'k_cache'"),
        # The rows of DeepSeek-V4 have other bytes.
        (
            {"k_cache": torch.zeros(2, 4, 1, 584, dtype=torch.uint8), "is_fp8_kvcache": True}, ShapeError,
            "'k_cache': expected 576 channels, like q, or rows of 656 bytes",
        ),
        (
            {"k_cache": torch.zeros(2, 4, 1, DIM, dtype=torch.uint8), "is_fp8_kvcache": True}, DtypeError,
            "'k_cache': expected float8_e4m3fn",
        ),
        ({"indices": INDICES, "causal": True}, ArgumentError, "'causal': expected False with indices"),
        ({"indices": INDICES.long()}, DtypeError, "'indices'"),
        ({"indices": INDICES[0]}, ShapeError, "'indices'"),
        ({"indices": [[[1]]]}, ArgumentError, "'indices'.*Tensor"),
        ({"indices": INDICES, "attn_sink": torch.zeros(3)}, ShapeError, r"'attn_sink': expected shape \(2,\)"),
        ({"indices": INDICES, "attn_sink": torch.zeros(2).half()}, DtypeError, "'attn_sink': expected float32"),
        (
            {"indices": INDICES, "attn_sink": torch.zeros(2, device="meta")}, ArgumentError,
            "'attn_sink': expected a tensor on cpu, like q, received meta",
        ),
        ({"indices": INDICES, "topk_length": torch.zeros(2)}, ShapeError, r"'topk_length': expected shape \(1,\)"),
        ({"indices": INDICES, "topk_length": torch.zeros(1)}, DtypeError, "'topk_length'"),
        ({"indices": INDICES, "topk_length": torch.tensor([5], dtype=torch.int32)}, ArgumentError, "topk_length"),
        ({"indices": INDICES, "block_table": "1"}, ArgumentError, "'block_table': expected a torch.Tensor"),
        ({"indices": INDICES, "cache_seqlens": [5]}, ArgumentError, "'cache_seqlens': expected a torch.Tensor"),
        *(
            ({"indices": INDICES, name: torch.ones(1, dtype=torch.int32).to_sparse()}, UnsupportedError, "layout")
            for name in ("q", "k_cache", "indices", "attn_sink", "topk_length", "block_table")
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_what_raises(options: dict[str, Any], error: type[Exception], words: str) -> None:
    pool, table, _ = pages([5], 4)
    call: dict[str, Any] = {
        "q": torch.zeros(1, 1, 2, DIM, dtype=torch.bfloat16), "k_cache": pool, "block_table": table,
        "cache_seqlens": torch.tensor([5], dtype=torch.int32), "head_dim_v": DIM_V, "tile_scheduler_metadata": None,
    }  # fmt: skip
    with pytest.raises(error, match=words) as raised:
        flash_mla.flash_mla_with_kvcache(**{**call, **options})
    assert "flash_mla_with_kvcache()" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"q": torch.zeros(2, DIM)}, ShapeError, "'q'"),
        ({"kv": torch.zeros(5, DIM)}, ShapeError, "'kv'"),
        ({"kv": torch.zeros(5, 2, DIM).bfloat16()}, ShapeError, "'kv': expected .* one head"),
        ({"kv": torch.zeros(5, 1, DIM)}, DtypeError, "'kv': expected bfloat16, like q"),
        ({"indices": torch.zeros(2, 4, dtype=torch.int32)}, ShapeError, "'indices'"),
        ({"indices": torch.zeros(3, 1, 4, dtype=torch.int32)}, ShapeError, "'indices'"),
        ({"sm_scale": None}, ArgumentError, "sm_scale"),
        ({"d_v": 576}, ArgumentError, "'d_v': expected a multiple of 8 below 576"),
        ({"kv": torch.zeros(0, 1, DIM).bfloat16()}, ShapeError, "'kv': expected 1 or more rows"),
        ({"attn_sink": torch.zeros(2)}, ShapeError, "attn_sink"),
        ({"topk_length": torch.zeros(3, dtype=torch.int32)}, ShapeError, "topk_length"),
        ({"topk_length": 3}, ArgumentError, "topk_length"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_sparse_prefill_refuses(options: dict[str, Any], error: type[Exception], words: str) -> None:
    call: dict[str, Any] = {
        "q": torch.zeros(2, 3, DIM, dtype=torch.bfloat16), "kv": torch.zeros(5, 1, DIM, dtype=torch.bfloat16),
        "indices": torch.zeros(2, 1, 4, dtype=torch.int32), "sm_scale": 0.1,
    }  # fmt: skip
    with pytest.raises(error, match=words) as raised:
        flash_mla.flash_mla_sparse_fwd(**{**call, **options})
    assert "flash_mla_sparse_fwd()" in str(raised.value)


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


def test_errors_of_packed_sequences_name_the_function_and_its_own_arguments() -> None:
    """Those of `attention_varlen` too, which calls some otherwise."""
    x, cu = torch.zeros(3, 4, 64), torch.tensor([0, 2, 3], dtype=torch.int32)
    wide = torch.zeros(3, 4, 192)
    plain, of_kv = flash_mla.flash_attn_varlen_func, flash_mla.flash_attn_varlen_kvpacked_func
    of_qkv = flash_mla.flash_attn_varlen_qkvpacked_func
    for function, arguments, options, named in (
        (plain, (x, x, x, cu.long(), cu, 2, 2), {}, "cu_seqlens_qo"),
        (plain, (x, x, x, cu, cu, 2, 1), {}, "max_seqlen_kv"),
        (of_qkv, (wide, cu.long(), 2, 64), {}, "cu_seqlens"),
        (of_qkv, (wide, cu, 1, 64), {}, "max_seqlen"),
        (of_qkv, (wide.int(), cu, 2, 64), {}, "qkv"),
        (of_qkv, (wide, cu, 2, 64), {"causal": 2}, "causal"),
        (of_kv, (x, wide[..., :128], cu, cu, 1, 2, 64), {}, "max_seqlen_qo"),
        (of_kv, (x, wide[..., :128].half(), cu, cu, 2, 2, 64), {}, "kv"),
        (of_kv, (torch.zeros(()), wide[..., :128], cu, cu, 2, 2, 64), {}, "q"),
    ):
        with pytest.raises(ArgumentError) as caught:
            function(*arguments, **options)
        assert (caught.value.function, caught.value.argument) == (function.__name__, named), str(caught.value)
    with pytest.raises(UnsupportedError, match=r"^flash_attn_varlen_qkvpacked_func\(\): dropout_p=0\.5"):
        of_qkv(wide, cu, 2, 64, dropout_p=0.5)
