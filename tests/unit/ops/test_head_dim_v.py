"""v with a head_dim of its own: selection, launches, calls on the CPU. No GPU, no driver."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import omniattn
from omniattn import testing
from omniattn.errors import ArgumentError, ShapeError, UnsupportedError
from omniattn.launch.structs import ATTN_FWD, ATTN_FWD_SM90
from omniattn.plan.attention import plan_attention
from omniattn.problems import UNLIMITED, AttentionProblem, AttentionStrides, BackwardProblem, Int4, Int8, Target
from omniattn.registry import REGISTRY
from omniattn.select import candidates, choices, select_backward
from tests.numerics import naive64
from tests.unit.launch.launch_fakes import fields_of_record
from tests.unit.select.shape_plans import row_of, unsplit

TARGETS = {
    "sm_80": Target((8, 0), 163 << 10),
    "sm_86": Target((8, 6), 99 << 10),
    "sm_90": Target((9, 0), 227 << 10, 132),
    "sm_120": Target((12, 0), 99 << 10),
}
HOPPER = TARGETS["sm_90"]
TUNED = [(192, 128), (128, 64), (64, 128), (96, 64)]
PAIRS = [*TUNED, (8, 256), (256, 8), (72, 40), (200, 136), (24, 16), (248, 256)]
CALLS: list[dict[str, Any]] = [
    {}, {"window_right": 0}, {"varlen": True}, {"softcap": 5.0}, {"mask": "bool"}, {"lse": True},
    {"mask": "float32", "mask_map": True}, {"varlen": True, "mask": "bool", "max_seqlen_q": 64, "max_seqlen_k": 64},
]  # fmt: skip


def problem(head_dim: int, own: int, **changes: Any) -> AttentionProblem:
    plain = AttentionProblem(
        "bfloat16", 2, 300, 500, 4, 2, head_dim, UNLIMITED, UNLIMITED, 0.1, 0.0, "none", "none", False,
        strides=AttentionStrides((8, 16, 24), (32, 40, 48), (56, 64, 72), (80, 88, 96), (13, 14), (0, 0, 0, 0)),
        own_head_dim_v=own,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), PAIRS)
def test_every_pair_has_a_kernel(head_dim: int, head_dim_v: int, target: Target) -> None:
    for changes in CALLS:
        rows = {way.row for way in candidates(problem(head_dim, head_dim_v, **changes), target)}
        assert all(row.head_dim >= head_dim and row.head_dim_v >= head_dim_v for row in rows)
        assert all(row.arch_specific or row.other_head_dim_v for row in rows)
        assert any(row.family == "attn_fwd_sm90" for row in rows) == (target is HOPPER)
    for knobs in (Int8(), Int4()):
        spec = row_of(problem(head_dim, head_dim_v, precision=knobs.precision), target)
        assert spec.quantized
        assert spec.head_dim >= max(head_dim, head_dim_v)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), TUNED)
def test_tuned_pairs(head_dim: int, head_dim_v: int, varlen: bool) -> None:
    """Rows of their own are among the ways; calls of one head_dim, which they could serve too, have none of them."""
    found = choices(problem(head_dim - 8, head_dim_v, varlen=varlen), HOPPER)
    own = [x for x in found if (x.candidate.row.head_dim, x.candidate.row.head_dim_v) == (head_dim, head_dim_v)]
    assert f"head_dim {head_dim - 8} and {head_dim_v} of v in a tile of {head_dim}, {head_dim_v} of v" in own[0].why[0]
    others = candidates(problem(64, 0, varlen=varlen), HOPPER)
    assert not any(way.row.own_head_dim_v for way in others)


def test_kernels_of_one_head_dim_stay_with_it() -> None:
    row = "attn_fwd_sm80_bf16_d128_v"
    with pytest.raises(ArgumentError, match="it is for v of another head_dim than q"):
        choices(problem(128, 0), HOPPER, row)
    with pytest.raises(ArgumentError, match="it takes v of q's head_dim only"):
        choices(problem(128, 64), HOPPER, row.replace("_v", ""))
    with pytest.raises(ArgumentError, match="it takes v of head_dim up to 64, not 72"):
        choices(problem(128, 72), HOPPER, "attn_fwd_sm90_bf16_d128v64_m256n64")


@pytest.mark.parametrize("cc", ["sm_80", "sm_90"])
def test_no_gradients_on_a_gpu(cc: str) -> None:
    with pytest.raises(UnsupportedError, match=r"head_dim 64 and 32 of v.*q, k and v of one head_dim, filled up with"):
        select_backward(BackwardProblem(problem(64, 32, lse=True)), TARGETS[cc])


def test_work_and_bytes() -> None:
    p = problem(192, 128)
    assert p.flops == 2 * 2 * 4 * 300 * 500 * (192 + 128)
    assert p.min_bytes == 2 * (2 * (192 + 128) * (300 * 4 + 500 * 2) + 4 * 300 * 4)
    assert (p.o_shape, p.q_shape) == ((2, 300, 4, 128), (2, 300, 4, 192))
    same = problem(192, 0)
    assert same.flops == 4 * 2 * 4 * 300 * 500 * 192
    assert same.o_shape == same.q_shape


def test_hopper_gets_maps_of_both_widths() -> None:
    (record,) = plan_attention(problem(192, 128), HOPPER, None).records
    fields = fields_of_record(record, ATTN_FWD_SM90)
    rows = {name: fields[f"map_{name}"] for name in "qkv"}
    assert [rows[name].dims for name in "qkv"] == [(192, 300, 4, 2), (192, 500, 2, 2), (128, 500, 2, 2)]
    assert rows["v"].strides_bytes == (128, 144, 112)
    assert (fields["fwd.head_dim"], fields["fwd.head_dim_qk"]) == (128, 0)


def test_expanded_arrays_have_maps_with_strides_of_0() -> None:
    strides = AttentionStrides((8, 16, 24), (0, 40, 0), (0, 64, 72), (80, 88, 96), (13, 14), (0, 0, 0, 0))
    row = "attn_fwd_sm90_bf16_d128_m128n128"
    (record,) = plan_attention(problem(128, 0, strides=strides), HOPPER, row).records
    fields = fields_of_record(record, ATTN_FWD_SM90)
    assert fields["map_k"].strides_bytes == (80, 0, 0)
    assert fields["map_v"].strides_bytes == (128, 144, 0)
    # One batch and one head have no strides of their own: those of the map are positive.
    strides = dataclasses.replace(strides, v=(0, 64, 0))
    one = problem(128, 0, strides=strides, batch=1, num_kv_heads=1, num_q_heads=1, seqlen_k=64)
    (record,) = plan_attention(one, HOPPER, row).records
    assert fields_of_record(record, ATTN_FWD_SM90)["map_k"].strides_bytes == (80, 16, 16)


@pytest.mark.parametrize("own", [0, 40])
def test_others_are_told_both(own: int) -> None:
    row = "attn_fwd_sm80_bf16_d96" + "_v" * bool(own)
    (record,) = plan_attention(problem(72, own), TARGETS["sm_80"], row).records
    fields = fields_of_record(record, ATTN_FWD)
    assert (fields["head_dim"], fields["head_dim_qk"]) == ((own, 72) if own else (72, 0))


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 104)])
def test_low_precision_quantizes_q_and_k_apart_from_v(
    head_dim: int, head_dim_v: int, target: str, varlen: bool
) -> None:
    p = problem(head_dim, head_dim_v, precision=Int8().precision, varlen=varlen)
    launches = unsplit(p, TARGETS[target])
    spec = launches.selection.spec
    whole = p.quantization(
        grouping=spec.grouping, pv=spec.pv, pv_accumulator=spec.pv_accumulator, unpacked=spec.qk == "int8"
    )
    qk, v = p.quantizations(whole)
    assert (qk.head_dim, qk.qk, qk.v, v.head_dim, v.qk, v.v) == (head_dim, True, False, head_dim_v, False, True)
    assert whole.head_dim == max(head_dim, head_dim_v)
    # Together they make the arrays that the kernel reads, in their shapes.
    assert qk.shapes() | v.shapes() == whole.shapes()
    assert [record.spec.op for record in launches.records] == ["quantize"] * 4 + ["attention"]
    assert all(record.spec.head_dim >= whole.head_dim_pad for record in launches.records)
    # Their scratch memory is apart too, and behind the operands.
    tickets = [
        next(x.add for x in record.pointers if x.operand == "workspace" and x.offset == field_of_ticket())
        for record in launches.records[:4]
    ]
    assert tickets[0] == tickets[1] < tickets[2] == tickets[3] < launches.workspace_bytes
    assert p.quantizations(whole)[0].head_dim_pad == whole.head_dim_pad


def field_of_ticket() -> int:
    from omniattn.launch.structs import QUANTIZE

    return QUANTIZE.offsets["ticket"]


def test_one_head_dim_is_quantized_at_once() -> None:
    p = problem(64, 0, precision=Int8().precision)
    whole = p.quantization(grouping="sm90", pv="fp8", pv_accumulator="fp32", unpacked=True)
    assert p.quantizations(whole) == (whole,)


def arrays(head_dim: int, head_dim_v: int, *lead: int, layout: str = "NHD") -> tuple[Any, Any, Any]:
    q, k, _ = testing.make_qkv(
        batch=2, seqlen_q=9, seqlen_k=13, heads_q=4, heads_kv=2, head_dim=head_dim, layout=layout
    )
    shape = (*k.shape[:-1], head_dim_v)
    return q, k, testing.normal(shape, 7)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 8), (8, 40)])
def test_on_the_cpu(head_dim: int, head_dim_v: int, layout: str) -> None:
    q, k, v = arrays(head_dim, head_dim_v, layout=layout)
    options: dict[str, Any] = {"layout": layout, "causal": True, "softcap": 3.0}
    wanted, wanted_lse = naive64.dense(q, k, v, **options)
    o, lse = omniattn.attention(q, k, v, return_lse=True, **options)
    testing.assert_close(o, wanted, atol=1e-5)
    testing.assert_close(lse, wanted_lse, atol=1e-5)
    out = np.zeros(wanted.shape, dtype=q.dtype)
    assert omniattn.attention(q, k, v, out=out, **options) is out
    assert np.array_equal(out, o)
    for precision, most in (("int8", 0.05), ("int4", 0.5)):
        low = omniattn.attention(q, k, v, precision=precision, **options)
        assert low.shape == wanted.shape
        assert np.abs(low - wanted).max() <= most * np.abs(wanted).max()


def test_low_precision_is_that_of_padded_arrays() -> None:
    q, k, v = arrays(24, 8)
    wide = np.concatenate([v, np.zeros((*v.shape[:-1], 16), dtype=v.dtype)], axis=-1)
    got = omniattn.attention(q, k, v, precision="int8")
    assert np.array_equal(got, omniattn.attention(q, k, wide, precision="int8")[..., :8])


def test_packed_on_the_cpu() -> None:
    q, k, v = (x[0] for x in arrays(16, 24))
    starts = np.array([0, 4, 9], dtype=np.int32), np.array([0, 6, 13], dtype=np.int32)
    o = omniattn.attention_varlen(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=5, max_seqlen_k=7
    )
    for b in range(2):
        own = (x[None, s[b] : s[b + 1]] for x, s in ((q, starts[0]), (k, starts[1]), (v, starts[1])))
        testing.assert_close(o[starts[0][b] : starts[0][b + 1]], naive64.dense(*own)[0][0], atol=1e-5)


def test_gradients_on_the_cpu() -> None:
    """Against those of padded arrays."""
    q, k, v = arrays(24, 8)
    wide = np.concatenate([v, np.zeros((*v.shape[:-1], 16), dtype=v.dtype)], axis=-1)
    do = testing.normal((*q.shape[:-1], 8), 5)
    wide_do = np.concatenate([do, np.zeros((*do.shape[:-1], 16), dtype=do.dtype)], axis=-1)
    o, lse = omniattn.attention(q, k, v, return_lse=True)
    wide_o = omniattn.attention(q, k, wide)
    dq, dk, dv = omniattn.attention_backward(do, q, k, v, o, lse)
    padded = omniattn.attention_backward(wide_do, q, k, wide, wide_o, lse)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    for got, wanted in zip((dq, dk, dv), (*padded[:2], padded[2][..., :8]), strict=True):
        testing.assert_close(got, wanted, atol=1e-6)


@pytest.mark.parametrize("head_dim_v", [0, 4, 12, 520])
def test_head_dims_that_no_kernel_has(head_dim_v: int) -> None:
    q, k, _ = arrays(16, 16)
    with pytest.raises(
        ShapeError, match=rf"'v': expected head_dim a multiple of 8 from 8 to 512, received {head_dim_v}"
    ):
        omniattn.attention(q, k, np.zeros((*k.shape[:-1], head_dim_v), dtype=k.dtype))


def test_out_has_the_shape_of_v() -> None:
    q, k, v = arrays(16, 24)
    with pytest.raises(ShapeError, match=r"'out': expected shape \(2, 9, 4, 24\), received \(2, 9, 4, 16\)"):
        omniattn.attention(q, k, v, out=np.zeros_like(q))


def test_rows_say_both_widths() -> None:
    wide = [spec for spec in REGISTRY if spec.own_head_dim_v and spec.op.startswith("attention")]
    wide = [spec for spec in wide if not spec.above_head_dim]
    assert {(spec.head_dim, spec.head_dim_v) for spec in wide} == set(TUNED)
    assert all(spec.prebuild == ("90a",) for spec in wide)
    for spec in REGISTRY:
        assert spec.head_dim_v == (spec.own_head_dim_v or spec.head_dim)
