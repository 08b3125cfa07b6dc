"""Launches of packed sequences on Hopper whose keys are split into even shares, one for each CTA."""

from __future__ import annotations

from dataclasses import asdict, replace

from ..problems import AttentionProblem
from ..problems.memory import aligned
from ..problems.split import PackGQA, StreamK
from ..problems.tile_order import first
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .attn_fwd import SINKS_KINDS, forward_values
from .attn_fwd_sm90 import key_value_maps, packed_gqa_map
from .attn_int8 import OperandPlaces
from .attn_int8_sm90 import flush_keys, key_maps, packed_operands_map
from .host_struct import At, HostStruct, member
from .score_mods import score_mod_values
from .structs import (
    ATTN_COMBINE_PACKED,
    ATTN_FWD_STREAM_K_MODS_SM90,
    ATTN_FWD_STREAM_K_SM90,
    ATTN_INT8_STREAM_K_SM90,
    CUT_TILE,
)

#: Classes of sequences, and a CTA's partial results of each (kernels_cu/params/attn_combine.cuh).
CLASSES, SLOTS = 4, 2


def workspace(spec: KernelSpec, problem: AttentionProblem, schedule: StreamK) -> tuple[int, int, int, int]:
    """Where bases and denominators lie behind the partial O, those of the LSE of quantized operands behind them, the
    cut tiles behind those, and the bytes of all.
    """
    rows = schedule.ctas * CLASSES * SLOTS * spec.block_m
    ml = aligned(4 * rows * problem.head_dim_v)
    lse = ml + aligned(8 * rows)
    cuts = lse + (aligned(8 * rows) if problem.precision.quantized and problem.lse else 0)
    return ml, lse, cuts, cuts + CUT_TILE.size * CLASSES * schedule.ctas


def build(
    spec: KernelSpec,
    combine: KernelSpec,
    problem: AttentionProblem,
    pack_gqa: PackGQA,
    schedule: StreamK,
    begin: int = 0,
    places: OperandPlaces | None = None,
) -> tuple[tuple[LaunchRecord, ...], int]:
    """The launches of a call, and where their workspace ends.

    pack_gqa: heads that share the rows of a tile. begin: where the workspace begins. places: of quantized operands.
    """
    p, s, ctas = problem, problem.strides, schedule.ctas
    assert s is not None
    ml, lse, cuts, num_bytes = workspace(spec, p, schedule)
    own_lse = places is not None and p.lse
    partial: dict[str, object] = {
        "partial_o": At("workspace", begin),
        "partial_ml": At("workspace", begin + ml),
        "partial_lse": At("workspace", begin + lse) if own_lse else None,
        "cuts": At("workspace", begin + cuts),
    }
    # Rows are those of packed sequences, which the kernel counts by itself; of a few heads it makes one.
    told = replace(p, num_q_heads=p.num_q_heads // pack_gqa.heads)
    unused = dict.fromkeys(("num_splits", "num_queries", "num_tiles", "first_tile"), 0)
    tiles = asdict(first(ctas)) | unused | {"pack": pack_gqa.pack, "pack_heads": pack_gqa.heads}
    if places is None:
        layout, values = _on_16_bits(spec, p, told, pack_gqa, partial)
    else:
        layout, values = _on_8_bits(spec, p, told, pack_gqa, partial, places)
    values |= member("tiles", tiles)
    main = LaunchRecord(spec, (ctas, 1, 1), 32 * spec.num_warps, *layout.pack(values))
    merged = {
        **partial,
        "o": At("o"),
        "lse": At("lse") if p.lse else None,
        "sinks": At("sinks") if p.sinks != "none" else None,
        "o_stride_s": s.o[1],
        "o_stride_h": s.o[2],
        "lse_stride_h": s.lse[1],
        "block_m": spec.block_m,
        "pack": pack_gqa.pack,
        "pack_heads": pack_gqa.heads,
        "head_dim": p.head_dim_v,
        "sinks_kind": SINKS_KINDS[p.sinks],
        "num_ctas": ctas,
    }
    grid = (spec.block_m // combine.block_m, -(-ctas // spec.ctas_per_sm), 1)
    merge = LaunchRecord(combine, grid, 32 * combine.num_warps, *ATTN_COMBINE_PACKED.pack(merged), overlap=True)
    return (main, merge), begin + num_bytes


def _on_16_bits(
    spec: KernelSpec, p: AttentionProblem, told: AttentionProblem, pack_gqa: PackGQA, partial: dict[str, object]
) -> tuple[HostStruct, dict[str, object]]:
    """Arguments of attention, but for its tiles; told: the problem of packed heads."""
    q = packed_gqa_map(p, pack_gqa, spec.block_m)
    k, v = key_value_maps(spec, p, q)
    values = {
        "map_q": q,
        "map_k": k,
        "map_v": v,
        **member("fwd", forward_values(told, 0, block_n=spec.block_n)),
        **{name: place for name, place in partial.items() if name != "partial_lse"},
    }
    if not spec.score_mods:
        return ATTN_FWD_STREAM_K_SM90, values
    return ATTN_FWD_STREAM_K_MODS_SM90, values | member("mods", score_mod_values(p, None))


def _on_8_bits(
    spec: KernelSpec,
    p: AttentionProblem,
    told: AttentionProblem,
    pack_gqa: PackGQA,
    partial: dict[str, object],
    places: OperandPlaces,
) -> tuple[HostStruct, dict[str, object]]:
    """The same on quantized operands, whose scales are found by the heads of the call."""
    at = places.at
    k, v = key_maps(spec, p, places, 1)
    forward = forward_values(told, 0, operands=(at["q_int"], at["k_int"], at["v"]), starts=places.starts)
    values = {
        "map_q": packed_operands_map(spec, p, places, pack_gqa, 1),
        "map_k": k,
        "map_v": v,
        **member("fwd", forward),
        **member("operands", places.values()),
        "flush_keys": flush_keys(places),
        "reserved": 0,
        **member("scales", places.block_scales()),
        **partial,
    }
    return ATTN_INT8_STREAM_K_SM90, values
