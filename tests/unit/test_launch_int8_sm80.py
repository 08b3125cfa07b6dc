"""attn_int8_sm80 without a GPU: its arguments, its tiles in shared memory, the bounds of its fp16 sums."""

from __future__ import annotations

import itertools
import math
import struct
from typing import Any

import numpy as np
import pytest

from omniattn.launch import attn_int8_sm80
from omniattn.launch.attn_fwd import _POINTERS, _REST, num_m_blocks, pack_rest
from omniattn.launch.attn_int8_sm80 import Int8Sm80Plan, operand_strides
from omniattn.problems.quantize import QuantizePlan, carve
from omniattn.launch.quantized_attention import OPERANDS
from omniattn.problems.precision import Int4, Int8, value_levels
from omniattn.problems import AttentionProblem as Problem
from omniattn.quantizer import problem_for, select_quantizer
from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.problems import Target
from omniattn.select import select_attention
from tests.unit.test_kernel_layout import check_natural_alignment, expanded, fields_of
from tests.unit.test_launch_sm90 import POINTERS, STREAM, STRIDES, WORKSPACE, Kernel, problem

ROWS = [spec for spec in REGISTRY if spec.op == "attention_int8" and spec.grouping == "sm80"]
AMPERE, ADA = Target((8, 0), 163 << 10), Target((8, 9), 99 << 10)


def make(p: Problem, target: Target, *, run: bool = True) -> tuple[KernelSpec, QuantizePlan, Int8Sm80Plan, list[Any]]:
    """The plan of `planning.make_plan`, with kernels that write down their launches."""
    assert p.low is not None
    spec = select_attention(p, target).spec
    assert spec in ROWS
    log: list[Any] = []
    kernels = [Kernel(log) for _ in range(3)]
    low = type(p.low)(**{**p.low.__dict__, "pv": spec.pv, "pv_accumulator": spec.pv_accumulator})
    described = problem_for(
        low, dtype=p.dtype, batch=p.batch, rows_q=p.seqlen_q, rows_k=p.seqlen_k, heads_q=p.num_q_heads,
        heads_kv=p.num_kv_heads, head_dim=p.head_dim, varlen=p.varlen, grouping="sm80", full_bias=False,
        max_seqlen_k=p.seqlen_k if p.varlen else 0, wide=spec.bits == 8,
    )  # fmt: skip
    quantizer = QuantizePlan(
        select_quantizer("quantize", p.dtype, p.head_dim, target.cc),
        kernels[1],  # type: ignore[arg-type]
        kernels[2],  # type: ignore[arg-type]
        described,
        (STRIDES.q, STRIDES.k, STRIDES.v),
        108,
    )
    plan = Int8Sm80Plan(spec, kernels[0] if run else None, quantizer, p, STRIDES, (17, 19))  # type: ignore[arg-type]
    return spec, quantizer, plan, log


def test_arguments_match_the_device_struct() -> None:
    fields = fields_of("params/attn_int8.cuh", "QuantizedOperands")
    assert expanded(OPERANDS.format) == "".join(code for code, _ in fields)
    assert [name for _, name in fields] == [
        "q_scale", "k_scale", "row_bias", "v_scale", "v_mean", "delta_s", "q_scale_stride_h", "k_scale_stride_h",
        "delta_stride_h", "delta_columns", "head_dim_pad",
    ]  # fmt: skip
    check_natural_alignment(expanded(_POINTERS.format, _REST.format, OPERANDS.format))
    assert attn_int8_sm80._ARGUMENTS.size == _POINTERS.size + _REST.size + OPERANDS.size
    assert attn_int8_sm80._ARGUMENTS.size % 8 == 0


@pytest.mark.parametrize("low", [Int8(), Int8(smooth_q=True, smooth_v=True), Int4(), Int4(smooth_q=False)], ids=str)
@pytest.mark.parametrize("target", [AMPERE, ADA], ids=["sm_80", "sm_89"])
@pytest.mark.parametrize("varlen", [False, True])
def test_a_launch_finds_everything_in_the_workspace(varlen: bool, target: Target, low: Int8) -> None:
    p = problem(low=low, varlen=varlen)
    spec, quantizer, plan, log = make(p, target)
    plan.launch(STREAM, (*POINTERS, WORKSPACE))
    assert len(log) == plan.num_launches == 3 + low.smooth_q
    _, grid, threads, stream, data = log[-1]
    assert (grid, threads, stream) == ((plan.num_ctas, 1, 1), 32 * spec.num_warps, STREAM)
    values = attn_int8_sm80._ARGUMENTS.unpack_from(data)
    offsets, outputs_bytes = carve(quantizer.problem.shapes())
    base = -(-WORKSPACE // 256) * 256
    at = {name: base + offset for name, offset in offsets.items()}
    starts = quantizer.starts(base + outputs_bytes)
    assert all(starts) == varlen
    assert values[:9] == (at["q_int"], at["k_int"], at["v"], *POINTERS[3:5], *starts, *POINTERS[7:])
    of_q, of_k, of_v = operand_strides(quantizer.problem)
    own = type(STRIDES)(of_q, of_k, of_v, STRIDES.o, STRIDES.lse, STRIDES.mask)
    assert values[9] == pack_rest(p, own, (17, 19), num_m_blocks(p, spec.block_m))
    assert values[9][-4:] == bytes(4), "AttnFwdParams::zero, which addresses depend on"
    shapes = quantizer.problem.shapes()
    operands = OPERANDS.unpack(values[10])
    assert operands[:4] == tuple(at[n] for n in ("q_scale", "k_scale", "row_bias", "v_scale"))
    assert operands[4:6] == (at["v_mean"] if low.smooth_v else 0, at.get("delta_s", 0))
    assert operands[6:8] == (shapes["q_scale"][0][-1], shapes["k_scale"][0][-1])
    blocks, columns = shapes["delta_s"][0][-2:] if low.smooth_q else (0, 0)
    assert operands[8:] == (blocks * columns, columns, 128)
    # Rows of the operands in 16-bit units, and copies of 16 bytes.
    assert of_q[1] == of_k[1] == 128 * spec.bits // 16
    assert of_v[1] == (128 if spec.pv == "fp16" else shapes["v"][0][-1] // 2)
    assert all(stride % 8 == 0 for stride in (*of_q, *of_k, *of_v))
    assert (of_q[0] == 0) == varlen
    assert base + outputs_bytes + quantizer.workspace_bytes <= WORKSPACE + plan.workspace_bytes


@pytest.mark.parametrize("low", [Int8(smooth_v=False), Int4()], ids=str)
@pytest.mark.parametrize("varlen", [False, True])
def test_operands_that_are_quantized_already(varlen: bool, low: Int8) -> None:
    """The same arguments as when the plan quantizes itself; no launch but that of attention."""
    p = problem(low=low, varlen=varlen)
    spec, quantizer, plan, log = make(p, ADA)
    plan.launch(STREAM, (*POINTERS, WORKSPACE))
    offsets, outputs_bytes = carve(quantizer.problem.shapes())
    base = -(-WORKSPACE // 256) * 256
    alone = Int8Sm80Plan(spec, Kernel(log), quantizer.problem, p, STRIDES, (17, 19))  # type: ignore[arg-type]
    assert alone.workspace_bytes == 0
    assert alone.num_launches == 1
    whole = log[-1]
    del log[:]
    at = {name: base + offset for name, offset in offsets.items()}
    alone.attend(STREAM, at, (0, 0, 0, *POINTERS[3:5], *quantizer.starts(base + outputs_bytes), *POINTERS[7:]))
    assert log[0][1:] == whole[1:]
    assert len(log) == 1
    with pytest.raises(RuntimeError, match="cannot run"):
        alone.launch(STREAM, (*POINTERS, WORKSPACE))


@pytest.mark.parametrize("changes", [{"seqlen_q": 0}, {"batch": 0}], ids=str)
def test_nothing_to_do_launches_nothing(changes: dict[str, int]) -> None:
    _, _, plan, log = make(problem(**changes), AMPERE)
    plan.launch(STREAM, (*POINTERS, WORKSPACE))
    assert log == []


def test_a_plan_that_describes_does_not_run() -> None:
    _, _, plan, log = make(problem(), AMPERE, run=False)
    with pytest.raises(RuntimeError, match="without a loaded kernel"):
        plan.launch(STREAM, (*POINTERS, WORKSPACE))
    assert log == []


def tile_offset(rows: int, row_bytes: int, row: int, chunk: int) -> int:
    """Byte of a 16-byte chunk in the tiles of tile/panel.cuh, for every length of rows that this kernel has."""
    if row_bytes >= 128:
        return chunk // 8 * rows * 128 + row * 128 + 16 * ((chunk % 8) ^ (row % 8))
    if row_bytes == 64:
        return row * 64 + 16 * (chunk ^ (row // 2 % 4))
    return row * 32 + 16 * (chunk ^ (row // 4 % 2))


def tiles_of(spec: KernelSpec) -> dict[str, tuple[int, int]]:
    """(rows, bytes of a row) of Q, K and V."""
    row = spec.head_dim * spec.bits // 8
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
