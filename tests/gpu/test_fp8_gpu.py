"""e4m3 for Q, K, P and V on a GPU against the NumPy emulation: kernels, quantizers, arrays of the caller, long sums."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402
from omniattn.errors import DtypeError  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.select.choice import VARIABLE  # noqa: E402

from .low_precision_cases import check, inputs, to_numpy  # noqa: E402

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (8, 9), reason="e4m3 products need compute capability 8.9"),
]

#: Kernels on mma.sync run on Hopper too, where nobody asks for them.
FAMILIES = ["attn_fp8_sm90", "attn_fp8_sm89"] if CAPABILITY == (9, 0) else ["attn_fp8_sm89"]
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (37, 11)},
    "scale": {"softmax_scale": 0.2, "causal": True},
    "softcap": {"softcap": 4.0},
    "negative_scale": {"softmax_scale": -0.1},
    "smooth_k": {"precision": oa.Fp8(smooth_k=True)},
    "as_it_is": {"precision": oa.Fp8(hadamard=False, smooth_v=False)},
}
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    PLANS.clear()


@pytest.fixture
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces the kernels on mma.sync where the GPU has others."""
    name = str(request.param)
    if name != FAMILIES[0]:
        names = (
            f"{name}_{short}_d{width}{suffix}"
            for suffix in ("", "_mods") for short in ("bf16", "fp16") for width in (64, 128, 256)
        )  # fmt: skip
        monkeypatch.setenv(VARIABLE, ",".join(names))
    return name


def _moved(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def _compare(tensors: list[Any], bounds: dict[str, float] | None = None, **options: Any) -> None:
    call = oa.attention_varlen if "cu_seqlens_q" in options else oa.attention
    on_gpu = _moved(options)
    got = call(*(t.cuda() for t in tensors), return_lse=True, **on_gpu)
    # Whether somebody asks for the LSE makes no difference to O, though a kernel of its own makes both.
    alone = call(*(t.cuda() for t in tensors), **on_gpu)
    assert torch.equal(alone.view(torch.int16), got[0].view(torch.int16))
    want = call(*tensors, return_lse=True, **options)
    # The tensor cores keep about 13 bits of a sum of products of Q and K.
    check(got, tuple(to_numpy(x) for x in want), **({"lse_atol": 2e-2} | (bounds or {})))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 256])
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_features(family: str, head_dim: int, feature: str) -> None:
    dtype = "float16" if head_dim in (72, 192) else "bfloat16"
    tensors = inputs(dtype, batch=2, seqlen_q=150, seqlen_k=203, heads_q=4, heads_kv=2, head_dim=head_dim, seed=1)
    # Hopper's kernel makes e4m3 of q itself, with a scale for each row: two roundings of q, independent of each other.
    inside = family == FAMILIES[0] and head_dim <= 128
    bounds = {"lse_atol": 0.5, "cosine": 0.9975, "relative_l1": 0.08} if inside else {}
    _compare(tensors, bounds, **({"precision": "fp8"} | FEATURES[feature]))


@pytest.mark.parametrize("mask", ["bool", "keys", "bias"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_masks_and_sinks(family: str, head_dim: int, mask: str) -> None:
    tensors = inputs(batch=1, seqlen_q=150, seqlen_k=200, heads_q=4, heads_kv=2, head_dim=head_dim, seed=2)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(1, 1 if mask == "keys" else 4, 1 if mask == "keys" else 150, 200, generator=generator)
    sinks = torch.randn(4, generator=generator)
    _compare(tensors, precision="fp8", mask=values > -0.5 if mask == "bool" else values, sinks=sinks)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_packed(family: str, head_dim: int, options: dict[str, Any]) -> None:
    q, k, v = (x[0] for x in inputs(batch=1, seqlen_q=300, seqlen_k=460, heads_q=4, heads_kv=2, head_dim=head_dim))
    starts = {
        "cu_seqlens_q": torch.tensor([0, 100, 100, 300], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 50, 180, 460], dtype=torch.int32),
    }
    _compare([q, k, v], precision="fp8", **starts, max_seqlen_q=200, max_seqlen_k=280, **options)


def test_rows_with_nan_and_infinity() -> None:
    q, k, v = inputs(batch=1, seqlen_q=200, seqlen_k=330, heads_q=2, heads_kv=2, head_dim=128)
    q[0, 7, 0, 5] = math.nan
    k[0, 200, 1, 9] = math.inf
    o = oa.attention(q.cuda(), k.cuda(), v.cuda(), precision="fp8", causal=True).cpu()
    want = oa.attention(q, k, v, precision="fp8", causal=True)
    # That query, and the rows of that head that see that key.
    nan = torch.zeros(o.shape, dtype=torch.bool)
    nan[0, 7, 0] = nan[0, 70:, 1] = True
    assert torch.equal(o.isnan(), nan)
    assert torch.equal(want.isnan(), nan)
    torch.testing.assert_close(o[~nan].float(), want[~nan].float(), rtol=0.1, atol=0.05)


# --- Quantizers ------------------------------------------------------------------------------------------------------

QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "fp8": {"dtype": "float8_e4m3", "seed": 7},
    "fp8_as_it_is": {"dtype": "float8_e4m3", "hadamard": False},
    "fp8_smooth_k": {"dtype": "float8_e4m3", "smooth_k": True},
    "int8": {"dtype": "int8", "hadamard": True, "seed": 2**32 - 1},
    "int8_sm80": {"dtype": "int8", "hadamard": True, "grouping": "sm80"},
    "int4": {"dtype": "int4", "hadamard": True},
}


@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 160, 256])
def test_bits_of_rotations(head_dim: int, name: str) -> None:
    dtype = "float16" if head_dim in (32, 96) else "bfloat16"
    q, k, _ = inputs(dtype, batch=2, seqlen_q=140, seqlen_k=260, heads_q=2, heads_kv=1, head_dim=head_dim)
    k[0, 3, 0, 1] = math.nan
    q[1, 2, 1, 4] = math.inf
    q[0, 128:] = 0.0
    got, want = oa.quantize_qk(q.cuda(), k.cuda(), **QUANTIZATIONS[name]), oa.quantize_qk(q, k, **QUANTIZATIONS[name])
    for field in ("q_int", "k_int", "q_scale", "k_scale"):
        a, b = getattr(got, field).cpu(), getattr(want, field)
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=field)


@pytest.mark.parametrize("name", ["fp8", "fp8_smooth_k", "int8"])
def test_bits_of_packed_rotations(name: str) -> None:
    q, k, _ = (x[0] for x in inputs(batch=1, seqlen_q=300, seqlen_k=460, heads_q=4, heads_kv=2, head_dim=64))
    starts = {
        "cu_seqlens_q": torch.tensor([0, 100, 100, 300], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 50, 180, 460], dtype=torch.int32),
    }
    more = {"max_seqlen_q": 200, "max_seqlen_k": 280, **QUANTIZATIONS[name]}
    got, want = oa.quantize_qk(q.cuda(), k.cuda(), **_moved(starts), **more), oa.quantize_qk(q, k, **starts, **more)
    per_q, per_k = want.problem.scales_per_tile
    for field, rows, per in (("q", starts["cu_seqlens_q"], per_q), ("k", starts["cu_seqlens_k"], per_k)):
        assert torch.equal(getattr(got, f"{field}_int").cpu(), getattr(want, f"{field}_int"))
        # Slots that no sequence fills hold anything.
        used = [
            slot * per + i
            for b, (begin, end) in enumerate(itertools.pairwise(rows.tolist()))
            for slot in range(-(-begin // 128) + b, -(-begin // 128) + b + -(-(end - begin) // 128))
            for i in range(per)
        ]
        a, b = getattr(got, f"{field}_scale").cpu(), getattr(want, f"{field}_scale")
        assert torch.equal(a[:, used], b[:, used])


# --- Arrays in e4m3 --------------------------------------------------------------------------------------------------


def _factors(kind: str, heads: int, heads_kv: int, batch: int) -> dict[str, Any]:
    shapes: dict[str, list[tuple[int, ...] | None]] = {
        "none": [None] * 3, "scalar": [(), (1,), ()], "head": [(batch, heads_kv)] * 3,
        "block": [(batch, heads, 2), (batch, heads_kv, 3), (batch, heads_kv)],
    }  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    return {
        f"descale_{name}": torch.rand(shape, generator=generator) + 0.5
        for name, shape in zip("qkv", shapes[kind], strict=True) if shape is not None
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["none", "scalar", "head", "block"])
@pytest.mark.parametrize(("head_dim", "layout"), [(64, "NHD"), (128, "HND"), (128, "NHD"), (96, "NHD"), (256, "HND")])
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_arrays(family: str, head_dim: int, layout: str, kind: str) -> None:
    tensors = inputs(batch=2, seqlen_q=200, seqlen_k=330, heads_q=4, heads_kv=2, head_dim=head_dim)
    q, k, v = (x.to(E4M3) if layout == "NHD" else x.transpose(1, 2).contiguous().to(E4M3) for x in tensors)
    _compare([q, k, v], layout=layout, **_factors(kind, 4, 2, 2), causal=kind == "block")


def test_packed_arrays() -> None:
    q, k, v = (x[0].to(E4M3) for x in inputs(batch=1, seqlen_q=300, seqlen_k=460, heads_q=4, heads_kv=2, head_dim=128))
    starts = {
        "cu_seqlens_q": torch.tensor([0, 100, 100, 300], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 50, 180, 460], dtype=torch.int32),
    }
    for kind in ("none", "head", "block"):
        _compare([q, k, v], **starts, max_seqlen_q=200, max_seqlen_k=280, **_factors(kind, 4, 2, 3))


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_sequences_longer_than_their_factors_are_nan(family: str) -> None:
    """A max_seqlen below the longest sequence: nothing is read behind the factors, and nothing is made up."""
    q, k, v = (
        x[0].to(E4M3).cuda() for x in inputs(batch=1, seqlen_q=400, seqlen_k=400, heads_q=2, heads_kv=2, head_dim=64)
    )
    starts = torch.tensor([0, 100, 400], dtype=torch.int32, device="cuda")
    for name, heads in (("descale_q", 2), ("descale_k", 2)):
        o = oa.attention_varlen(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=128, max_seqlen_k=128,
            **{name: torch.ones(2, heads, 1, device="cuda")},
        )  # fmt: skip
        assert o[100:].isnan().all()
        assert not o[:100].isnan().any()


def test_views_of_e4m3_are_read_where_they_are() -> None:
    """q, k and v of one projection: strides, no copies; the results are those of copies."""
    packed = torch.randn(2, 200, 3, 4, 128, device="cuda").to(E4M3)
    views = packed.unbind(2)
    o = oa.attention(*views, causal=True, out_dtype="float16")
    copied = oa.attention(
        *(x.clone(memory_format=torch.contiguous_format) for x in views), causal=True, out_dtype="float16"
    )
    assert o.dtype == torch.float16
    assert torch.equal(o, copied)


def test_e5m2_raises() -> None:
    x = torch.zeros(1, 8, 1, 64, device="cuda").to(torch.float8_e5m2)
    with pytest.raises(DtypeError, match="e4m3"):
        oa.attention(x, x, x)


# --- Long sums -------------------------------------------------------------------------------------------------------


def _relative_error(keys: int) -> float:
    """Of the output, for values of one sign: what the tensor cores cut off adds up over the keys of one sum."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k = (torch.randn(1, n, 1, 64, device="cuda", generator=generator).to(E4M3) for n in (128, keys))
    v = (torch.rand(1, keys, 1, 64, device="cuda", generator=generator) + 0.5).to(E4M3)
    o = oa.attention(q, k, v).double()[0, :, 0]
    p = torch.softmax(q.double()[0, :, 0] @ k.double()[0, :, 0].T / 8, dim=-1)
    want = p @ v.double()[0, :, 0]
    return float(((o - want) / want).abs().mean())


def test_long_sums_of_one_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    split = _relative_error(131072)  # over CTAs, on Hopper: shorter sums
    monkeypatch.setenv(VARIABLE, "attn_fp8_sm90_bf16_d64,attn_fp8_sm89_bf16_d64")
    whole = _relative_error(131072)
    assert whole <= 1.2 * _relative_error(4096)
    assert split <= 1.1 * whole


# --- Accuracy --------------------------------------------------------------------------------------------------------

#: Root mean square error of FlashAttention-3's FP8 forward on outliers (Shah et al. 2024, table 3).
_PUBLISHED_RMSE = 9.1e-3


def _rmse(precision: oa.Fp8, head_dim: int) -> float:
    q, k, v = (
        torch.from_numpy(x).double()
        for x in testing.make_qkv("outlier", seqlen_q=2048, seqlen_k=2048, heads_q=4, head_dim=head_dim, seed=0)
    )
    p = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * head_dim**-0.5, dim=-1)
    want = torch.einsum("bhqk,bkhd->bqhd", p, v)
    o = oa.attention(*(x.half().cuda() for x in (q, k, v)), precision=precision).cpu().double()
    return float((o - want).square().mean().sqrt())


def test_rmse_on_outliers_is_below_the_published_one() -> None:
    best = _rmse(oa.Fp8(), 128)
    assert best <= _PUBLISHED_RMSE
    assert best < 0.75 * _rmse(oa.Fp8(hadamard=False), 128)
    assert _rmse(oa.Fp8(), 64) <= 1.6e-2
