"""INT8 and INT4 attention on mma.sync against the NumPy emulation, every row of the family that this GPU can run.

As the GPU's own code; `test_architectures_gpu.py` runs the same rows as PTX for sm_80 and sm_89.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402
from omniattn.errors import ArgumentError, UnsupportedError  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.problems import Int4, Int8  # noqa: E402
from omniattn.reference import low_precision  # noqa: E402
from omniattn.registry import REGISTRY, KernelSpec  # noqa: E402

from .installations import compile_missing  # noqa: E402
from .low_precision_cases import (  # noqa: E402
    check,
    check_against_integers,
    growing_scores,
    inputs,
    softmax_on_integers,
    to_numpy,
)

pytestmark = pytest.mark.gpu

CC = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
#: (bits, pv, pv_accumulator) of the kernels that this GPU has instructions for.
PRODUCTS = [
    (bits, pv, acc)
    for bits in (8, 4)
    for pv in ("fp16", "fp8")
    for acc in ("fp32", "fp16")
    if pv == "fp16" or CC >= (8, 9)
]
PRODUCT_IDS = [f"int{bits}-{pv}-acc_{acc}" for bits, pv, acc in PRODUCTS]
ROWS = [spec for spec in REGISTRY if spec.quantized and spec.grouping == "sm80" and spec.min_arch <= CC]

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (37, 11)},
    "window_empty_rows": {"window": (0, 0)},
    "scale": {"softmax_scale": 0.2, "causal": True},
    "softcap": {"softcap": 4.0, "causal": True},
    "mask": {"mask": "bool"},
    "bias": {"mask": "float32", "causal": True},
    "negative_scale": {"softmax_scale": -0.1, "window": (70, 70)},
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_missing(s for s in ROWS if s.dtype == "bfloat16" or s.head_dim == 64)


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    PLANS.clear()


def _precision(bits: int, pv: str, acc: str, **knobs: Any) -> Int8 | Int4:
    return (Int8 if bits == 8 else Int4)(pv=pv, pv_accumulator=acc, **knobs)


def _row(precision: Int8 | Int4, head_dim: int, dtype: str, mods: bool) -> KernelSpec:
    smooth_q = "any" if mods else "always" if precision.smooth_q else "never"
    # On Hopper some have a twin with another trade of registers.
    found = [
        s
        for s in ROWS
        if (s.qk, s.pv, s.pv_accumulator) == (precision.qk, precision.pv, precision.pv_accumulator)
        and s.dtype == dtype
        and (s.score_mods, s.smooth_q, s.value_factors) == (mods, smooth_q, False)
        and s.head_dim == (64 if head_dim <= 64 else 128 if head_dim <= 128 else 256)
    ]
    return max(found, key=lambda s: s.min_arch)


def _options(options: dict[str, Any], q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """With arrays in place of the kinds of masks."""
    made = dict(options)
    generator = torch.Generator().manual_seed(9)
    if made.get("mask") == "bool":
        made["mask"] = torch.rand(q.shape[1], k.shape[1], generator=generator) < 0.7
    elif made.get("mask") == "float32":
        made["mask"] = torch.randn(q.shape[2], q.shape[1], k.shape[1], generator=generator)
    return made


def _run(monkeypatch: Any, tensors: list[torch.Tensor], precision: Int8 | Int4, **options: Any) -> tuple[Any, Any]:
    """(o, lse) of the GPU, by the row of this family, and of the emulation."""
    mods = "mask" in options or "softcap" in options or options.get("softmax_scale", 1) <= 0
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(precision, tensors[0].shape[-1], dtype, mods).name)
    on_gpu = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    call = oa.attention_varlen if "cu_seqlens_q" in options else oa.attention
    got = call(*(t.cuda() for t in tensors), return_lse=True, precision=precision, **on_gpu)
    on_cpu = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    want = low_precision.attention(*map(to_numpy, tensors), precision=precision, grouping="sm80", **on_cpu)
    return got, want


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("product", PRODUCTS, ids=PRODUCT_IDS)
def test_features(monkeypatch: Any, product: tuple[int, str, str], head_dim: int, feature: str) -> None:
    dtype = "float16" if head_dim == 64 else "bfloat16"
    shape = {"batch": 2, "seqlen_q": 150, "seqlen_k": 203, "heads_q": 4, "heads_kv": 2, "head_dim": head_dim}
    q, k, v = inputs(dtype, seed=head_dim, **shape)
    precision = _precision(*product, smooth_v=head_dim != 128)
    got, want = _run(monkeypatch, [q, k, v], precision, **_options(FEATURES[feature], q, k))
    # fp16 P has 11 bits: then what is left is the order of sums.
    tight = product[1] == "fp16"
    check(got, want, lse_atol=2e-3, cosine=0.99999 if tight else 0.9985, relative_l1=6e-3 if tight else 0.05)


@pytest.mark.parametrize("product", PRODUCTS, ids=PRODUCT_IDS)
def test_every_smoothing(monkeypatch: Any, product: tuple[int, str, str]) -> None:
    """Means of K and V that the results have to get back, in LSE, sinks and softcap too."""
    q, k, v = inputs(batch=2, seqlen_q=170, seqlen_k=140, heads_q=4, heads_kv=2, head_dim=128, seed=5)
    k, v = k + 2, v + 3
    sinks = torch.tensor([0.0, 3.0, -2.0, 30.0])
    for smooth_q in (False, True):
        precision = _precision(*product, smooth_q=smooth_q, smooth_v=True)
        for options in ({"sinks": sinks, "causal": True}, {"softcap": 6.0}, {"softcap": 6.0, "sinks": sinks}):
            got, want = _run(monkeypatch, [q, k, v], precision, **options)
            check(got, want, lse_atol=2e-3)


@pytest.mark.parametrize("granularity", ["per_tensor", "per_block", "per_warp"])
@pytest.mark.parametrize("product", PRODUCTS, ids=PRODUCT_IDS)
def test_granularities(monkeypatch: Any, product: tuple[int, str, str], granularity: str) -> None:
    tensors = inputs(batch=1, seqlen_q=300, seqlen_k=300, heads_q=2, heads_kv=1, head_dim=128, seed=2)
    for smooth_k in (False, True):
        precision = _precision(*product, granularity=granularity, smooth_k=smooth_k)
        got, want = _run(monkeypatch, tensors, precision, causal=True)
        check(got, want)


@pytest.mark.parametrize("product", PRODUCTS, ids=PRODUCT_IDS)
def test_lengths_around_tiles(monkeypatch: Any, product: tuple[int, str, str]) -> None:
    for head_dim in (64, 128, 256):
        for seqlen_q in (1, 31, 129):
            for seqlen_k in (1, 63, 65, 200):
                tensors = inputs(
                    batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=2, heads_kv=1, head_dim=head_dim,
                    seed=seqlen_k,
                )  # fmt: skip
                for causal in (False, True):
                    got, want = _run(monkeypatch, tensors, _precision(*product), causal=causal)
                    # With one key or two, P is rounded by up to 1/16 at the kernel's base, not at the emulation's.
                    check(got, want, relative_l1=0.05 if product[1] == "fp16" else 0.07)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("product", PRODUCTS, ids=PRODUCT_IDS)
def test_packed_sequences(
    monkeypatch: Any, product: tuple[int, str, str], head_dim: int, options: dict[str, Any]
) -> None:
    lengths_q, lengths_k = [70, 0, 1, 129, 300, 2], [131, 5, 0, 66, 300, 700]
    tensors = [
        torch.randn(n + 3, heads, head_dim, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16)
        for n, heads in ((sum(lengths_q), 4), (sum(lengths_k), 2), (sum(lengths_k), 2))
    ]
    starts = [torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (lengths_q, lengths_k)]
    got, want = _run(
        monkeypatch, tensors, _precision(*product), cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=300,
        max_seqlen_k=700, **options,
    )  # fmt: skip
    check(got, want)
    assert not got[0][sum(lengths_q) :].any()


@pytest.mark.parametrize("product", PRODUCTS, ids=PRODUCT_IDS)
def test_scores_that_grow_against_a_softmax_on_dequantized_operands(
    monkeypatch: Any, product: tuple[int, str, str]
) -> None:
    for seed, head_dim in enumerate((64, 128, 256)):
        q, k, v = growing_scores(seed, head_dim, 7)
        precision = _precision(*product, smooth_q=False)
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(precision, head_dim, "bfloat16", False).name)
        o, lse = oa.attention(q, k, v, causal=True, precision=precision, return_lse=True)
        want = softmax_on_integers(q, k, v, grouping="sm80", bits=product[0])
        check_against_integers(o, lse, want, 0.99999 if product[1] == "fp16" else 0.998)


@pytest.mark.parametrize("product", [p for p in PRODUCTS if p[2] == "fp16"], ids=str)
@pytest.mark.parametrize("step", [0.0, 0.05, 0.7, 1.3, 1.39, 3.0])
def test_fp16_sums_do_not_overflow(monkeypatch: Any, product: tuple[int, str, str], step: float) -> None:
    """All keys alike, values just below the largest of their format, and scores that rise from tile to tile by as much
    as the softmax lets pass without a new base: the largest sums that there can be."""
    head_dim, tiles = 128, 6
    q, k = torch.zeros(1, 130, 1, head_dim), torch.zeros(1, 64 * tiles, 1, head_dim)
    q[..., 0] = 1
    # Keys are walked from the last tile to the first.
    k[..., 0] = step * torch.arange(tiles - 1, -1, -1).repeat_interleave(64)[None, :, None]
    for value in (1.9921875, -255.0, 65280.0, 3.0e38):
        v = torch.full((1, 64 * tiles, 1, head_dim), value)
        tensors = [t.to(torch.bfloat16) for t in (q, k, v)]
        # A smoothed V would be nothing but its mean.
        precision = _precision(*product, smooth_q=False, smooth_k=False, smooth_v=False)
        got, _ = _run(monkeypatch, tensors, precision, softmax_scale=1.0)
        assert got[0].isfinite().all()
        error = (got[0].double() / tensors[2].double().cuda()[:, :1] - 1).abs().max().item()
        # P is the same for all keys of a tile: so is its rounding.
        assert error <= (2.0**-4 if product[1] == "fp8" else 2.0**-8)


@pytest.mark.parametrize("product", PRODUCTS, ids=PRODUCT_IDS)
def test_nan_stays_with_the_rows_that_meet_it(monkeypatch: Any, product: tuple[int, str, str]) -> None:
    q, k, v = (t.cuda() for t in inputs(batch=1, seqlen_q=400, seqlen_k=400, heads_q=2, heads_kv=2, head_dim=128))
    precision = _precision(*product)
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(precision, 128, "bfloat16", False).name)
    bad = q.clone()
    bad[0, 77, 1, 5] = float("nan")
    o, lse = oa.attention(bad, k, v, causal=True, precision=precision, return_lse=True)
    expected = torch.zeros(1, 400, 2, dtype=torch.bool, device="cuda")
    expected[0, 77, 1] = True
    assert torch.equal(o.isnan().any(-1), expected)
    assert torch.equal(o.isnan().all(-1), expected)
    assert torch.equal(lse.isnan(), expected.transpose(1, 2))
    bad = k.clone()
    bad[0, 300, 0, 9] = float("inf")  # its group: keys 256 + {8i + 4, 8i + 5}
    nan = oa.attention(q, bad, v, causal=True, precision=precision).isnan().any(-1)[0]
    assert nan[300:, 0].all()
    assert not nan[:260, 0].any()
    assert not nan[:, 1].any()
    bad = v.clone()
    bad[0, 350, 1, 3] = float("nan")
    o = oa.attention(q, k, bad, precision=precision)
    assert o[0, :, 1, 3].isnan().all()
    assert not o[0, :, 1, 4:].isnan().any()
    assert not o[0, :, 0].isnan().any()


@pytest.mark.parametrize("spread", [5.0, 15.0, 200.0])
@pytest.mark.parametrize("product", PRODUCTS, ids=PRODUCT_IDS)
def test_coarse_scores(monkeypatch: Any, product: tuple[int, str, str], spread: float) -> None:
    torch.manual_seed(3)
    tensors = [(torch.randn(1, 200, 2, 128) * (spread if i < 2 else 1.0)).to(torch.bfloat16) for i in range(3)]
    got, want = _run(monkeypatch, tensors, _precision(*product), causal=True)
    assert testing.compare(to_numpy(got[0]), want[0]).cosine >= 0.97
    assert (np.abs(to_numpy(got[1]) - want[1]) <= 1e-3 * (1 + np.abs(want[1]))).all()


@pytest.mark.parametrize("product", PRODUCTS, ids=PRODUCT_IDS)
def test_same_bits_every_time_and_in_any_batch(monkeypatch: Any, product: tuple[int, str, str]) -> None:
    q, k, v = (t.cuda() for t in inputs(batch=3, seqlen_q=500, seqlen_k=500, heads_q=4, heads_kv=2, head_dim=128))
    precision = _precision(*product)
    for options in ({}, {"softcap": 9.0}):
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(precision, 128, "bfloat16", bool(options)).name)
        first = oa.attention(q, k, v, causal=True, precision=precision, return_lse=True, **options)
        for _ in range(4):
            again = oa.attention(q, k, v, causal=True, precision=precision, return_lse=True, **options)
            assert torch.equal(again[0], first[0])
            assert torch.equal(again[1], first[1])
        alone = oa.attention(q[1:2], k[1:2], v[1:2], causal=True, precision=precision, **options)
        assert torch.equal(alone[0], first[0][1])


def _operands(precision: Int8 | Int4, tensors: list[torch.Tensor], **lengths: Any) -> tuple[Any, Any]:
    of_k = {name: lengths[name] for name in ("cu_seqlens_k", "max_seqlen_k") if name in lengths}
    qk = oa.quantize_qk(
        tensors[0], tensors[1], dtype=precision.qk, grouping="sm80", smooth_q=precision.smooth_q,
        with_bias=True, **lengths,
    )  # fmt: skip
    kind = "float16" if precision.pv == "fp16" else "float8_e4m3"
    return qk, oa.quantize_v(tensors[2], dtype=kind, pv_accumulator=precision.pv_accumulator, **of_k)


@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize("product", PRODUCTS, ids=PRODUCT_IDS)
def test_operands_that_are_quantized_already_give_the_same_bits(
    monkeypatch: Any, product: tuple[int, str, str], head_dim: int
) -> None:
    tensors = [t.cuda() for t in inputs(batch=2, seqlen_q=150, seqlen_k=203, heads_q=4, heads_kv=2, head_dim=head_dim)]
    mask = torch.rand(150, 203, generator=torch.Generator().manual_seed(1)).cuda() < 0.8
    sinks = torch.tensor([0.0, 3.0, -2.0, 30.0], device="cuda")
    for smooth_q in (False, True):
        precision = _precision(*product, smooth_q=smooth_q)
        qk, values = _operands(precision, tensors)
        for options in ({}, {"causal": True, "sinks": sinks}, {"softcap": 6.0}, {"mask": mask}):
            mods = "softcap" in options or "mask" in options
            monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(precision, head_dim, "bfloat16", mods).name)
            want = oa.attention(*tensors, precision=precision, return_lse=True, **options)
            for _ in range(2):  # the second call takes the fast path
                got = oa.attention(qk.q, qk.k, values, precision=precision, return_lse=True, **options)
                assert torch.equal(got[0], want[0])
                assert torch.equal(got[1], want[1])
    lengths_q, lengths_k = [70, 0, 1, 129], [131, 5, 0, 66]
    starts = [torch.tensor([0, *np.cumsum(x)], dtype=torch.int32, device="cuda") for x in (lengths_q, lengths_k)]
    lengths = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "max_seqlen_q": 129, "max_seqlen_k": 131}
    packed = [tensors[0][:, :100].flatten(0, 1), *(t[:, :101].flatten(0, 1) for t in tensors[1:])]
    qk, values = _operands(precision, packed, **lengths)
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(precision, head_dim, "bfloat16", False).name)
    want = oa.attention_varlen(*packed, precision=precision, causal=True, **lengths)
    assert torch.equal(oa.attention_varlen(qk.q, qk.k, values, precision=precision, causal=True), want)


def test_operands_choose_their_kernel(monkeypatch: Any) -> None:
    """Without being told, on Hopper too: the grouping and the packing decide."""
    monkeypatch.delenv("OMNIATTN_FORCE_KERNEL", raising=False)
    tensors = [t.cuda() for t in inputs(batch=1, seqlen_q=140, seqlen_k=140, head_dim=64)]
    for precision in (Int8(pv="fp16", pv_accumulator="fp32"), Int4(pv="fp16", pv_accumulator="fp32")):
        qk, values = _operands(precision, tensors)
        found = oa.explain(qk.q, qk.k, values)
        assert found.kernel.startswith(f"attn_{precision.qk}_sm80")
        got = oa.attention(qk.q, qk.k, values, causal=True)
        want = low_precision.attention(
            *(to_numpy(t) for t in tensors), precision=precision, grouping="sm80", causal=True
        )[0]  # fmt: skip
        report = testing.compare(to_numpy(got), want)
        assert report.cosine >= 0.99999, report


def test_too_small_a_max_seqlen_k_is_not_a_number(monkeypatch: Any) -> None:
    q, k, v = (torch.randn(500, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 500], dtype=torch.int32, device="cuda")
    precision = Int4(pv="fp16", pv_accumulator="fp32")
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(precision, 128, "bfloat16", False).name)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 500, "precision": precision, "causal": True}
    want = oa.attention_varlen(q, k, v, max_seqlen_k=500, **options)
    got = oa.attention_varlen(q, k, v, max_seqlen_k=128, **options)
    assert torch.equal(got[:128], want[:128])
    assert got[128:].isnan().all()


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_operands_of_a_max_seqlen_k_of_0_are_not_a_number(softcap: float) -> None:
    """What lies behind the first tile of delta_s becomes NaN; nothing outside it is read."""
    tensors = [torch.randn(500, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    cu = torch.tensor([0, 500], dtype=torch.int32, device="cuda")
    precision = Int8(pv="fp16", pv_accumulator="fp32", smooth_q=True)
    results = []
    for longest in (500, 0):
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 500, "max_seqlen_k": longest}
        qk, values = _operands(precision, tensors, **lengths)
        results.append(oa.attention_varlen(qk.q, qk.k, values, causal=True, softcap=softcap))
    torch.cuda.synchronize()
    want, got = results
    assert torch.equal(got[:64], want[:64])
    assert got[64:].isnan().all()


def test_no_keys_and_no_queries(monkeypatch: Any) -> None:
    q, k, v = (t.cuda() for t in inputs(batch=1, seqlen_q=70, seqlen_k=70, heads_q=2, heads_kv=2, head_dim=64))
    precision = Int8(pv="fp16")
    o, lse = oa.attention(q, k[:, :0], v[:, :0], precision=precision, return_lse=True)
    assert not o.any()
    assert torch.isneginf(lse).all()
    assert oa.attention(q[:, :0], k, v, precision=precision).shape == (1, 0, 2, 64)


def test_layouts_strides_and_graphs() -> None:
    q, k, v = (t.cuda() for t in inputs(batch=2, seqlen_q=200, seqlen_k=260, heads_q=4, heads_kv=4, head_dim=64))
    options = {"causal": True, "precision": Int8(pv="fp16")}
    want = oa.attention(q, k, v, **options)
    hnd = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    assert torch.equal(oa.attention(*hnd, layout="HND", **options).transpose(1, 2), want)
    out = torch.full((2, 200, 4, 80), float("nan"), dtype=q.dtype, device="cuda")
    oa.attention(q, k, v, out=out[..., :64], **options)
    assert torch.equal(out[..., :64], want)
    assert out[..., 64:].isnan().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = oa.attention(q, k, v, **options)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(captured, oa.attention(q, k, v, **options))


def test_what_is_chosen_is_explained(monkeypatch: Any) -> None:
    q, k, v = (t.cuda() for t in inputs(batch=1, seqlen_q=64, seqlen_k=64, head_dim=64))
    monkeypatch.delenv("OMNIATTN_FORCE_KERNEL", raising=False)
    for options in ({"softcap": 5.0}, {"mask": torch.ones(64, 64, dtype=torch.bool, device="cuda")}):
        for precision in ("int8", "int4"):
            found = oa.explain(q, k, v, precision=precision, **options)
            families = ("attn_int8_sm90",) if CC == (9, 0) else ("attn_int8_sm8", "attn_int4_sm8")
            assert found.kernel.startswith(families)
            assert any("accumulators" in reason for reason in found.why)
            assert oa.attention(q, k, v, precision=precision, **options).isfinite().all()
    assert "acc16" in oa.explain(q, k, v, precision=Int8(pv="fp16", pv_accumulator="fp16")).kernel
    with pytest.raises(UnsupportedError, match="token"):
        oa.attention(q, k, v, precision=Int8(granularity="per_token"))
    with pytest.raises(UnsupportedError, match="not exact"):
        oa.attention(q, k, v, precision=Int8(pv="exact"))
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "attn_int4_sm80_bf16_d64_smoothq")
    with pytest.raises(ArgumentError, match="4-bit"):
        oa.attention(q, k, v, precision="int8")
