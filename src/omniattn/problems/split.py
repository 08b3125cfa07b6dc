"""How the keys of a call are divided among CTAs, and which query heads share the rows of a tile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from .attention import AttentionProblem
from .tile_order import TileList

#: Rows of a tile that have one head, as far apart as a lane's rows are on mma.sync and those that a thread packs.
_ROWS_APART = 8


class PackGQA(NamedTuple):
    """Query heads of one kv head that share the rows of a tile: row r is query ``r // pack`` of head ``r % pack``.

    Attributes
    ----------
    heads : int
    pack : int
        Rows of a query. Those beyond ``heads`` are no head's: 7 heads take 8 rows.
    """

    heads: int
    pack: int


ONE_HEAD = PackGQA(1, 1)


@dataclass(frozen=True, slots=True)
class Whole:
    """Every CTA has all keys of its tile of queries.

    Attributes
    ----------
    tiles : TileList, optional
        The order in which persistent CTAs take them; None: the GPU hands out a CTA for each.
    ctas : int
        Of a persistent kernel.
    spare : int
        CTAs less than the GPU has places for, so that the others have equal work.
    """

    tiles: TileList | None = None
    ctas: int = 0
    spare: int = 0


@dataclass(frozen=True, slots=True)
class SplitKV:
    """The keys of every tile are divided among CTAs.

    Attributes
    ----------
    splits : int
        Parts of a tile's keys; 1: a kernel that can split them has all.
    """

    splits: int


@dataclass(frozen=True, slots=True)
class StreamK:
    """Packed sequences: every CTA has an even share of the keys of all tiles, and two partial results at most.

    Attributes
    ----------
    ctas : int
    """

    ctas: int


@dataclass(frozen=True, slots=True)
class TailSplit:
    """The last tiles of a persistent kernel's list, head by head, which would be a round of their own, have their keys
    divided; those before them have not.

    Attributes
    ----------
    splits, first_tile, num_tiles : int
    """

    splits: int
    first_tile: int
    num_tiles: int


#: How the keys of a call are divided among CTAs.
Schedule = Whole | SplitKV | StreamK | TailSplit
WHOLE = Whole()


def is_final(problem: AttentionProblem, num_splits: int) -> bool:
    """Whether the kernel that attends writes o and the LSE: one split leaves nothing to merge. Not on 8 bits."""
    return num_splits == 1 and not problem.precision.quantized


def of_equal_lengths(problem: AttentionProblem) -> AttentionProblem:
    """Packed sequences as a batch of sequences of the mean length: what a choice on the host can know of them."""
    p = problem
    if not p.varlen or p.batch == 0:
        return p
    rows, keys = -(-p.seqlen_q // p.batch), -(-p.seqlen_k // p.batch)
    return replace(p, varlen=False, used=(False, False), pages=None, seqlen_q=rows, seqlen_k=keys)


def tiles_of_group(problem: AttentionProblem, block_m: int, pack_gqa: PackGQA) -> int:
    """Tiles of rows of the query heads of one kv head."""
    group = problem.num_q_heads // problem.num_kv_heads
    return group // pack_gqa.heads * -(-problem.seqlen_q * pack_gqa.pack // block_m)


def gqa_packing(problem: AttentionProblem, block_m: int, *, whole: bool = False) -> PackGQA:
    """The heads that make the fewest tiles; of those the ones that leave the fewest rows unused, then the most.

    whole: none may be unused.
    """
    packs = [n for n in range(1, block_m + 1) if block_m % n == 0]
    return _fewest_tiles(problem, block_m, packs, 1, whole)


def gqa_packing_on_mma_sync(problem: AttentionProblem, block_m: int) -> PackGQA:
    """The same where a CTA computes one tile; one head, unless that makes more tiles.

    Heads share the list of tiles that a block mask or a mask expression leaves, so they keep their own tiles where it
    differs between them. Lists of other masks only spare work.
    """
    if problem.varlen or problem.tiles_by[1]:
        return ONE_HEAD
    packs = [n for n in (1, 2, 4, _ROWS_APART) if block_m % n == 0]
    return _fewest_tiles(problem, block_m, packs, -1, False)


def gqa_packing_with_scores(problem: AttentionProblem, block_m: int) -> PackGQA:
    """The same on wgmma with scores, whose masks are packed by the rows of a tile.

    User positions are those of a head's queries, one number a key is that of all rows, and so are the tiles that a
    block mask or a mask expression leaves.
    """
    p = problem
    by_head = p.strides is not None and p.strides.mask[1] != 0
    if p.score_mod is not None or p.block_mask is not None or (p.mask_encoding == "keys" and by_head):
        return ONE_HEAD
    return _fewest_tiles(p, block_m, [1, 2, 4, _ROWS_APART], -1, False)


def _fewest_tiles(problem: AttentionProblem, block_m: int, packs: list[int], order: int, whole: bool) -> PackGQA:
    """order: 1 for the most heads of equally good ones, -1 for the fewest."""
    group = problem.num_q_heads // problem.num_kv_heads
    return _fewest(group, problem.seqlen_q, block_m, tuple(packs), order, whole)


@lru_cache(4096)
def _fewest(group: int, queries: int, block_m: int, packs: tuple[int, ...], order: int, whole: bool) -> PackGQA:
    of_heads = [max(n for n in range(1, pack + 1) if group % n == 0) for pack in packs]
    ways = [PackGQA(*way) for way in zip(of_heads, packs, strict=True) if not whole or way[0] == way[1]]

    def rank(way: PackGQA) -> tuple[int, float, int]:
        return group // way.heads * -(-queries * way.pack // block_m), way.pack / way.heads, -order * way.heads

    return min(ways, key=rank)
