"""Masks, biases and softcap of int8 attention on Hopper: every form against fp64 on the quantized operands."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import omniattn as oa  # noqa: E402
from omniattn.problems import Int4, Int8  # noqa: E402

from .low_precision_cases import check_expected, expected, growing_scores, inputs, quantize  # noqa: E402
from .softcap_mask_cases import DTYPES, FORMS, hide_and_show_tiles, random_options  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_plans"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the kernels are for compute capability 9.0",
    ),
]


def mask_of(form: str, shape: tuple[int, int, int, int], dtype: str, seed: int = 0) -> torch.Tensor:
    """A mask parts of which hide whole tiles, or nothing."""
    generator = torch.Generator("cuda").manual_seed(seed)
    batch, heads, rows, keys = shape
    shape = (batch, heads, 1 if "keys" in form else rows, keys)
    visible = torch.rand(shape, generator=generator, device="cuda") < 0.8
    hide_and_show_tiles(visible)
    if form.startswith("bool"):
        return visible
    values = 2 * torch.randn(shape, generator=generator, device="cuda")
    values = torch.where(visible, values, -torch.inf)
    return values.to(getattr(torch, dtype)) if form == "io" else values


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, precision: Any = None, **options: Any) -> None:
    """O and LSE of the quantized operands against fp64; the same bits without LSE, and from the arrays themselves."""
    precision = precision or Int8()
    assert oa.explain(q, k, v, precision=precision, **options).kernel.startswith("attn_int8_sm90")
    qk, v8 = quantize(precision, q, k, v, with_bias=True)
    o, lse = oa.attention(qk.q, qk.k, v8, return_lse=True, **options)
    want = expected(qk, v8, **options)
    nothing_is_zero = "sinks" not in options
    check_expected(o.transpose(1, 2), lse, want, v.double().abs().max().item() if v.numel() else 0.0, nothing_is_zero)
    direct, direct_lse = oa.attention(q, k, v, precision=precision, return_lse=True, **options)
    assert torch.equal(direct, o)
    assert torch.equal(direct_lse, lse)
    assert torch.equal(oa.attention(q, k, v, precision=precision, **options), o)


def tensors(batch: int, seqlen_q: int, seqlen_k: int, heads: int, head_dim: int, dtype: str) -> list[torch.Tensor]:
    made = inputs(
        dtype, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads, heads_kv=1, head_dim=head_dim,
        seed=head_dim,
    )  # fmt: skip
    made[1] = made[1] + 1  # a mean, which softcap has to get back
    return [x.cuda() for x in made]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 4.0, "window": (150, 40)}], ids=str)
def test_forms(form: str, head_dim: int, dtype: str, options: dict[str, Any]) -> None:
    check(*tensors(2, 330, 520, 2, head_dim, dtype), mask=mask_of(form, (2, 2, 330, 520), dtype), **options)


@pytest.mark.parametrize("cap", [0.5, 4.0, 50.0, 1000.0, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softmax_scale": -0.3}, {"softmax_scale": 0.0}], ids=str)
def test_softcap(options: dict[str, Any], head_dim: int, cap: float) -> None:
    check(*tensors(2, 330, 700, 2, head_dim, "bfloat16"), softcap=cap, **options)


@pytest.mark.parametrize("mean", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap_of_rows_far_from_zero(head_dim: int, mean: float) -> None:
    """The mean of K moves the scores of a row to where tanh bends."""
    q, k, v = tensors(1, 200, 900, 2, head_dim, "bfloat16")
    check(q + 0.2, k + mean, v, softcap=20.0)
    check(q, k * torch.linspace(0.1, 4, 900, device="cuda")[:, None, None].to(k.dtype), v, softcap=20.0)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-39])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scales_that_are_not_positive(head_dim: int, scale: float) -> None:
    check(*tensors(2, 200, 333, 3, head_dim, "float16"), softmax_scale=scale, causal=True)
    mask = mask_of("bool", (1, 1, 200, 333), "")
    check(*tensors(1, 200, 333, 2, head_dim, "float16"), softmax_scale=scale, mask=mask)


@pytest.mark.parametrize("precision", [Int8(smooth_q=True), Int4(), Int4(smooth_q=False), Int8(smooth_k=False),
                                       Int8(granularity="per_block", smooth_v=False)], ids=str)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_knobs(head_dim: int, precision: Any) -> None:
    q, k, v = tensors(2, 330, 520, 2, head_dim, "bfloat16")
    for form in FORMS:
        check(q, k, v, precision, mask=mask_of(form, (1, 2, 330, 520), "bfloat16"), causal=form == "bool")
    check(q, k, v, precision, softcap=5.0, causal=True)
    check(q, k, v, precision, softcap=5.0, mask=mask_of("bool", (1, 1, 330, 520), ""))
    check(q, k, v, precision, softmax_scale=-0.1)


@given(
    data=st.data(),
    form=st.sampled_from(("none", *FORMS)),
    head_dim=st.sampled_from([16, 64, 72, 128, 128, 160, 256]),
    seqlen_q=st.integers(1, 450),
    seqlen_k=st.integers(1, 450),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_random_problems(
    data: st.DataObject, form: str, head_dim: int, seqlen_q: int, seqlen_k: int, dtype: str
) -> None:
    if form in ("float32", "io"):
        seqlen_k = -(-seqlen_k // 8) * 8  # rows of whole 16 bytes: tensor maps
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    options = random_options(data, heads, 300)
    if "sinks" in options:
        options["sinks"] = torch.from_numpy(options["sinks"]).cuda()
    if form != "none":
        extents = data.draw(st.sampled_from([1, batch])), data.draw(st.sampled_from([1, heads]))
        options["mask"] = mask_of(form, (*extents, seqlen_q, seqlen_k), dtype, data.draw(st.integers(0, 99)))
    precision = data.draw(st.sampled_from([Int8(), Int8(), Int8(smooth_q=True)]))
    check(*tensors(batch, seqlen_q, seqlen_k, heads, head_dim, dtype), precision, **options)


@pytest.mark.parametrize("form", ["bool", "bool keys", "keys"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_that_nobody_sees_are_never_loaded(head_dim: int, form: str) -> None:
    """NaN in scales and values there reaches nobody: not even as 0 times NaN."""
    q, k, v = tensors(1, 300, 640, 2, head_dim, "bfloat16")
    mask = mask_of(form, (1, 1, 300, 640), "bfloat16")
    mask[..., 128:384] = False if form.startswith("bool") else -torch.inf
    qk, v8 = quantize(Int8(), q, k, v)
    want = oa.attention(qk.q, qk.k, v8, mask=mask)
    k_scale, values = qk.k_scale.clone(), v8.v.clone()
    k_scale[..., 4:12] = torch.nan
    values[..., 128:384] = 0x7F
    spoilt = dataclasses.replace(qk, k_scale=k_scale)
    got = oa.attention(spoilt.q, spoilt.k, dataclasses.replace(v8, v=values), mask=mask)
    assert torch.equal(got, want)
    assert not got.isnan().any()


@pytest.mark.parametrize("form", FORMS)
def test_marks_of_nan_stay_where_they_are_seen(form: str) -> None:
    """A key with NaN marks the rows that see its group, a query its own row; hidden ones mark nobody."""
    q, k, v = tensors(1, 200, 512, 1, 128, "bfloat16")
    q[0, 150] = torch.nan
    k[0, 300, 0, 5] = torch.inf
    mask = mask_of(form, (1, 1, 200, 512), "bfloat16")
    hidden = slice(256, 384)  # the tile of scales
    rows = slice(0, 1) if "keys" in form else slice(0, 100)
    mask[..., rows, hidden] = False if form.startswith("bool") else -torch.inf
    if "keys" not in form:
        mask[..., 100:, hidden] = True if form.startswith("bool") else 0.0
    for options in ({}, {"softcap": 8.0}):
        out = oa.attention(q, k, v, mask=mask, precision="int8", **options)[0, :, 0].isnan().any(-1)
        want = torch.zeros(200, dtype=torch.bool, device="cuda")
        want[150] = True
        if "keys" not in form:
            want[100:] = True
        assert torch.equal(out, want)


@pytest.mark.parametrize("form", ["float32", "io", "keys"])
@pytest.mark.parametrize("value", [-3.0e38, 1.0e30, 9000.0, 1e5])
def test_large_values(form: str, value: float) -> None:
    q, k, v = tensors(1, 130, 264, 1, 64, "bfloat16")
    mask = mask_of(form, (1, 1, 130, 264), "bfloat16")
    mask[..., 100] = value
    check(q, k, v, mask=mask)


@pytest.mark.parametrize("form", ["float32", "io", "keys"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity(form: str, value: float) -> None:
    q, k, v = tensors(1, 130, 264, 1, 64, "bfloat16")
    mask = mask_of(form, (1, 1, 130, 264), "bfloat16")
    mask[..., 100] = value
    assert oa.attention(q, k, v, mask=mask, precision="int8").isnan().all()


def test_rows_that_have_only_the_lowest_number_are_means() -> None:
    q, k, v = tensors(1, 64, 200, 1, 64, "bfloat16")
    for mask in (
        torch.full((64, 200), torch.finfo(torch.float32).min, device="cuda"),
        torch.full((1, 200), torch.finfo(torch.float32).min, device="cuda"),
        torch.full((64, 200), torch.finfo(torch.bfloat16).min, device="cuda", dtype=torch.bfloat16),
    ):
        out = oa.attention(q, k, v, mask=mask, precision="int8").float()
        want = v.float().mean(dim=1, keepdim=True).expand_as(out)
        assert torch.allclose(out, want, atol=1e-2)


@pytest.mark.parametrize("seed", range(3))
def test_large_logits(seed: int) -> None:
    """Scores beyond what P has room for, and scales that integers have no exact sums for."""
    q, k, v = growing_scores(seed, (64, 128, 256)[seed % 3], 5)
    for form in FORMS:
        check(q, k, v, mask=mask_of(form, (1, 1, q.shape[1], 904), "bfloat16")[..., :900])
    check(q, k, v, softcap=50.0, causal=True)


@pytest.mark.parametrize("form", FORMS)
def test_same_bits_every_time(form: str) -> None:
    q, k, v = tensors(2, 700, 900, 4, 128, "bfloat16")
    mask = mask_of(form, (2, 4, 700, 904), "bfloat16")[..., :900]
    for softcap in (0.0, 20.0):
        want = oa.attention(q, k, v, mask=mask, softcap=softcap, precision="int8")
        for _ in range(15):
            assert torch.equal(oa.attention(q, k, v, mask=mask, softcap=softcap, precision="int8"), want)


@pytest.mark.parametrize("precision", [Int8(), Int8(smooth_q=True)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_sequences_with_softcap(head_dim: int, precision: Int8) -> None:
    heads, lengths = 4, [5, 0, 300, 129, 64, 700]
    starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(sum(lengths) + 3, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 700, "max_seqlen_k": 700}
    for call in ({"softcap": 3.0, "causal": True}, {"softcap": 50.0}, {"softmax_scale": -0.2}):
        found = oa.explain(q, k, v, **packed, **call, precision=precision)
        assert found.kernel.startswith("attn_int8_sm90")
        qk, v8 = quantize(precision, q, k, v, with_bias=True, **packed)
        o, lse = oa.attention_varlen(qk.q, qk.k, v8, return_lse=True, **call)
        want = expected(qk, v8, **call)
        check_expected(o.transpose(0, 1), lse, want, v.double().abs().max().item())
        assert torch.equal(oa.attention_varlen(q, k, v, **packed, **call, precision=precision), o)


def test_what_stays_on_mma_sync() -> None:
    q, k, v = tensors(1, 200, 256, 2, 128, "bfloat16")
    mask = torch.zeros(200, 257, device="cuda")[:, :256]
    found = oa.explain(q, k, v, mask=mask, precision="int8")
    assert found.kernel.startswith("attn_int8_sm80")
    assert "tensor maps cannot describe this mask" in str(found)
    text = str(oa.explain(q, k, v, mask=torch.ones(200, 256, dtype=torch.bool, device="cuda"), precision="int8"))
    assert "mask_pack_sm80_bf16" in text
    assert "mask_list_sm80" in text
