"""Launches of attention kernels with the keys split over CTAs, and of ``attn_combine_sm80``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from ..problems import AttentionProblem, Target
from ..problems.memory import aligned
from ..problems.split import ONE_HEAD, PackGQA, SplitKV, TailSplit, is_final
from ..problems.tile_order import TileList, head_by_head, num_m_blocks
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .attn_fwd import SINKS_KINDS, forward_values
from .attn_fwd_sm90 import operand_map, packed_gqa_map
from .attn_int8 import OperandPlaces
from .attn_int8_sm90 import flush_keys, key_maps, packed_operands_map
from .host_struct import At, member, strides
from .masks import MaskPlaces, memory_of
from .score_mod import array_values
from .score_mods import bias_map, score_mod_values
from .structs import (
    ATTN_COMBINE_USED,
    ATTN_FP8_SPLIT_FACTORS_SM90,
    ATTN_FP8_SPLIT_MODS_FACTORS_SM90,
    ATTN_FWD_SPLIT_MODS_SM80,
    ATTN_FWD_SPLIT_MODS_SM90,
    ATTN_FWD_SPLIT_SM80,
    ATTN_FWD_SPLIT_SM90,
    ATTN_FWD_SPLIT_USER_MOD_SM80,
    ATTN_FWD_SPLIT_USER_MOD_SM90,
    ATTN_INT8_SPLIT_MODS_SM90,
    ATTN_INT8_SPLIT_SM90,
)

#: Of quantized operands: with and without score modifications, with and without factors of V.
_INT8_LAYOUTS = {
    (False, False): ATTN_INT8_SPLIT_SM90,
    (True, False): ATTN_INT8_SPLIT_MODS_SM90,
    (False, True): ATTN_FP8_SPLIT_FACTORS_SM90,
    (True, True): ATTN_FP8_SPLIT_MODS_FACTORS_SM90,
}
_COMBINE_THREADS = 256
#: Channels of a thread of the second kernel, and partial results that it asks for at once.
_WIDTH, _UNROLL = 4, 8
#: CTAs of the second kernel that are enough: with fewer its threads share the splits of a row.
_COMBINE_CTAS = 512


@dataclass(frozen=True)
class _Split:
    """A call as a split of its keys makes it."""

    spec: KernelSpec
    problem: AttentionProblem
    pack_gqa: PackGQA
    schedule: SplitKV | TailSplit

    @property
    def splits(self) -> int:
        return self.schedule.splits

    @property
    def tail(self) -> TailSplit | None:
        return self.schedule if isinstance(self.schedule, TailSplit) else None

    @property
    def heads(self) -> int:
        """What a kernel takes for heads."""
        return self.problem.num_q_heads // self.pack_gqa.heads

    @property
    def rows(self) -> int:
        """What it takes for the queries of each."""
        return self.problem.seqlen_q * self.pack_gqa.pack

    @property
    def blocks(self) -> int:
        """Tiles of rows of each."""
        return -(-self.rows // self.spec.block_m)

    @property
    def merged_rows(self) -> int:
        """Rows that have partial results, of all heads; of a tail those that no head has, too."""
        if self.tail is not None:
            return self.tail.num_tiles * self.spec.block_m
        return (1 if self.problem.varlen else self.problem.batch) * self.heads * self.rows

    @property
    def told(self) -> AttentionProblem:
        """The problem that a kernel is told. It writes o and the LSE where there is one split, and minds sinks then."""
        told = replace(self.problem, seqlen_q=self.rows, num_q_heads=self.heads)
        return told if is_final(self.problem, self.splits) else replace(told, lse=False, sinks="none")

    @property
    def tiles(self) -> TileList:
        if self.tail is not None:
            return head_by_head(self.splits, self.tail.num_tiles)
        return head_by_head(self.problem.batch * self.heads, self.blocks * self.splits)

    def tile_values(self) -> dict[str, object]:
        """The member ``tiles``."""
        (heads, pack), tail = self.pack_gqa, self.tail
        few = (0, 0) if tail is None else (tail.num_tiles, tail.first_tile)
        own = {
            "num_splits": self.splits, "pack": pack, "num_queries": self.problem.seqlen_q, "pack_heads": heads,
            "num_tiles": few[0], "first_tile": few[1],
        }  # fmt: skip
        return member("tiles", asdict(self.tiles) | own)

    def workspace(self) -> tuple[int, int]:
        """Where bases and denominators lie behind the partial O, and the bytes of both.

        With an LSE of quantized operands another array like that follows, and is counted (it is left empty where v has
        a factor for each 128 rows).
        """
        p, results = self.problem, self.merged_rows * self.splits
        ml = aligned(4 * results * p.head_dim_v)
        return ml, ml + 8 * results * (2 if p.precision.quantized and p.lse else 1)


def workspace(
    spec: KernelSpec, problem: AttentionProblem, pack_gqa: PackGQA, schedule: SplitKV | TailSplit
) -> tuple[int, int]:
    """Where bases and denominators lie behind the partial O of a call, and the bytes of both."""
    return _Split(spec, problem, pack_gqa, schedule).workspace()


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
    pack_gqa: PackGQA,
    schedule: SplitKV | TailSplit,
    masks: MaskPlaces | None = None,
    begin: int = 0,
    places: OperandPlaces | None = None,
) -> tuple[tuple[LaunchRecord, ...], int]:
    """The launches of a call, and where their workspace ends.

    combine: None where one split leaves nothing to merge. pack_gqa: query heads that share rows of a tile. masks: what
    was made of the mask, where attention does not read it itself. begin: where the memory of partial results begins.
    places: of quantized operands.
    """
    split = _Split(spec, problem, pack_gqa, schedule)
    if combine is None:
        nothing: dict[str, At | None] = {"partial_o": None, "partial_ml": None}
        if spec.arch_specific:
            return _main_sm90(split, target, nothing, masks), begin
        return _main_sm80(split, nothing, masks), begin
    ml_at, num_bytes = split.workspace()
    partial: dict[str, At | None] = {
        "partial_o": At("workspace", begin),
        "partial_ml": At("workspace", begin + ml_at),
    }
    of_lse: At | None = None
    if places is not None:
        # With factors of v the LSE is of the same sums as O.
        own_lse = problem.lse and not spec.value_factors
        of_lse = At("workspace", begin + (ml_at + num_bytes) // 2) if own_lse else None
        records = _main_int8(split, target, {**partial, "partial_lse": of_lse}, places, masks)
    elif spec.arch_specific:
        records = _main_sm90(split, target, partial, masks)
    else:
        records = _main_sm80(split, partial, masks)
    return (*records, _merge(combine, split, {**partial, "partial_lse": of_lse})), begin + num_bytes


def _main_sm90(
    split: _Split,
    target: Target,
    partial: dict[str, At | None],
    masks: MaskPlaces | None,
) -> tuple[LaunchRecord, ...]:
    spec, p, s = split.spec, split.problem, split.problem.strides
    assert s is not None
    pack, extent = split.pack_gqa.pack, p.mask_extent
    q = packed_gqa_map(p, split.pack_gqa, spec.block_m)
    kv_shape = (p.batch, p.seqlen_k, p.num_kv_heads)
    values = {
        "map_q": q,
        "map_k": operand_map("k", p.dtype, (*kv_shape, p.head_dim), s.k, spec.block_n),
        "map_v": operand_map("v", p.dtype, (*kv_shape, p.head_dim_v), s.v, spec.block_n),
        **member("fwd", forward_values(split.told, split.blocks, mask_extent=(extent[0] * pack, extent[1]))),
        **split.tile_values(),
        **partial,
    }
    layout = ATTN_FWD_SPLIT_SM90
    if spec.score_mods:
        layout = ATTN_FWD_SPLIT_MODS_SM90
        values |= {
            "map_bias": bias_map(spec, p, q, masks, split.pack_gqa),
            **member("mods", score_mod_values(p, masks)),
        }
    if p.score_mod is not None:
        layout = ATTN_FWD_SPLIT_USER_MOD_SM90
        values |= member("arrays", array_values(p.score_mod))
    grid = (min(split.tiles.num_items, target.sm_count * spec.ctas_per_sm), 1, 1)
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *layout.pack(values)),)


def _main_int8(
    split: _Split,
    target: Target,
    partial: dict[str, At | None],
    places: OperandPlaces,
    masks: MaskPlaces | None,
) -> tuple[LaunchRecord, ...]:
    """As on 16 bits; scales and biases of queries are found by the heads of the call, and sinks are known of.

    With score modifications the rows of a tile are those of one head.
    """
    spec, p, at = split.spec, split.problem, places.at
    score_mods, factors = spec.score_mods, spec.value_factors
    assert split.pack_gqa == ONE_HEAD or not score_mods
    q = packed_operands_map(spec, p, places, split.pack_gqa, p.batch)
    k, v = key_maps(spec, p, places, p.batch)
    told = replace(split.told, sinks=p.sinks)
    forward = forward_values(told, split.blocks, operands=(at["q_int"], at["k_int"], at["v"]), starts=places.starts)
    values = {
        "map_q": q,
        "map_k": k,
        "map_v": v,
        **member("fwd", forward),
        **member("operands", places.values()),
        **split.tile_values(),
        "flush_keys": flush_keys(places),
        "reserved": 0,
        **member("scales", places.block_scales()),
        **partial,
    }
    if score_mods:
        values |= {
            "map_bias": bias_map(spec, p, q, pack_gqa=split.pack_gqa),
            **member("mods", score_mod_values(p, masks)),
        }
    if factors:
        values |= member("factors", places.value_factors())
        del values["partial_lse"]
    layout = _INT8_LAYOUTS[score_mods, factors]
    grid = (min(split.tiles.num_items, target.sm_count), 1, 1)
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *layout.pack(values)),)


def _main_sm80(split: _Split, partial: dict[str, At | None], masks: MaskPlaces | None) -> tuple[LaunchRecord, ...]:
    """A CTA a tile and split. Partial results in place of o and the LSE, before the sink."""
    spec, problem, told, (rows, keys) = split.spec, split.problem, split.told, split.problem.mask_extent
    blocks = num_m_blocks(told, spec.block_m)
    tiles = blocks * told.num_q_heads * (1 if problem.varlen else problem.batch)
    values, layout = forward_values(told, blocks, mask_extent=(rows * split.pack_gqa.pack, keys)), ATTN_FWD_SPLIT_SM80
    values["head_dim_qk"] = told.head_dim if spec.other_head_dim_v else 0
    if spec.score_mods:
        layout = ATTN_FWD_SPLIT_MODS_SM80
        memory = dict(zip(("mask_first_byte", "mask_end_byte"), memory_of(problem), strict=True))
        values = member("fwd", values) | member("mods", score_mod_values(told, masks)) | memory
    if problem.score_mod is not None:
        layout = ATTN_FWD_SPLIT_USER_MOD_SM80
        values = member("call", values) | member("arrays", array_values(problem.score_mod))
    grid = (tiles, split.splits, 1)
    values = member("call", values) | partial | {"pack_log2": split.pack_gqa.pack.bit_length() - 1}
    values["pack_heads"] = split.pack_gqa.heads
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *layout.pack(values)),)


def _merge(combine: KernelSpec, split: _Split, partial: dict[str, At | None]) -> LaunchRecord:
    """The second launch. Rows of packed sequences are those of one batch."""
    p, s, tail = split.problem, split.problem.strides, split.tail
    assert s is not None
    heads, rows, block_m = split.heads, split.rows, split.spec.block_m
    columns = split.merged_rows * p.head_dim_v // _WIDTH
    of_tail = {"tile_rows": 0, "first_tile": 0, "blocks": 0, "num_queries": 0}
    if tail is not None:
        rows = tail.num_tiles * block_m
        of_tail = {
            "tile_rows": block_m, "first_tile": tail.first_tile, "blocks": split.blocks, "num_queries": p.seqlen_q
        }  # fmt: skip
    threads = combine_threads(columns, split.splits)
    merged = {
        **partial,
        "o": At("o"),
        "lse": At("lse") if p.lse else None,
        "sinks": At("sinks") if p.sinks != "none" else None,
        **strides("o", s.o),
        "lse_stride_b": s.lse[0],
        "lse_stride_h": s.lse[1],
        "num_columns": columns,
        "num_splits": split.splits,
        "heads": heads,
        "rows": rows,
        "pack": split.pack_gqa.pack,
        "head_dim": p.head_dim_v,
        "threads_log2": threads.bit_length() - 1,
        "sinks_kind": SINKS_KINDS[p.sinks],
        "pack_heads": split.pack_gqa.heads,
        **of_tail,
        "num_sequences": p.batch,
        "cu_seqlens_q": At("cu_seqlens_q") if p.varlen else None,
    }
    values = member("combine", merged) | {"seqused_q": At("seqused_q") if p.used[0] else None}
    return LaunchRecord(
        combine, (-(-columns // threads), 1, 1), _COMBINE_THREADS, *ATTN_COMBINE_USED.pack(values), overlap=True
    )
