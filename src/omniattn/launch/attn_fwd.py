"""Launch of ``attn_fwd_sm80``: one CTA a tile of query rows; and what all attention kernels are told."""

from __future__ import annotations

from ..problems import AttentionProblem, Pages
from ..problems.tile_order import num_m_blocks
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .dropout import dropout_values
from .host_struct import At, member, strides
from .masks import MASK_KINDS, MaskPlaces, memory_of
from .numbers import MAX_GRID_X
from .score_mod import array_values
from .score_mods import score_mod_values
from .structs import (
    ATTN_FWD,
    ATTN_FWD_DROPOUT_SM80,
    ATTN_FWD_MODS_DROPOUT_SM80,
    ATTN_FWD_MODS_SM80,
    ATTN_FWD_USER_MOD_SM80,
)
from .used_rows import used_rows

#: Numbers of the kinds in device code (``kernels_cu/params/attn_fwd.cuh``).
SINKS_KINDS = {"none": 0, "float32": 1, "io": 2}


def page_rows(pages: Pages, block_n: int) -> int:
    """Rows of a copy from a page: the largest power of two that divides pages and tiles."""
    if not pages.has_table or pages.max_pages == 1:  # no other page follows: rows behind it are zeros
        return block_n & -block_n
    return min(pages.page_size & -pages.page_size, block_n & -block_n)


def forward_values(
    problem: AttentionProblem,
    blocks: int,
    *,
    mask_extent: tuple[int, int] = (0, 0),
    tile_offset: int = 0,
    operands: tuple[At, At, At] = (At("q"), At("k"), At("v")),
    starts: tuple[At, At] = (At("cu_seqlens_q"), At("cu_seqlens_k")),
    block_n: int = 1,
) -> dict[str, object]:
    """The fields of AttnFwdParams.

    ``operands`` are q, k, v as the kernel reads them, ``starts`` the cu_seqlens that it reads. block_n: keys of a tile,
    which kernels with tensor maps copy from pages.
    """
    s, pages = problem.strides, problem.pages
    assert s is not None, "a problem without strides describes a call, it cannot be launched"
    return {
        **dict(zip("qkv", operands, strict=True)),
        "o": At("o"),
        "lse": At("lse") if problem.lse else None,
        "cu_seqlens_q": starts[0] if problem.varlen and not problem.queries_per_sequence else None,
        "cu_seqlens_k": starts[1] if problem.varlen and pages is None else None,
        **used_rows(problem.used),
        "block_table": None if pages is None or not pages.has_table else At("block_table"),
        "batch_index": At("batch_index") if pages is not None and pages.has_index else None,
        "mask": At("mask") if problem.mask != "none" else None,
        "sinks": At("sinks") if problem.sinks != "none" else None,
        **strides("q", s.q),
        **strides("k", s.k),
        **strides("v", s.v),
        **strides("o", s.o),
        "lse_stride_b": s.lse[0],
        "lse_stride_h": s.lse[1],
        **dict(zip((f"mask_stride_{x}" for x in "bhqk"), s.mask, strict=True)),
        "table_stride": 0 if pages is None else pages.table_stride,
        "tile_offset": tile_offset,
        "batch": problem.batch,
        "num_q_heads": problem.num_q_heads,
        "num_kv_heads": problem.num_kv_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k if pages is None else pages.capacity,
        "page_size": 0 if pages is None else pages.page_size,
        "num_pages": 0 if pages is None else pages.num_pages,
        "queries_per_sequence": problem.queries_per_sequence or problem.passed_over,
        "page_rows_log2": 0 if pages is None else (page_rows(pages, block_n) - 1).bit_length(),
        "mask_rows": mask_extent[0],
        "mask_cols": mask_extent[1],
        "head_dim": problem.head_dim_v,
        "window_left": problem.window_left,
        "window_right": problem.window_right,
        "num_m_blocks": blocks,
        "mask_kind": MASK_KINDS[problem.mask],
        "sinks_kind": SINKS_KINDS[problem.sinks],
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "head_dim_qk": 0 if pages is None else problem.head_dim,
    }


def tile_launches(num_tiles: int) -> list[tuple[int, int]]:
    """(first tile, tiles) of each launch: a grid has at most `MAX_GRID_X` CTAs."""
    return [(first, min(MAX_GRID_X, num_tiles - first)) for first in range(0, num_tiles, MAX_GRID_X)]


def build(spec: KernelSpec, problem: AttentionProblem, masks: MaskPlaces | None = None) -> tuple[LaunchRecord, ...]:
    """The launches of a call. masks: what was made of the mask, where attention does not read it itself."""
    blocks = num_m_blocks(problem, spec.block_m)
    tiles = blocks * problem.num_q_heads * (1 if problem.varlen else problem.batch)
    records = []
    for first, count in tile_launches(tiles):
        values = forward_values(problem, blocks, mask_extent=problem.mask_extent, tile_offset=first)
        values["head_dim_qk"] = problem.head_dim if spec.other_head_dim_v else 0
        layout = ATTN_FWD
        if spec.score_mods:
            layout = ATTN_FWD_MODS_SM80
            memory = dict(zip(("mask_first_byte", "mask_end_byte"), memory_of(problem), strict=True))
            values = member("fwd", values) | member("mods", score_mod_values(problem, masks)) | memory
        if problem.score_mod is not None:
            layout = ATTN_FWD_USER_MOD_SM80
            values = member("call", values) | member("arrays", array_values(problem.score_mod))
        if problem.dropout is not None:
            layout = ATTN_FWD_MODS_DROPOUT_SM80 if spec.score_mods else ATTN_FWD_DROPOUT_SM80
            values = member("call", values) | member("dropout", dropout_values(problem.dropout))
        arguments = layout.pack(values)
        records.append(LaunchRecord(spec, (count, 1, 1), 32 * spec.num_warps, *arguments))
    return tuple(records)
