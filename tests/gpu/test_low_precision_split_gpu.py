"""Few queries on many keys on 8-bit operands: kernels that split the keys over CTAs, beside those that do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402

from .test_few_queries_gpu import exact, tensors  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the Hopper kernel's"
    ),
]

FORCE = "OMNIATTN_FORCE_KERNEL"
#: Calls that differ in what the kernel does: (batch, heads, lengths, options).
CALLS: dict[str, tuple[int, tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "full": (1, (32, 8), (16, 8192), {}),
    "causal": (2, (6, 2), (77, 7003), {"causal": True}),
    "window": (1, (8, 8), (33, 9000), {"window": (8500, 20)}),
    "narrow window": (2, (4, 2), (200, 3000), {"window": (100, 3)}),
    "one query, sinks": (1, (12, 1), (1, 5001), {"causal": True, "sinks": True}),
    "tiles of queries": (1, (14, 2), (300, 20000), {"causal": True}),
    "rows without keys": (1, (4, 1), (150, 90), {"causal": True}),
    "one head": (1, (1, 1), (1, 100000), {}),
}


QUANTIZATIONS = [
    oa.Int8(smooth_k=False, smooth_v=False), oa.Int8(hadamard=True, seed=3), oa.Int8(granularity="per_block"),
    oa.Int8(granularity="per_warp"), oa.Int4(smooth_q=False),
]  # fmt: skip


def rows_of(head_dim: int, dtype: str = "bfloat16", lse: bool = False, qk: str = "int8") -> list[str]:
    """The kernels of a head_dim that split keys: those that make the LSE, or those that do not."""
    tile = min(d for d in (64, 128, 256) if d >= head_dim)
    specs = [s for s in REGISTRY if s.op == "attention_split" and s.qk == qk and s.dtype == dtype]
    # test_fp8_factors_gpu.py, test_low_precision_split_score_mods_gpu.py and test_stream_k_int8_gpu.py have the others.
    specs = [s for s in specs if not (s.value_factors or s.score_mods) and s.sequences != "packed"]
    return [s.name for s in specs if (s.head_dim, s.lse) == (tile, lse)]


def whole_row(head_dim: int, dtype: str, lse: bool = True, qk: str = "int8") -> str:
    """The kernel that has all keys of a tile in one CTA."""
    tile = min(d for d in (64, 128, 256) if d >= head_dim)
    return f"attn_{qk}_sm90_{'fp16' if dtype == 'float16' else 'bf16'}_d{tile}" + "_lse" * lse


def forced(monkeypatch: pytest.MonkeyPatch, row: str, *arrays: Any, **call: Any) -> Any:
    monkeypatch.setenv(FORCE, row)
    assert oa.explain(*arrays, **call).kernel == row
    return oa.attention(*arrays, **call)


def far(a: Any, b: Any) -> float:
    """Distance as a fraction of b's size."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 72, 112, 128, 192, 256])
@pytest.mark.parametrize("name", CALLS)
def test_as_near_to_float64_as_without_a_split(
    name: str, head_dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, heads, lengths, options = CALLS[name]
    q, k, v = tensors(batch, heads, lengths, head_dim, dtype)
    v[..., :3] += 5.0  # a mean for v_mean
    k[..., 5] += 3.0  # and for row_bias
    call = dict(options)
    if call.pop("sinks", False):
        call["sinks"] = torch.randn(heads[0], device="cuda")
    want, want_lse = exact(q, k, v, **call)
    call |= {"precision": "int8", "return_lse": True}
    o_whole, lse_whole = forced(monkeypatch, whole_row(head_dim, dtype), q, k, v, **call)
    for row in rows_of(head_dim, dtype, lse=True):
        o, lse = forced(monkeypatch, row, q, k, v, **call)
        assert far(o, want) <= 1.1 * far(o_whole, want) + 2e-3, row
        assert far(o, o_whole) <= 0.02, row
        assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
        seen = want_lse != -torch.inf
        assert bool(((lse - lse_whole)[seen].abs() <= 1e-3).all()), row
        assert not o.transpose(1, 2)[~seen].any()
        # A kernel of its own where nobody wants the LSE, which leaves O the same bits.
        alone = forced(monkeypatch, row.removesuffix("_lse"), q, k, v, **call | {"return_lse": False})
        assert torch.equal(alone, o), row


@pytest.mark.parametrize("precision", QUANTIZATIONS, ids=str)
def test_every_quantization(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(2, (8, 2), (40, 6001), 128, "bfloat16")
    q[:, ::3] *= 4.0  # scales of rows that differ
    v[..., 7] += 9.0
    want, _ = exact(q, k, v)
    whole = forced(monkeypatch, whole_row(128, "bfloat16", lse=False), q, k, v, precision=precision)
    for row in rows_of(128):
        o = forced(monkeypatch, row, q, k, v, precision=precision)
        assert far(o, whole) <= 0.02
        assert far(o, want) <= 1.1 * far(whole, want) + 2e-3


def test_v_of_another_head_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    for head_dim, head_dim_v in ((128, 64), (64, 128), (96, 64)):
        q, k, _ = tensors(1, (8, 2), (20, 5000), head_dim, "bfloat16")
        v = torch.randn(1, 5000, 2, head_dim_v, device="cuda", dtype=q.dtype)
        want, want_lse = exact(q, k, v)
        for row in rows_of(max(head_dim, head_dim_v), lse=True):
            o, lse = forced(monkeypatch, row, q, k, v, precision="int8", return_lse=True)
            assert far(o, want) <= 0.06
            assert torch.allclose(lse.double(), want_lse, atol=5e-3)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_operands_of_the_caller(head_dim: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a call that quantizes, from operands that it has not quantized."""
    q, k, v = tensors(2, (8, 2), (33, 5000), head_dim, "bfloat16")
    if layout == "HND":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    sinks = torch.randn(8, device="cuda")
    call: dict[str, Any] = {"causal": True, "return_lse": True, "sinks": sinks, "layout": layout}
    made = oa.quantize_qk(q, k, layout=layout, with_bias=True)
    v8 = oa.quantize_v(v, layout=layout, smooth_v=True)
    for row in rows_of(head_dim, lse=True) + rows_of(head_dim):
        call["return_lse"] = row.endswith("lse")
        inside = forced(monkeypatch, row, q, k, v, precision="int8", **call)
        outside = forced(monkeypatch, row, made.q, made.k, v8, **call)
        for a, b in zip(inside, outside, strict=True) if call["return_lse"] else ((inside, outside),):
            assert torch.equal(a, b)


def test_what_gets_chosen() -> None:
    """Few queries on many keys are split without being asked, from 16 bits and from operands."""
    q, k, v = tensors(1, (32, 8), (16, 32768), 128, "bfloat16")
    made, v8 = oa.quantize_qk(q, k, with_bias=True), oa.quantize_v(v)
    for arrays, call in (((q, k, v), {"precision": "int8"}), ((made.q, made.k, v8), {})):
        for lse in (False, True):
            chosen = oa.explain(*arrays, return_lse=lse, **call).kernel
            assert "_split" in chosen
            assert chosen.endswith("_lse") == lse


def descales(kind: str, batch: int, heads: int, rows: int, seed: int) -> Any:
    """Of one array: None, one a head, or one for each 128 rows; the values differ by a factor of four."""
    if kind == "none":
        return None
    shape = (batch, heads) if kind == "per_head" else (batch, heads, -(-rows // 128))
    return 0.5 + 1.5 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def scaled(x: Any, factor: Any) -> Any:
    """(batch, rows, heads, channels) times its descale."""
    if factor is None:
        return x.double()
    if factor.ndim == 2:
        return x.double() * factor.repeat_interleave(x.shape[2] // factor.shape[1], 1)[:, None, :, None]
    return x.double() * factor.repeat_interleave(128, 2)[:, :, : x.shape[1]].transpose(1, 2)[..., None]


@pytest.mark.parametrize("kind", ["none", "per_head", "per_block"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("name", CALLS)
def test_arrays_in_e4m3(name: str, head_dim: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside float64 on the same numbers and the kernel without a split."""
    batch, heads, lengths, options = CALLS[name]
    dtype = "float16" if kind == "per_head" else "bfloat16"
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors(batch, heads, lengths, head_dim, dtype))
    call: dict[str, Any] = {"out_dtype": dtype, "return_lse": True} | options
    if call.pop("sinks", False):
        call["sinks"] = torch.randn(heads[0], device="cuda")
    of = {
        # One a head is one a kv head.
        "descale_q": descales(kind, batch, heads[1 if kind == "per_head" else 0], lengths[0], 1),
        "descale_k": descales(kind, batch, heads[1], lengths[1], 2),
        "descale_v": descales("per_head" if kind == "per_block" else kind, batch, heads[1], lengths[1], 3),
    }
    arrays = [scaled(x, of[name]) for x, name in zip((q, k, v), of, strict=True)]
    want, want_lse = exact(*arrays, **options | ({"sinks": call["sinks"]} if "sinks" in call else {}))
    call |= {name: factor for name, factor in of.items() if factor is not None}
    o_whole, lse_whole = forced(monkeypatch, whole_row(head_dim, dtype, qk="fp8"), q, k, v, **call)
    seen = want_lse != -torch.inf
    for row in rows_of(head_dim, dtype, lse=True, qk="fp8"):
        o, lse = forced(monkeypatch, row, q, k, v, **call)
        assert o.dtype == getattr(torch, dtype)
        assert far(o, want) <= 1.1 * far(o_whole, want) + 2e-3, row
        assert torch.equal(lse == -torch.inf, ~seen)
        assert bool(((lse - lse_whole)[seen].abs() <= 1e-3).all()), row
        assert bool(((lse - want_lse)[seen].abs() <= 2e-2).all()), row
        assert not o.transpose(1, 2)[~seen].any()
        alone = forced(monkeypatch, row.removesuffix("_lse"), q, k, v, **call | {"return_lse": False})
        assert torch.equal(alone, o), row


def test_e4m3_is_split_without_being_asked() -> None:
    q, k, v = tensors(1, (32, 8), (16, 32768), 128, "bfloat16")
    e4m3 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    for arrays, call in (((q, k, v), {"precision": "fp8"}), (e4m3, {})):
        assert "_split" in oa.explain(*arrays, **call).kernel
        o, lse = oa.attention(*arrays, **call, return_lse=True)
        assert torch.equal(oa.attention(*arrays, **call), o)
        want, want_lse = exact(*(x.double() for x in arrays))
        assert far(o, want) <= 0.06
        assert bool(((lse - want_lse).abs() <= 2e-2).all())
    blocks = 1.0 + torch.rand(1, 8, 256, device="cuda")
    assert oa.explain(*e4m3, descale_v=blocks).kernel.endswith("_split_factors")


def test_nan_stays_in_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(1, (8, 2), (16, 5000), 128, "bfloat16")
    q[0, 5, 3, 7] = torch.nan
    for row in rows_of(128):
        o = forced(monkeypatch, row, q, k, v, precision="int8")
        bad = o.isnan().all(-1)
        assert bad[0, 5, 3]
        assert int(o.isnan().any(-1).sum()) == 1
    k[0, 4990, 1, 0] = torch.nan
    for row in rows_of(128):
        o = forced(monkeypatch, row, q, k, v, precision="int8", causal=True)
        # Of kv head 1: queries that see key 4990 stand at 4984 and later.
        assert o[0, 6:, 4:].isnan().all()
        assert not o[0, :, :3].isnan().any()


def test_the_same_bits_again_and_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(1, (32, 8), (16, 8192), 128, "bfloat16")
    for row in rows_of(128):
        expected = forced(monkeypatch, row, q, k, v, precision="int8")
        for _ in range(20):
            assert torch.equal(forced(monkeypatch, row, q, k, v, precision="int8"), expected)
        graph = torch.cuda.CUDAGraph()
        out = torch.empty_like(q)
        with torch.cuda.graph(graph):
            oa.attention(q, k, v, precision="int8", out=out)
        for _ in range(2):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, expected)


def test_expanded_heads_and_many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that does not divide the tile; a query for each of 64 heads, and of 1."""
    for heads in ((7, 1), (64, 1), (5, 5)):
        q, k, v = tensors(1, heads, (3, 30000), 128, "bfloat16")
        want, _ = exact(q, k, v)
        for row in rows_of(128):
            assert far(forced(monkeypatch, row, q, k, v, precision=dataclasses.replace(oa.Int8())), want) <= 0.06
