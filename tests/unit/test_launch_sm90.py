"""Launches of the Hopper kernels without a GPU: tensor maps, and the arguments that attn_int8_sm90 finds."""

from __future__ import annotations

import dataclasses
import itertools
import re
import struct
from typing import Any

import pytest

from omniattn.launch import attn_int8_sm90, tensor_maps
from omniattn.launch.attn_fwd import _POINTERS, _REST, ForwardStrides, num_m_blocks, pack_rest
from omniattn.launch.attn_int8_sm90 import Int8Sm90Plan
from omniattn.launch.params import PARAMS
from omniattn.problems.quantize import QuantizePlan, carve
from omniattn.launch.quantized_attention import OPERANDS
from omniattn.launch.tensor_maps import MappedOperand
from omniattn.problems.precision import Int4, Int8
from omniattn.problems import UNLIMITED, AttentionProblem as Problem
from omniattn.quantizer import problem_for, select_quantizer
from omniattn.registry import REGISTRY, KernelSpec, by_name
from omniattn.problems import Target
from omniattn.select import select_attention
from tests.unit.test_kernel_layout import KERNELS, check_natural_alignment, expanded, fields_of

SMS = 132
STREAM = 0x51
WORKSPACE = 0x7F0000001310  # no multiple of 256
POINTERS = (0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000, 0x7000, 0, 0x9000)
INT8 = [spec for spec in REGISTRY if spec.family == "attn_int8_sm90"]


class Kernel:
    """Encodes "maps" that can be read again, and keeps what it is launched with."""

    overlap = None

    def __init__(self, log: list[Any] | None = None) -> None:
        self.maps: list[tuple[Any, ...]] = []
        self.log: list[Any] = [] if log is None else log

    def encode_tensor_map(self, *facts: Any) -> bytes:
        self.maps.append(facts)
        return len(self.maps).to_bytes(128, "little")

    def launch(
        self, grid: tuple[int, int, int], block_x: int, stream: int, params_address: int, cluster: Any = None
    ) -> None:
        assert params_address == PARAMS.address
        self.log.append((self, grid, block_x, stream, bytes(PARAMS.buffer.raw)))


# Tensor maps


def test_a_map_is_encoded_once_for_an_address() -> None:
    kernel = Kernel()
    operand = MappedOperand("uint8", (64, 5, 2, 1), (64, 320, 0), (64, 16, 1, 1))
    first = operand.at(0x100, kernel)  # type: ignore[arg-type]
    assert operand.at(0x100, kernel) is first  # type: ignore[arg-type]
    assert operand.at(0x200, kernel) != first  # type: ignore[arg-type]
    # An extent of 1 has no stride of its own; the map wants a positive multiple of 16.
    assert kernel.maps == [
        ("uint8", address, (64, 5, 2, 1), (64, 320, 16), (64, 16, 1, 1)) for address in (0x100, 0x200)
    ]


def test_maps_of_many_addresses_do_not_pile_up() -> None:
    kernel = Kernel()
    operand = MappedOperand("uint8", (64, 5, 2, 1), (64, 320, 640), (64, 16, 1, 1))
    for address in range(0, 16 * 1000, 16):
        got = operand.at(address, kernel)  # type: ignore[arg-type]
        assert got == operand.at(address, kernel)  # type: ignore[arg-type]
        assert len(operand._maps) <= tensor_maps._MAX_MAPS
    assert len(kernel.maps) == 1000


def test_equal_addresses_of_different_operands_are_different_maps() -> None:
    kernel = Kernel()
    dims, strides = (64, 5, 2, 1), (64, 320, 640)
    narrow, wide = (MappedOperand("uint8", dims, strides, (64, rows, 1, 1)) for rows in (16, 32))
    assert narrow.at(0x100, kernel) != wide.at(0x100, kernel)  # type: ignore[arg-type]


# attn_int8_sm90


def int8_fields() -> list[tuple[str, str]]:
    """Fields of AttnInt8Sm90Params behind the maps and the arguments of all forward kernels."""
    body = re.search(r"struct AttnInt8Sm90Params \{(.*?)\};", _read("params/attn_int8.cuh"), re.DOTALL)
    assert body is not None
    statements = [" ".join(s.split()) for s in body[1].split(";") if s.strip()]
    assert statements[:2] == ["TensorMap map_q, map_k, map_v", "AttnFwdParams fwd"]
    assert statements[2:] == ["QuantizedOperands operands", "TileList tiles", "int32 flush_keys"]
    tile_list = re.search(r"struct TileList \{(.*?)\};", _read("params/attn_fwd.cuh"), re.DOTALL)
    assert tile_list is not None
    names_of_list = re.findall(r"uint32 (\w+);", tile_list[1])
    assert len(names_of_list) == tile_list[1].count(";")
    operands = fields_of("params/attn_int8.cuh", "QuantizedOperands")
    return [*operands, *(("I", name) for name in names_of_list), ("i", "flush_keys")]


def _read(source: str) -> str:
    """Device code without comments."""
    return re.sub(r"//[^\n]*", "", (KERNELS / source).read_text(encoding="utf-8"))


def test_arguments_match_the_device_struct() -> None:
    fields = int8_fields()
    assert expanded(OPERANDS.format, attn_int8_sm90._TAIL.format) == "".join(code for code, _ in fields)
    assert [name for _, name in fields] == [
        "q_scale", "k_scale", "row_bias", "v_scale", "v_mean", "delta_s", "q_scale_stride_h", "k_scale_stride_h",
        "delta_stride_h", "delta_columns", "head_dim_pad", "num_items", "num_pairs", "num_tail_heads",
        "lead_rows", "flush_keys",
    ]  # fmt: skip
    # Maps are aligned to 64 bytes, and so is the struct: every field where C puts it, and a whole number of 64.
    at = 3 * 128 + _POINTERS.size + _REST.size
    assert at % 8 == 0
    check_natural_alignment(expanded(_POINTERS.format, _REST.format))
    for code, name in fields:
        size = struct.calcsize("<" + code)
        assert at % size == 0, name
        at += size
    assert attn_int8_sm90._ARGUMENTS.size == -(-at // 64) * 64
    assert "alignas(64)" in _read("ptx/tma.cuh")
    assert attn_int8_sm90._ARGUMENTS.size <= 4096, "more than a kernel's arguments may have"


def problem(**changes: Any) -> Problem:
    low = changes.get("low", Int8())
    plain = Problem(
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
        precision=f"int{low.bits}",
        deterministic=False,
        low=low,
    )
    return dataclasses.replace(plain, **changes)


STRIDES = ForwardStrides((1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12), (13, 14), (0, 0, 0, 0))


def make(
    p: Problem, spec: KernelSpec | None = None, *, run: bool = True
) -> tuple[Kernel, QuantizePlan, Int8Sm90Plan, list[Any]]:
    """The plan of `planning.make_plan`, with kernels that write down their launches."""
    assert p.low is not None
    spec = spec or select_attention(p, Target((9, 0), 227 << 10)).spec
    log: list[Any] = []
    kernel, quantizer_kernel, delta_kernel = Kernel(log), Kernel(log), Kernel(log)
    described = problem_for(
        p.low, dtype=p.dtype, batch=p.batch, rows_q=p.seqlen_q, rows_k=p.seqlen_k, heads_q=p.num_q_heads,
        heads_kv=p.num_kv_heads, head_dim=p.head_dim, varlen=p.varlen, grouping="sm90", full_bias=False,
        max_seqlen_k=p.seqlen_k if p.varlen else 0, wide=True,
    )  # fmt: skip
    quantizer = QuantizePlan(
        select_quantizer("quantize", p.dtype, p.head_dim, (9, 0)),
        quantizer_kernel,  # type: ignore[arg-type]
        delta_kernel,  # type: ignore[arg-type]
        described,
        (STRIDES.q, STRIDES.k, STRIDES.v),
        SMS,
    )
    plan = Int8Sm90Plan(spec, kernel if run else None, quantizer, p, STRIDES, SMS)  # type: ignore[arg-type]
    return kernel, quantizer, plan, log


def launched(p: Problem) -> tuple[dict[str, int], Kernel, bytes, dict[str, int], Int8Sm90Plan]:
    """(fields by name, kernel, the other bytes, addresses of the operands, plan) of one launch."""
    kernel, quantizer, plan, log = make(p)
    plan.launch(STREAM, (*POINTERS, WORKSPACE))
    assert [call[0] is kernel for call in log] == [False] * (plan.num_launches - 1) + [True]
    assert {call[3] for call in log} == {STREAM}
    _, grid, threads, _, data = log[-1]
    assert grid == (plan.num_ctas, 1, 1)
    assert threads == plan.threads
    values = attn_int8_sm90._ARGUMENTS.unpack_from(data)
    # The kernel reads the copies of cu_seqlens that the quantizer has made, which never decrease.
    offsets, outputs_bytes = carve(quantizer.problem.shapes())
    starts = quantizer.starts(-(-WORKSPACE // 256) * 256 + outputs_bytes)
    assert all(starts) == p.varlen
    assert values[3:12] == (*POINTERS[:5], *starts, *POINTERS[7:])
    facts = (*OPERANDS.unpack(values[-2]), *attn_int8_sm90._TAIL.unpack(values[-1]))
    fields = dict(zip((n for _, n in int8_fields()), facts, strict=True))
    base = -(-WORKSPACE // 256) * 256
    at = {name: base + offset for name, offset in offsets.items()}
    spec = select_attention(p, Target((9, 0), 227 << 10)).spec
    assert values[12] == pack_rest(p, STRIDES, (0, 0), num_m_blocks(p, spec.block_m))
    # The maps in their order: the number of each was its content.
    numbers = [int.from_bytes(values[i], "little") for i in range(3)]
    maps = b"".join(repr(kernel.maps[n - 1]).encode() + b"\n" for n in numbers)
    return fields, kernel, maps, at, plan


def test_a_launch_finds_everything_in_the_workspace() -> None:
    p = problem(low=Int8(smooth_q=True, smooth_v=True), window_right=0)
    fields, _, maps, at, plan = launched(p)
    for name in ("q_scale", "k_scale", "row_bias", "v_scale", "v_mean", "delta_s"):
        assert fields[name] == at[name], name
    shapes = make(p)[1].problem.shapes()
    assert fields["q_scale_stride_h"] == shapes["q_scale"][0][-1]
    assert fields["k_scale_stride_h"] == shapes["k_scale"][0][-1]
    blocks, columns = shapes["delta_s"][0][-2:]
    assert (fields["delta_stride_h"], fields["delta_columns"]) == (blocks * columns, columns)
    assert fields["head_dim_pad"] == 128
    # 192 query rows a tile: two blocks of eight heads, causal; one by one, because there are SMs for all of them.
    assert (fields["num_items"], fields["num_pairs"], fields["num_tail_heads"]) == (16, 0, 8)
    assert plan.num_ctas == 16
    keys = shapes["v"][0][-1]
    assert keys == 512
    assert maps.decode().splitlines() == [
        repr(("uint8", at["q_int"], (128, 300, 4, 2), (128, 128 * 300, 128 * 300 * 4), (128, 192, 1, 1))),
        repr(("uint8", at["k_int"], (128, 500, 2, 2), (128, 128 * 500, 128 * 500 * 2), (128, 64, 1, 1))),
        repr(("uint8", at["v"], (512, 128, 2, 2), (512, 512 * 128, 512 * 128 * 2), (64, 128, 1, 1))),
    ]


@pytest.mark.parametrize("low", [Int8(), Int8(smooth_q=True, smooth_v=True), Int4()], ids=str)
@pytest.mark.parametrize("varlen", [False, True])
def test_quantized_operands_are_launched_with_the_same_arguments(varlen: bool, low: Int8) -> None:
    p = problem(low=low, varlen=varlen)
    _, quantizer, plan, log = make(p)
    plan.launch(STREAM, (*POINTERS, WORKSPACE))
    offsets, outputs_bytes = carve(quantizer.problem.shapes())
    base = -(-WORKSPACE // 256) * 256
    starts = quantizer.starts(base + outputs_bytes)
    alone = Int8Sm90Plan(
        select_attention(p, Target((9, 0), 227 << 10)).spec,
        Kernel(log),
        quantizer.problem,
        p,
        STRIDES,
        SMS,  # type: ignore[arg-type]
    )
    assert (alone.workspace_bytes, alone.num_launches) == (0, 1)
    at = {name: base + offset for name, offset in offsets.items()}
    alone.attend(STREAM, at, (*POINTERS[:5], *starts, *POINTERS[7:]))
    whole, part = log[-2:]
    # The first 384 bytes are the maps, of which the fake ones are numbered for each kernel: 1, 2, 3 in both.
    assert part[1:] == whole[1:]
    with pytest.raises(RuntimeError, match="describes a call"):
        alone.launch(STREAM, (*POINTERS, WORKSPACE))


def test_what_is_not_smoothed_is_null() -> None:
    fields, _, _, at, plan = launched(problem(low=Int8(smooth_v=False)))
    assert (fields["v_mean"], fields["delta_s"], fields["delta_columns"], fields["delta_stride_h"]) == (0, 0, 0, 0)
    assert "delta_s" not in at
    assert plan.num_launches == 3
    assert launched(problem(low=Int4()))[-1].num_launches == 4


def test_packed_sequences_have_one_batch() -> None:
    p = problem(varlen=True, batch=7)
    fields, kernel, _, at, plan = launched(p)
    blocks = -(-300 // 192) + 7 + 2
    assert plan.num_tiles == fields["num_items"] == 4 * blocks
    assert [(facts[1], facts[2][1:]) for facts in kernel.maps[:2]] == [
        (at["q_int"], (300, 4, 1)), (at["k_int"], (500, 2, 1)),
    ]  # fmt: skip


def test_without_keys_the_maps_are_those_of_q() -> None:
    _, kernel, maps, at, _ = launched(problem(seqlen_k=0))
    assert len(kernel.maps) == 1
    assert kernel.maps[0][1] == at["q_int"]
    assert len(set(maps.splitlines())) == 1


@pytest.mark.parametrize("changes", [{"seqlen_q": 0}, {"batch": 0}], ids=str)
def test_nothing_to_do_launches_nothing(changes: dict[str, int]) -> None:
    _, _, plan, log = make(problem(**changes), by_name("attn_int8_sm90_bf16_d128"))
    plan.launch(STREAM, (*POINTERS, WORKSPACE))
    assert log == []


def test_a_plan_that_describes_does_not_run() -> None:
    _, _, plan, log = make(problem(), run=False)
    assert plan.num_launches == 3
    with pytest.raises(RuntimeError, match="without a loaded kernel"):
        plan.launch(STREAM, (*POINTERS, WORKSPACE))
    assert log == []


@pytest.mark.parametrize("low", [Int8(), Int8(smooth_q=True, smooth_v=True), Int4()], ids=str)
@pytest.mark.parametrize("varlen", [False, True])
def test_operands_do_not_overlap_and_fit_wherever_the_workspace_lies(varlen: bool, low: Int8) -> None:
    _, quantizer, plan, _ = make(problem(low=low, varlen=varlen))
    sizes = {
        name: struct.calcsize({"float32": "f", "float16": "e"}.get(dtype, "B")) * _product(shape)
        for name, (shape, dtype) in quantizer.problem.shapes().items()
    }
    offsets, outputs_bytes = carve(quantizer.problem.shapes())
    spans = sorted((offset, offset + sizes[name]) for name, offset in offsets.items())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= outputs_bytes
    # Tensor maps and bulk copies want their operands at multiples of 16 bytes, swizzled tiles of 128 and more.
    assert all(offset % 256 == 0 for offset in offsets.values())
    for address in (256, 257, 511):
        base = -(-address // 256) * 256
        assert base + outputs_bytes + quantizer.workspace_bytes <= address + plan.workspace_bytes


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


@pytest.mark.parametrize("spec", INT8, ids=lambda spec: spec.name)
def test_boxes_of_every_row_are_tiles(spec: KernelSpec) -> None:
    """One copy of K is BLOCK_N rows of at most 128 bytes; one of V is HEAD_DIM rows of BLOCK_N bytes."""
    varlen = "dense" in spec.lacks
    low = Int8(smooth_q="smooth_q" in spec.features)
    kernel, _, plan, _ = make(problem(dtype=spec.dtype, head_dim=spec.head_dim, varlen=varlen, low=low), spec)
    plan.launch(STREAM, (*POINTERS, WORKSPACE))
    row = min(spec.head_dim, 128)
    assert [facts[-1][:2] for facts in kernel.maps] == [
        (row, spec.block_m), (row, spec.block_n), (spec.block_n, spec.head_dim),
    ]  # fmt: skip
    assert all(extent <= 256 for facts in kernel.maps for extent in facts[-1]), "the largest box"
    assert plan.threads == 32 * spec.num_warps <= 1024
