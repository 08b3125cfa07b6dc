"""Launches of attention kernels with the keys split over CTAs, and of ``attn_combine_sm80``."""

from __future__ import annotations

from dataclasses import asdict, replace

from ..problems import AttentionProblem, Target
from ..problems.memory import aligned
from ..problems.split import ONE_HEAD, KeySplit, is_final
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from . import tile_order
from .attn_fwd import SINKS_KINDS, forward_values, num_m_blocks
from .attn_fwd_sm90 import operand_map, shared_rows_map
from .attn_int8 import OperandPlaces
from .attn_int8_sm90 import flush_keys, key_maps, shared_queries_map
from .host_struct import At, member, strides
from .masks import MaskPlaces, memory_of
from .score_forms import bias_map, form_values
from .score_mod import array_values
from .structs import (
    ATTN_COMBINE,
    ATTN_FP8_SPLIT_FACTORS_SM90,
    ATTN_FP8_SPLIT_FORMS_FACTORS_SM90,
    ATTN_FWD_SPLIT_FORMS_SM80,
    ATTN_FWD_SPLIT_FORMS_SM90,
    ATTN_FWD_SPLIT_MOD_SM80,
    ATTN_FWD_SPLIT_MOD_SM90,
    ATTN_FWD_SPLIT_SM80,
    ATTN_FWD_SPLIT_SM90,
    ATTN_INT8_SPLIT_FORMS_SM90,
    ATTN_INT8_SPLIT_SM90,
)

#: Of quantized operands: with and without score forms, with and without factors of V.
_INT8_LAYOUTS = {
    (False, False): ATTN_INT8_SPLIT_SM90,
    (True, False): ATTN_INT8_SPLIT_FORMS_SM90,
    (False, True): ATTN_FP8_SPLIT_FACTORS_SM90,
    (True, True): ATTN_FP8_SPLIT_FORMS_FACTORS_SM90,
}
_COMBINE_THREADS = 256
#: Channels of a thread of the second kernel, and partial results that it asks for at once.
_WIDTH, _UNROLL = 4, 8
#: CTAs of the second kernel that are enough: with fewer its threads share the splits of a row.
_COMBINE_CTAS = 512


def workspace(problem: AttentionProblem, split: KeySplit) -> tuple[int, int]:
    """Where bases and denominators lie behind the partial O, and the bytes of both.

    With an LSE of quantized operands another array like that follows, and is counted (it is left empty where v has a
    factor for each 128 rows).
    """
    results = _merged_rows(problem, split) * split.num_splits
    ml = aligned(4 * results * problem.head_dim_v)
    return ml, ml + 8 * results * (2 if problem.precision.quantized and problem.lse else 1)


def combine_threads(columns: int, num_splits: int) -> int:
    """Threads of a CTA that have columns of their own; the others share the splits of the same ones."""
    threads = _COMBINE_THREADS
    while threads > 32 and columns < threads * _COMBINE_CTAS and num_splits > _UNROLL * _COMBINE_THREADS // threads:
        threads //= 2
    return threads


def build(
    spec: KernelSpec,
    combine: KernelSpec | None,
    problem: AttentionProblem,
    target: Target,
    split: KeySplit,
    masks: MaskPlaces | None = None,
    begin: int = 0,
    places: OperandPlaces | None = None,
) -> tuple[tuple[LaunchRecord, ...], int]:
    """The launches of a call, and where their workspace ends.

    combine: None where one split leaves nothing to merge. masks: what was made of the mask, where attention does not
    read it itself. begin: where the memory of partial results begins. places: of quantized operands.
    """
    if combine is None:
        nothing: dict[str, At | None] = {"partial_o": None, "partial_ml": None}
        if spec.arch_specific:
            return _main_sm90(spec, problem, target, split, nothing, masks), begin
        return _main_sm80(spec, problem, split, nothing, masks), begin
    ml_at, num_bytes = workspace(problem, split)
    partial: dict[str, At | None] = {
        "partial_o": At("workspace", begin),
        "partial_ml": At("workspace", begin + ml_at),
    }
    of_lse: At | None = None
    if places is not None:
        # With factors of v the LSE is of the same sums as O.
        own_lse = problem.lse and "value_factors" not in spec.features
        of_lse = At("workspace", begin + (ml_at + num_bytes) // 2) if own_lse else None
        records = _main_int8(spec, problem, target, split, {**partial, "partial_lse": of_lse}, places, masks)
    elif spec.arch_specific:
        records = _main_sm90(spec, problem, target, split, partial, masks)
    else:
        records = _main_sm80(spec, problem, split, partial, masks)
    return (*records, _merge(combine, problem, split, {**partial, "partial_lse": of_lse})), begin + num_bytes


def _main_sm90(
    spec: KernelSpec,
    problem: AttentionProblem,
    target: Target,
    split: KeySplit,
    partial: dict[str, At | None],
    masks: MaskPlaces | None,
) -> tuple[LaunchRecord, ...]:
    p, s = problem, problem.strides
    assert s is not None
    pack, extent = split.shared.pack, p.mask_extent
    q = shared_rows_map(p, split.shared, spec.block_m)
    kv_shape = (p.batch, p.seqlen_k, p.num_kv_heads)
    tiles = _tiles(p, split)
    values = {
        "map_q": q,
        "map_k": operand_map("k", p.dtype, (*kv_shape, p.head_dim), s.k, spec.block_n),
        "map_v": operand_map("v", p.dtype, (*kv_shape, p.head_dim_v), s.v, spec.block_n),
        **member("fwd", forward_values(_packed(p, split), split.blocks, mask_extent=(extent[0] * pack, extent[1]))),
        **_tile_values(tiles, p, split),
        **partial,
    }
    layout = ATTN_FWD_SPLIT_SM90
    if "score_mods" in spec.features:
        layout = ATTN_FWD_SPLIT_FORMS_SM90
        values |= {"map_bias": bias_map(spec, p, q, masks, split.shared), **member("forms", form_values(p, masks))}
    if p.score_mod is not None:
        layout = ATTN_FWD_SPLIT_MOD_SM90
        values |= member("arrays", array_values(p.score_mod))
    grid = (min(tiles.num_items, target.sm_count * spec.ctas_per_sm), 1, 1)
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *layout.pack(values)),)


def _main_int8(
    spec: KernelSpec,
    problem: AttentionProblem,
    target: Target,
    split: KeySplit,
    partial: dict[str, At | None],
    places: OperandPlaces,
    masks: MaskPlaces | None,
) -> tuple[LaunchRecord, ...]:
    """As on 16 bits; scales and biases of queries are found by the heads of the call, and sinks are known of.

    With forms the rows of a tile are those of one head.
    """
    p, at = problem, places.at
    forms, factors = "score_mods" in spec.features, "value_factors" in spec.features
    assert split.shared == ONE_HEAD or not forms
    q = shared_queries_map(spec, p, places, split.shared, p.batch)
    k, v = key_maps(spec, p, places, p.batch)
    tiles = _tiles(p, split)
    told = replace(_packed(p, split), sinks=p.sinks)
    forward = forward_values(told, split.blocks, operands=(at["q_int"], at["k_int"], at["v"]), starts=places.starts)
    values = {
        "map_q": q,
        "map_k": k,
        "map_v": v,
        **member("fwd", forward),
        **member("operands", places.values()),
        **_tile_values(tiles, p, split),
        "flush_keys": flush_keys(places),
        "reserved": 0,
        **member("scales", places.block_scales()),
        **partial,
    }
    if forms:
        values |= {"map_bias": bias_map(spec, p, q, shared=split.shared), **member("forms", form_values(p, masks))}
    if factors:
        values |= member("factors", places.value_factors())
        del values["partial_lse"]
    layout = _INT8_LAYOUTS[forms, factors]
    grid = (min(tiles.num_items, target.sm_count), 1, 1)
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *layout.pack(values)),)


def _merged_rows(problem: AttentionProblem, split: KeySplit) -> int:
    """Rows that have partial results, of all heads; of a tail those that no head has, too."""
    if split.tail is not None:
        return split.tail.num_tiles * split.tail.rows
    heads, rows = _extents(problem, split)
    return (1 if problem.varlen else problem.batch) * heads * rows


def _extents(problem: AttentionProblem, split: KeySplit) -> tuple[int, int]:
    """What a kernel takes for heads, and for the queries of each."""
    return problem.num_q_heads // split.shared.heads, problem.seqlen_q * split.shared.pack


def _packed(problem: AttentionProblem, split: KeySplit) -> AttentionProblem:
    """The problem that a kernel is told. It writes o and the LSE where there is one split, and minds sinks then."""
    heads, rows = _extents(problem, split)
    told = replace(problem, seqlen_q=rows, num_q_heads=heads)
    return told if is_final(problem, split.num_splits) else replace(told, lse=False, sinks="none")


def _tiles(problem: AttentionProblem, split: KeySplit) -> tile_order.TileList:
    if split.tail is not None:
        return tile_order.head_by_head(split.num_splits, split.tail.num_tiles)
    heads, _ = _extents(problem, split)
    return tile_order.head_by_head(problem.batch * heads, split.blocks * split.num_splits)


def _tile_values(tiles: tile_order.TileList, problem: AttentionProblem, split: KeySplit) -> dict[str, object]:
    """The member ``tiles``."""
    (heads, pack), tail = split.shared, split.tail
    own = {"num_splits": split.num_splits, "pack": pack, "num_queries": problem.seqlen_q, "pack_heads": heads}
    few = (0, 0) if tail is None else (tail.num_tiles, tail.first_tile)
    return member("tiles", asdict(tiles) | own | dict(zip(("num_tiles", "first_tile"), few, strict=True)))


def _main_sm80(
    spec: KernelSpec,
    problem: AttentionProblem,
    split: KeySplit,
    partial: dict[str, At | None],
    masks: MaskPlaces | None,
) -> tuple[LaunchRecord, ...]:
    """A CTA a tile and split. Partial results in place of o and the LSE, before the sink."""
    told, (rows, keys) = _packed(problem, split), problem.mask_extent
    blocks = num_m_blocks(told, spec.block_m)
    tiles = blocks * told.num_q_heads * (1 if problem.varlen else problem.batch)
    values, layout = forward_values(told, blocks, mask_extent=(rows * split.shared.pack, keys)), ATTN_FWD_SPLIT_SM80
    if "score_mods" in spec.features:
        layout = ATTN_FWD_SPLIT_FORMS_SM80
        memory = dict(zip(("mask_first_byte", "mask_end_byte"), memory_of(problem), strict=True))
        values = member("fwd", values) | member("forms", form_values(told, masks)) | memory
    if problem.score_mod is not None:
        layout = ATTN_FWD_SPLIT_MOD_SM80
        values = member("call", values) | member("arrays", array_values(problem.score_mod))
    grid = (tiles, split.num_splits, 1)
    values = member("call", values) | partial | {"pack_log2": split.shared.pack.bit_length() - 1}
    values["pack_heads"] = split.shared.heads
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *layout.pack(values)),)


def _merge(
    combine: KernelSpec, problem: AttentionProblem, split: KeySplit, partial: dict[str, At | None]
) -> LaunchRecord:
    """The second launch. Rows of packed sequences are those of one batch."""
    p, s = problem, problem.strides
    assert s is not None
    (heads, rows), tail = _extents(p, split), split.tail
    columns = _merged_rows(p, split) * p.head_dim_v // _WIDTH
    of_tail = {"tile_rows": 0, "first_tile": 0, "blocks": 0, "num_queries": 0}
    if tail is not None:
        rows = tail.num_tiles * tail.rows
        of_tail = {
            "tile_rows": tail.rows, "first_tile": tail.first_tile, "blocks": split.blocks, "num_queries": p.seqlen_q
        }  # fmt: skip
    threads = combine_threads(columns, split.num_splits)
    values = {
        **partial,
        "o": At("o"),
        "lse": At("lse") if p.lse else None,
        "sinks": At("sinks") if p.sinks != "none" else None,
        **strides("o", s.o),
        "lse_stride_b": s.lse[0],
        "lse_stride_h": s.lse[1],
        "num_columns": columns,
        "num_splits": split.num_splits,
        "heads": heads,
        "rows": rows,
        "pack": split.shared.pack,
        "head_dim": p.head_dim_v,
        "threads_log2": threads.bit_length() - 1,
        "sinks_kind": SINKS_KINDS[p.sinks],
        "pack_heads": split.shared.heads,
        **of_tail,
        "zero": 0,
    }
    return LaunchRecord(
        combine, (-(-columns // threads), 1, 1), _COMBINE_THREADS, *ATTN_COMBINE.pack(values), overlap=True
    )
