"""Launch of ``attn_fwd_sm90``: tensor maps, persistent grid, order of the tiles."""

from __future__ import annotations

from dataclasses import asdict, replace

from ..problems import UNLIMITED, AttentionProblem, Target
from ..problems.memory import ITEMSIZE
from ..problems.split import PackGQA
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord, TensorMap
from . import tile_order
from .attn_fwd import forward_values, num_m_blocks, page_rows
from .host_struct import member
from .masks import MaskPlaces
from .score_mod import array_values
from .score_mods import bias_map, score_mod_values
from .structs import ATTN_FWD_MODS_SM90, ATTN_FWD_SM90, ATTN_FWD_USER_MOD_SM90

_GROUP_ROWS = 64  # query rows of a warpgroup
PANEL = 64  #: Columns of one copy: 128 bytes, the width of the swizzle.


def _tile_lengths(problem: AttentionProblem, spec: KernelSpec, lead_rows: int) -> list[int]:
    """Work of each tile of query rows."""
    p = problem
    return tile_order.lengths(
        p.seqlen_q, p.seqlen_k, spec.block_m, spec.block_n, p.window_left, p.window_right, lead_rows
    )


def _head_bytes(problem: AttentionProblem) -> float:
    """Of the K and V of a query head; of heads that share them, its part."""
    p = problem
    itemsize = 1 if p.precision.quantized else ITEMSIZE[p.dtype]
    return itemsize * p.seqlen_k * (p.head_dim + p.head_dim_v) * p.num_kv_heads / p.num_q_heads


def tiles_of(problem: AttentionProblem, spec: KernelSpec, blocks: int, num_ctas: int) -> tile_order.TileList:
    """In which order ``num_ctas`` CTAs of ``spec`` take its ``blocks`` tiles of query rows of every head."""
    heads = problem.num_q_heads * (1 if problem.varlen else problem.batch)
    if heads * blocks == 0 or problem.varlen:
        return tile_order.head_by_head(heads, blocks)
    if problem.window_left != UNLIMITED and spec.ctas_per_sm == 1:
        # Kernels with scores take heads that come one by one from different tiles on, because of masks. Without a mask
        # that is no better than chance.
        if spec.score_mods and problem.mask == "none" and not problem.finds_tiles:
            return tile_order.interleave(heads, blocks)
        return tile_order.windowed(heads, _tile_lengths(problem, spec, 0), num_ctas)
    if problem.window_left == UNLIMITED != problem.window_right:
        # Tiles grow with their row. Rows that fill up the last tile go before the first one, where keys are few; whole
        # warpgroups of them, and not with delta_s, whose blocks of 128 rows start at row 0.
        spare = blocks * spec.block_m - problem.seqlen_q
        delta = spec.smooth_q == "always" or (spec.smooth_q == "any" and problem.precision.smooth_q)
        lead_rows = 0 if delta else spare // _GROUP_ROWS * _GROUP_ROWS
        lengths = _tile_lengths(problem, spec, lead_rows)
        order = tile_order.causal(heads, lengths, num_ctas, _head_bytes(problem), tile_order.SPARE_CTAS)
        return replace(order, lead_rows=lead_rows)
    return tile_order.head_by_head(heads, blocks)


def ctas_of(problem: AttentionProblem, spec: KernelSpec, tiles: tile_order.TileList, target: Target) -> int:
    """How many CTAs share ``tiles``."""
    p, most = problem, target.sm_count * spec.ctas_per_sm
    heads, blocks = p.batch * p.num_q_heads, -(-p.seqlen_q // spec.block_m)
    if tile_order.takes_even_share(p) and spec.ctas_per_sm == 1 and tiles.num_items == heads * blocks:
        most, _ = tile_order.even_share(heads, blocks, tile_order.short_tile(p.seqlen_q, spec.block_m), most)
    elif tiles.num_pairs == tiles.num_items > 0:
        most, _ = tile_order.paired_ctas(tiles, heads, _tile_lengths(p, spec, tiles.lead_rows), most)
    return min(tiles.num_items, most)


def tile_values(tiles: tile_order.TileList) -> dict[str, object]:
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


def key_value_maps(spec: KernelSpec, problem: AttentionProblem) -> tuple[TensorMap, TensorMap]:
    """Of k and v: of batches, of packed sequences, or of pools of pages, whose copies lie within a page."""
    p, s, pages = problem, problem.strides, problem.pages
    assert s is not None
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
    target: Target,
    masks: MaskPlaces | None = None,
    first_tiles: int | None = None,
) -> tuple[LaunchRecord, ...]:
    """The launch of a call; none where there is no query.

    masks: what was made of the mask. first_tiles: how many tiles of queries, head by head; None: all, in their order.
    """
    blocks, batch = num_m_blocks(problem, spec.block_m), 1 if problem.varlen else problem.batch
    heads = batch * problem.num_q_heads
    if blocks * heads == 0:
        return ()
    s = problem.strides
    assert s is not None
    num_ctas = target.sm_count * spec.ctas_per_sm
    tiles = tiles_of(problem, spec, blocks, num_ctas) if first_tiles is None else tile_order.first(first_tiles)
    q = operand_map(
        "q", problem.dtype, (batch, problem.seqlen_q, problem.num_q_heads, problem.head_dim), s.q, spec.block_m
    )
    k = v = q
    # Without keys nothing is copied, but a map of zero rows cannot be made: the rows of q stand in.
    if problem.seqlen_k:
        k, v = key_value_maps(spec, problem)
    values = {"map_q": q, "map_k": k, "map_v": v, **tile_values(tiles)}
    values |= member("fwd", forward_values(problem, blocks, mask_extent=problem.mask_extent, block_n=spec.block_n))
    layout = ATTN_FWD_SM90
    if spec.score_mods:
        layout = ATTN_FWD_MODS_SM90
        values |= {"map_bias": bias_map(spec, problem, q, masks), **member("mods", score_mod_values(problem, masks))}
    if problem.score_mod is not None:
        layout = ATTN_FWD_USER_MOD_SM90
        values |= member("arrays", array_values(problem.score_mod))
    grid = (ctas_of(problem, spec, tiles, target), 1, 1)
    # Kernels that visit all tiles wait by themselves for the one that packs the mask, if it has anything to pack.
    overlap = masks is not None and not spec.lists and problem.seqlen_k > 0
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *layout.pack(values), overlap=overlap),)
