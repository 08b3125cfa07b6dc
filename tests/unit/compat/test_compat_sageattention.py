"""omniattn.compat.sageattention on the CPU: against exact attention, and against the precisions that it stands for."""

from __future__ import annotations

from typing import Any

import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch")
from omniattn.compat import sageattention as sage  # noqa: E402
from tests.unit.compat.compat_cases import naive, randoms, starts  # noqa: E402

pytestmark = pytest.mark.frameworks

#: Relative L1 error of 8-bit attention on N(0, 1).
LOW = 0.08


def qkv(layout: str, sq: int = 40, sk: int = 40, dim: int = 64, **more: Any) -> list[torch.Tensor]:
    made = randoms((2, sq, 4, dim), (2, sk, 2, dim), (2, sk, 2, dim), dtype=torch.float16, **more)
    return made if layout == "NHD" else [x.detach().transpose(1, 2).contiguous() for x in made]


def exact(layout: str, q: Any, k: Any, v: Any, **score: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if layout == "HND":
        o, lse = naive(*(x.double().transpose(1, 2) for x in (q, k, v)), **score)
        return o.transpose(1, 2), lse
    return naive(*(x.double() for x in (q, k, v)), **score)


def near(made: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((made.double() - expected).abs().sum() <= LOW * expected.abs().sum()) and made.shape == expected.shape


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("sq", "sk", "dim"), [(40, 40, 64), (20, 50, 36), (50, 20, 96)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sageattn(layout: str, sq: int, sk: int, dim: int, is_causal: bool) -> None:
    q, k, v = qkv(layout, sq, sk, dim)
    top_left = torch.ones(sq, sk, dtype=torch.bool).tril() if is_causal else None
    o, lse = sage.sageattn(q, k, v, tensor_layout=layout, is_causal=is_causal, return_lse=True)
    ref, ref_lse = exact(layout, q, k, v, mask=top_left)
    assert o.dtype == q.dtype
    assert near(o, ref)
    assert lse.shape == (2, 4, sq)
    assert (lse - ref_lse).abs().max() <= 0.05
    assert torch.equal(sage.sageattn(q, k, v, layout, is_causal), o)
    scaled = sage.sageattn(q, k, v, layout, is_causal, 0.3)
    assert near(scaled, exact(layout, q, k, v, mask=top_left, scale=0.3)[0])
    bias = torch.randn(4, sq, sk, generator=torch.Generator().manual_seed(2)).half()
    masked = sage.sageattn(q, k, v, layout, is_causal, attn_mask=bias, dropout_p=0.0)
    hidden = torch.zeros(sq, sk) if top_left is None else torch.zeros(sq, sk).masked_fill(~top_left, -torch.inf)
    assert near(masked, exact(layout, q, k, v, mask=bias + hidden)[0])


@pytest.mark.parametrize("shape", [(40,), (40, 1), (2, 1, 1, 40), ()])
def test_masks_of_causal_attention_over_more_keys(shape: tuple[int, ...]) -> None:
    """Keys that nobody sees are left out; of the mask too, unless it is broadcast over them."""
    q, k, v = qkv("HND", 40, 60)
    shape = (*shape[:-1], 60) if shape and shape[-1] == 40 else shape
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.8
    mask = mask if shape else torch.tensor(True)
    top_left = torch.ones(40, 60, dtype=torch.bool).tril()
    assert near(sage.sageattn(q, k, v, is_causal=True, attn_mask=mask), exact("HND", q, k, v, mask=top_left & mask)[0])


KNOBS: list[tuple[str, dict[str, Any], oa.Int8]] = [
    ("sageattn", {}, oa.Int8()),
    ("sageattn", {"smooth_k": False}, oa.Int8(smooth_k=False)),
    ("sageattn_qk_int8_pv_fp16_triton", {}, oa.Int8("per_block", True, False, False, "fp16", "fp16")),
    (
        "sageattn_qk_int8_pv_fp16_triton", {"smooth_k": False, "quantization_backend": "cuda"},
        oa.Int8("per_block", False, False, False, "fp16", "fp16"),
    ),
    ("sageattn_qk_int8_pv_fp16_cuda", {}, oa.Int8("per_thread", True, False, False, "fp16", "fp32")),
    (
        "sageattn_qk_int8_pv_fp16_cuda", {"qk_quant_gran": "per_warp", "pv_accum_dtype": "fp16+fp32", "smooth_v": True},
        oa.Int8("per_warp", True, False, True, "fp16", "fp16"),
    ),
    ("sageattn_qk_int8_pv_fp8_cuda", {}, oa.Int8("per_thread", True, False, False, "fp8", "fp16")),
    (
        "sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32+fp32", "smooth_v": True},
        oa.Int8("per_thread", True, False, True, "fp8", "fp32"),
    ),
    (
        "sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32"},
        oa.Int8("per_thread", True, False, False, "fp8", "fp32"),
    ),
    ("sageattn_qk_int8_pv_fp8_cuda_sm90", {}, oa.Int8("per_thread", True, False, False, "fp8", "fp32")),
    (
        "sageattn_qk_int8_pv_fp8_cuda_sm90", {"qk_quant_gran": "per_warp", "smooth_k": False},
        oa.Int8("per_warp", False, False, False, "fp8", "fp32"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "knobs", "precision"), KNOBS, ids=str)
def test_knobs(name: str, knobs: dict[str, Any], precision: oa.Int8) -> None:
    q, k, v = qkv("NHD", 20, 70)
    k = k + 3
    o, lse = getattr(sage, name)(q, k, v, tensor_layout="NHD", return_lse=True, **knobs)
    expected, expected_lse = oa.attention(q, k, v, precision=precision, return_lse=True)
    assert torch.equal(o, expected)
    assert torch.equal(lse, expected_lse)
    assert (lse - exact("NHD", q, k, v)[1]).abs().max() <= 0.2


def test_varlen() -> None:
    q, k, v = randoms((30, 4, 64), (50, 2, 64), (50, 2, 64), dtype=torch.float16)
    cu_q, cu_k = starts([10, 20]), starts([35, 15])
    for smooth in (True, False):
        for kind in (torch.int32, torch.int64):
            o = sage.sageattn_varlen(q, k, v, cu_q.to(kind), cu_k.to(kind), 20, 35, smooth_k=smooth)
            assert torch.equal(
                o,
                oa.attention_varlen(
                    q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=20, max_seqlen_k=35,
                    precision=oa.Int8(smooth_k=smooth),
                ),
            )  # fmt: skip
    k, v = k[:30], v[:30]
    o = sage.sageattn_varlen(q, k, v, cu_q, cu_q, 20, 20, True, 0.2)
    for rows in (slice(0, 10), slice(10, 30)):
        ref, _ = exact("NHD", q[None, rows], k[None, rows], v[None, rows], causal=True, scale=0.2)
        assert near(o[None, rows], ref)
    odd = sage.sageattn_varlen(q[..., :36], k[..., :36], v[..., :36], cu_q, cu_q, 20, 20)
    assert odd.shape == (30, 4, 36)
    for starts_k, longest in ((starts([12, 18]), 18), (starts([12, 18]), 20), (cu_q, 21)):
        with pytest.raises(UnsupportedError, match="bottom right"):
            sage.sageattn_varlen(q, k, v, cu_q, starts_k, 20, longest, is_causal=True)


def test_training() -> None:
    """What the original cannot do: gradients are those of exact attention, up to 8 bits."""
    leaves = qkv("NHD", grad=True)
    o = sage.sageattn(*leaves, tensor_layout="NHD", is_causal=True)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    ref, _ = naive(*wide, causal=True)
    for a, b in zip(torch.autograd.grad(o.double().square().sum(), leaves), wide, strict=True):
        (want,) = torch.autograd.grad(ref.square().sum(), [b], retain_graph=True)
        assert near(a, want)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "text"),
    [
        ("sageattn", {"dropout_p": 0.5}, UnsupportedError, "dropout_p=0.5"),
        ("sageattn", {"attn_mask": torch.ones(8, 8).to_sparse()}, UnsupportedError, r"sageattn\(\): .*'attn_mask' has"),
        ("sageattn", {"scale": 0.5}, TypeError, "scale"),
        ("sageattn", {"enable_gqa": True}, TypeError, "enable_gqa"),
        ("sageattn", {"tensor_layout": "BHSD"}, ArgumentError, "tensor_layout"),
        ("sageattn", {"is_causal": None}, ArgumentError, "is_causal"),
        ("sageattn", {"return_lse": 2}, ArgumentError, "return_lse"),
        ("sageattn", {"attn_mask": torch.zeros(3)}, ArgumentError, "mask"),
        ("sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": "fp16"}, UnsupportedError, "overflow"),
        ("sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": "fp8"}, ArgumentError, "pv_accum_dtype"),
        ("sageattn_qk_int8_pv_fp16_cuda", {"qk_quant_gran": "per_block"}, ArgumentError, "qk_quant_gran"),
        ("sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp16"}, ArgumentError, "pv_accum_dtype"),
        ("sageattn_qk_int8_pv_fp8_cuda", {"smooth_k": None}, ArgumentError, "smooth_k"),
        ("sageattn_qk_int8_pv_fp8_cuda_sm90", {"pv_accum_dtype": "fp32"}, ArgumentError, "pv_accum_dtype"),
        ("sageattn_qk_int8_pv_fp8_cuda_sm90", {"smooth_v": True}, TypeError, "smooth_v"),
        ("sageattn_qk_int8_pv_fp16_triton", {"quantization_backend": "numpy"}, ArgumentError, "quantization_backend"),
    ],
)
def test_errors(name: str, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        getattr(sage, name)(*qkv("HND", 8, 8), **arguments)


def test_errors_name_the_function_and_its_own_arguments() -> None:
    """Those of `attention` too, which calls some otherwise."""
    x, cu = qkv("HND", 8, 8), starts([8, 8])
    packed = [torch.zeros(16, 4, 64, dtype=torch.float16) for _ in range(3)]
    for function, arguments, options, named in (
        (sage.sageattn, x, {"sm_scale": "1"}, "sm_scale"),
        (sage.sageattn, x, {"attn_mask": torch.zeros(9, 9)}, "attn_mask"),
        (sage.sageattn_qk_int8_pv_fp8_cuda, x, {"sm_scale": torch.zeros(2)}, "sm_scale"),
        (sage.sageattn_varlen, (*packed, cu, cu, 8, 8), {"sm_scale": "1"}, "sm_scale"),
        (sage.sageattn_varlen, (*packed, cu, cu, 7, 8), {}, "max_seqlen_q"),
        (sage.sageattn_qk_int8_pv_fp16_cuda, x, {"pv_accum_dtype": torch.zeros(2)}, "pv_accum_dtype"),
        (sage.sageattn_varlen, (*packed, cu + 0.7, cu, 8, 8), {}, "cu_seqlens_q"),
        # Padded, both have 64 channels.
        (sage.sageattn, (x[0][..., :60], *x[1:]), {}, "k"),
        (sage.sageattn_varlen, (packed[0], packed[1][..., :63], packed[2], cu, cu, 8, 8), {}, "k"),
        (sage.sageattn_varlen, (*packed, cu, cu.short(), 8, 8), {}, "cu_seqlens_k"),
    ):
        with pytest.raises(ArgumentError) as caught:
            function(*arguments, **options)
        assert (caught.value.function, caught.value.argument) == (function.__name__, named), str(caught.value)
