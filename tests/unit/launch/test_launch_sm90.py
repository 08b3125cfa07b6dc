"""Launches of the Hopper kernels without a GPU: tensor maps, and the arguments that attn_int8_sm90 finds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from typing import Any

import pytest

from omniattn.launch import attn_int8, attn_int8_sm90, quantize_kv
from omniattn.launch.attn_fwd import forward_values
from omniattn.launch.attn_fwd_sm90 import mapped
from omniattn.launch.host_struct import At
from omniattn.launch.quantize import scratch, starts_in
from omniattn.launch.structs import ATTN_FWD, ATTN_INT8_SM90, QUANTIZE
from omniattn.plan.attention import plan_attention
from omniattn.plan.engine import Launches
from omniattn.problems import UNLIMITED, AttentionProblem, AttentionStrides, Int4, Int8, Target
from omniattn.problems.quantize import QuantizeProblem, carve
from omniattn.problems.score_mod import BlockMaskProblem
from omniattn.problems.tile_order import num_m_blocks
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.runtime import record as record_module
from omniattn.runtime.record import LaunchRecord, Program, TensorMap
from omniattn.select import choices
from tests.unit.launch.launch_fakes import Kernel, fields_of_record, program_of, read, unpacked
from tests.unit.select.shape_plans import is_whole, planned

HOPPER = Target((9, 0), 227 << 10, 132)
STREAM = 0x51
WORKSPACE = 0x7F0000001300
ARRAYS = ("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "mask", "sinks", "o", "lse", "workspace")
ADDRESSES = (0x1000, 0x2000, 0x3000, 0, 0x6000, 0x7000, 0, 0x9000, 0x4000, 0x5000, WORKSPACE)
INT8 = [spec for spec in REGISTRY if (spec.family, spec.op) == ("attn_int8_sm90", "attention")]
STRIDES = AttentionStrides((1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12), (13, 14), (0, 0, 0, 0))


def test_a_zero_that_hopper_s_kernels_rely_on() -> None:
    """They add bits of it to an address, so that an arrival waits for loads: with other bits they would stray."""
    problem = AttentionProblem(
        "float16", 1, 64, 64, 2, 2, 128, -1, 0, 0.1, 0.0, "none", "none", False, lse=False, strides=STRIDES
    )
    own = dataclasses.replace(problem, own_head_dim_v=64)
    assert [forward_values(p, 1)["head_dim_qk"] for p in (problem, own)] == [0, 0]
    # The one builder that sets it is the generic kernel's, for rows that Hopper's families do not have.
    rows = [spec for spec in REGISTRY if spec.other_head_dim_v]
    assert rows
    assert {spec.family for spec in rows} == {"attn_fwd_sm80"}


# Tensor maps


def program_of_maps(*maps: TensorMap) -> tuple[Kernel, Program]:
    """A launch that has nothing but maps in its arguments."""
    placed = tuple(m._replace(offset=128 * i) for i, m in enumerate(maps))
    record = LaunchRecord(INT8[0], (1, 1, 1), 32, bytes(128 * len(maps)), tensor_maps=placed)
    program, (kernel,) = program_of([record], ("x",))
    return kernel, program


def test_a_map_is_encoded_once_for_an_address() -> None:
    kernel, program = program_of_maps(mapped("x", 0, "uint8", (64, 5, 2, 1), (64, 320, 0), (64, 16, 1, 1)))
    for address in (0x100, 0x100, 0x200, 0x100):
        program.launch(STREAM, [address])
    contents = [data[:128] for *_, data, _ in kernel.log]
    assert contents[0] == contents[1] == contents[3] != contents[2]
    # An extent of 1 has no stride of its own; the map wants a positive multiple of 16.
    assert kernel.maps == [
        ("uint8", address, (64, 5, 2, 1), (64, 320, 16), (64, 16, 1, 1)) for address in (0x100, 0x200)
    ]


def test_maps_of_many_addresses_do_not_pile_up() -> None:
    kernel, program = program_of_maps(mapped("x", 0, "uint8", (64, 5, 2, 1), (64, 320, 640), (64, 16, 1, 1)))
    operand = record_module._Maps(program.records[0].tensor_maps[0], kernel)  # type: ignore[arg-type]
    for address in range(0, 16 * 1000, 16):
        got = operand.at(address)
        assert got == operand.at(address)
        assert len(operand._maps) <= record_module._MAX_ARGUMENTS
    assert len(kernel.maps) == 1000


def test_equal_addresses_of_different_operands_are_different_maps() -> None:
    dims, strides = (64, 5, 2, 1), (64, 320, 640)
    kernel, program = program_of_maps(*(mapped("x", 0, "uint8", dims, strides, (64, rows, 1, 1)) for rows in (16, 32)))
    program.launch(STREAM, [0x100])
    ((*_, data, _),) = kernel.log
    assert data[:128] != data[128:256]
    assert [facts[-1] for facts in kernel.maps] == [(64, 16, 1, 1), (64, 32, 1, 1)]


def test_a_map_lies_behind_its_operand() -> None:
    kernel, program = program_of_maps(mapped("x", 0x40, "uint8", (64, 5), (64,), (64, 16)))
    program.launch(STREAM, [0x100])
    assert kernel.maps[0][1] == 0x140


# attn_int8_sm90


def test_the_struct_is_aligned_for_its_maps() -> None:
    assert list(ATTN_INT8_SM90.offsets)[:3] == ["map_q", "map_k", "map_v"]
    assert all(ATTN_INT8_SM90.offsets[name] % 64 == 0 for name in ("map_q", "map_k", "map_v"))
    assert ATTN_INT8_SM90.size % 64 == 0
    assert "alignas(64)" in read("ptx/tma.cuh")


def problem(knobs: Int8 | Int4 | None = None, **changes: Any) -> AttentionProblem:
    plain = AttentionProblem(
        dtype="bfloat16",
        batch=2,
        seqlen_q=300,
        seqlen_k=500,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=120,
        window_left=UNLIMITED,
        window_right=UNLIMITED,
        softmax_scale=0.1,
        softcap=0.0,
        mask="none",
        sinks="none",
        varlen=False,
        precision=(knobs or Int8()).precision,
        strides=STRIDES,
    )
    if changes.get("varlen"):
        changes = {"max_seqlen_k": changes.get("seqlen_k", plain.seqlen_k)} | changes
    return dataclasses.replace(plain, **changes)


def quantized_ahead(p: AttentionProblem, target: Target) -> Launches:
    """What is launched where Q is quantized by a kernel of its own, and every CTA has all keys of its tile."""
    return planned(p, target, lambda way: is_whole(way) and not way.row.quantizes_q)


def quantized(p: AttentionProblem, spec: KernelSpec) -> QuantizeProblem:
    """What `plan_attention` has quantized for ``spec``."""
    return p.quantization(
        grouping=spec.grouping, pv=spec.pv, pv_accumulator=spec.pv_accumulator, unpacked=spec.qk == "int8"
    )


def places(launches: Launches, p: AttentionProblem) -> tuple[dict[str, At], tuple[At, At], int]:
    """Operands in the workspace, the copies of cu_seqlens there, and bytes of the operands."""
    spec = launches.selection.spec
    described = quantized(p, spec)
    offsets, size = carve(described.shapes())
    memory = At("workspace", size)
    room = scratch(launches.others[0].spec, described)
    assert launches.workspace_bytes == size + room.size
    return {name: At("workspace", offset) for name, offset in offsets.items()}, starts_in(room, memory), size


def fwd_values(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[f"fwd.{name}"] for name, _ in ATTN_FWD.fields}


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """With floats as fp32 has them."""
    return {
        name: struct.unpack("<f", struct.pack("<f", x))[0] if isinstance(x, float) else x for name, x in values.items()
    }


def launched(p: AttentionProblem) -> tuple[dict[str, Any], LaunchRecord, dict[str, At], Launches]:
    """(fields by name, record, places of the operands, all launches) of one call's attention kernel."""
    launches = quantized_ahead(p, HOPPER)
    spec, *others = (selection.spec for selection in (launches.selection, *launches.others))
    record = launches.records[-1]
    assert [r.spec for r in launches.records] == [others[0], others[0], *others[1:], spec]
    assert record.threads == 32 * spec.num_warps
    fields = fields_of_record(record, ATTN_INT8_SM90)
    # The kernel reads the copies of cu_seqlens that the quantizer has made, which never decrease.
    at, starts, _ = places(launches, p)
    wanted = forward_values(
        p, num_m_blocks(p, spec.block_m), operands=(at["q_int"], at["k_int"], at["v"]), starts=starts
    )
    assert fwd_values(fields) == rounded(wanted)
    assert (fields["fwd.cu_seqlens_q"] is not None) == p.varlen
    return fields, record, at, launches


def test_a_launch_finds_everything_in_the_workspace() -> None:
    p = problem(Int8(smooth_q=True, smooth_v=True), window_right=0)
    fields, record, at, launches = launched(p)
    for name in ("q_scale", "k_scale", "row_bias", "v_scale", "v_mean", "delta_s"):
        assert fields[f"operands.{name}"] == at[name], name
    shapes = quantized(p, launches.selection.spec).shapes()
    assert fields["operands.q_scale_stride_h"] == shapes["q_scale"][0][-1]
    assert fields["operands.k_scale_stride_h"] == shapes["k_scale"][0][-1]
    blocks, columns = shapes["delta_s"][0][-2:]
    assert (fields["operands.delta_stride_h"], fields["operands.delta_columns"]) == (blocks * columns, columns)
    assert fields["operands.head_dim_pad"] == 128
    # 192 query rows a tile: two blocks of eight heads, causal; one by one, because there are SMs for all of them.
    assert (fields["tiles.num_items"], fields["tiles.num_pairs"], fields["tiles.num_tail_heads"]) == (16, 0, 8)
    assert record.grid == (16, 1, 1)
    assert fields["flush_keys"] == attn_int8_sm90.FLUSH_KEYS_SMOOTH_V
    keys = shapes["v"][0][-1]
    assert keys == 512
    assert [fields[name] for name in ("map_q", "map_k", "map_v")] == [
        TensorMap(*at["q_int"], "uint8", (128, 300, 4, 2), (128, 128 * 300, 128 * 300 * 4), (128, 192, 1, 1)),
        TensorMap(*at["k_int"], "uint8", (128, 500, 2, 2), (128, 128 * 500, 128 * 500 * 2), (128, 64, 1, 1)),
        TensorMap(*at["v"], "uint8", (512, 128, 2, 2), (512, 512 * 128, 512 * 128 * 2), (64, 128, 1, 1)),
    ]


KNOBS = [Int8(), Int8(smooth_q=True, smooth_v=True), Int4()]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("varlen", [False, True])
def test_the_driver_gets_addresses_for_places(varlen: bool, knobs: Int8 | Int4) -> None:
    p = problem(knobs, varlen=varlen, lse=True, sinks="float32")
    launches = quantized_ahead(p, HOPPER)
    log: list[Any] = []
    program, kernels = program_of(launches.records, ARRAYS, log)
    program.launch(STREAM, ADDRESSES)
    assert [call[0].spec for call in log] == [record.spec for record in launches.records]
    assert [call[1:4] for call in log] == [(record.grid, record.threads, STREAM) for record in launches.records]
    own = dict(zip(ARRAYS, ADDRESSES, strict=True))
    found = unpacked(log[-1][4], ATTN_INT8_SM90)
    for name, wanted in fields_of_record(launches.records[-1], ATTN_INT8_SM90).items():
        if isinstance(wanted, TensorMap):
            number = int.from_bytes(found[name], "little")
            assert kernels[-1].maps[number - 1] == (
                "uint8", WORKSPACE + wanted.add, wanted.dims, wanted.strides_bytes, wanted.box,
            )  # fmt: skip
        elif isinstance(wanted, At):
            assert found[name] == own[wanted.operand] + wanted.offset, name
        else:
            assert found[name] == (0 if wanted is None else wanted), name


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("varlen", [False, True])
def test_quantized_operands_are_launched_with_the_same_arguments(varlen: bool, knobs: Int8 | Int4) -> None:
    p = problem(knobs, varlen=varlen)
    fields, record, at, launches = launched(p)
    described = quantized(p, launches.selection.spec)
    alone = quantized_ahead(dataclasses.replace(p, operands=described), HOPPER)
    assert alone.selection.spec == launches.selection.spec
    assert (alone.workspace_bytes, len(alone.records), alone.others) == (0, 1, ())
    (given,) = alone.records
    assert (given.grid, given.threads, given.arguments) == (record.grid, record.threads, record.arguments)
    # The same struct but for where its operands are: arguments of their own names.
    names = {place: At(name) for name, place in at.items()}
    names |= {fields[f"fwd.{name}"]: At(name) for name in ("cu_seqlens_q", "cu_seqlens_k") if varlen}
    of_given = fields_of_record(given, ATTN_INT8_SM90)
    for name, value in fields.items():
        if isinstance(value, TensorMap):
            operand, add = names[At(value.operand, value.add)]
            assert of_given[name] == value._replace(operand=operand, add=add)
        else:
            assert of_given[name] == (names.get(value, value) if isinstance(value, At) else value), name
    assert attn_int8.given(described).at["q_int"] == At("q_int")


def test_q_is_read_as_it_comes() -> None:
    """Where the kernel quantizes it: in bytes, by the call's strides; the workspace has K and V alone."""
    p = problem(window_right=0)
    launches = planned(p, HOPPER, lambda way: is_whole(way) and way.row.quantizes_q)
    sums, blocks, attention = launches.records
    assert [record.spec.op for record in launches.records] == ["quantize_kv_sums", "quantize_kv", "attention"]
    assert (sums.grid, blocks.grid, blocks.overlap) == ((2 * 4 * 2, 1, 1), (2 * 4 * 4, 1, 1), True)
    fields = fields_of_record(attention, ATTN_INT8_SM90)
    batch, row, head = (2 * stride for stride in STRIDES.q)
    assert fields["map_q"] == TensorMap("q", 0, "uint8", (240, 300, 4, 2), (row, head, batch), (128, 192, 1, 1))
    described = dataclasses.replace(quantized(p, launches.selection.spec), rows_q=0)
    offsets, size = carve(described.shapes())
    assert (fields["map_k"].operand, fields["map_k"].add) == ("workspace", offsets["k_int"])
    assert launches.workspace_bytes == size + quantize_kv.scratch_bytes(sums.spec, described)
    assert launches.workspace_bytes < quantized_ahead(p, HOPPER).workspace_bytes


@pytest.mark.parametrize("head_dim", [64, 120, 256])
def test_q_times_the_mean_of_k_is_made_where_q_is_read(head_dim: int) -> None:
    """With an LSE or sinks the kernel gets K's mean in the place of row_bias."""
    for changes in ({"lse": True}, {"sinks": "float32"}):
        p = problem(head_dim=head_dim, **changes)
        launches = planned(p, HOPPER, lambda way: is_whole(way) and way.row.quantizes_q)
        assert launches.selection.spec.name.endswith("_q16_lse")
        assert [record.spec.op for record in launches.records] == ["quantize_kv_sums", "quantize_kv", "attention"]
        fields = fields_of_record(launches.records[-1], ATTN_INT8_SM90)
        described = dataclasses.replace(quantized(p, launches.selection.spec), rows_q=0, row_bias="marks")
        offsets, _ = carve(described.shapes())
        assert fields["operands.row_bias"] == At("workspace", offsets["k_mean"])
        assert fields["map_q"].box == (128, launches.selection.spec.block_m, 1, 1)
    without = planned(
        problem(Int8(smooth_k=False), lse=True), HOPPER, lambda way: is_whole(way) and way.row.quantizes_q
    )
    assert fields_of_record(without.records[-1], ATTN_INT8_SM90)["operands.row_bias"] is None


@pytest.mark.parametrize("q", [(1 << 20, -512, 128), (-(1 << 20), 512, 128), (1 << 40, 512, 128)])
def test_q_that_no_tensor_map_describes_is_quantized_before(q: tuple[int, int, int]) -> None:
    """Of operands that the library makes there is a map always; of the caller's q by its strides alone."""
    p = problem()
    assert any(way.candidate.row.quantizes_q for way in choices(p, HOPPER))
    other = dataclasses.replace(p, strides=dataclasses.replace(STRIDES, q=q))
    ways = choices(other, HOPPER)
    assert ways
    assert not any(way.candidate.row.quantizes_q for way in ways)
    assert any(way.candidate.row.quantizes_q for way in choices(p, HOPPER)), "the answer is kept by the strides too"


def test_packed_q_is_read_as_it_comes() -> None:
    """Sequences begin where the copies of cu_seqlens say that never decrease, those of queries too."""
    p = problem(varlen=True, batch=7)
    launches = planned(p, HOPPER, lambda way: is_whole(way) and way.row.quantizes_q)
    sums, blocks, attention = launches.records
    assert [record.spec.sequences for record in launches.records] == ["packed"] * 3
    assert (sums.grid, blocks.grid) == ((2 * 2 * (2 + 7), 1, 1), (2 * 2 * (4 + 7), 1, 1))
    assert (blocks.overlap, attention.overlap) == (True, True)
    fields = fields_of_record(attention, ATTN_INT8_SM90)
    end, size = launches.workspace_bytes, 4 * (7 + 1)
    assert fields["fwd.cu_seqlens_q"] == At("workspace", end - 2 * size)
    assert fields["fwd.cu_seqlens_k"] == At("workspace", end - size)
    of_sums = fields_of_record(sums, QUANTIZE)
    assert [of_sums[f"cu_seqlens_{x}"] for x in "qk"] == [At("cu_seqlens_q"), At("cu_seqlens_k")]
    assert [of_sums[f"starts_{x}"] for x in "qk"] == [fields[f"fwd.cu_seqlens_{x}"] for x in "qk"]
    assert (of_sums["seqlen_q"], of_sums["seqlen_k"]) == (p.seqlen_q, p.seqlen_k)
    _, row, head = (2 * stride for stride in STRIDES.q)
    assert fields["map_q"].dims == (240, 300, 4, 1)
    assert fields["map_q"].strides_bytes[:2] == (row, head)


def test_the_general_quantizer_copies_starts_of_packed_q_that_it_does_not_quantize() -> None:
    p = problem(varlen=True, batch=7)
    found = planned(p, HOPPER, lambda way: is_whole(way) and way.row.quantizes_q)
    force = f"{found.selection.spec.name},quantize_sm80_bf16_d256"
    launches = plan_attention(p, HOPPER, force)
    clear, blocks, attention = launches.records
    assert [record.spec.op for record in launches.records] == ["quantize", "quantize", "attention"]
    fields, of_clear = fields_of_record(attention, ATTN_INT8_SM90), fields_of_record(clear, QUANTIZE)
    assert [of_clear[f"cu_seqlens_{x}"] for x in "qk"] == [At("cu_seqlens_q"), At("cu_seqlens_k")]
    assert [of_clear[f"starts_{x}"] for x in "qk"] == [fields[f"fwd.cu_seqlens_{x}"] for x in "qk"]
    assert of_clear["seqlen_q"] == p.seqlen_q
    assert fields_of_record(blocks, QUANTIZE)["seqlen_q"] == 0


def test_what_is_not_smoothed_is_null() -> None:
    fields, _, at, launches = launched(problem(Int8(smooth_v=False)))
    names = ("v_mean", "delta_s", "delta_columns", "delta_stride_h")
    assert [fields[f"operands.{name}"] for name in names] == [None, None, 0, 0]
    assert fields["flush_keys"] == attn_int8_sm90.FLUSH_KEYS
    assert "delta_s" not in at
    assert len(launches.records) == 3
    assert len(launched(problem(Int4()))[-1].records) == 4


def test_packed_sequences_have_one_batch() -> None:
    p = problem(varlen=True, batch=7)
    fields, _, at, _ = launched(p)
    blocks = -(-300 // 192) + 7 + 2
    assert fields["tiles.num_items"] == 4 * blocks
    assert [(At(m.operand, m.add), m.dims[1:]) for m in (fields["map_q"], fields["map_k"])] == [
        (at["q_int"], (300, 4, 1)), (at["k_int"], (500, 2, 1)),
    ]  # fmt: skip


def test_without_keys_the_maps_are_those_of_q() -> None:
    fields, _, at, _ = launched(problem(seqlen_k=0))
    assert fields["map_q"] == fields["map_k"] == fields["map_v"]
    assert At(fields["map_q"].operand, fields["map_q"].add) == at["q_int"]


@pytest.mark.parametrize("changes", [{"seqlen_q": 0}, {"batch": 0}], ids=str)
def test_nothing_to_do_launches_nothing(changes: dict[str, int]) -> None:
    launches = plan_attention(problem(**changes), HOPPER, "attn_int8_sm90_bf16_d128")
    assert launches.selection.spec.name == "attn_int8_sm90_bf16_d128"
    assert launches.records == ()


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("varlen", [False, True])
def test_operands_do_not_overlap_and_fit_into_the_workspace(varlen: bool, knobs: Int8 | Int4) -> None:
    p = problem(knobs, varlen=varlen)
    launches = quantized_ahead(p, HOPPER)
    described = quantized(p, launches.selection.spec)
    sizes = {
        name: struct.calcsize({"float32": "f", "float16": "e"}.get(dtype, "B")) * math.prod(shape)
        for name, (shape, dtype) in described.shapes().items()
    }
    at, _, outputs_bytes = places(launches, p)
    spans = sorted((place.offset, place.offset + sizes[name]) for name, place in at.items())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= outputs_bytes
    # Tensor maps and bulk copies want their operands at multiples of 16 bytes, swizzled tiles of 128 and more.
    assert all(place.offset % 256 == 0 for place in at.values())
    reached = [p.add for r in launches.records for p in r.pointers if p.operand == "workspace"]
    assert max(reached) <= launches.workspace_bytes


@pytest.mark.parametrize("spec", INT8, ids=lambda spec: spec.name)
def test_boxes_of_every_row_are_tiles(spec: KernelSpec) -> None:
    """One copy of K is BLOCK_N rows of at most 128 bytes; one of V is HEAD_DIM rows of BLOCK_N bytes."""
    varlen, smooth_q = spec.sequences == "packed", spec.smooth_q != "never"
    forms: dict[str, Any] = {}
    if spec.bias_bytes:
        mask = {2: "io", 4: "float32"}[spec.bias_bytes]
        strides = dataclasses.replace(STRIDES, mask=(0, 300 * 504, 504, 1))
        forms = {"mask": mask, "mask_map": True, "seqlen_k": 504, "strides": strides}
    elif spec.block_masks:
        forms = {"block_mask": BlockMaskProblem((3, 8), (0, 0, 8, 1))}
    elif spec.score_mods:
        forms = {"softmax_scale": -1.0} if spec.softcap == "never" else {"softcap": 3.0}
    knobs = Int8(smooth_q=smooth_q, fast_exp=spec.integer_powers == "linear")
    p = problem(knobs, dtype=spec.dtype, head_dim=spec.head_dim, varlen=varlen, lse=spec.lse, **forms)
    launches = plan_attention(p, HOPPER, spec.name)
    assert launches.selection.spec == spec
    record = launches.records[-1]
    row = min(spec.head_dim, 128)
    boxes = [(128 if spec.quantizes_q else row, spec.block_m), (row, spec.block_n), (spec.block_n, spec.head_dim)]
    if spec.score_mods:  # the map of queries stands in for that of a bias
        boxes.append((128 // spec.bias_bytes, spec.block_m) if spec.bias_bytes else boxes[0])
    assert [m.box[:2] for m in record.tensor_maps] == boxes
    assert all(extent <= 256 for m in record.tensor_maps for extent in m.box), "the largest box"
    assert record.threads == 32 * spec.num_warps <= 1024
