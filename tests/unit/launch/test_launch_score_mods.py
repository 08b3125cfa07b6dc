"""What the Hopper kernel is told of masks, softcap and scales, and which calls it takes. No GPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from omniattn.launch import attn_fwd_sm90, masks, score_mods
from omniattn.launch.host_struct import At
from omniattn.launch.structs import (
    ATTN_FWD_MODS_SM80,
    ATTN_FWD_MODS_SM90,
    ATTN_FWD_USER_MOD_SM90,
    ATTN_INT8_MODS_SM90,
    MASK_LIST,
    TILE_KINDS,
)
from omniattn.plan.attention import plan_attention
from omniattn.problems import UNLIMITED, AttentionProblem, AttentionStrides, Int8, Target
from omniattn.problems.score_mod import ScoreModProblem
from omniattn.reference.mask_tiles import FIRST_GROUP
from omniattn.registry import by_name
from omniattn.registry.masks import MAX_TILES
from omniattn.select import candidates, choices
from omniattn.select.orders import usual_order
from tests.unit.launch.launch_fakes import fields_of_record
from tests.unit.select.shape_plans import is_whole, planned

HOPPER = Target((9, 0), 227 << 10, 132)
BATCH, HEADS, ROWS, KEYS, DIM = 2, 3, 400, 520, 128


def problem(mask_strides: tuple[int, int, int, int] = (0, 0, 0, 0), **fields: Any) -> AttentionProblem:
    strides = AttentionStrides(
        *(((HEADS * ROWS * DIM, HEADS * DIM, DIM),) * 4), lse=(HEADS * ROWS, ROWS), mask=mask_strides
    )
    return dataclasses.replace(
        AttentionProblem(
            "bfloat16", BATCH, ROWS, KEYS, HEADS, HEADS, DIM, UNLIMITED, UNLIMITED, 0.1, 0.0, "none", "none", False,
            strides=strides,
        ),
        **fields,
    )  # fmt: skip


#: A full mask's strides.
FULL = (HEADS * ROWS * KEYS, ROWS * KEYS, KEYS, 1)


@pytest.mark.parametrize("tanh", [score_mods._TANH, score_mods._TANH_NEAR], ids=["7", "5"])
@pytest.mark.parametrize("scale", [0.088, -0.088, 3.0])
@pytest.mark.parametrize("cap", [1e-3, 1.0, 50.0, 900.0])
def test_polynomials_of_the_cap(scale: float, cap: float, tanh: tuple[float, tuple[float, ...]]) -> None:
    limit, poly = score_mods._cap_polynomial(scale, cap, tanh)
    assert limit > 0
    s = np.linspace(-limit, limit, 20001, dtype=np.float32)
    z = s * s
    factor = np.float32(0)
    for c in np.float32(poly)[::-1]:
        factor = factor * z + c
    found = factor * s
    wanted = cap * math.log2(math.e) * np.tanh(s.astype(np.float64) * scale / cap)
    assert np.abs(found - wanted)[wanted != 0].max() <= 1.5e-6 * np.abs(wanted).max()
    assert (np.abs(found - wanted) <= 1.5e-6 * np.abs(wanted) + 1e-12).all()


@pytest.mark.parametrize(("scale", "cap"), [(0.0, 1.0), (1e-38, 1e30), (1e38, 1e-38), (0.088, 1e9), (3e38, 2.0)])
def test_caps_that_the_polynomial_is_not_for(scale: float, cap: float) -> None:
    assert score_mods._cap_polynomial(scale, cap) == (0.0, (0.0,) * 4)
    assert score_mods._cap_polynomial(scale, cap, score_mods._TANH_NEAR) == (0.0, (0.0,) * 3)
    values = score_mods.score_mod_values(problem(softmax_scale=scale, softcap=cap), None)
    assert values["cap_near_limit"] < 0.0


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"softcap": 30.0}, score_mods.SOFTCAP),
        ({"softmax_scale": -0.1}, score_mods.SCALED),
        ({"softmax_scale": 0.0}, score_mods.SCALED),
        ({"softmax_scale": -0.1, "softcap": 30.0}, score_mods.SOFTCAP),
        ({"mask": "bool", "mask_strides": FULL}, score_mods.BITS),
        ({"mask": "float32", "mask_strides": (KEYS, 0, 0, 1)}, score_mods.KEY_BIAS),
        ({"mask": "io", "mask_strides": FULL, "softcap": 5.0}, score_mods.BIAS | score_mods.SOFTCAP),
    ],
    ids=str,
)
def test_forms(fields: dict[str, Any], flags: int) -> None:
    one = problem(**fields)
    values = score_mods.score_mod_values(one, None)
    assert values["flags"] == flags
    assert values["factor"] == (one.softcap or one.softmax_scale)
    assert values["factor2"] == pytest.approx(values["factor"] * math.log2(math.e))
    assert (values["bias_batch"], values["bias_head"]) == (
        int(one.strides.mask[0] != 0), int(one.strides.mask[1] != 0),
    )  # fmt: skip


def problem_with(mask: str, strides: tuple[int, int, int, int], **fields: Any) -> AttentionProblem:
    return problem(strides, **{"mask": mask, "mask_map": True, **fields})


PACKED: dict[str, Any] = {"varlen": True, "max_seqlen_q": ROWS, "max_seqlen_k": KEYS}
MASK_MOD = ScoreModProblem("score", "k <= q + b", ())

CHOSEN = [
    (problem(softcap=2.0), "attn_fwd_sm90_bf16_d128_m64n64_softcap"),
    (problem(softmax_scale=-1.0), "attn_fwd_sm90_bf16_d128_m64n64_masks"),
    (problem_with("bool", FULL), "attn_fwd_sm90_bf16_d128_m192n64_masks"),
    (problem_with("bool", FULL, softcap=2.0), "attn_fwd_sm90_bf16_d128_m192n64_softcap"),
    (problem_with("bool", (0, 0, 0, 1), mask_map=False), "attn_fwd_sm90_bf16_d128_m192n64_masks"),
    (problem_with("float32", (KEYS, 0, 0, 1), mask_map=False), "attn_fwd_sm90_bf16_d128_m192n64_masks"),
    (problem_with("float32", FULL), "attn_fwd_sm90_bf16_d128_m64n64_bias32"),
    (problem_with("io", FULL, softcap=2.0), "attn_fwd_sm90_bf16_d128_m64n64_bias16"),
    (problem_with("io", FULL, mask_map=False), "attn_fwd_sm90_bf16_d128_m64n64_bias16"),
    (problem_with("io", FULL, mask_map=False, seqlen_q=32), "attn_fwd_sm80_bf16_d128_mods"),
    (problem(softcap=2.0, varlen=True), "attn_fwd_sm90_bf16_d128_m192n64_varlen_softcap"),
    (problem(softmax_scale=-1.0, varlen=True), "attn_fwd_sm90_bf16_d128_m192n64_varlen_softcap"),
    (problem_with("bool", FULL, **PACKED), "attn_fwd_sm90_bf16_d128_m192n64_varlen_masks"),
    (problem_with("bool", (0, 0, 0, 1), head_dim=64, **PACKED), "attn_fwd_sm90_bf16_d64_m192n64_varlen_masks"),
    (problem_with("float32", (KEYS, 0, 0, 1), **PACKED), "attn_fwd_sm90_bf16_d128_m192n64_varlen_masks"),
    (problem_with("bool", FULL, softcap=2.0, **PACKED), "attn_fwd_sm90_bf16_d128_m192n64_varlen_masks_softcap"),
    (problem_with("io", FULL, softcap=2.0, **PACKED), "attn_fwd_sm90_bf16_d128_m192n64_varlen_bias16"),
    (problem_with("float32", FULL, **PACKED), "attn_fwd_sm90_bf16_d128_m192n64_varlen_bias32"),
    (problem_with("float32", FULL, mask_map=False, **PACKED), "attn_fwd_sm80_bf16_d128_mods"),
    (problem_with("bool", (0, 0, 1, 0), **PACKED), "attn_fwd_sm80_bf16_d128_mods"),
    # A mask expression: tiles are found where the longest sequence is known.
    (problem(score_mod=MASK_MOD, **PACKED), "attn_fwd_sm90_bf16_d128_m192n64_varlen_masks"),
    (problem(score_mod=MASK_MOD, softcap=2.0, **PACKED), "attn_fwd_sm90_bf16_d128_m192n64_varlen_masks_softcap"),
    (problem(score_mod=MASK_MOD, varlen=True), "attn_fwd_sm90_bf16_d128_m192n64_varlen_softcap"),
    (problem(score_mod=ScoreModProblem("score", None, ()), **PACKED), "attn_fwd_sm90_bf16_d128_m192n64_varlen_softcap"),
    (problem(softcap=2.0, tensor_maps=False), "attn_fwd_sm80_bf16_d128_m64n64_mods"),
    # A mask of a bit a query would be packed into one of a bit a score; too many tiles.
    (problem_with("bool", (0, 0, 1, 0)), "attn_fwd_sm80_bf16_d128_m64n64_mods"),
    (problem(softcap=2.0, seqlen_k=64 * MAX_TILES), "attn_fwd_sm90_bf16_d128_m192n64_softcap"),
    (problem(softcap=2.0, seqlen_k=64 * MAX_TILES + 1), "attn_fwd_sm80_bf16_d128_mods"),
    (problem(seqlen_k=64 * MAX_TILES + 1), "attn_fwd_sm90_bf16_d128_m192n64"),
]


@pytest.mark.parametrize(("one", "name"), CHOSEN, ids=[f"{i} {name}" for i, (_, name) in enumerate(CHOSEN)])
def test_which_kernels_take_what(one: AttentionProblem, name: str) -> None:
    """Of rows with the same tile the one that does nothing which the call has no use for."""
    rows = {way.row.name for way in candidates(one, HOPPER) if way.row.op == "attention"}
    assert name in rows
    kind = name.rpartition("_m192n64")[2]
    same_tile = {row for row in rows if "_d128_m192n64" in row and "_d128_m192n64" in name}
    assert {row.rpartition("_m192n64")[2] for row in same_tile} <= {kind}


INT8 = Int8().precision
CHOSEN_INT8 = [
    (problem(softcap=2.0), "attn_int8_sm90_bf16_d128_softcap"),
    (problem(softcap=2.0, lse=True), "attn_int8_sm90_bf16_d128_softcap_lse"),
    (problem(softmax_scale=-1.0), "attn_int8_sm90_bf16_d128_masks"),
    (problem(softmax_scale=-1.0, lse=True), "attn_int8_sm90_bf16_d128_masks_lse"),
    (problem_with("bool", FULL), "attn_int8_sm90_bf16_d128_masks"),
    (problem_with("bool", FULL, softcap=2.0), "attn_int8_sm90_bf16_d128_softcap"),
    (problem_with("float32", (KEYS, 0, 0, 1), mask_map=False), "attn_int8_sm90_bf16_d128_masks"),
    (problem_with("float32", FULL), "attn_int8_sm90_bf16_d128_bias32"),
    (problem_with("io", FULL, softcap=2.0), "attn_int8_sm90_bf16_d128_bias16"),
    (problem(softcap=2.0, varlen=True), "attn_int8_sm90_bf16_d128_varlen_softcap"),
    (problem(softmax_scale=0.0, varlen=True), "attn_int8_sm90_bf16_d128_varlen_softcap"),
    # Masks of packed sequences, and those that nothing packs or maps.
    (problem_with("bool", FULL, varlen=True), "attn_int8_sm80_bf16_d128_mods"),
    (problem_with("io", FULL, mask_map=False), "attn_int8_sm80_bf16_d128_mods"),
    (problem(softcap=2.0, tensor_maps=False), "attn_int8_sm80_bf16_d128_mods"),
]


@pytest.mark.parametrize(("one", "name"), CHOSEN_INT8, ids=[f"{i} {n}" for i, (_, n) in enumerate(CHOSEN_INT8)])
def test_which_int8_kernel_takes_what(one: AttentionProblem, name: str) -> None:
    for smooth_q in (False, True):  # the same rows: they add delta_s where there is some
        precision = Int8(smooth_q=smooth_q).precision
        ways = candidates(dataclasses.replace(one, precision=precision), HOPPER)
        assert {way.row.name for way in ways if way.row.op == "attention"} == {name}
    values = candidates(dataclasses.replace(one, precision=Int8(pv="fp16").precision), HOPPER)
    assert {way.row.family for way in values} == {"attn_int8_sm80"}


def test_an_int8_mask_has_memory_of_its_own() -> None:
    one = problem_with("bool", FULL, precision=INT8)
    launches = planned(one, HOPPER, is_whole)
    assert [record.spec.op for record in launches.records] == [
        "mask_pack", "mask_list", *["quantize"] * (len(launches.records) - 3), "attention",
    ]  # fmt: skip
    assert {other.spec.op for other in launches.others} == {"quantize", "mask_pack", "mask_list"}
    without = planned(problem(precision=INT8), HOPPER, is_whole)
    spec = launches.selection.spec
    blocks = -(-ROWS // spec.block_m)
    first = launches.workspace_bytes - masks.workspace_bytes(one, blocks)
    assert first >= without.workspace_bytes
    record = launches.records[-1]
    assert len(record.arguments) == ATTN_INT8_MODS_SM90.size
    found = {name: next(x for x in record.pointers if x.offset == ATTN_INT8_MODS_SM90.offsets[name])
             for name in ("mods.tiles", "mods.lists")}  # fmt: skip
    own = masks.places(one, blocks, At("workspace", first))
    assert (found["mods.tiles"].operand, found["mods.tiles"].add) == own.bits
    assert (found["mods.lists"].operand, found["mods.lists"].add) == own.lists


def test_smoothed_queries_begin_at_row_0() -> None:
    """delta_s has blocks of 128 rows: a first tile that begins before row 0 would lie in the wrong ones."""
    spec = by_name("attn_int8_sm90_bf16_d128_masks")
    for smooth_q in (False, True):
        one = problem_with("bool", FULL, precision=Int8(smooth_q=smooth_q).precision, window_right=0)
        tiles = usual_order(spec, one, HOPPER).tiles
        assert tiles is not None
        assert tiles.lead_rows == (0 if smooth_q else 128)


def test_a_forced_kernel_says_why_it_does_not_fit() -> None:
    for name, one, reason in (
        ("attn_fwd_sm90_bf16_d128_m192n64_masks", problem(softcap=1.0), "no softcap"),
        ("attn_fwd_sm90_bf16_d128_m192n64_bias16", problem_with("bool", FULL), "differ between queries"),
        ("attn_fwd_sm90_bf16_d128_m192n64_bias16", problem_with("float32", FULL), "additive masks of 16 bits"),
        ("attn_fwd_sm90_bf16_d128_m192n64_masks", problem_with("io", FULL), "additive mask that differs"),
    ):
        with pytest.raises(Exception, match=reason):
            choices(one, HOPPER, name)


def test_the_mask_is_prepared_before_attention() -> None:
    one = problem_with("bool", (0, ROWS * KEYS, KEYS, 1), window_right=0)
    launches = plan_attention(one, HOPPER, "attn_fwd_sm90_bf16_d128_m192n64_masks")
    assert [record.spec.op for record in launches.records] == ["mask_pack", "mask_list", "attention"]
    assert [other.spec.op for other in launches.others] == ["mask_pack", "mask_list"]
    spec = launches.selection.spec
    blocks = -(-ROWS // spec.block_m)
    assert launches.workspace_bytes == masks.workspace_bytes(one, blocks)
    record = launches.records[-1]
    assert len(record.arguments) == ATTN_FWD_MODS_SM90.size
    places = {
        name: pointer
        for pointer in record.pointers
        for name in ("mods.tiles", "mods.lists")
        if pointer.offset == ATTN_FWD_MODS_SM90.offsets[name]
    }
    assert {pointer.operand for pointer in places.values()} == {"workspace"}
    assert len(places) == 2


def test_masks_of_packed_sequences_are_prepared_before_attention() -> None:
    total_q, total_k = 3 * ROWS, 2 * KEYS
    one = problem_with("bool", FULL, seqlen_q=total_q, seqlen_k=total_k, **PACKED)
    launches = plan_attention(one, HOPPER, "attn_fwd_sm90_bf16_d128_m192n64_varlen_masks")
    assert [record.spec.op for record in launches.records] == ["mask_pack", "mask_list", "attention"]
    spec, record = launches.selection.spec, launches.records[-1]
    blocks = -(-total_q // spec.block_m) + BATCH + 2
    assert launches.workspace_bytes == masks.workspace_bytes(one, blocks)
    fields = fields_of_record(record, ATTN_FWD_MODS_SM90)
    assert (fields["fwd.num_m_blocks"], fields["tiles.lead_rows"]) == (blocks, 0)
    assert (fields["fwd.mask_rows"], fields["fwd.mask_cols"]) == (ROWS, KEYS)
    assert (fields["mods.lists_stride_b"], fields["mods.num_tiles"]) == (0, -(-KEYS // 64) + 1)
    assert fields["mods.lists_stride_h"] == blocks * (2 + -(-KEYS // 64))
    assert fields["mods.tiles_stride_b"] != 0


def test_tiles_of_mask_expressions_of_packed_sequences() -> None:
    total_q, total_k = 3 * ROWS, 2 * KEYS
    one = problem(score_mod=MASK_MOD, seqlen_q=total_q, seqlen_k=total_k, **PACKED)
    row = "attn_fwd_sm90_bf16_d128_m192n64_varlen_masks"
    launches = plan_attention(one, HOPPER, row)
    kinds, listing, record = launches.records
    assert [kinds.spec.op, listing.spec.op, record.spec.op] == ["tile_kinds", "mask_list", "attention"]
    rows = -(-total_q // 64) + BATCH
    fields = fields_of_record(kinds, TILE_KINDS)
    assert fields.items() >= {
        "cu_seqlens_q": At("cu_seqlens_q"), "cu_seqlens_k": At("cu_seqlens_k"), "blocks": None, "batch": BATCH,
        "heads": 1, "m_tiles": rows, "n_tiles": -(-KEYS // 64), "seqlen_q": total_q, "seqlen_k": total_k,
    }.items()  # fmt: skip
    assert kinds.grid == (-(-rows * -(-KEYS // 64) // 4), 1, 1)
    assert fields_of_record(listing, MASK_LIST)["kinds_of_slots"] == 1
    forms = fields_of_record(record, ATTN_FWD_USER_MOD_SM90)
    assert forms["mods.flags"] & score_mods.MOD_TILES
    # A packed mask decides about tiles, and mma.sync finds none.
    both = plan_attention(dataclasses.replace(one, mask="bool", strides=problem(FULL).strides), HOPPER, row)
    assert [r.spec.op for r in both.records] == ["mask_pack", "mask_list", "attention"]
    ampere = planned(one, AMPERE, is_whole)
    assert [r.spec.op for r in ampere.records] == ["attention"]


AMPERE = Target((8, 0), 163 << 10, 108)


@pytest.mark.parametrize(
    ("one", "packed"),
    [
        (problem_with("bool", FULL), True),
        (problem_with("float32", (KEYS, 0, 0, 1)), True),
        (problem_with("io", FULL), False),
        (problem(softcap=2.0), False),
        # A mask of a bit a query would be packed into one of a bit a score; too many tiles.
        (problem_with("bool", (0, 0, 1, 0)), False),
        (problem_with("bool", FULL, varlen=True, max_seqlen_q=ROWS, max_seqlen_k=KEYS), False),
        (problem_with("bool", (0, 0, 0, 1), seqlen_k=64 * MAX_TILES + 1), False),
    ],
)
def test_mma_sync_reads_masks_that_are_not_packed(one: AttentionProblem, packed: bool) -> None:
    launches = plan_attention(one, AMPERE, "attn_fwd_sm80_bf16_d128_mods")  # few tiles: keys would be split
    spec, record = launches.selection.spec, launches.records[-1]
    assert [r.spec.op for r in launches.records] == ["mask_pack", "mask_list"] * packed + ["attention"]
    assert launches.workspace_bytes == packed * masks.workspace_bytes(one, -(-ROWS // spec.block_m))
    at = {pointer.offset: pointer.operand for pointer in record.pointers}
    for name in ("mods.tiles", "mods.lists"):
        assert at.get(ATTN_FWD_MODS_SM80.offsets[name]) == ("workspace" if packed else None)
    assert at.get(ATTN_FWD_MODS_SM80.offsets["fwd.mask"]) == (None if one.mask == "none" else "mask")
    assert len(record.arguments) == ATTN_FWD_MODS_SM80.size


def test_tiles_of_a_bias_are_a_tensor_map() -> None:
    spec = by_name("attn_fwd_sm90_bf16_d128_m192n64_bias32")
    biased = problem_with("float32", (0, ROWS * KEYS, KEYS, 1))
    (record,) = attn_fwd_sm90.build(spec, biased, usual_order(spec, biased, HOPPER))
    bias = next(x for x in record.tensor_maps if x.operand == "mask")
    assert bias.dims == (KEYS, ROWS, HEADS, 1)
    assert bias.strides_bytes == (4 * KEYS, 4 * ROWS * KEYS, 16)
    assert bias.box == (32, spec.block_m, 1, 1)
    assert bias.offset == ATTN_FWD_MODS_SM90.offsets["map_bias"]
    # Of packed sequences as far as the longest one reaches.
    spec = by_name("attn_fwd_sm90_bf16_d128_m192n64_varlen_bias32")
    one = problem_with("float32", FULL, seqlen_q=9 * ROWS, seqlen_k=9 * KEYS, **PACKED)
    (record,) = attn_fwd_sm90.build(spec, one, usual_order(spec, one, HOPPER))
    bias = next(x for x in record.tensor_maps if x.operand == "mask")
    assert bias.dims == (KEYS, ROWS, HEADS, BATCH)


def test_entries_number_every_tile() -> None:
    assert FIRST_GROUP == MAX_TILES


def test_masks_without_a_reader_have_no_place() -> None:
    values = score_mods.score_mod_values(problem(softcap=1.0), None)
    assert values["tiles"] is None
    assert values["lists"] is None
    found = masks.places(problem_with("bool", FULL), 3, At("workspace"))
    values = score_mods.score_mod_values(problem_with("bool", FULL), found)
    assert values["tiles"] == found.bits
    assert values["lists"] == found.lists
