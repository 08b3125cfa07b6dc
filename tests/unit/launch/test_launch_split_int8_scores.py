"""Keys of 8 bits split over CTAs, with masks, biases, softcap or smoothed queries. No GPU: records in NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError
from omniattn.launch import score_mods
from omniattn.launch.host_struct import At
from omniattn.launch.structs import (
    ATTN_FP8_SPLIT_MODS_FACTORS_SM90,
    ATTN_INT8_SPLIT_MODS_SM90,
    MASK_LIST,
    MASK_PACK,
)
from omniattn.plan.attention import plan_attention
from omniattn.plan.stages import launches_of
from omniattn.problems import AttentionProblem, Descale, Descales, Fp8, Int4, Int8
from omniattn.problems.precision import FP8_ARRAYS
from omniattn.problems.split import ONE_HEAD, SplitKV
from omniattn.reference.dequantize import contents
from omniattn.reference.e4m3 import decode_e4m3
from omniattn.reference.mask_tiles import key_bias, lists, pack_bits
from omniattn.reference.quantize import KEY_ORDER
from omniattn.registry import REGISTRY, KernelSpec, by_name
from omniattn.runtime.record import LaunchRecord, TensorMap
from omniattn.select import Candidate, candidates, choices, ranked
from omniattn.select.candidate import mask_inputs
from omniattn.testing.cases import cases_for
from tests.unit.launch.launch_fakes import fields_of_merge, fields_of_record
from tests.unit.launch.test_launch_split import AMPERE, HOPPER, combine, items_of, problem_of, visible
from tests.unit.launch.test_launch_split_int8 import INT8, bytes_of

ROWS = [s for s in REGISTRY if s.op == "attention_split" and s.quantized and s.score_mods]
SMOOTHED = Int8(smooth_q=True).precision


def few(extents: tuple[int, ...] = (1, 32, 8, 16, 32768), of_mask: Any = None, **changes: Any) -> AttentionProblem:
    """of_mask: its strides."""
    b, hq, hk, sq, sk = extents
    given = {"precision": INT8, "dtype": "bfloat16", "lse": False, "d": 128, **changes}
    p = problem_of(b, sq, sk, hq, hk, **given)
    assert p.strides is not None
    return p if of_mask is None else dataclasses.replace(p, strides=dataclasses.replace(p.strides, mask=of_mask))


def test_rows() -> None:
    """One for each form, width, type and way of scales; with as many stages as fit."""
    kinds = ("masks", "softcap", "bias16", "bias32")
    names = {
        f"attn_{qk}_sm90_{short}_d{d}_m128n64_split_{kind}{factors}"
        for qk, factors in (("int8", ""), ("fp8", ""), ("fp8", "_factors"))
        for short in ("fp16", "bf16") for d in (64, 128, 256) for kind in kinds
    }  # fmt: skip
    assert {s.name for s in ROWS} == names
    for spec in ROWS:
        assert (spec.block_m, spec.prebuild, spec.min_arch) == (128, ("90a",), (9, 0))
        assert spec.lse
        stages = int(dict(spec.defines)["NUM_STAGES"])
        stage_bytes = 128 * spec.head_dim + 16 + (128 * 64 * spec.bias_bytes or 1024)
        stage_bytes += 256 if spec.smooth_q == "any" else 0
        assert spec.smem_bytes <= HOPPER.max_smem
        assert spec.smem_bytes + stage_bytes > HOPPER.max_smem or stages == 8


# Records carried out


def elements(m: TensorMap, memory: np.ndarray, coordinates: tuple[int, ...]) -> np.ndarray:
    """What a copy brings from flat ``memory``: rows of the box, zeros outside the tensor."""
    grids = np.meshgrid(*(np.arange(n) + c for n, c in zip(m.box[::-1], coordinates[::-1], strict=True)), indexing="ij")
    inside, at = np.ones(grids[0].shape, bool), np.zeros(grids[0].shape, np.int64)
    strides = (1, *(x // memory.itemsize for x in m.strides_bytes))
    for grid, extent, stride in zip(grids, m.dims[::-1], strides[::-1], strict=True):
        inside &= (grid >= 0) & (grid < extent)
        at += grid * stride
    return np.where(inside, memory[np.where(inside, at, 0)], 0).astype(float).reshape(-1, m.box[0])


def made_of(records: tuple[LaunchRecord, ...], mask: np.ndarray) -> dict[int, np.ndarray]:
    """What the kernels before attention leave in the workspace, flat, by offset."""
    f, of_list = fields_of_record(records[0], MASK_PACK), fields_of_record(records[1], MASK_LIST)
    values, kinds = pack_bits(mask) if f["bits"] is not None else key_bias(mask[:, :, 0])
    names = ("num_m_blocks", "block_m", "lead_rows", "seqlen_q", "seqlen_k", "window_left", "window_right")
    listed = lists(kinds, **{x: of_list[x] for x in names}, broadcast_rows=bool(of_list["broadcast_rows"]))
    assert of_list["kinds"] == f["kinds"]
    return {(f["bits"] or f["key_bias"]).offset: values.ravel(), of_list["lists"].offset: listed.ravel()}


def visible_of(words: np.ndarray) -> np.ndarray:
    """(64, 64) of the 128 words of a tile of bits."""
    thread, bit = np.arange(128)[:, None], np.arange(32)
    rows = thread // 32 * 16 + thread % 32 // 4 + 8 * (bit >> 1 & 1)
    found = np.zeros((64, 64), bool)
    found[rows, 8 * (bit >> 2) + 2 * (thread % 4) + (bit & 1)] = words[:, None] >> bit.astype(np.uint32) & 1
    return found


def attend(
    spec: KernelSpec, record: LaunchRecord, memory: dict[str, np.ndarray], made: dict[int, np.ndarray],
    workspace: np.ndarray,
) -> None:  # fmt: skip
    """attn_int8_sm90 with SPLIT_KEYS and SCORE_MOD, without the rounding of P."""
    f = fields_of_record(record, ATTN_INT8_SPLIT_MODS_SM90)
    splits, rows, sk, d = f["tiles.num_splits"], f["fwd.seqlen_q"], f["fwd.seqlen_k"], f["fwd.head_dim"]
    heads, blocks, pad = f["fwd.num_q_heads"], f["fwd.num_m_blocks"], f["operands.head_dim_pad"]
    window, group = (f["fwd.window_left"], f["fwd.window_right"]), heads // f["fwd.num_kv_heads"]
    assert (f["tiles.pack"], f["tiles.pack_heads"], f["tiles.num_queries"], f["tiles.lead_rows"]) == (1, 1, rows, 0)
    form, of_mask = f["mods.flags"], f["mods.tiles"]
    for item in items_of(f, record.grid[0]):
        head, place = divmod(item, blocks * splits)
        split, block = divmod(blocks * splits - 1 - place, blocks)
        (batch, head), m0 = divmod(head, heads), block * 128
        kv = batch * f["fwd.num_kv_heads"] + head // group
        first = visible(m0, rows, sk, *window)[0] // 64
        end = max(-(-visible(min(m0 + 128, rows) - 1, rows, sk, *window)[1] // 64), first)
        entries = [n | (1 if form & score_mods.BIAS else 2) * 0b0101 << 22 for n in range(end - 1, first - 1, -1)]
        if f["mods.lists"] is None:
            each, rest = divmod(len(entries), splits)  # splits go forward, steps backward
            last = len(entries) - (split * each + min(split, rest))
            entries = entries[last - each - (split < rest) : last]
        else:
            of_lists = made[f["mods.lists"].offset]
            at = batch * f["mods.lists_stride_b"] + head * f["mods.lists_stride_h"]
            at += block * (1 + f["mods.num_tiles"])
            entries = of_lists[at + 1 : at + 1 + of_lists[at]].tolist()
            each, rest = divmod(len(entries), splits)
            entries = entries[split * each + min(split, rest) :][: each + (split < rest)]
        own = np.minimum(m0 + np.arange(128), rows - 1)
        seen = np.array([visible(row, rows, sk, *window) for row in own])
        of_call = batch * heads + head
        q_scale = memory["q_scale"][of_call * f["operands.q_scale_stride_h"] + (own >> 4) * 8 + (own & 7)]
        shift = memory["row_bias"][of_call * rows + own].astype(float)
        at_q = [bytes_of(f["map_q"], memory["q_int"], (x, 0, m0, head, batch)) for x in range(0, pad, min(pad, 128))]
        q = np.concatenate(at_q, 1).view(np.int8).astype(float)
        m2, total, o = np.full(128, -3e38), np.zeros(128), np.zeros((128, pad))
        for entry in entries:
            n, kinds = entry & (1 << 22) - 1, [entry >> 22 + 2 * g & 3 for g in (0, 1)]
            at = (n * 64, head // group, batch)
            k = np.concatenate(
                [bytes_of(f["map_k"], memory["k_int"], (x, *at)) for x in range(0, pad, min(pad, 128))], 1
            )
            v = bytes_of(f["map_v"], memory["v"], (at[0], 0, *at[1:]))[:pad]
            k_scale = memory["k_scale"][kv * f["operands.k_scale_stride_h"] + n // 2 * 4 + np.arange(64) % 8 // 2]
            keys = n * 64 + np.arange(64)
            s = (q @ k.view(np.int8).astype(float).T) * q_scale[:, None] * k_scale
            if f["operands.delta_s"] is not None:
                assert n * 64 + 64 <= f["operands.delta_columns"]
                of_block = (of_call * f["operands.delta_stride_h"] + own // 128 * f["operands.delta_columns"])[:, None]
                s = s + memory["delta_s"][of_block + keys]
            if form & score_mods.SOFTCAP:
                s = f["mods.factor"] * np.tanh((s + shift[:, None]) * f["mods.cap_scale"])
            else:
                s = s * f["mods.factor"]
            if form & score_mods.BIAS:
                coordinates = (0, m0, head * f["mods.bias_head"], batch * f["mods.bias_batch"])
                box = f["map_bias"].box[0]
                tiles = [elements(f["map_bias"], memory["mask"], (n * 64 + x, *coordinates)) for x in range(0, 64, box)]
                s = s + np.concatenate(tiles, 1)
            at = batch * f["mods.tiles_stride_b"] + head * f["mods.tiles_stride_h"]
            if form & score_mods.KEY_BIAS:
                s = s + made[of_mask.offset][at + n * 64 : at + n * 64 + 64]
            for g in (0, 1):
                part = slice(64 * g, 64 * g + 64)
                if kinds[g] == 0:
                    s[part] = -np.inf
                elif form & score_mods.BITS and kinds[g] == 1:
                    word = at + n * 128 + (m0 // 64 + g) * f["mods.tiles_stride_m"]
                    s[part][~visible_of(made[of_mask.offset][word : word + 128])] = -np.inf
            s[(keys < seen[:, :1]) | (keys >= seen[:, 1:])] = -np.inf
            s *= np.log2(np.e)
            base = np.maximum(m2, s.max(axis=1))
            p, alpha = np.exp2(s - base[:, None]), np.exp2(m2 - base)
            permuted = p.reshape(128, -1, 16)[:, :, KEY_ORDER].reshape(p.shape)
            m2, total = base, total * alpha + p.sum(axis=1)
            o = o * alpha[:, None] + permuted @ decode_e4m3(v).astype(float).T
        channels = kv * pad + np.arange(pad)
        mean = memory["v_mean"][channels] if f["operands.v_mean"] is not None else 0.0
        o = o * memory["v_scale"][channels] + total[:, None] * mean
        lacks = 0.0 if form & score_mods.SOFTCAP else shift * f["fwd.softmax_scale"] * np.log2(np.e)
        base = np.where(total > 0, m2 + lacks, m2)
        m2 = base if f["fwd.sinks"] is not None else m2
        results = (of_call * splits + split) * rows
        for to, r in ((results + m0 + r, r) for r in range(min(128, rows - m0))):
            o_at, ml_at, lse_at = (f[x].offset // 4 for x in ("partial_o", "partial_ml", "partial_lse"))
            assert np.isnan(workspace[o_at + to * d : o_at + to * d + d]).all()
            workspace[o_at + to * d : o_at + to * d + d] = o[r, :d]
            workspace[ml_at + 2 * to : ml_at + 2 * to + 2] = m2[r], total[r]
            workspace[lse_at + 2 * to : lse_at + 2 * to + 2] = base[r], total[r]


#: Extents (batch, query heads, kv heads, queries, keys), window, and extents of the mask.
CALLS = [
    ((2, 4, 2, 5, 712), (-1, -1), (2, 1)),
    ((1, 2, 1, 150, 328), (-1, 0), (1, 2)),
    ((1, 4, 4, 70, 520), (260, 6), (1, 1)),
    ((1, 3, 1, 40, 24), (-1, 0), (1, 3)),
]


@pytest.mark.parametrize("splits", [1, 3, 7])
@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize(
    ("form", "softcap", "kind"),
    [
        ("none", 0.0, "masks"), ("none", 6.0, "softcap"), ("bits", 0.0, "masks"), ("bits of keys", 3.0, "softcap"),
        ("keys", 0.0, "masks"), ("tiles", 0.0, "bias32"), ("tiles", 5.0, "bias32"),
    ],
)  # fmt: skip
def test_carried_out(form: str, softcap: float, kind: str, call: Any, splits: int) -> None:
    """All records of a call on smoothed queries, against attention on the operands' numbers in float64."""
    (b, hq, hk, sq, sk), (left, right), (mask_b, mask_h) = call
    rng = np.random.default_rng(sq + splits)
    q, k, v = (
        rng.standard_normal((b, n, h, 64)).astype(np.float16) for n, h in ((sq, hq), (sk, hk), (sk, hk))
    )  # fmt: skip
    q[..., 2] += 1.0
    k[..., 3] += 2.0
    v[..., 1] -= 3.0
    qk, v8 = oa.quantize_qk(q, k, with_bias=True, smooth_q=True), oa.quantize_v(v, smooth_v=True)
    (_, arrays), (_, of_v) = contents(qk), contents(v8)
    arrays = arrays | of_v
    p = few((b, hq, hk, sq, sk), d=64, dtype="float16", left=left, right=right, precision=SMOOTHED, lse=True)
    p = dataclasses.replace(p, softcap=softcap, sinks="float32" if softcap else "none")
    p = dataclasses.replace(p, operands=p.quantization(grouping="sm90", pv="fp8", pv_accumulator="fp32", unpacked=True))
    mask_rows = 1 if "keys" in form else sq
    shown = rng.random((mask_b, mask_h, mask_rows, sk)) < 0.7
    shown[..., sk // 4 : sk // 2] = False
    shown[:, :, mask_rows // 2 : mask_rows // 2 + (mask_rows > 1)] = False
    mask = np.where(shown, rng.standard_normal(shown.shape), -np.inf).astype(np.float32)
    if form != "none":
        strides = tuple(x // 4 * (n > 1) for x, n in zip(mask.strides[:3], mask.shape[:3], strict=True))
        assert p.strides is not None
        p = dataclasses.replace(
            p, mask="bool" if "bits" in form else "float32", mask_map=form == "tiles",
            strides=dataclasses.replace(p.strides, mask=(*strides, 1)),
        )  # fmt: skip
    row = by_name(f"attn_int8_sm90_fp16_d64_m128n64_split_{kind}")
    launches = launches_of(Candidate(row, ONE_HEAD, SplitKV(splits), mask_inputs(row, p)[0]), p, HOPPER, None)
    *before, main, merged = launches.records
    assert main.spec is row
    assert [r.spec.op for r in before] == (["mask_pack", "mask_list"] if "bits" in form or form == "keys" else [])
    made = made_of(tuple(before), shown if "bits" in form else mask) if before else {}
    memory = {name: x.ravel().view(np.uint8 if x.itemsize == 1 else x.dtype) for name, x in arrays.items()}
    memory["mask"] = mask.ravel()
    workspace = np.full(launches.workspace_bytes // 4, np.nan)
    o, lse = np.full(q.size, np.nan), np.full(q[..., 0].size, np.nan)
    sinks = np.linspace(-1.0, 2.0, hq) if softcap else None
    attend(main.spec, main, memory, made, workspace)
    combine(merged, workspace, o, lse, sinks)

    own = np.arange(sq)
    biases = (
        np.where(shown, mask if form in ("keys", "tiles") else 0.0, -np.inf) if form != "none" else np.zeros((1,) * 4)
    )
    biases = np.broadcast_to(biases, (b, hq, sq, sk))
    numbers = (v8.v_scale[..., None] * decode_e4m3(of_v["v"]) + v8.v_mean[..., None]).astype(float)
    codes = numbers.reshape(*numbers.shape[:3], -1, 16) if numbers.shape[-1] % 16 == 0 else None
    assert codes is not None
    values = np.empty_like(codes)
    values[..., KEY_ORDER] = codes
    values = values.reshape(numbers.shape).transpose(0, 1, 3, 2)
    assert p.strides is not None
    wanted, wanted_lse = np.full_like(o, np.nan), np.full_like(lse, np.nan)  # compared as a whole, which is quicker
    for i, h in np.ndindex(b, hq):
        q_scale = arrays["q_scale"][i, h][own // 16 * 8 + own % 8].astype(float)
        k_scale = arrays["k_scale"][i, h // (hq // hk)][np.arange(sk) // 128 * 4 + np.arange(sk) % 8 // 2]
        s = arrays["q_int"][i, h].astype(float) @ arrays["k_int"][i, h // (hq // hk)].astype(float).T
        s = (
            s * q_scale[:, None] * k_scale
            + arrays["delta_s"][i, h][own // 128, :sk]
            + arrays["row_bias"][i, h][:, None]
        )
        s *= p.softmax_scale
        s = softcap * np.tanh(s / softcap) if softcap else s
        s = s + biases[i, h]
        for r in range(sq):
            lo, hi = visible(r, sq, sk, left, right)
            terms = np.exp(s[r, lo:hi])
            total = terms.sum() + (0.0 if sinks is None else np.exp(sinks[h]))
            want = terms @ values[i, h // (hq // hk), lo:hi] / total if total else np.zeros(64)
            at = i * p.strides.o[0] + r * p.strides.o[1] + h * p.strides.o[2]
            wanted[at : at + 64] = want
            wanted_lse[i * p.strides.lse[0] + h * p.strides.lse[1] + r] = np.log(total) if total else -np.inf
    assert not np.isnan(wanted).any()
    assert not np.isnan(wanted_lse).any()
    np.testing.assert_allclose(o, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-4)


# Selection and plans


def taken_by(spec: KernelSpec, **changes: Any) -> AttentionProblem:
    """A call that the row takes, with what it is for."""
    fields: dict[str, Any] = {
        "d": spec.head_dim,
        "dtype": spec.dtype,
        "softcap": 0.0 if spec.softcap == "never" else 9.0,
    }
    if spec.value_factors:
        by_block = Descale("per_block", (8 * 40, 40, 1))
        fields |= {"precision": FP8_ARRAYS, "descales": Descales(v=by_block)}
    else:
        fields["precision"] = (Fp8() if spec.qk == "fp8" else Int8()).precision
    kind = {0: "bool", 2: "io", 4: "float32"}[spec.bias_bytes]
    return few((2, 32, 8, 9, 5000), (9 * 5000, 0, 5000, 1), mask_map=True, **{**fields, "mask": kind, **changes})


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.name)
def test_forced_rows(spec: KernelSpec, lse: bool) -> None:
    """The mask first, then what makes operands; results behind both."""
    factors = spec.value_factors
    launches = plan_attention(taken_by(spec, lse=lse), HOPPER, spec.name)
    ops = [r.spec.op for r in launches.records]
    before = [] if spec.bias_bytes else ["mask_pack", "mask_list"]
    merge = "attention_combine" + "_lse" * (lse and not factors)
    assert ops[: len(before)] == before
    assert ops[-2:] == ["attention_split", merge]
    assert {*ops[len(before) : -2]} <= {"quantize", "quantize_fp8_sums", "quantize_values", "layout_fp8"}
    assert [x.spec.op for x in launches.others] == [*dict.fromkeys(ops[len(before) : -2]), *before, merge]
    main, merged = launches.records[-2:]
    assert launches.selection.spec is main.spec is spec
    assert [r.overlap for r in launches.records[-2:]] == [False, True]
    layout = ATTN_FP8_SPLIT_MODS_FACTORS_SM90 if factors else ATTN_INT8_SPLIT_MODS_SM90
    f, m = fields_of_record(main, layout), fields_of_merge(merged)
    assert f["fwd.lse"] is f["fwd.sinks"] is f["operands.delta_s"] is None
    if factors:
        assert f["factors.factors"] == At("descale_v")
        assert m["partial_lse"] is None
    else:
        assert f["partial_lse"] == m["partial_lse"]
        assert (f["partial_lse"] is not None) == lse
    assert all(m[name] == f[name] for name in ("partial_o", "partial_ml"))
    assert m["lse"] == (At("lse") if lse else None)
    # Operands, then what is made of the mask, then results.
    of_mask = {f["mods.tiles"], f["mods.lists"]} - {None}
    results_at = [f[name].offset for name in ("partial_o", "partial_ml")]
    operands = [x for name, x in f.items() if name.startswith(("operands.", "fwd.")) and isinstance(x, At)]
    operands = [x for x in operands if x.operand == "workspace"]
    places = [max((x.offset for x in operands), default=-1), *sorted(x.offset for x in of_mask), *results_at]
    assert places == sorted({*places})
    results = 2 * 32 * 9 * f["tiles.num_splits"]
    assert f["partial_ml"].offset - f["partial_o"].offset >= 4 * results * spec.head_dim
    assert launches.workspace_bytes >= f["partial_ml"].offset + 8 * results * (1 + (lse and not factors))
    assert f["map_q"].box == (min(spec.head_dim, 128), 1, 128, 1, 1)
    if spec.bias_bytes:
        assert f["map_bias"].operand == "mask"
        assert f["map_bias"].box == (128 // spec.bias_bytes, 1, 128, 1, 1)
        assert f["map_bias"].dims == (5000, 1, 9, 1, 2)
    else:
        ends = {x: fields_of_record(launches.records[0], MASK_PACK)[x] for x in ("bits", "kinds")}
        assert f["mods.tiles"] == ends["bits"]
        assert f["mods.lists"] == fields_of_record(launches.records[1], MASK_LIST)["lists"]
        assert f["mods.lists"].offset < f["partial_o"].offset


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"mask": "bool"}, "masks"), ({"mask": "float32"}, "masks"), ({"softcap": 30.0}, "softcap"),
        ({"softcap": 30.0, "mask": "bool"}, "softcap"), ({"softmax_scale": -1.0}, "masks"),
        ({"precision": SMOOTHED}, "masks"), ({"precision": Int4().precision}, "masks"),
        ({"precision": SMOOTHED, "softcap": 30.0}, "softcap"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize("lse", [False, True])
def test_few_queries_are_split(changes: dict[str, Any], kind: str, head_dim: int, lse: bool) -> None:
    p = dataclasses.replace(few(d=head_dim, lse=lse), **changes)
    (us, first), *others = ranked(p, HOPPER)
    tile = {96: 128}.get(head_dim, head_dim)
    assert first.row.name == f"attn_int8_sm90_bf16_d{tile}_m128n64_split_{kind}"
    assert first.pack_gqa == ONE_HEAD
    assert isinstance(first.schedule, SplitKV)
    assert first.schedule.splits >= 2
    assert us < 0.9 * min(time for time, way in others if way.row.op == "attention")
    launches = plan_attention(p, HOPPER, None)
    assert ("quantize_delta" in [r.spec.op for r in launches.records]) == p.precision.smooth_q
    # O has the same bits.
    assert choices(dataclasses.replace(p, lse=not lse), HOPPER)[0].candidate == first


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("precision", [INT8, SMOOTHED, Fp8().precision], ids=str)
def test_biases_of_queries_and_keys(precision: Any, itemsize: int) -> None:
    mask = {2: "io", 4: "float32"}[itemsize]
    p = few((1, 32, 8, 16, 32768), (0, 0, 32768, 1), mask=mask, mask_map=True, precision=precision)
    name = plan_attention(p, HOPPER, None).selection.spec.name
    assert name == f"attn_{precision.qk}_sm90_bf16_d128_m128n64_split_bias{8 * itemsize}"


@pytest.mark.parametrize(
    "changes", [{"varlen": True}, {"tensor_maps": False}, {"precision": Int8(pv="fp16").precision}], ids=str
)
@pytest.mark.parametrize("form", [{"softcap": 30.0}, {"mask": "bool"}], ids=str)
def test_others_have_no_splits(form: dict[str, Any], changes: dict[str, Any]) -> None:
    ways = candidates(dataclasses.replace(few(), **form, **changes), HOPPER)
    assert not any(way.row.op == "attention_split" for way in ways)


def test_what_rows_do_not_take() -> None:
    p = few()
    for changes, row in (
        ({"softcap": 9.0}, "int8_sm90_bf16_d128_m128n64_split_masks"),
        ({"mask": "bool"}, "int8_sm90_bf16_d128_m128n64_split_bias16"),
        ({}, "int8_sm90_bf16_d128_m128n64_split_bias16"),
        ({"mask": "bool"}, "fp8_sm90_bf16_d128_m128n64_split_masks"),
        ({"mask": "bool"}, "int8_sm90_fp16_d128_m128n64_split_masks"),
        ({"mask": "bool", "precision": FP8_ARRAYS}, "fp8_sm90_bf16_d128_m128n64_split_masks_factors"),
        ({"varlen": True, "softcap": 9.0}, "int8_sm90_bf16_d128_m128n64_split_softcap"),
    ):
        call = dataclasses.replace(p, **changes)
        with pytest.raises(ArgumentError, match="a kernel that can serve this call"):
            plan_attention(call, HOPPER, f"attn_{row}")
    call = dataclasses.replace(p, mask="bool")
    assert plan_attention(call, AMPERE, None).records[-1].spec.op == "attention"


@pytest.mark.parametrize("spec", [s for s in ROWS if s.dtype == "bfloat16"], ids=lambda spec: spec.name)
def test_every_row_has_a_case(spec: KernelSpec) -> None:
    """Cases with a mask or a softcap that the row takes, by which it is verified."""
    if spec.value_factors:
        return  # factor_cases.py has all forms
    cases = cases_for("fp8_attention" if spec.qk == "fp8" else "quantized_attention")
    kinds = {0: ({"mask"}, {"keys"}), 2: ({"io"},), 4: ({"bias"},)}[spec.bias_bytes]
    own = [case for case in cases if any(kind <= {*case.arrays} for kind in kinds) and not case.packed]
    assert any("softcap" not in case.options or spec.softcap == "any" for case in own)
