"""Launches of calls on e4m3 without a GPU: quantizer, layout of V, scales by strides, signs of the rotation."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

import omniattn as oa
from omniattn.checks.attention import check_descales
from omniattn.errors import StrideError
from omniattn.launch import quantize
from omniattn.launch.host_struct import At
from omniattn.launch.structs import (
    ATTN_FP8_RAW_SM90,
    ATTN_INT8_MODS_SM90,
    ATTN_INT8_SM80,
    ATTN_INT8_SM90,
    LAYOUT_FP8,
    QUANTIZE,
    QUANTIZE_FP8,
    QUANTIZE_FP8_SUMS,
)
from omniattn.plan.attention import plan_attention
from omniattn.plan.engine import Launches
from omniattn.plan.others import plan_quantize
from omniattn.problems import (
    FP8_ARRAYS,
    AttentionProblem,
    AttentionStrides,
    Descale,
    Descales,
    QuantizeCall,
    QuantizeProblem,
    Target,
)
from omniattn.reference.rotation import negative_channels
from omniattn.registry import REGISTRY
from omniattn.testing.layout_cases import layout_cases
from tests.unit.launch.launch_fakes import fields_of_record
from tests.unit.select.shape_plans import unsplit

HOPPER, ADA = Target((9, 0), 232448, 132), Target((8, 9), 101376, 128)


def problem(precision: Any = None, **changes: Any) -> AttentionProblem:
    """batch 2, 4 query heads on 2, 300 queries, 500 keys, head_dim 128; NHD."""
    d, steps = 128, {name: (rows * heads * 128, heads * 128, 128) for name, rows, heads in
                     (("q", 300, 4), ("k", 500, 2), ("v", 500, 2), ("o", 300, 4))}  # fmt: skip
    strides = AttentionStrides(**steps, lse=(1200, 300), mask=(0, 0, 0, 0))
    made = AttentionProblem(
        "bfloat16", 2, 300, 500, 4, 2, d, -1, -1, d**-0.5, 0.0, "none", "none", False,
        (precision or oa.Fp8()).precision, strides=strides,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def with_queries(**changes: Any) -> Launches:
    """Launches by the kernel whose Q is quantized by one before it."""
    return plan_attention(problem(**changes), HOPPER, "attn_fp8_sm90_bf16_d128")


def arrays(kind: str = "none", **changes: Any) -> AttentionProblem:
    steps = {"none": [(0, 0, 0)] * 3, "scalar": [(0, 0, 0)] * 3, "per_head": [(2, 1, 0)] * 3,
             "per_block": [(12, 3, 1), (8, 4, 1), (2, 1, 0)]}[kind]  # fmt: skip
    kinds = [kind, kind, "per_head" if kind == "per_block" else kind]
    descales = Descales(*(Descale(name, step) for name, step in zip(kinds, steps, strict=True)))
    return dataclasses.replace(problem(), precision=FP8_ARRAYS, descales=descales, **changes)


def test_quantizer_layout_and_kernel_follow_each_other() -> None:
    names = [record.spec.name for record in unsplit(problem(), HOPPER).records]
    quantizers = ["quantize_fp8_sm80_bf16_d128_sums", "quantize_values_sm80_bf16_d128"]
    assert names == [*quantizers, "attn_fp8_sm90_bf16_d128_q16"]
    names = [record.spec.name for record in with_queries().records]
    assert names == [*quantizers, "attn_fp8_sm90_bf16_d128"]
    names = [record.spec.name for record in unsplit(problem(), ADA).records]
    assert names == ["quantize_fp8_sm80_bf16_d128", *["quantize_sm80_bf16_d128"] * 2, "attn_fp8_sm89_bf16_d128_acc16"]
    names = [record.spec.name for record in unsplit(problem(oa.Fp8(smooth_k=True)), HOPPER).records]
    assert names == [*["quantize_sm80_bf16_d128_rotated"] * 2, "attn_fp8_sm90_bf16_d128"]
    for target, kernel in ((HOPPER, "attn_fp8_sm90_bf16_d128"), (ADA, "attn_fp8_sm89_bf16_d128")):
        launches = unsplit(arrays(), target)
        assert [record.spec.name for record in launches.records] == ["layout_fp8_sm80_d128", kernel]
        assert [other.spec.name for other in launches.others] == ["layout_fp8_sm80_d128"]
    # Nothing to attend to: nothing is launched, whatever there is to quantize.
    assert unsplit(problem(seqlen_q=0), HOPPER).records == ()
    assert unsplit(arrays(seqlen_q=0), HOPPER).records == ()


def test_quantizer_of_rows() -> None:
    record = unsplit(problem(oa.Fp8(seed=9)), ADA).records[0]
    found = fields_of_record(record, QUANTIZE_FP8)
    assert record.grid == (2 * (4 * 3 + 2 * 4), 1, 1)
    assert (found["q.items"], found["q.blocks"], found["k.items"], found["k.blocks"]) == (24, 3, 16, 4)
    assert [found[f"q.stride_{x}"] for x in "bsh"] == [300 * 512, 512, 128]
    assert (found["q.x"], found["k.x"]) == (At("q"), At("k"))
    assert (found["rotation.channels"], found["rotation.to_e4m3"]) == (128, 1)
    assert tuple(found["rotation.signs"]) == quantize.sign_words(9)
    plain = fields_of_record(unsplit(problem(oa.Fp8(hadamard=False)), ADA).records[0], QUANTIZE_FP8)
    assert (plain["rotation.channels"], plain["rotation.norm"], set(plain["rotation.signs"])) == (0, 1.0, {0})


@pytest.mark.parametrize("changes", [{}, {"smooth_k": True}, {"varlen": True}, {"granularity": "per_tensor"}])
def test_which_rows_the_short_quantizer_takes(changes: dict[str, Any]) -> None:
    p = QuantizeProblem(
        "bfloat16", 2, 300, 500, 4, 2, 128, qk_dtype="float8_e4m3",
        **({"varlen": False, "granularity": "per_block", "smooth_k": False, "v": False} | changes),
    )  # fmt: skip
    assert p.is_of_rows == (not changes)
    launches = plan_quantize(QuantizeCall(p, ((1, 1, 1),) * 3, "NHD", 0), HOPPER, None)
    assert launches.selection.spec.op == ("quantize_fp8" if not changes else "quantize")


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32 - 1])
def test_signs_are_those_of_the_reference(seed: int) -> None:
    words = quantize.sign_words(seed)
    assert [bool(words[c // 32] >> c % 32 & 1) for c in range(256)] == list(negative_channels(256, seed))


@pytest.mark.parametrize("target", [HOPPER, ADA], ids=["sm90", "sm89"])
@pytest.mark.parametrize("kind", ["none", "scalar", "per_head", "per_block"])
def test_factors_are_read_where_they_are(kind: str, target: Target) -> None:
    for changes in ({}, {"softcap": 4.0}):
        launches = unsplit(arrays(kind, **changes), target)
        layout = ATTN_INT8_SM80
        if target is HOPPER:
            layout = ATTN_INT8_MODS_SM90 if changes else ATTN_INT8_SM90
        found = fields_of_record(launches.records[-1], layout)
        given = kind != "none"
        assert found["operands.q_scale"] == (At("descale_q") if given else None)
        assert found["operands.k_scale"] == (At("descale_k") if given else None)
        assert found["operands.row_bias"] is None
        blocks = {"per_head": ((2, 1, 0), (2, 1, 0)), "per_block": ((12, 3, 1), (8, 4, 1))}
        of_q, of_k = blocks.get(kind, ((0, 0, 0), (0, 0, 0)))
        assert tuple(found[f"scales.q_stride_{x}"] for x in ("b", "h", "block")) == of_q
        assert tuple(found[f"scales.k_stride_{x}"] for x in ("b", "h", "block")) == of_k
        assert (found["scales.by_slot"], found["scales.row_bytes"]) == (0, 128)
        assert found["scales.q_heads"] == (2 if kind == "per_head" else 1)
        assert (found["scales.q_blocks"], found["scales.k_blocks"]) == ((3, 4) if kind == "per_block" else (2**24,) * 2)
        made = fields_of_record(launches.records[-2], LAYOUT_FP8)
        assert made["descale"] == (At("descale_v") if given else None)
        assert found["scales.drift"] == made["drift"]
        assert found["scales.drift_stride_h"] == made["slots"] == 4


def test_own_scales_are_one_behind_the_other() -> None:
    found = fields_of_record(with_queries().records[-1], ATTN_INT8_SM90)
    assert tuple(found[f"scales.q_stride_{x}"] for x in ("b", "h", "block")) == (12, 3, 1)
    assert tuple(found[f"scales.k_stride_{x}"] for x in ("b", "h", "block")) == (8, 4, 1)
    assert (found["scales.by_slot"], found["scales.q_heads"], found["scales.drift"]) == (0, 1, None)
    packed = problem(varlen=True, max_seqlen_q=300, max_seqlen_k=500)
    found = fields_of_record(unsplit(packed, HOPPER).records[-1], ATTN_INT8_SM90)
    assert (found["scales.by_slot"], found["scales.q_stride_b"], found["scales.q_stride_h"]) == (1, 0, 5)


def test_values_without_a_look_at_them_are_summed_in_short_parts() -> None:
    """The caller's V is looked at by the layout; the quantizer's has no mean, unless it keeps it."""
    for precision, keys in ((oa.Fp8(), 2048), (oa.Fp8(smooth_v=False), 256)):
        found = fields_of_record(unsplit(problem(precision), HOPPER).records[-1], ATTN_INT8_SM90)
        assert (found["flush_keys"], found["scales.drift"]) == (keys, None)
    found = fields_of_record(unsplit(arrays(), HOPPER).records[-1], ATTN_INT8_SM90)
    assert found["flush_keys"] == 256
    assert found["scales.drift"] is not None


def test_tensor_maps_of_the_callers_arrays() -> None:
    record = unsplit(arrays(head_dim=128), HOPPER).records[-1]
    by_operand = {found.operand: found for found in record.tensor_maps}
    assert by_operand["q"].dims == (128, 300, 4, 2)
    assert by_operand["q"].strides_bytes == (512, 128, 300 * 512)
    assert by_operand["k"].dims == (128, 500, 2, 2)
    assert by_operand["workspace"].dims == (512, 128, 2, 2)


def test_every_layout_row_has_cases_with_and_without_drift() -> None:
    for spec in REGISTRY:
        if spec.op != "layout_fp8":
            continue
        drifts = {int(x) for case in layout_cases(spec) for x in case.prepare()[2]["drift"].reshape(-1)}
        assert {0, 1} <= drifts


def test_cases_of_layouts_are_told_apart_by_width() -> None:
    """Whoever prepares numbers ahead keeps them by case."""
    rows = [spec for spec in REGISTRY if spec.op == "layout_fp8"]
    cases = [case for spec in rows for case in layout_cases(spec)]
    assert len(set(cases)) == len(cases) == 4 * len(rows)


def test_queries_keys_and_values_in_two_launches() -> None:
    """500 keys: a chunk of 256 and one of 244; sums in front of 40 blocks of Q and K; four blocks of V a head."""
    sums, values, attention = with_queries().records
    assert [x.spec.op for x in (sums, values, attention)] == ["quantize_fp8_sums", "quantize_values", "attention"]
    assert (sums.grid, values.grid) == ((8 + 40, 1, 1), (16, 1, 1))
    assert (sums.overlap, values.overlap) == (False, True)
    first, second = fields_of_record(sums, QUANTIZE_FP8_SUMS), fields_of_record(values, QUANTIZE)
    assert {name: first[f"values.{name}"] for name in second} == second
    assert (first["chunks"], second["slots_r"], second["slots_k"], second["units"]) == (8, 2, 4, 4)
    names = "attn_fp8_sm90_bf16_d128,quantize_fp8_sm80_bf16_d128"
    alone = fields_of_record(plan_attention(problem(), HOPPER, names).records[0], QUANTIZE_FP8)
    assert {name: first[f"rows.{name}"] for name in alone} == alone
    found = fields_of_record(attention, ATTN_INT8_SM90)
    assert (found["operands.v_scale"], found["operands.v_mean"]) == (second["v_scale"], second["v_mean"])


def test_queries_that_attention_quantizes() -> None:
    """The same launches without Q's 24 blocks, and the rotation for the kernel that attends."""
    sums, values, attention = unsplit(problem(oa.Fp8(seed=9)), HOPPER).records
    assert attention.spec.name == "attn_fp8_sm90_bf16_d128_q16"
    assert (sums.grid, values.grid) == ((8 + 16, 1, 1), (16, 1, 1))
    assert (sums.overlap, values.overlap, attention.overlap) == (False, True, True)
    found = fields_of_record(attention, ATTN_FP8_RAW_SM90)
    assert (found["rotation.channels"], found["rotation.norm"]) == (128, pytest.approx(128**-0.5))
    assert tuple(found["rotation.signs"]) == quantize.sign_words(9)
    assert found["operands.row_bias"] is None
    by_operand = {found.operand: found for found in attention.tensor_maps}
    assert by_operand["q"].dims == (256, 300, 4, 2)  # bytes
    plain = fields_of_record(unsplit(problem(oa.Fp8(hadamard=False)), HOPPER).records[-1], ATTN_FP8_RAW_SM90)
    assert (plain["rotation.channels"], plain["rotation.norm"]) == (0, 1.0)


@pytest.mark.parametrize(
    "changes",
    [{"precision": oa.Fp8(smooth_k=True)}, {"precision": oa.Fp8(granularity="per_tensor")}, {"head_dim": 256},
     {"varlen": True, "max_seqlen_q": 300, "max_seqlen_k": 500}],
    ids=["mean of k", "one scale", "256 channels", "packed"],
)  # fmt: skip
def test_what_needs_queries_quantized_ahead(changes: dict[str, Any]) -> None:
    assert not unsplit(problem(**changes), HOPPER).selection.spec.quantizes_q


def test_scratch_of_values_lies_apart() -> None:
    launches = unsplit(problem(), HOPPER)
    found = fields_of_record(launches.records[1], QUANTIZE)
    sizes = {
        "v_out": 4 * 128 * 512, "v_scale": 4 * 4 * 128, "v_mean": 4 * 4 * 128, "v_error": 8 * 4 * 128,
        "partials": 16 * 4 * 2 * 128, "v_bad": 16, "v_done": 16,
    }  # fmt: skip
    spans = sorted((found[name].offset, found[name].offset + size) for name, size in sizes.items())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= launches.workspace_bytes


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({"precision": oa.Fp8(smooth_v=False)}, HOPPER),
        ({"precision": oa.Fp8(smooth_k=True)}, HOPPER),
        ({"varlen": True, "max_seqlen_q": 300, "max_seqlen_k": 500}, HOPPER),
        ({}, ADA),
    ],
    ids=["no mean of v", "mean of k", "packed", "older GPU"],
)
def test_what_is_left_to_the_quantizer_for_anything(changes: dict[str, Any], target: Target) -> None:
    launches = unsplit(problem(**changes), target)
    assert not any(record.spec.op == "quantize_values" for record in launches.records)


def test_named_quantizers_are_taken() -> None:
    for name in ("quantize_values_sm80_bf16_d128", "quantize_fp8_sm80_bf16_d128_sums"):
        ops = [record.spec.op for record in plan_attention(problem(), HOPPER, name).records]
        assert ops[:2] == ["quantize_fp8_sums", "quantize_values"]
        assert ops[2] in ("attention", "attention_split")
    for name in ("quantize_sm80_bf16_d128", "quantize_fp8_sm80_bf16_d128"):
        ops = [record.spec.op for record in plan_attention(problem(), HOPPER, name).records]
        assert ops[:3] == ["quantize_fp8", "quantize", "quantize"]
        assert ops[3] in ("attention", "attention_split")
    with pytest.raises(oa.errors.ArgumentError, match="compiled for float16"):
        plan_attention(problem(), HOPPER, "quantize_values_sm80_fp16_d128")


@pytest.mark.parametrize(("step", "device"), [(-1, "cuda"), (2**32, "cuda"), (-1, "cpu"), (2**32 - 1, "cuda")])
def test_strides_between_the_blocks_of_factors(step: int, device: str) -> None:
    """Kernels count blocks from the first one on, with 32 bits for the step."""
    factors: Any = SimpleNamespace(dtype="float32", device=device, shape=(2, 4, 3), strides=(3, 6, step))
    if device == "cuda" and step != 2**32 - 1:
        with pytest.raises(StrideError, match=r"descale_k.*blocks at a stride from 0 to 2\^32 - 1.*\(3, 6, "):
            check_descales({"descale_k": factors}, (2, 8, 4), (300, 300), "attention")
    else:
        found = check_descales({"descale_k": factors}, (2, 8, 4), (300, 300), "attention")
        assert found.k == Descale("per_block", (3, 6, step))
