"""What host and device share, as the device compiler has it: layouts of structs, numbers of enums, constants."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest

from build_tools.jobs import ROOT
from build_tools.layouts import device_constants, device_kinds, device_layout
from omniattn.launch import attn_fwd, attn_fwd_stream_k, kv_append, masks, quantize, structs
from omniattn.launch.host_struct import HostStruct
from omniattn.problems import quantize as quantize_problem
from omniattn.problems import score_mod
from omniattn.problems.decode import NEWEST, OLDER
from omniattn.problems.precision import GRANULARITIES
from omniattn.reference import mask_tiles
from omniattn.registry import REGISTRY

#: Header of every struct that the headers declare.
HEADERS = {
    name: f"params/{path.name}"
    for path in sorted((ROOT / "kernels_cu/params").glob("*.cuh"))
    for name in re.findall(
        r"^ *struct (?:alignas\(\d+\) )?(\w+)[^;(){]*\{", path.read_text(encoding="utf-8"), re.MULTILINE
    )
}
STRUCTS = {one.name: one for one in vars(structs).values() if isinstance(one, HostStruct)}


def split(code: str) -> tuple[int, str]:
    """Count and element of a field's code."""
    found = re.fullmatch(r"(\d*)([A-Za-z])", code)
    assert found is not None, code
    return int(found[1] or 1), found[2]


def size_of(code: str) -> int:
    """Bytes: of pointers (``P``), tensor maps (``M``), or what the `struct` module says."""
    count, element = split(code)
    return count * struct.calcsize({"P": "<Q", "M": "<128s"}.get(element, "<" + element))


@pytest.mark.parametrize("name", STRUCTS)
def test_layout(name: str) -> None:
    host = STRUCTS[name]
    names = [field for field, _ in host.fields]
    size, layout = device_layout(HEADERS[name], name, names)
    assert size == host.size
    assert {field: (host.offsets[field], size_of(code)) for field, code in host.fields} == layout
    # Nothing of the device's is left out: what lies between fields is less than the next one's alignment could take.
    spans = sorted(layout.values())
    ends = [0, *(at + extent for at, extent in spans)]
    for end, begin in zip(ends, [*(at for at, _ in spans), size], strict=True):
        assert 0 <= begin - end < (64 if begin == size else 8), f"{name}: {begin - end} bytes at {end} have no name"


@pytest.mark.parametrize("name", STRUCTS)
def test_types(name: str) -> None:
    host = STRUCTS[name]
    kinds = device_kinds(HEADERS[name], name, [field for field, _ in host.fields])
    assert kinds == {field: {"M": "bytes"}.get(split(code)[1], split(code)[1]) for field, code in host.fields}


def test_every_struct_of_the_kernels_is_known_to_the_host() -> None:
    assert len(STRUCTS) > 50
    assert set(HEADERS) == set(STRUCTS)


def test_arguments_fit_into_what_a_launch_takes() -> None:
    assert all(host.size <= 4096 for host in STRUCTS.values())


#: Header, expression in device code, what the host has.
CONSTANTS = [
    *(
        ("params/attn_fwd.cuh", name, masks.MASK_KINDS[kind])
        for name, kind in (
            ("kMaskNone", "none"), ("kMaskBool", "bool"), ("kMaskFloat", "float32"), ("kMaskIo", "io"),
        )
    ),
    *(
        ("params/attn_fwd.cuh", name, attn_fwd.SINKS_KINDS[kind])
        for name, kind in (("kSinksNone", "none"), ("kSinksFloat", "float32"), ("kSinksIo", "io"))
    ),
    *(
        ("params/kv_append.cuh", name, kv_append.ROPE[kind])
        for name, kind in (("kRopeNone", "none"), ("kRopeHalf", "half"), ("kRopeInterleaved", "interleaved"))
    ),
    ("params/attn_combine.cuh", "kStreamKSlots", attn_fwd_stream_k.SLOTS),
    ("params/attn_combine.cuh", "kStreamKClasses", attn_fwd_stream_k.CLASSES),
    ("params/decode.cuh", "kRecentOlder", OLDER),
    ("params/decode.cuh", "kRecentNewest", NEWEST),
    ("params/kv_copy.cuh", "kMaxPairs", structs.MAX_PAIRS),
    ("params/score_mod.cuh", "kMaxModArrays", structs.MAX_MOD_ARRAYS),
    ("params/score_mod.cuh", "kMaxModDims", structs.MAX_MOD_DIMS),
    ("params/mask_tiles.cuh", "kTileEmpty", mask_tiles.EMPTY),
    ("params/mask_tiles.cuh", "kTileMixed", mask_tiles.MIXED),
    ("params/mask_tiles.cuh", "kTileFull", mask_tiles.FULL),
    ("params/mask_tiles.cuh", "kFirstGroup", mask_tiles.FIRST_GROUP),
    *(
        ("params/quantize.cuh", name, GRANULARITIES.index(kind))
        for name, kind in (
            ("kPerTensor", "per_tensor"), ("kPerBlock", "per_block"), ("kPerWarp", "per_warp"),
            ("kPerThread", "per_thread"), ("kPerToken", "per_token"),
        )
    ),
    *(
        ("params/quantize.cuh", name, flag)
        for name, flag in (
            ("kSmoothQ", quantize._SMOOTH_Q), ("kSmoothK", quantize._SMOOTH_K), ("kSmoothV", quantize._SMOOTH_V),
            ("kFullBias", quantize._FULL_BIAS), ("kHasQk", quantize._HAS_QK), ("kHasV", quantize._HAS_V),
            ("kHalfV", quantize._HALF_V),
        )
    ),
    ("scheduler/slots.cuh", "kBlockRows", quantize_problem.BLOCK_ROWS),
    ("quantize/sampling.cuh", "kChunkRows", quantize_problem.CHUNK_ROWS),
    ("quantize/sampling.cuh", "kMaxChunks", quantize_problem.MAX_CHUNKS),
    ("quantize/sampling.cuh", "kLeastSample", quantize_problem.LEAST_SAMPLE),
    ("quantize/sampling.cuh", "kMostSampleLog2", quantize_problem.MOST_SAMPLE_LOG2),
]  # fmt: skip


@pytest.mark.parametrize("header", sorted({header for header, _, _ in CONSTANTS}))
def test_constants(header: str) -> None:
    expected = {name: value for place, name, value in CONSTANTS if place == header}
    assert dict(zip(expected, device_constants(header, list(expected)), strict=True)) == expected


def test_limits_of_score_modifications() -> None:
    """What a call may have is what its struct has room for."""
    assert (score_mod.MAX_ARRAYS, score_mod.MAX_DIMS) == (structs.MAX_MOD_ARRAYS, structs.MAX_MOD_DIMS)


SPECIALIZED = [spec for spec in REGISTRY if spec.op == "quantize" and spec.specialization]


@pytest.mark.parametrize("spec", SPECIALIZED, ids=lambda spec: spec.name)
def test_constants_of_specialized_quantizers(spec: Any) -> None:
    """What a row is chosen for is what its kernel computes."""
    grouping, v_dtype = spec.specialization
    numbers = ["kCommon", "kCommonKeyTile", "kCommonQuerySlice", "kCommonFlags & kHalfV"]
    defines = [(name, value) for name, value in spec.defines if name in ("COMMON", "GROUPING", "PACKED", "V_TYPE")]
    assert device_constants("quantize/items.cuh", numbers, defines=defines) == [
        1,
        quantize_problem.KEY_TILES[grouping],
        quantize_problem.QUERY_SLICES[grouping],
        quantize._HALF_V if v_dtype == "float16" else 0,
    ]
