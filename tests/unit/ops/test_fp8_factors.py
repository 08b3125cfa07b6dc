"""``descale_v`` with a factor for each 128 rows of v: what it means, which kernels take it, what they are told."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.launch.host_struct import At
from omniattn.launch.structs import (
    ATTN_FP8_FACTORS_SM89,
    ATTN_FP8_FACTORS_SM90,
    ATTN_FP8_MODS_FACTORS_SM90,
    ATTN_FP8_SPLIT_FACTORS_SM90,
    LAYOUT_FP8,
)
from omniattn.plan.attention import plan_attention
from omniattn.problems import AttentionStrides, Descale, Target
from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.registry import REGISTRY
from tests.unit.launch.launch_fakes import fields_of_merge, fields_of_record
from tests.unit.launch.test_launch_fp8 import ADA, HOPPER, arrays
from tests.unit.ops.test_fp8 import drawn, e4m3, expanded, factors
from tests.unit.select.shape_plans import planned, unsplit

pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.frameworks


def exact(q: Any, k: Any, v: Any, dv: Any, **options: Any) -> tuple[Any, Any]:
    """(o, lse) of the values in fp64."""
    q, k, v = (decode_e4m3(x.view(np.uint8)).astype(np.float64) for x in (q, k, v))
    o, lse = oa.attention(q, k, v * expanded(dv, v.shape[1], v.shape[2]), return_lse=True, **options)
    return o, lse


def wide(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Six decades, both signs, one of them 0."""
    made = 10.0 ** rng.uniform(-4, 2, shape) * rng.choice([-1.0, 1.0], shape)
    made.reshape(-1)[-1] = 0.0
    return made.astype(np.float32)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (150, 10)}, {"softcap": 4.0}], ids=str)
@pytest.mark.parametrize("draw", [factors, wide], ids=["near", "wide"])
def test_values_are_products(draw: Any, options: dict[str, Any]) -> None:
    low, dv = e4m3(*drawn()), draw(np.random.default_rng(1), (2, 2, 3))
    o, lse = oa.attention(*low, descale_v=dv, out_dtype="float16", return_lse=True, **options)
    want, want_lse = exact(*low, dv, **options)
    assert np.abs(o - want).max() <= 0.05 * np.abs(want).max()
    assert np.abs(o - want).mean() <= 0.03 * np.abs(want).mean()
    assert np.abs(lse - want_lse).max() <= 2e-5


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e6])
def test_any_size(size: float) -> None:
    low, dv = e4m3(*drawn()), factors(np.random.default_rng(1), (2, 2, 3)) * np.float32(size)
    o, lse = oa.attention(*low, descale_v=dv, return_lse=True)
    want, want_lse = exact(*low, dv)
    assert np.abs(o.astype(np.float64) - want).max() <= 0.05 * np.abs(want).max()
    assert np.abs(lse - want_lse).max() <= 5e-5


def test_rows_of_small_factors_are_as_accurate() -> None:
    """P is rounded against what counts in its own row, not against the largest factor of the head."""
    low, dv = e4m3(*drawn(256, 256)), np.ones((2, 2, 2), np.float32)
    dv[:, :, 0] = 1e-6
    o, want = oa.attention(*low, descale_v=dv, causal=True), exact(*low, dv, causal=True)[0]
    for rows in (slice(0, 128), slice(128, 256)):
        assert np.abs(o.astype(np.float64) - want)[:, rows].mean() <= 0.05 * np.abs(want[:, rows]).mean()


def test_signs_zeros_and_what_is_no_number() -> None:
    low, dv = e4m3(*drawn(384, 384)), factors(np.random.default_rng(1), (2, 2, 3))
    o = oa.attention(*low, descale_v=dv, causal=True).astype(np.float32)
    assert np.array_equal(oa.attention(*low, descale_v=-dv, causal=True).astype(np.float32), -o)
    dv[:, :, 0] = 0.0
    o = oa.attention(*low, descale_v=dv, causal=True).astype(np.float32)
    assert not o[:, :128].any()
    assert np.abs(o[:, 128:]).max(axis=-1).all()
    for bad in (np.nan, np.inf, -np.inf):
        dv[1, 1, 2] = bad
        o, lse = oa.attention(*low, descale_v=dv, causal=True, return_lse=True)
        seen = np.zeros(o.shape, dtype=bool)
        seen[1, 256:, 2:] = True
        assert np.array_equal(np.isnan(o.astype(np.float32)), seen)
        assert np.array_equal(np.isnan(lse), seen[..., 0].swapaxes(1, 2))


def test_packed_sequences_are_the_single_ones() -> None:
    of_q, of_k = [140, 1, 0, 57], [130, 300, 5, 0]
    starts = [np.array([0, *np.cumsum(x)], dtype=np.int32) for x in (of_q, of_k)]
    rng = np.random.default_rng(2)
    q, k, v = e4m3(*(rng.standard_normal((sum(n), h, 64)) for n, h in ((of_q, 4), (of_k, 2), (of_k, 2))))
    dv = wide(rng, (4, 2, 3))
    longest = {"max_seqlen_q": 140, "max_seqlen_k": 300}
    o, lse = oa.attention_varlen(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], **longest, descale_v=dv, causal=True, return_lse=True
    )
    for b in range(4):
        rows, keys = (slice(s[b], s[b + 1]) for s in starts)
        one, one_lse = oa.attention(
            q[None, rows], k[None, keys], v[None, keys], causal=True, return_lse=True,
            descale_v=dv[b : b + 1, :, : -(-of_k[b] // 128)],
        )  # fmt: skip
        assert np.array_equal(o[rows].astype(np.float32), one[0].astype(np.float32))
        assert np.array_equal(lse[:, rows], one_lse[0])


def test_sinks_masks_and_a_head_dim_of_v() -> None:
    q, k, v = drawn()
    low, dv = e4m3(q, k, v[..., :40]), wide(np.random.default_rng(4), (2, 2, 3))
    sinks, mask = np.array([0.5, 2.0, -1.0, 30.0], np.float32), np.random.default_rng(3).random((2, 1, 150, 300)) < 0.6
    o, lse = oa.attention(*low, descale_v=dv, sinks=sinks, mask=mask, return_lse=True, out_dtype="float16")
    want, want_lse = exact(*low, dv, sinks=sinks.astype(np.float64), mask=mask)
    assert np.abs(o - want).max() <= 0.05 * np.abs(want).max()
    assert np.abs(lse - want_lse).max() <= 2e-5


@pytest.mark.frameworks
def test_torch_in_a_graph_gives_the_bits_of_numpy() -> None:
    torch = pytest.importorskip("torch")
    low, dv = e4m3(*drawn()), wide(np.random.default_rng(1), (2, 2, 3))
    tensors = [torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) for x in low]

    def f(q: Any, k: Any, v: Any, factor: Any) -> Any:
        return oa.attention(q, k, v, descale_v=factor, causal=True, return_lse=True)

    want, want_lse = oa.attention(*low, descale_v=dv, causal=True, return_lse=True)
    torch._dynamo.reset()
    for function in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        o, lse = function(*tensors, torch.from_numpy(dv))
        assert np.array_equal(o.float().numpy(), want.astype(np.float32))
        assert np.array_equal(lse.numpy(), want_lse)
    with pytest.raises(UnsupportedError, match=r"e4m3 .*have none"):
        f(*tensors, torch.from_numpy(dv).requires_grad_())


@pytest.mark.frameworks
def test_jax_gives_the_bits_of_numpy() -> None:
    jax = pytest.importorskip("jax")
    low, dv = e4m3(*drawn()), wide(np.random.default_rng(1), (2, 2, 3))
    want = oa.attention(*low, descale_v=dv, causal=True)
    given = [jax.numpy.asarray(x) for x in (*low, dv)]
    o = jax.jit(lambda q, k, v, factor: oa.attention(q, k, v, descale_v=factor, causal=True))(*given)
    assert np.array_equal(np.asarray(o.astype("float32")), want.astype(np.float32))


# --- What a GPU is told ----------------------------------------------------------------------------------------------


def by_block(**changes: Any) -> Any:
    problem = arrays("per_block", **changes)
    of_v = Descale("per_block", (8, 4, 1))
    return dataclasses.replace(problem, descales=dataclasses.replace(problem.descales, v=of_v))


def test_facts() -> None:
    low, dv = e4m3(*drawn()), np.ones((2, 3, 2), np.float32).swapaxes(1, 2)
    assert oa.explain(*low, descale_v=dv).problem.descales.v == Descale("per_block", (6, 1, 2))


@pytest.mark.parametrize("target", [HOPPER, ADA], ids=["sm90", "sm89"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_rows(head_dim: int, target: Target) -> None:
    width = next(d for d in (64, 128, 256) if d >= head_dim)
    own = "sm90" if target is HOPPER else "sm89"
    for changes, name in (
        ({}, f"attn_fp8_{own}_bf16_d{width}_factors"), ({"lse": True}, f"attn_fp8_{own}_bf16_d{width}_factors"),
    ):  # fmt: skip
        made = unsplit(by_block(head_dim=head_dim, **changes), target)
        assert [record.spec.name for record in made.records] == [f"layout_fp8_sm80_d{width}", name]
    packed = by_block(head_dim=head_dim, varlen=True, max_seqlen_q=300, max_seqlen_k=500)
    name = unsplit(packed, target).records[-1].spec.name
    assert name == f"attn_fp8_{own}_bf16_d{width}_factors" + "_varlen" * (own == "sm90")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("lse", [False, True])
def test_rows_with_forms(head_dim: int, lse: bool) -> None:
    width = next(d for d in (64, 128, 256) if d >= head_dim)
    bias = {"mask_map": True, "strides": dataclasses.replace(arrays().strides, mask=(0, 0, 512, 1))}
    packed = {"varlen": True, "max_seqlen_q": 300, "max_seqlen_k": 500}
    for changes, name in (
        ({"softcap": 4.0}, "softcap"), ({"softcap": 4.0, "mask": "bool"}, "softcap"), ({"mask": "bool"}, "masks"),
        ({"softmax_scale": -1.0}, "masks"), ({"softmax_scale": 0.0, "softcap": 4.0}, "softcap"),
        ({"mask": "float32", **bias}, "bias32"), ({"mask": "io", "softcap": 4.0, **bias}, "bias16"),
        ({"softcap": 4.0, **packed}, "varlen_softcap"), ({"softmax_scale": -1.0, **packed}, "varlen_softcap"),
    ):  # fmt: skip
        call = by_block(head_dim=head_dim, lse=lse, **changes)
        row = f"attn_fp8_sm90_bf16_d{width}_{name}_factors"
        launches = planned(call, HOPPER, lambda way, row=row: way.row.name == row)
        made = [record.spec.name for record in launches.records]
        assert made[-1] == row
        assert f"layout_fp8_sm80_d{width}" in made
        assert unsplit(call, ADA).records[-1].spec.name == f"attn_fp8_sm89_bf16_d{width}_factors_mods"
    # What Hopper's rows cannot take goes to those of every GPU.
    for changes in ({"mask": "float32", **bias, "mask_map": False}, {"mask": "bool", **packed}):
        made = unsplit(by_block(head_dim=head_dim, **changes), HOPPER).records
        assert made[-1].spec.name == f"attn_fp8_sm89_bf16_d{width}_factors_mods"


def test_arguments_of_rows_with_forms() -> None:
    made = unsplit(by_block(softcap=4.0), HOPPER)
    found = fields_of_record(made.records[-1], ATTN_FP8_MODS_FACTORS_SM90)
    assert found["factors.factors"] == At("descale_v")
    assert tuple(found[f"factors.stride_{x}"] for x in ("b", "h", "block")) == (8, 4, 1)
    assert found["scales.k_blocks"] == 4
    assert found["mods.cap_scale"] == pytest.approx(128**-0.5 / 4.0)
    assert found["operands.delta_s"] is found["operands.row_bias"] is None


def test_rows_with_factors_take_no_other_call() -> None:
    for spec in REGISTRY:
        if spec.value_factors:
            with pytest.raises(ArgumentError, match=r"128 rows|packed|score|head_dim|element|compiled|additive"):
                plan_attention(arrays(), HOPPER, spec.name)
    with pytest.raises(ArgumentError, match="no factor for each 128 rows of v"):
        plan_attention(by_block(), HOPPER, "attn_fp8_sm90_bf16_d128")


@pytest.mark.parametrize("target", [HOPPER, ADA], ids=["sm90", "sm89"])
def test_factors_are_read_where_they_are(target: Target) -> None:
    layout = ATTN_FP8_FACTORS_SM90 if target is HOPPER else ATTN_FP8_FACTORS_SM89
    records = unsplit(by_block(), target).records
    found = fields_of_record(records[-1], layout)
    assert found["factors.factors"] == At("descale_v")
    assert tuple(found[f"factors.stride_{x}"] for x in ("b", "h", "block")) == (8, 4, 1)
    # 500 keys are four blocks; without factors of K there is one more reason to count them.
    assert found["scales.k_blocks"] == 4
    only_v = arrays("none")
    only_v = dataclasses.replace(
        only_v, descales=dataclasses.replace(only_v.descales, v=Descale("per_block", (8, 4, 1)))
    )
    found = fields_of_record(unsplit(only_v, target).records[-1], layout)
    assert (found["scales.k_blocks"], found["scales.k_stride_block"], found["operands.k_scale"]) == (4, 0, None)
    # What lays V out multiplies nothing.
    assert fields_of_record(records[-2], LAYOUT_FP8)["descale"] is None
    nothing = fields_of_record(unsplit(by_block(seqlen_k=0), target).records[-1], layout)
    assert nothing["factors.factors"] is None


def test_codes_hold_the_sign() -> None:
    """Kernels flip the signs of P's bytes where a factor is negative."""
    p = np.linspace(0, 448, 100, dtype=np.float32)
    assert np.array_equal(encode_e4m3(-p), encode_e4m3(p) ^ 0x80)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_queries_are_split(head_dim: int, lse: bool) -> None:
    strides = AttentionStrides(
        q=(32 * 16 * head_dim, 32 * head_dim, head_dim), k=(8 * 32768 * head_dim, 8 * head_dim, head_dim),
        v=(8 * 32768 * head_dim, 8 * head_dim, head_dim), o=(32 * 16 * head_dim, 32 * head_dim, head_dim),
        lse=(512, 16), mask=(0, 0, 0, 0),
    )  # fmt: skip
    call = by_block(
        batch=1,
        num_q_heads=32,
        num_kv_heads=8,
        seqlen_q=16,
        seqlen_k=32768,
        head_dim=head_dim,
        lse=lse,
        strides=strides,
    )
    made = plan_attention(call, HOPPER, None)
    assert [r.spec.op for r in made.records] == ["layout_fp8", "attention_split", "attention_combine"]
    main = made.records[1]
    assert main.spec.name.endswith("_split_factors")
    found = fields_of_record(main, ATTN_FP8_SPLIT_FACTORS_SM90)
    assert found["factors.factors"] == At("descale_v")
    assert tuple(found[f"factors.stride_{x}"] for x in ("b", "h", "block")) == (8, 4, 1)
    merged = fields_of_merge(made.records[2])
    # One sum for O and LSE.
    assert merged["partial_ml"] == found["partial_ml"]
    assert merged["partial_lse"] is None
    assert (merged["lse"] is None) == (not lse)
    assert unsplit(call, ADA).records[-1].spec.op == "attention"
