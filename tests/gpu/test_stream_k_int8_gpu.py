"""Even shares of packed sequences on 8-bit operands, beside the kernels that have all keys of a tile in one CTA."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.registry import REGISTRY, KernelSpec  # noqa: E402

from .test_few_queries_gpu import exact  # noqa: E402
from .test_low_precision_split_gpu import FORCE, QUANTIZATIONS, far, whole_row  # noqa: E402
from .test_stream_k_gpu import CASES, call, packed, random_lengths, starts  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the Hopper kernel's"
    ),
]
ROWS = [s for s in REGISTRY if s.op == "attention_split" and s.quantized and s.sequences == "packed"]


def of_float64(args: tuple[Any, ...], sinks: Any = None, **options: Any) -> tuple[Any, Any]:
    """O and LSE of the rows that sequences own; others are 0 and -inf."""
    q, k, v, of_q, of_k = args
    o = torch.zeros(*q.shape[:2], v.shape[2], device="cuda", dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device="cuda", dtype=torch.float64)
    at_q, at_k = of_q.tolist(), of_k.tolist()
    for b in range(len(at_q) - 1):
        rows, keys = slice(at_q[b], at_q[b + 1]), slice(at_k[b], at_k[b + 1])
        if rows.start < rows.stop:
            found, found_lse = exact(q[None, rows], k[None, keys], v[None, keys], sinks=sinks, **options)
            o[rows], lse[:, rows] = found[0], found_lse[0]
    return o, lse


def beside_whole(
    spec: KernelSpec, args: tuple[Any, ...], longest: list[int], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    precision = options.pop("precision", oa.Fp8() if spec.qk == "fp8" else oa.Int8())
    want, want_lse = of_float64(args, **options)
    monkeypatch.setenv(FORCE, whole_row(spec.head_dim, spec.dtype, qk=spec.qk) + "_varlen")
    whole, whole_lse = call(args, *longest, precision=precision, **options)
    monkeypatch.setenv(FORCE, spec.name)
    (o, lse), (again, lse_again) = (call(args, *longest, precision=precision, **options) for _ in range(2))
    assert torch.equal(o, again)
    assert torch.equal(lse, lse_again)
    assert torch.isfinite(o).all()
    assert far(o, want) <= 1.1 * far(whole, want) + 2e-3
    assert far(o, whole) <= 0.03
    empty = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert (lse - whole_lse).masked_fill(empty, 0.0).abs().max() <= 1e-3
    assert not o.transpose(0, 1)[empty].any()
    q, k, v, of_q, of_k = args
    alone = oa.attention_varlen(
        q, k, v, cu_seqlens_q=of_q, cu_seqlens_k=of_k, max_seqlen_q=longest[0], max_seqlen_k=longest[1],
        precision=precision, **options,
    )  # fmt: skip
    assert torch.equal(alone, o)


@pytest.mark.parametrize("spec", ROWS, ids=lambda s: s.name)
@pytest.mark.parametrize("case", CASES)
def test_beside_whole(case: str, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    *extents, options = CASES[case]
    torch.manual_seed(len(case))
    q, k, v, of_q, of_k = packed(
        *extents, spec.head_dim - 8 * (case == "window"), getattr(torch, spec.dtype), 3, 70
    )  # fmt: skip
    v[..., :3] += 5.0  # a mean for v_mean
    k[..., 5] += 3.0  # and for row_bias
    q[::3] *= 2.0  # scales of rows that differ
    sinks = torch.randn(extents[2][0], device="cuda") if case in ("lengths", "one of many") else None
    longest = [max(x) for x in extents[:2]]
    beside_whole(spec, (q, k, v, of_q, of_k), longest, monkeypatch, sinks=sinks, **options)


@pytest.mark.parametrize("seed", range(30))
def test_random(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of = random.Random(1000 + seed)
    spec = of.choice(ROWS)
    group, heads_k = of.choice([1, 2, 4, 6, 7, 8, 16]), of.choice([1, 2, 5])
    lengths_q, lengths_k = random_lengths(of)
    options: dict[str, Any] = of.choice([{}, {"causal": True}, {"window": (of.randrange(700), of.randrange(50))}])
    torch.manual_seed(seed)
    args = packed(
        lengths_q, lengths_k, (group * heads_k, heads_k), spec.head_dim, getattr(torch, spec.dtype),
        of.choice([0, 1, 200]), of.choice([0, 5, 1000]),
    )  # fmt: skip
    beside_whole(spec, args, [max(lengths_q), max(lengths_k)], monkeypatch, **options)


@pytest.mark.parametrize("precision", QUANTIZATIONS, ids=str)
def test_every_quantization(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    args = packed([40, 3, 1], [6001, 100, 3000], (8, 2), 128, torch.bfloat16)
    spec = next(s for s in ROWS if (s.qk, s.head_dim, s.dtype) == ("int8", 128, "bfloat16"))
    beside_whole(spec, args, [40, 6001], monkeypatch, precision=precision)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_forced_and_replayed(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = packed([32] * 8, [4000, 100, 8192, 2000, 1, 3000, 9000, 2000], (32, 8), 128, torch.bfloat16)
    names = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), args[3:], strict=True))
    options: dict[str, Any] = {"causal": True, "precision": precision}
    row = f"attn_{precision}_sm90_bf16_d128_m128n64_varlen_split"
    monkeypatch.setenv(FORCE, row)
    plan = oa.explain(oa.attention_varlen, *args[:3], **names, max_seqlen_q=32, max_seqlen_k=9000, **options)
    assert plan.kernel == row
    call(args, 32, 9000, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = call(args, 32, 9000, **options)
    for lengths in ([2000] * 8, [1, 9000, 10, 9000, 10, 1, 0, 5000]):
        args[4].copy_(starts(lengths))
        graph.replay()
        torch.cuda.synchronize()
        want, want_lse = of_float64(args, causal=True)
        # A sequence of one key has the LSE of its score, whose rounding no other averages out.
        assert far(o, want) <= 0.08
        empty = want_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, empty)
        assert (lse - want_lse).masked_fill(empty, 0.0).abs().max() <= (0.3 if precision == "fp8" else 0.06)


@pytest.mark.parametrize("heads", [(8, 2), (7, 1), (6, 2)])
@pytest.mark.parametrize("granularity", ["head", "block"])
def test_arrays_in_e4m3(granularity: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales of the caller, beside the kernel that does not split."""
    torch.manual_seed(3)
    q, k, v, of_q, of_k = packed([3, 40, 1], [5000, 700, 2000], heads, 128, torch.bfloat16)
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    scales = {f"descale_{x}": 0.5 + torch.rand(3, heads[1], device="cuda") for x in "qkv"}
    if granularity == "block":  # of 128 rows of each sequence
        scales["descale_q"] = 0.5 + torch.rand(3, heads[0], 1, device="cuda")
        scales["descale_k"] = 0.5 + torch.rand(3, heads[1], 40, device="cuda")
    args: dict[str, Any] = {
        "cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_q": 40, "max_seqlen_k": 5000, "return_lse": True,
        **scales,
    }  # fmt: skip
    made = []
    for row in ("attn_fp8_sm90_bf16_d128_lse_varlen", "attn_fp8_sm90_bf16_d128_m128n64_varlen_split"):
        monkeypatch.setenv(FORCE, row)
        assert oa.explain(oa.attention_varlen, q8, k8, v8, **args).kernel == row
        made.append(oa.attention_varlen(q8, k8, v8, **args))
    (whole, whole_lse), (o, lse) = made
    assert far(o, whole) <= 0.04  # P is rounded at other bases
    assert (lse - whole_lse).abs().max() <= 1e-3


def test_operands_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a call that quantizes, from operands that it has not quantized."""
    torch.manual_seed(4)
    q, k, v, of_q, of_k = packed([33, 1, 7], [5000, 60, 2000], (8, 2), 128, torch.bfloat16)
    starts_of = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_q": 33, "max_seqlen_k": 5000}
    of_k_alone = {name: starts_of[name] for name in ("cu_seqlens_k", "max_seqlen_k")}
    made = oa.quantize_qk(q, k, with_bias=True, **starts_of)
    v8 = oa.quantize_v(v, smooth_v=True, **of_k_alone)
    monkeypatch.setenv(FORCE, "attn_int8_sm90_bf16_d128_m128n64_varlen_split")
    inside = call((q, k, v, of_q, of_k), 33, 5000, precision="int8", causal=True)
    outside = oa.attention_varlen(made.q, made.k, v8, causal=True, return_lse=True)
    for a, b in zip(inside, outside, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("head_dim_v", [128, 64])
def test_other_arrays(layout: str, head_dim_v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 3, rows that do not count, v of another head_dim, beside the kernel that does not split."""
    torch.manual_seed(head_dim_v)
    lengths_q, lengths_k = [1 + i % 3 for i in range(50)], [67 * i % 2500 for i in range(50)]
    q, k, v, of_q, of_k = packed(lengths_q, lengths_k, (6, 2), 128, torch.bfloat16, 2, 9)
    arrays = [x.transpose(0, 1) if layout == "HND" else x for x in (q, k, v[..., :head_dim_v].contiguous())]
    used = torch.tensor([max(x - 5, 0) for x in lengths_k], dtype=torch.int32, device="cuda")
    made = []
    for row in ("attn_int8_sm90_bf16_d128_lse_varlen", "attn_int8_sm90_bf16_d128_m128n64_varlen_split"):
        monkeypatch.setenv(FORCE, row)
        made.append(
            oa.attention_varlen(
                *arrays, cu_seqlens_q=of_q, cu_seqlens_k=of_k, max_seqlen_q=3, max_seqlen_k=2500, layout=layout,
                causal=True, seqused_k=used, precision="int8", return_lse=True,
            )
        )  # fmt: skip
    (whole, whole_lse), (o, lse) = made
    assert far(o, whole) <= 0.03
    empty = whole_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert (lse - whole_lse).masked_fill(empty, 0.0).abs().max() <= 1e-3
