"""Keys of 8 bits split over CTAs, without a GPU: records carried out in NumPy from the bytes that they point at."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError
from omniattn.launch import attn_fwd_split, attn_int8
from omniattn.launch.host_struct import At
from omniattn.launch.structs import ATTN_INT8_SPLIT_SM90
from omniattn.plan.attention import plan_attention
from omniattn.problems import AttentionProblem, Descale, Descales, Fp8, Int4, Int8, QuantizeProblem
from omniattn.problems.precision import FP8_ARRAYS
from omniattn.problems.split import SplitKV, gqa_packing
from omniattn.reference.dequantize import contents, dequantize_qk, dequantize_v
from omniattn.reference.e4m3 import decode_e4m3
from omniattn.reference.quantize import KEY_ORDER
from omniattn.registry import REGISTRY, KernelSpec, by_name
from omniattn.runtime.record import LaunchRecord, TensorMap
from omniattn.select import choices, ranked
from omniattn.testing.cases import cases_for
from tests.unit.launch.launch_fakes import fields_of_merge, fields_of_record
from tests.unit.launch.test_launch_split import AMPERE, FEW, HOPPER, combine, items_of, problem_of, visible

#: Plain rows; others: test_fp8_factors.py, test_launch_split_int8_scores.py, test_stream_k.py.
SPLIT = [
    s for s in REGISTRY
    if s.op == "attention_split" and s.quantized and not (s.value_factors or s.score_mods)
    and s.sequences != "packed"
]  # fmt: skip
#: Small tiles, so that small problems have many; kernels of such tiles do not exist. Scales are of 128 keys.
SMALL = dataclasses.replace(by_name("attn_int8_sm90_fp16_d64_m128n64_split"), block_m=16)
INT8 = Int8().precision


def bytes_of(m: TensorMap, memory: np.ndarray, coordinates: tuple[int, ...]) -> np.ndarray:
    """What a copy brings from flat ``memory`` of bytes: rows of the box, zeros outside the tensor."""
    grids = np.meshgrid(*(np.arange(n) + c for n, c in zip(m.box[::-1], coordinates[::-1], strict=True)), indexing="ij")
    inside = np.ones(grids[0].shape, bool)
    at = np.zeros(grids[0].shape, np.int64)
    for index, extent, stride in zip(grids, m.dims[::-1], (1, *m.strides_bytes)[::-1], strict=True):
        inside &= (index >= 0) & (index < extent)
        at += index * stride
    return np.where(inside, memory[np.where(inside, at, 0)], 0).astype(np.uint8).reshape(-1, m.box[0])


def attend(spec: KernelSpec, record: LaunchRecord, memory: dict[str, np.ndarray], workspace: np.ndarray) -> None:
    """attn_int8_sm90 with SPLIT_KEYS, without the rounding of P. memory: the operands by name, flat."""
    f = fields_of_record(record, ATTN_INT8_SPLIT_SM90)
    map_q, map_k, map_v = f["map_q"], f["map_k"], f["map_v"]
    pack, splits, queries = (f[f"tiles.{name}"] for name in ("pack", "num_splits", "num_queries"))
    rows, sk, d = f["fwd.seqlen_q"], f["fwd.seqlen_k"], f["fwd.head_dim"]
    heads, blocks, pad = f["fwd.num_q_heads"], f["fwd.num_m_blocks"], f["operands.head_dim_pad"]
    window, group = (f["fwd.window_left"], f["fwd.window_right"]), f["fwd.num_q_heads"] // f["fwd.num_kv_heads"]
    assert map_q.box[1] * map_q.box[2] == spec.block_m
    o_at, ml_at, lse_at = (f[name].offset // 4 for name in ("partial_o", "partial_ml", "partial_lse"))
    scale = f["fwd.softmax_scale"]
    for item in items_of(f, record.grid[0]):
        per_head = blocks * splits
        head = item // per_head
        block = per_head - 1 - (item - head * per_head)
        split, m0 = block // blocks, block % blocks * spec.block_m
        batch, head = divmod(head, heads)
        kv = batch * f["fwd.num_kv_heads"] + head // group
        top = visible(m0 // pack, queries, sk, *window)
        bottom = visible((min(m0 + spec.block_m, rows) - 1) // pack, queries, sk, *window)
        first, end = top[0] // spec.block_n, -(-bottom[1] // spec.block_n)
        each, rest = divmod(max(end - first, 0), splits)
        first += split * each + min(split, rest)
        end = first + each + (split < rest)
        own = m0 + np.arange(spec.block_m)
        exists = own < rows
        own = np.minimum(own, rows - 1)
        query, of_heads = own // pack, f["tiles.pack_heads"]
        seen = np.array([visible(row, queries, sk, *window) for row in query])
        of_call = (batch * heads + head) * of_heads + np.minimum(own % pack, of_heads - 1)
        q_scale = memory["q_scale"][of_call * f["operands.q_scale_stride_h"] + (query >> 4) * 8 + (query & 7)]
        bias = memory["row_bias"][of_call * queries + query] * scale
        q = np.concatenate(
            [bytes_of(map_q, memory["q_int"], (x, 0, m0 // pack, head, batch)) for x in range(0, pad, map_q.box[0])], 1
        )
        m2, total, o = np.full(spec.block_m, -3e38), np.zeros(spec.block_m), np.zeros((spec.block_m, pad))
        for n in range(end - 1, first - 1, -1):
            at = (n * spec.block_n, head // group, batch)
            k = np.concatenate([bytes_of(map_k, memory["k_int"], (x, *at)) for x in range(0, pad, map_k.box[0])], 1)
            v = bytes_of(map_v, memory["v"], (at[0], 0, *at[1:]))[:pad]
            of_tile = kv * f["operands.k_scale_stride_h"] + n * spec.block_n // 128 * 4
            k_scale = memory["k_scale"][of_tile + np.arange(spec.block_n) % 8 // 2]
            s = q.view(np.int8).astype(float) @ k.view(np.int8).astype(float).T
            s *= q_scale[:, None] * k_scale * (scale * np.log2(np.e))
            keys = n * spec.block_n + np.arange(spec.block_n)
            s[(keys < seen[:, :1]) | (keys >= seen[:, 1:])] = -np.inf
            base = np.maximum(m2, s.max(axis=1))
            p, alpha = np.exp2(s - base[:, None]), np.exp2(m2 - base)
            permuted = p.reshape(spec.block_m, -1, 16)[:, :, KEY_ORDER].reshape(p.shape)
            m2, total = base, total * alpha + p.sum(axis=1)
            o = o * alpha[:, None] + permuted @ decode_e4m3(v).astype(float).T
        channels = kv * pad + np.arange(pad)
        mean = memory["v_mean"][channels] if f["operands.v_mean"] is not None else 0.0
        o = o * memory["v_scale"][channels] + total[:, None] * mean
        base = np.where(total > 0, m2 + bias * np.log2(np.e), m2)
        if f["fwd.sinks"] is not None:
            m2 = base
        place = (batch * heads + head) * splits + split
        for r in np.flatnonzero(exists):
            to = place * rows + m0 + r
            assert np.isnan(workspace[o_at + to * d : o_at + to * d + d]).all()
            workspace[o_at + to * d : o_at + to * d + d] = o[r, :d]
            workspace[ml_at + 2 * to : ml_at + 2 * to + 2] = m2[r], total[r]
            assert np.isnan(workspace[lse_at + 2 * to])
            workspace[lse_at + 2 * to : lse_at + 2 * to + 2] = base[r], total[r]


def operands_of(p: AttentionProblem, seed: int) -> tuple[QuantizeProblem, dict[str, np.ndarray], list[np.ndarray]]:
    """What describes quantized operands, their arrays, and q, k, v as these say, heads first, in float64."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.standard_normal((p.batch, rows, heads, p.head_dim)).astype(np.float16)
        for rows, heads in ((p.seqlen_q, p.num_q_heads), (p.seqlen_k, p.num_kv_heads), (p.seqlen_k, p.num_kv_heads))
    )
    q *= (1 + np.arange(q.shape[1])[None, :, None, None] % 5 + np.arange(q.shape[2])[:, None]).astype(np.float16)
    k[..., 3] += 2.0
    v[..., 1] -= 3.0
    qk, v8 = oa.quantize_qk(q, k, with_bias=True), oa.quantize_v(v, smooth_v=True)
    (problem, arrays), (_, of_v) = contents(qk), contents(v8)
    whole = p.quantization(grouping="sm90", pv="fp8", pv_accumulator="fp32", unpacked=True)
    assert {n: x.shape for n, x in (arrays | of_v).items()} == {n: s for n, (s, _) in whole.shapes().items()}
    assert problem.row_bias == whole.row_bias == "full"
    numbers = [x.astype(np.float64) for x in (*dequantize_qk(qk), dequantize_v(v8))]
    return whole, arrays | of_v, numbers


def carried_out(p: AttentionProblem, spec: KernelSpec, splits: int) -> None:
    """Both records of a split in NumPy against attention on the operands' numbers, in float64."""
    p = dataclasses.replace(p, precision=INT8)
    pack_gqa = gqa_packing(p, spec.block_m)
    schedule = SplitKV(splits)
    whole, arrays, (q, k, v) = operands_of(p, p.seqlen_q * 1000 + splits)
    merge = by_name("attn_combine_lse_sm90_fp16")
    (main, merged), num_bytes = attn_fwd_split.build(
        spec, merge, p, HOPPER, pack_gqa, schedule, places=attn_int8.given(whole)
    )
    memory = {name: x.ravel().view(np.uint8 if x.itemsize == 1 else x.dtype) for name, x in arrays.items()}
    sinks = np.linspace(-1.0, 2.0, p.num_q_heads) if p.sinks != "none" else None
    workspace = np.full(num_bytes // 4, np.nan)
    o, lse = np.full(p.batch * p.seqlen_q * p.num_q_heads * p.head_dim, np.nan), np.full(q[..., 0].size, np.nan)
    attend(spec, main, memory, workspace)
    combine(merged, workspace, o, lse, sinks)
    group, s = p.num_q_heads // p.num_kv_heads, p.strides
    assert s is not None
    wanted, wanted_lse = np.full_like(o, np.nan), np.full_like(lse, np.nan)  # compared as a whole, which is quicker
    for b, h, i in np.ndindex(p.batch, p.num_q_heads, p.seqlen_q):
        lo, hi = visible(i, p.seqlen_q, p.seqlen_k, p.window_left, p.window_right)
        smoothed = k[b, h // group, lo:hi] - arrays["k_mean"][b, h // group, : p.head_dim]
        terms = np.exp((smoothed @ q[b, h, i] + arrays["row_bias"][b, h, i]) * p.softmax_scale)
        total = terms.sum() + (0.0 if sinks is None else np.exp(sinks[h]))
        expected = terms @ v[b, h // group, lo:hi] / total if total else np.zeros(p.head_dim)
        at = b * s.o[0] + i * s.o[1] + h * s.o[2]
        wanted[at : at + p.head_dim] = expected
        wanted_lse[b * s.lse[0] + h * s.lse[1] + i] = np.log(total) if total else -np.inf
    assert not np.isnan(wanted).any()
    assert not np.isnan(wanted_lse).any()
    np.testing.assert_allclose(o, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("splits", [1, 3, 7])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (130, 6)])
def test_scales_and_biases_are_those_of_the_rows(splits: int, window: tuple[int, int]) -> None:
    left, right = window
    for batch, sq, sk, hq, hk in ((2, 5, 301, 4, 2), (1, 1, 500, 8, 1), (1, 40, 260, 2, 2), (1, 21, 64, 6, 2),
                                  (2, 5, 300, 7, 1), (1, 9, 200, 6, 2)):  # fmt: skip
        carried_out(problem_of(batch, sq, sk, hq, hk, d=32, left=left, right=right), SMALL, splits)


def test_sinks_wide_heads_and_real_tiles() -> None:
    small = dataclasses.replace(by_name("attn_int8_sm90_fp16_d128_m128n64_split"), block_m=16)
    carried_out(problem_of(1, 3, 200, 4, 1, d=72, right=0, sinks="float32"), small, 3)
    carried_out(problem_of(2, 9, 300, 16, 2, d=128), by_name("attn_int8_sm90_fp16_d128_m192n64_split"), 2)
    carried_out(problem_of(1, 70, 200, 4, 1, d=64, right=0), by_name("attn_int8_sm90_fp16_d64_m128n64_split"), 2)


# Selection and plans


def few(extents: tuple[int, ...], right: int = -1, head_dim: int = 128, **changes: Any) -> AttentionProblem:
    b, hq, hk, sq, sk = extents
    given = {"precision": INT8, "dtype": "bfloat16", "lse": False, **changes}
    return problem_of(b, sq, sk, hq, hk, d=head_dim, right=right, **given)


def test_rows_that_need_an_lse() -> None:
    needy = {spec.name for spec in SPLIT if spec.needs_lse}
    assert needy == {spec.name for spec in SPLIT if spec.name.endswith("_split_lse")}
    assert needy


@pytest.mark.parametrize("spec", SPLIT, ids=lambda spec: spec.name)
def test_forced_rows(spec: KernelSpec) -> None:
    """Quantizers first, where the operands do not come quantized; results behind the operands."""
    precision = (Fp8() if spec.qk == "fp8" else Int8()).precision
    p = few((2, 32, 8, 9, 5000), head_dim=spec.head_dim, dtype=spec.dtype, lse=spec.lse, precision=precision)
    launches = plan_attention(p, HOPPER, spec.name)
    ops = [r.spec.op for r in launches.records]
    merge = "attention_combine" + "_lse" * p.lse
    assert ops[-2:] == ["attention_split", merge]
    assert {*ops[:-2]} <= {"quantize", "quantize_fp8_sums", "quantize_values"}
    assert [x.spec.op for x in launches.others] == [*dict.fromkeys(ops[:-2]), merge]
    main, merged = launches.records[-2:]
    assert launches.selection.spec is main.spec is spec
    assert [r.overlap for r in launches.records[-2:]] == [False, True]
    assert main.num_ctas <= HOPPER.sm_count
    f, m = fields_of_record(main, ATTN_INT8_SPLIT_SM90), fields_of_merge(merged)
    assert f["fwd.lse"] is f["fwd.sinks"] is f["operands.delta_s"] is None
    assert f["partial_lse"] == m["partial_lse"]
    assert (f["partial_lse"] is not None) == p.lse
    assert m["lse"] == (At("lse") if p.lse else None)
    if not p.lse:
        with pytest.raises(ArgumentError, match="makes no LSE"):
            plan_attention(dataclasses.replace(p, lse=True), HOPPER, spec.name)
    if spec.needs_lse:  # it would write sums that have no place
        with pytest.raises(ArgumentError, match="for calls that want the LSE"):
            plan_attention(dataclasses.replace(p, lse=False), HOPPER, spec.name)
    results = 2 * 32 * 9 * f["tiles.num_splits"]
    used = [place for name, place in f.items() if name.startswith("operands.") and isinstance(place, At)]
    assert f["partial_o"].offset > max(place.offset for place in used)
    assert f["partial_ml"].offset - f["partial_o"].offset >= 4 * results * spec.head_dim
    assert launches.workspace_bytes >= f["partial_ml"].offset + 8 * results * (1 + p.lse)
    if p.lse:
        assert f["partial_lse"].offset == f["partial_ml"].offset + 8 * results
    assert all(m[name] == f[name] for name in ("partial_o", "partial_ml"))
    for box in (x.box for x in main.tensor_maps):
        assert all(1 <= n <= 256 for n in box)
    assert np.prod(f["map_q"].box[1:]) == spec.block_m
    assert f["map_k"].box == (min(spec.head_dim, 128), 64, 1, 1)
    assert f["map_v"].box == (64, spec.head_dim, 1, 1)


def test_operands_of_the_caller_need_room_for_results_alone() -> None:
    p = few((1, 8, 2, 16, 9000))
    whole = p.quantization(grouping="sm90", pv="fp8", pv_accumulator="fp32", unpacked=True)
    given = dataclasses.replace(p, operands=whole)
    launches = plan_attention(given, HOPPER, "attn_int8_sm90_bf16_d128_m128n64_split")
    main, merged = launches.records
    f = fields_of_record(main, ATTN_INT8_SPLIT_SM90)
    assert f["map_q"].operand == "q_int"
    assert (f["operands.k_scale"], f["operands.row_bias"]) == (At("k_scale"), At("row_bias"))
    assert f["partial_o"] == At("workspace", 0)
    assert merged.spec.op == "attention_combine"


@pytest.mark.parametrize(
    "changes",
    [
        {"seqlen_k": 0}, {"varlen": True}, {"softcap": 30.0}, {"mask": "bool"},
        {"tensor_maps": False}, {"precision": Int8(smooth_q=True).precision}, {"precision": Fp8().precision},
        {"precision": Int4().precision}, {"precision": Int8(pv="fp16").precision},
        {"precision": FP8_ARRAYS}, {"precision": oa.problems.EXACT},
    ],
    ids=str,
)  # fmt: skip
def test_what_they_do_not_take(changes: dict[str, Any]) -> None:
    p = dataclasses.replace(few((1, 32, 8, 16, 32768)), **changes)
    with pytest.raises(ArgumentError):
        plan_attention(p, HOPPER, "attn_int8_sm90_bf16_d128_m128n64_split")


def test_other_rows_and_gpus() -> None:
    p = few((1, 32, 8, 16, 32768))
    with pytest.raises(ArgumentError, match="it multiplies bfloat16, not int8 ones"):
        plan_attention(p, HOPPER, "attn_fwd_sm90_bf16_d128_m128n128_split")
    assert [r.spec.op for r in plan_attention(p, AMPERE, None).records][-1] == "attention"


@pytest.mark.parametrize("spec", SPLIT, ids=lambda spec: spec.name)
def test_rows_are_what_their_cases_launch(spec: KernelSpec) -> None:
    """A row's cases, forced as the GPU tests do: most are split in several parts."""
    splits = []
    for case in cases_for("fp8_attention" if spec.qk == "fp8" else "quantized_attention"):
        ((sq, sk), *more) = case.lengths
        left, right = case.options.get("window", (-1, 0 if case.options.get("causal") else -1))
        precision = case.options["precision"].precision
        if case.packed or precision.smooth_q or {*case.arrays} - {"sinks"} or "softcap" in case.options:
            continue
        p = problem_of(
            1 + len(more), sq, sk, case.heads_q, case.heads_kv, spec.head_dim - case.below, left, right, case.layout,
            "float32" if "sinks" in case.arrays else "none", spec.dtype, precision=precision,
            lse=spec.lse,
        )  # fmt: skip
        (main,) = (r for r in plan_attention(p, HOPPER, spec.name).records if r.spec.op == "attention_split")
        assert main.spec is spec
        splits.append(fields_of_record(main, ATTN_INT8_SPLIT_SM90)["tiles.num_splits"])
    assert sum(n > 1 for n in splits) >= 3
    assert max(splits) > 10


def test_arrays_in_e4m3() -> None:
    """V is laid out first, Q and K are read where they are, heads of a kv head share a scale or have their own."""
    p = few((2, 32, 8, 9, 5000), precision=FP8_ARRAYS)
    for q, heads in ((Descale("per_head", (8, 1, 0)), 4), (Descale("per_block", (32, 1, 64)), 1)):
        given = dataclasses.replace(p, descales=Descales(q=q))
        launches = plan_attention(given, HOPPER, "attn_fp8_sm90_bf16_d128_m192n64_split")
        assert [r.spec.op for r in launches.records] == ["layout_fp8", "attention_split", "attention_combine"]
        f, s = fields_of_record(launches.records[1], ATTN_INT8_SPLIT_SM90), p.strides
        assert s is not None
        assert (f["map_q"].operand, f["map_k"].operand, f["map_v"].operand) == ("q", "k", "workspace")
        assert f["map_q"].strides_bytes == (s.q[2], s.q[1], 4 * s.q[2], s.q[0])
        assert f["scales.q_heads"] == heads
        assert f["operands.q_scale"] == At("descale_q")
        assert f["partial_o"].offset > f["map_v"].add


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("extents", FEW)
def test_few_queries_are_split(extents: tuple[int, ...], right: int, lse: bool) -> None:
    p = few(extents, right, lse=lse)
    (us, first), *others = ranked(p, HOPPER)
    spec = first.row
    assert (spec.op, spec.qk, spec.dtype, spec.head_dim) == ("attention_split", "int8", "bfloat16", 128)
    assert spec.lse == lse
    assert isinstance(first.schedule, SplitKV)
    assert us < 0.9 * min(time for time, way in others if way.row.op == "attention")
    launches = plan_attention(p, HOPPER, None)
    assert [r.spec.op for r in launches.records][-2:] == ["attention_split", "attention_combine" + "_lse" * lse]
    # O has the same bits with an LSE and without: the same tiles and splits.
    other = choices(dataclasses.replace(p, lse=not lse), HOPPER)[0].candidate
    assert (other.pack_gqa, other.schedule, other.row.block_m) == (first.pack_gqa, first.schedule, spec.block_m)
    # What quantizes takes longer than exact attention, and `explain` says so.
    assert any("precision='exact' for few queries" in reason for reason in launches.selection.why)


def test_a_call_that_became_exact_says_so() -> None:
    p = dataclasses.replace(few((1, 32, 8, 16, 32768)), precision=oa.problems.EXACT, note="exact in place of int8")
    assert choices(p, HOPPER)[0].why[0] == "exact in place of int8"
