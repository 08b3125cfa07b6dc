"""Which small tile a call of short sequences with scores gets, and a tiny one without (docs/performance/short.md).

Hopper's own kernel has tiles of 192 and 256 query rows, and small ones of 64, which the shortest sequences fill in
part: those have tiles of 16 rows on mma.sync. Limits as measured on an H200; other GPUs keep their tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..problems import UNLIMITED, AttentionProblem, Target
from ..registry import KernelSpec
from .tile import SHORT, SMALL, tile_us

#: Narrowest head_dim of the tiles of 64 and 128. From 65 to 96 large tiles are narrower than 128: there 64 rows have
#: columns of zeros to make up for, and on mma.sync only one warp is taken.
_NARROWEST = {64: 33, 128: 65}
#: Queries and keys up to which one warp with 16 rows is the fastest; and up to which it or four warps with 64 are.
_ONE_WARP, _FOUR_WARPS = 48, 64
#: Queries and keys up to which four warps are the fastest of many sequences at head_dim 64, without an additive mask.
_MANY = 128
#: Queries and keys up to which four warps are faster where all tiles run at once, at head_dim 64 without any mask.
_ALL_AT_ONCE = 1024
#: Keys up to which four warps were measured beside the 128 rows of mma.sync; keys a query.
_MAX_KEYS, _RATIO = 2048, 4
#: Heads an SM up to which one warp is faster than four; tiles an SM up to which 64 rows are faster than 128.
_FEW_HEADS, _FEW_TILES = 2, 4

#: Of the small tiles on wgmma: what part of the large tile's time the model of sequences without scores may give them;
#: with a causal mask; of up to so many queries and keys.
_SHARE, _CAUSAL_SHARE, _SHORT_SHARE = 0.9, 1.07, 1.05
_SHORT = 128
#: Queries that one small tile holds: with any number of keys, where all SMs have one.
_ONE_TILE = 64
#: Of tiles of 128 for head_dim 72 to 96: queries and keys up to which they are faster with a mask where rows are no
#: multiples of so many elements; others, and those without a mask, up to `_SHORT`.
_WIDER, _WHOLE_SECTORS = 64, 32
#: Keys up to which a mask that is packed may be visited whole: large tiles pass over what it hides.
_ALL_VISITED = 256
#: Queries and keys up to which one warp is the fastest with a mask, where there is a small tile on wgmma.
_ONE_WARP_MASKED = 32

#: Without score modifiers: queries and keys up to which one warp is faster than Hopper's tiles of 64 rows, by the
#: head_dim of the tile, without and with a causal mask; of packed sequences, which are longer in the larger tiles'
#: search for them, the mean, if the longest is known to be short.
_PLAIN = {64: (24, 48), 128: (16, 24)}
_PACKED, _PACKED_LONGEST = {64: (40, 48), 128: (28, 40)}, 64
#: Heads an SM up to which all run at once, in tiles of any size; there one warp wins up to its own 16 rows.
_ALL_HEADS, _OWN_ROWS = 4, 16


def _causal(p: AttentionProblem) -> bool:
    return p.window_right == 0 and p.window_left == UNLIMITED


def _block_m(p: AttentionProblem, head_dim: int, of_hopper: bool, sm_count: int) -> int | None:
    """Query rows of the best small tile; None where a large one is better."""
    longest, heads = max(p.seqlen_q, p.seqlen_k), p.batch * p.num_q_heads
    tiles = heads * -(-p.seqlen_q // 64)
    if longest <= _ONE_WARP:
        return 16
    if longest <= _FOUR_WARPS:
        return 16 if _causal(p) or heads <= _FEW_HEADS * sm_count else 64
    if longest > _MAX_KEYS or p.seqlen_k > _RATIO * p.seqlen_q:
        return None
    if not of_hopper:
        return 64 if heads * -(-p.seqlen_q // 128) <= _FEW_TILES * sm_count else None
    if head_dim == 64 and longest <= _MANY and p.mask_form != "tiles" and tiles > sm_count:
        return 64
    if head_dim == 64 and longest <= _ALL_AT_ONCE and p.mask == "none" and tiles <= sm_count:
        return 64
    return None


def _on_wgmma(p: AttentionProblem, target: Target, usual: KernelSpec, rows: Sequence[KernelSpec]) -> KernelSpec | None:
    """Hopper's small tile, where it is faster than its large one."""
    longest = max(p.seqlen_q, p.seqlen_k)
    one_tile = p.seqlen_q <= _ONE_TILE and p.batch * p.num_q_heads > target.sm_count
    if p.seqlen_q > SHORT or (p.seqlen_k > min(_MAX_KEYS, _RATIO * p.seqlen_q) and not one_tile):
        return None
    wider = usual.head_dim not in _NARROWEST
    one_warp = _ONE_WARP if p.mask == "none" and not wider else _ONE_WARP_MASKED
    if longest <= (one_warp if p.head_dim >= _NARROWEST[64] else _FOUR_WARPS):
        return None
    if p.packs_mask and p.seqlen_k > _ALL_VISITED and not one_tile:
        return None
    tiles = [spec for spec in rows if SMALL in spec.tuned_for and spec.arch_specific]
    small = min(tiles, key=lambda spec: spec.head_dim, default=None)
    if small is None or small.head_dim < usual.head_dim or not usual.arch_specific:
        return None
    share = _CAUSAL_SHARE if _causal(p) else _SHORT_SHARE if longest <= _SHORT else _SHARE
    if one_tile and longest > _SHORT:
        # Large tiles pass over keys that a packed mask hides.
        share = _SHARE if p.packs_mask else _SHORT_SHARE
        return small if tile_us(p, small, target) < share * tile_us(p, usual, target) else None
    if small.head_dim > usual.head_dim:
        most = _WIDER if p.mask != "none" and p.head_dim % _WHOLE_SECTORS else _SHORT
        return small if longest <= most and not p.own_head_dim_v else None
    return small if tile_us(p, small, target) < share * tile_us(p, usual, target) else None


def small_form_tile(
    problem: AttentionProblem, target: Target, usual: KernelSpec, rows: Sequence[KernelSpec]
) -> KernelSpec | None:
    """The row of a small tile that is faster than ``usual``; None where none is.

    Parameters
    ----------
    problem : AttentionProblem
        Exact attention with score modifiers.
    target : Target
    usual : KernelSpec
        The row that long sequences take.
    rows : sequence of KernelSpec
        Rows that can serve the problem.

    Returns
    -------
    KernelSpec or None
    """
    p = problem
    if p.varlen or p.score_mod is not None or p.block_mask is not None or target.cc != (9, 0):
        return None
    if (on_wgmma := _on_wgmma(p, target, usual, rows)) is not None:
        return on_wgmma
    small = [
        spec
        for spec in rows
        if SMALL in spec.tuned_for and not spec.arch_specific
        if _NARROWEST[spec.head_dim] <= p.head_dim <= spec.head_dim
    ]
    if not small:
        return None
    if small[0].head_dim > usual.head_dim:
        block_m = 16 if max(p.seqlen_q, p.seqlen_k) <= _ONE_WARP else None
    else:
        block_m = _block_m(p, small[0].head_dim, usual.arch_specific, target.sm_count)
    return next((spec for spec in small if spec.block_m == block_m), None)


def small_plain_tile(problem: AttentionProblem, target: Target, rows: Sequence[KernelSpec]) -> KernelSpec | None:
    """The row of one warp, if it is the fastest of a call without score modifiers; None if it is not.

    Parameters
    ----------
    problem : AttentionProblem
        Exact attention without score modifiers.
    target : Target
    rows : sequence of KernelSpec
        Rows that can serve the problem.

    Returns
    -------
    KernelSpec or None
    """
    p = problem
    heads = p.batch * p.num_q_heads
    if target.cc != (9, 0) or p.own_head_dim_v or heads <= target.sm_count:
        return None
    limits, length = _PLAIN, max(p.seqlen_q, p.seqlen_k)
    if p.varlen:
        if not (p.max_seqlen_q and p.max_seqlen_k) or max(p.max_seqlen_q, p.max_seqlen_k) > _PACKED_LONGEST:
            return None  # one of them may be long
        limits, length = _PACKED, -(-length // p.batch)
    if heads <= _ALL_HEADS * target.sm_count and length > _OWN_ROWS:
        return None
    tiles = [s for s in rows if SMALL in s.tuned_for and not s.arch_specific and not s.score_mods]
    spec = min(tiles, key=lambda s: s.head_dim, default=None)
    return spec if spec and length <= limits[spec.head_dim][_causal(p)] else None
