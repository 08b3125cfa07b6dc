"""Launch of ``attn_fwd_sm90``: tensor maps, persistent grid, list of tiles."""

from __future__ import annotations

from dataclasses import asdict

from ..problems import AttentionProblem
from ..problems.split import PackGQA, Whole
from ..problems.tile_order import TileList, num_m_blocks
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord, TensorMap
from .attn_fwd import forward_values, page_rows
from .dropout import dropout_values
from .host_struct import member
from .masks import MaskPlaces
from .score_mod import array_values
from .score_mods import bias_map, score_mod_values
from .structs import ATTN_FWD_DROPOUT_SM90, ATTN_FWD_MODS_SM90, ATTN_FWD_SM90, ATTN_FWD_USER_MOD_SM90

PANEL = 64  #: Columns of one copy: 128 bytes, the width of the swizzle.


def tile_values(tiles: TileList) -> dict[str, object]:
    """The member ``tiles``."""
    return member("tiles", asdict(tiles))


def mapped(
    operand: str, add: int, dtype: str, dims: tuple[int, ...], strides_bytes: tuple[int, ...], box: tuple[int, ...]
) -> TensorMap:
    """A tensor map. A stride of 0 is that of an expanded array; an extent of 1, which needs none, gets 16 bytes."""
    strides = tuple(s if n > 1 else s or 16 for n, s in zip(dims[1:], strides_bytes, strict=True))
    return TensorMap(operand, add, dtype, dims, strides, box)


def operand_map(
    name: str, dtype: str, shape: tuple[int, int, int, int], strides: tuple[int, int, int], rows: int
) -> TensorMap:
    """One of q, k, v, do: (batch, seq, heads, head_dim), strides (batch, seq, head) in elements of two bytes."""
    batch, seqlen, heads, head_dim = shape
    strides_bytes = (2 * strides[1], 2 * strides[2], 2 * strides[0])
    return mapped(name, 0, dtype, (head_dim, seqlen, heads, batch), strides_bytes, (PANEL, rows, 1, 1))


def key_value_maps(spec: KernelSpec, problem: AttentionProblem, q: TensorMap) -> tuple[TensorMap, TensorMap]:
    """Of k and v: of batches, of packed sequences, or of pools of pages, whose copies lie within a page.

    Without keys nothing is copied, but a map of no rows cannot be made: that of ``q`` stands in.
    """
    p, s, pages = problem, problem.strides, problem.pages
    assert s is not None
    if p.seqlen_k == 0:
        return q, q
    lead = (1 if p.varlen else p.batch, p.seqlen_k) if pages is None else (pages.num_pages, pages.page_size)
    rows = spec.block_n if pages is None else page_rows(pages, spec.block_n)
    return (
        operand_map("k", p.dtype, (*lead, p.num_kv_heads, p.head_dim), s.k, rows),
        operand_map("v", p.dtype, (*lead, p.num_kv_heads, p.head_dim_v), s.v, rows),
    )


def packed_gqa_map(problem: AttentionProblem, pack_gqa: PackGQA, rows: int) -> TensorMap:
    """Of q, of which heads share the rows of a tile: (head_dim, heads, seq, heads / shared, batch).

    Rows that are no head's lie beyond the second dimension: zeros.
    """
    p, s = problem, problem.strides
    assert s is not None
    (heads, pack), (b, seq, head) = pack_gqa, (2 * x for x in s.q)
    return mapped(
        "q", 0, p.dtype, (p.head_dim, heads, p.seqlen_q, p.num_q_heads // heads, 1 if p.varlen else p.batch),
        (head, seq, heads * head, b), (PANEL, pack, rows // pack, 1, 1),
    )  # fmt: skip


def build(
    spec: KernelSpec,
    problem: AttentionProblem,
    order: Whole,
    masks: MaskPlaces | None = None,
) -> tuple[LaunchRecord, ...]:
    """The launch of a call; none where there is no query.

    order: the list of tiles, and the CTAs that share it. masks: what was made of the mask.
    """
    blocks, batch = num_m_blocks(problem, spec.block_m), 1 if problem.varlen else problem.batch
    heads = batch * problem.num_q_heads
    if blocks * heads == 0:
        return ()
    s = problem.strides
    assert s is not None
    assert order.tiles is not None, "persistent kernels have a list of tiles"
    q = operand_map(
        "q", problem.dtype, (batch, problem.seqlen_q, problem.num_q_heads, problem.head_dim), s.q, spec.block_m
    )
    k, v = key_value_maps(spec, problem, q)
    values = {"map_q": q, "map_k": k, "map_v": v, **tile_values(order.tiles)}
    values |= member("fwd", forward_values(problem, blocks, mask_extent=problem.mask_extent, block_n=spec.block_n))
    layout = ATTN_FWD_SM90
    if spec.score_mods:
        layout = ATTN_FWD_MODS_SM90
        values |= {"map_bias": bias_map(spec, problem, q, masks), **member("mods", score_mod_values(problem, masks))}
    if problem.score_mod is not None:
        layout = ATTN_FWD_USER_MOD_SM90
        values |= member("arrays", array_values(problem.score_mod))
    if problem.dropout is not None:
        layout = ATTN_FWD_DROPOUT_SM90
        values |= member("dropout", dropout_values(problem.dropout))
    grid = (order.ctas, 1, 1)
    # Kernels that visit all tiles wait by themselves for the one that packs the mask, if it has anything to pack.
    overlap = masks is not None and not spec.lists and problem.seqlen_k > 0
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *layout.pack(values), overlap=overlap),)
