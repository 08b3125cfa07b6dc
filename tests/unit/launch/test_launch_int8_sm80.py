"""attn_int8_sm80 without a GPU: its arguments, its tiles in shared memory, the bounds of its fp16 sums."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from typing import Any

import numpy as np
import pytest

from omniattn.launch.attn_fwd import forward_values
from omniattn.launch.host_struct import At
from omniattn.launch.structs import ATTN_INT8_SM80
from omniattn.plan.attention import plan_attention
from omniattn.plan.engine import Launches
from omniattn.problems import AttentionProblem, Int4, Int8, Target
from omniattn.problems.precision import value_levels
from omniattn.problems.quantize import operand_strides
from omniattn.problems.tile_order import num_m_blocks
from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.runtime.record import LaunchRecord
from tests.unit.launch.launch_fakes import fields_of_record, program_of, unpacked
from tests.unit.launch.test_launch_sm90 import (
    ADDRESSES,
    ARRAYS,
    STREAM,
    STRIDES,
    fwd_values,
    places,
    problem,
    quantized,
    rounded,
)
from tests.unit.select.shape_plans import unsplit

ROWS = [spec for spec in REGISTRY if spec.quantized and spec.grouping == "sm80"]
AMPERE, ADA = Target((8, 0), 163 << 10, 108), Target((8, 9), 99 << 10, 128)


def planned(p: AttentionProblem, target: Target) -> tuple[KernelSpec, LaunchRecord, Launches]:
    """Row, record of its launch, and all launches of a call."""
    launches = unsplit(p, target)
    spec, record = launches.selection.spec, launches.records[-1]
    assert spec in ROWS
    assert record.spec == spec
    return spec, record, launches


@pytest.mark.parametrize("knobs", [Int8(), Int8(smooth_q=True, smooth_v=True), Int4(), Int4(smooth_q=False)], ids=str)
@pytest.mark.parametrize("target", [AMPERE, ADA], ids=["sm_80", "sm_89"])
@pytest.mark.parametrize("varlen", [False, True])
def test_a_launch_finds_everything_in_the_workspace(varlen: bool, target: Target, knobs: Int8 | Int4) -> None:
    p = problem(knobs, varlen=varlen, max_seqlen_q=17, mask="io")
    spec, record, launches = planned(p, target)
    assert len(launches.records) == 3 + knobs.smooth_q
    batch = 1 if varlen else p.batch
    blocks = num_m_blocks(p, spec.block_m)
    assert (record.grid, record.threads) == ((blocks * p.num_q_heads * batch, 1, 1), 32 * spec.num_warps)
    fields = fields_of_record(record, ATTN_INT8_SM80)
    at, starts, _ = places(launches, p)
    described = quantized(p, spec)
    of_q, of_k, of_v = operand_strides(described)
    halves = [(b // 2, row // 2, head // 2) for b, row, head in (of_q, of_k, of_v)]
    own = dataclasses.replace(p, strides=dataclasses.replace(STRIDES, q=halves[0], k=halves[1], v=halves[2]))
    wanted = forward_values(
        own, blocks, mask_extent=(17, 500) if varlen else (300, 500),
        operands=(at["q_int"], at["k_int"], at["v"]), starts=starts,
    )  # fmt: skip
    assert fwd_values(fields) == rounded(wanted)
    assert (fields["fwd.cu_seqlens_q"] is not None) == varlen
    assert fields["fwd.head_dim_qk"] == 0, "AttnFwdParams::head_dim_qk, which addresses depend on"
    shapes = described.shapes()
    for name in ("q_scale", "k_scale", "row_bias", "v_scale"):
        assert fields[f"operands.{name}"] == at[name], name
    assert fields["operands.v_mean"] == (at["v_mean"] if knobs.smooth_v else None)
    assert fields["operands.delta_s"] == at.get("delta_s")
    assert ("delta_s" in at) == knobs.smooth_q
    blocks, columns = shapes["delta_s"][0][-2:] if knobs.smooth_q else (0, 0)
    numbers = ("q_scale_stride_h", "k_scale_stride_h", "delta_stride_h", "delta_columns", "head_dim_pad")
    assert [fields[f"operands.{name}"] for name in numbers] == [
        shapes["q_scale"][0][-1], shapes["k_scale"][0][-1], blocks * columns, columns, 128,
    ]  # fmt: skip
    # Rows of the operands in 16-bit units, and copies of 16 bytes.
    assert halves[0][1] == halves[1][1] == 128 * BITS[spec.qk] // 16
    assert halves[2][1] == (128 if spec.pv == "fp16" else shapes["v"][0][-1] // 2)
    assert all(stride % 8 == 0 for three in halves for stride in three)
    assert (halves[0][0] == 0) == varlen


BITS = {"int8": 8, "int4": 4, "fp8": 8}


@pytest.mark.parametrize("knobs", [Int8(smooth_v=False), Int4()], ids=str)
@pytest.mark.parametrize("varlen", [False, True])
def test_operands_that_are_quantized_already(varlen: bool, knobs: Int8 | Int4) -> None:
    """The same arguments as where the call quantizes them itself; no launch but that of attention."""
    p = problem(knobs, varlen=varlen)
    spec, record, launches = planned(p, ADA)
    described = quantized(p, spec)
    alone = plan_attention(dataclasses.replace(p, operands=described), ADA, spec.name)
    assert (alone.workspace_bytes, len(alone.records), alone.others) == (0, 1, ())
    (given,) = alone.records
    assert (given.grid, given.threads, given.arguments) == (record.grid, record.threads, record.arguments)
    at, starts, _ = places(launches, p)
    names = {place: At(name) for name, place in at.items()}
    names |= dict(zip(starts, (At("cu_seqlens_q"), At("cu_seqlens_k")), strict=True)) if varlen else {}
    fields, of_given = (fields_of_record(r, ATTN_INT8_SM80) for r in (record, given))
    for name, value in fields.items():
        assert of_given[name] == (names.get(value, value) if isinstance(value, At) else value), name


@pytest.mark.parametrize("knobs", [Int8(), Int4()], ids=str)
def test_the_driver_gets_addresses_for_places(knobs: Int8 | Int4) -> None:
    p = problem(knobs, varlen=True, sinks="io")
    _, record, launches = planned(p, AMPERE)
    log: list[Any] = []
    program, _ = program_of(launches.records, ARRAYS, log)
    program.launch(STREAM, ADDRESSES)
    own, found = dict(zip(ARRAYS, ADDRESSES, strict=True)), unpacked(log[-1][4], ATTN_INT8_SM80)
    for name, wanted in fields_of_record(record, ATTN_INT8_SM80).items():
        if isinstance(wanted, At):
            assert found[name] == own[wanted.operand] + wanted.offset, name
        else:
            assert found[name] == (0 if wanted is None else wanted), name


@pytest.mark.parametrize("changes", [{"seqlen_q": 0}, {"batch": 0}], ids=str)
def test_nothing_to_do_launches_nothing(changes: dict[str, int]) -> None:
    assert unsplit(problem(**changes), AMPERE).records == ()


def tile_offset(rows: int, row_bytes: int, row: int, chunk: int) -> int:
    """Byte of a 16-byte chunk in the tiles of tile/panel.cuh, for every length of rows that this kernel has."""
    if row_bytes >= 128:
        return chunk // 8 * rows * 128 + row * 128 + 16 * ((chunk % 8) ^ (row % 8))
    if row_bytes == 64:
        return row * 64 + 16 * (chunk ^ (row // 2 % 4))
    return row * 32 + 16 * (chunk ^ (row // 4 % 2))


def tiles_of(spec: KernelSpec) -> dict[str, tuple[int, int]]:
    """(rows, bytes of a row) of Q, K and V."""
    row = spec.head_dim * BITS[spec.qk] // 8
    v = (64, 2 * spec.head_dim) if spec.pv == "fp16" else (spec.head_dim, 64)
    return {"q": (spec.block_m, row), "k": (64, row), "v": v}


ALL_TILES = sorted({tile for spec in ROWS for tile in tiles_of(spec).values()})


@pytest.mark.parametrize(("rows", "row_bytes"), ALL_TILES)
def test_shared_memory_without_bank_conflicts(rows: int, row_bytes: int) -> None:
    """Chunks have places of their own; eight rows of ldmatrix, and eight lanes of a copy, touch all banks once."""
    chunks = row_bytes // 16
    places = {tile_offset(rows, row_bytes, row, c) for row in range(rows) for c in range(chunks)}
    assert places == set(range(0, rows * row_bytes, 16))
    for first in range(0, rows, 8):
        for c in range(chunks):
            assert len({tile_offset(rows, row_bytes, first + r, c) // 16 % 8 for r in range(8)}) == 8
    per_row = min(chunks, 8)  # lanes of a copy that share a row of a panel
    for row in range(0, rows, 8 // per_row):
        for panel in range(max(chunks // 8, 1)):
            lanes = [(row + lane // per_row, panel * 8 + lane % per_row) for lane in range(8)]
            assert len({tile_offset(rows, row_bytes, r, c) // 16 % 8 for r, c in lanes}) == 8


@pytest.mark.parametrize(("rows", "row_bytes"), ALL_TILES)
def test_address_of_a_step_is_one_xor(rows: int, row_bytes: int) -> None:
    """What PanelLane computes: a lane's offset at step 0, then an XOR and constants."""
    for row, half in itertools.product(range(16), range(2)):
        start = tile_offset(rows, min(row_bytes, 128), row, half)
        for base, step in itertools.product(range(0, rows - 15, 8), range(row_bytes // 32)):
            inside = step % 4 if row_bytes >= 128 else step
            at = (start ^ (inside << 5)) + step // 4 * rows * 128 + base * min(row_bytes, 128)
            assert at == tile_offset(rows, row_bytes, base + row, 2 * step + half)


@pytest.mark.parametrize("row_bytes", [64, 128, 256])
@pytest.mark.parametrize("threads", [128, 256])
def test_copies_of_whole_tiles(row_bytes: int, threads: int) -> None:
    """WholeTileCopy: every chunk once, to its place; a thread has one address in global, two in shared memory."""
    rows, warps = 64, threads // 32
    panel_row = min(row_bytes, 128)
    chunks = panel_row // 16
    step, of_a_warp = 32 // chunks, rows // warps
    span = of_a_warp * row_bytes
    assert of_a_warp % 8 == 0
    found = {}
    for warp in range(warps):
        for r, panel in itertools.product(range(0, of_a_warp, step), range(row_bytes // panel_row)):
            own, offset = r % 8 // step, r * row_bytes + panel * 128 - span // 2
            assert own in (0, 1)
            assert -2048 <= offset <= 2047, "what cp.async adds to an address"
            written = []
            for lane in range(32):
                row, chunk = warp * of_a_warp + lane // chunks, lane % chunks
                source = row * row_bytes + chunk * 16 + span // 2 + offset
                start = tile_offset(rows, row_bytes, row + own * step, chunk)
                written.append(start + panel * rows * 128 + (r - own * step) * panel_row)
                found[source // row_bytes, source % row_bytes // 16] = written[-1]
            for first in range(0, 32, 8):
                assert len({at // 16 % 8 for at in written[first : first + 8]}) == 8, "bank conflicts"
    assert found == {
        (row, c): tile_offset(rows, row_bytes, row, c) for row in range(rows) for c in range(row_bytes // 16)
    }


@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.name)
def test_shared_memory_and_threads_of_a_row(spec: KernelSpec) -> None:
    defines = dict(spec.defines)
    stages, tiles = int(defines["NUM_STAGES"]), tiles_of(spec)
    sizes = {name: rows * row for name, (rows, row) in tiles.items()}
    assert all(size % 1024 == 0 for size in sizes.values())
    if spec.family == "attn_int8_mbarrier_sm90":
        # k_scale four times, barriers, a FwdTile with what the loop seldom needs, scales and means of V, row_bias.
        rest, needed = 2048, 4 * 16 + 2 * stages * 8 + 40 + 8 + 4 * 8 + 8 * spec.head_dim + 4 * spec.block_m
    else:
        # delta_s and k_scale twice, and a FwdTile with what the loop seldom needs.
        rest, needed = 1024, 2 * 64 * 4 + 2 * 16 + 40 + 8 + 4 * 8
    assert rest - 1024 < needed <= rest
    assert spec.smem_bytes == sizes["q"] + stages * (sizes["k"] + sizes["v"]) + rest
    assert spec.smem_bytes <= 99 << 10, "more than a CTA may have on sm_86, sm_89 and sm_120"
    ctas = int(defines["MIN_CTAS"])
    if spec.min_arch >= (9, 0):
        assert ctas * (spec.smem_bytes + 1024) <= 228 << 10, "an SM of sm_90 has 228 KiB"
        assert spec.block_m == 32 * spec.num_warps
        return
    if (spec.pv, spec.pv_accumulator) != ("fp16", "fp32"):
        assert ctas * (spec.smem_bytes + 1024) <= 100 << 10, "an SM of sm_86 and sm_89 has 100 KiB"
    assert ctas * (spec.smem_bytes + 1024) <= 164 << 10, "an SM of sm_80 has 164 KiB"
    rows_a_warp = spec.block_m // spec.num_warps
    assert rows_a_warp in (16, 32), "a lane's rows share one scale of Q"
    assert 65536 // (ctas * 32 * spec.num_warps) >= 168


def test_fp16_sums_stay_below_the_largest_fp16() -> None:
    """The bounds that the kernel's header derives, with the very roundings."""
    keys, lanes, most = 64, 4, 65504.0
    # e4m3: a lane's 16 P add up to 448 at most, before they are rounded.
    levels = value_levels("fp8", "fp16")
    assert decode_e4m3(encode_e4m3(np.array([levels], dtype=np.float32)))[0] == levels
    codes = decode_e4m3(np.arange(0x7F, dtype=np.uint8))
    halves = (codes[1:] + codes[:-1]) / 2  # what rounds up the most
    normal = halves >= 2.0**-6
    assert (codes[1:][normal] / halves[normal]).max() <= 17 / 16
    small = (codes[1:] - halves)[~normal].max()
    assert small <= 2.0**-10
    row = lanes * 448 * 17 / 16 + keys * small
    assert levels * row + keys / 32 * 16 < most
    # fp16: a lane's P add up to 60 at most, |v| < 256.
    row = lanes * 60 * (1 + 2.0**-11)
    assert 256 * row + keys / 16 * 16 < most
    # What the base of the softmax makes of 16 equal scores is within what a lane may have.
    assert 16 * 2**4.754887502 <= 448
    assert math.isclose(2**4.754887502, 27, rel_tol=1e-6)


def test_int32_products_leave_the_seed_alone() -> None:
    """Accumulators begin with 12582912.0f's pattern: |S| < 2^22 keeps the exponent, and S in the mantissa."""
    seed = 0x4B400000
    for s in (0, 1, -1, 127 * 127 * 256, -127 * 127 * 256, 2**22 - 1, -(2**22)):
        (value,) = struct.unpack("<f", struct.pack("<I", seed + s))
        assert value == 12582912.0 + s
