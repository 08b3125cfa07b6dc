"""The list of tiles of a persistent kernel (``kernels_cu/scheduler/persistent.cuh``), and what its CTAs get of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .attention import UNLIMITED, AttentionProblem

#: Bits of a number of tiles of one CTA.
_COUNT_BITS = 24


@dataclass(frozen=True, slots=True)
class TileList:
    """``TileList`` of the kernels.

    Attributes
    ----------
    num_items : int
        Pairs and single tiles.
    num_pairs : int
        Items that are a long and a short tile of one head.
    num_tail_heads : int
        Heads, the last ones, whose tiles follow one by one, the longest first. Of a kernel that adds to dq in an order:
        heads of a group, whose tiles are drawn in turn.
    lead_rows : int
        Rows of each head's first tile that lie before row 0.
    """

    num_items: int
    num_pairs: int
    num_tail_heads: int
    lead_rows: int = 0


def head_by_head(heads: int, blocks: int) -> TileList:
    """Every head's tiles as neighbours: for tiles of equal length, and for packed sequences."""
    return TileList(heads * blocks, 0, 0)


def first(tiles: int) -> TileList:
    """So many tiles, the first ones of head by head."""
    return TileList(tiles, 0, 0)


def in_pairs(heads: int, blocks: int, tail: int = 0, lead_rows: int = 0) -> TileList:
    """Pairs of a long and a short tile of a head; of the last ``tail`` heads single tiles."""
    pairs = (heads - tail) * ((blocks + 1) // 2)
    return TileList(pairs + tail * blocks, pairs, tail, lead_rows)


def interleave(heads: int, blocks: int) -> TileList:
    """A tile of each head in turn, the last tiles first."""
    return TileList(heads * blocks, 0, heads)


def num_m_blocks(problem: AttentionProblem, block_m: int) -> int:
    """Tiles of query rows of each head: of one sequence, or for packed ones a bound that holds for any lengths."""
    blocks = -(-problem.seqlen_q // block_m)
    if problem.varlen and blocks:
        # One partly filled tile a sequence, and one each before and behind all sequences.
        blocks += problem.batch + 2
    return blocks


def num_n_blocks(problem: AttentionProblem, block_n: int) -> int:
    """Tiles of keys of each head: of one sequence, or for packed ones a bound that holds for any lengths."""
    blocks = -(-problem.seqlen_k // block_n)
    if problem.varlen and blocks:
        # One partly filled tile a sequence, and one each before and behind all sequences.
        blocks += problem.batch + 2
    return blocks


class HeadTiles(NamedTuple):
    """The tiles of a head, all heads having the same.

    Attributes
    ----------
    rows, columns : int
        Of a head's scores: queries and keys for tiles of queries, keys and queries for tiles of keys.
    block, step : int
        Rows of a tile, columns of a step.
    left, right : int
        Columns that a row sees besides its own, which is the last one for the last row.
    lead_rows : int
        Rows of the first tile that lie before row 0.
    longest_first : bool
        Tiles get shorter along the rows, as those of keys under causality; lists have the longest one last.
    """

    rows: int
    columns: int
    block: int
    step: int
    left: int
    right: int
    lead_rows: int = 0
    longest_first: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Work of each tile in the order of lists: steps that its rows see, and one to begin and end it."""
        return _lengths(self)


@lru_cache(1024)
def _lengths(of: HeadTiles) -> tuple[int, ...]:
    offset, columns, step, found = of.columns - of.rows, of.columns, of.step, []
    for row in range(-of.lead_rows, of.rows, of.block):
        begin = 0
        if of.left != UNLIMITED:
            begin = min(max(row + offset - of.left, 0), columns)
        end = columns
        if of.right != UNLIMITED:
            end = min(max(min(row + of.block, of.rows) + offset + of.right, 0), columns)
        steps = -(-end // step) - begin // step
        found.append(1 + steps if steps > 0 else 1)
    return tuple(found[::-1] if of.longest_first else found)


def busiest(tiles: TileList, heads: int, lengths: tuple[int, ...], num_ctas: int, is_rotated: bool = False) -> int:
    """Work of the busiest CTA; arguments as those of `busiest_cta`."""
    return busiest_cta(tiles, heads, lengths, num_ctas, is_rotated)[0]


@lru_cache(4096)
def busiest_cta(
    tiles: TileList, heads: int, lengths: tuple[int, ...], num_ctas: int, is_rotated: bool = False
) -> tuple[int, int]:
    """Work of the busiest of ``num_ctas`` CTAs, and its tiles: the list is walked as the kernels walk it.

    Parameters
    ----------
    tiles : TileList
    heads : int
        Of all batch entries.
    lengths : tuple of int
        Work of each tile of a head, in any unit.
    num_ctas : int
    is_rotated : bool
        Head by head each head begins at another tile, as kernels with score modifications have it.
    """
    import numpy as np  # not at import: importing the package loads no library

    blocks = len(lengths)
    # A tile has its length above, and counts as one below.
    work = (np.array(lengths[::-1], dtype=np.int64) << _COUNT_BITS) + 1
    rounds = -(-tiles.num_items // num_ctas)
    table = np.zeros((rounds, num_ctas), dtype=np.int64)
    items = table.reshape(-1)
    if tiles.num_pairs == 0 and tiles.num_tail_heads == 0:
        of_heads = items[: tiles.num_items].reshape(heads, blocks)
        of_heads[:] = work
        if is_rotated:
            begin = (np.arange(heads, dtype=np.uint32) * np.uint32(0x9E3779B9)) >> 16
            of_heads[:] = work[(np.arange(blocks) - begin.astype(np.int64)[:, None]) % blocks]
    else:
        pair = work[: (blocks + 1) // 2].copy()
        pair[: blocks // 2] += work[: (blocks - 1) // 2 : -1]
        items[: tiles.num_pairs].reshape(-1, pair.size)[:] = pair
        singles = items[tiles.num_pairs : tiles.num_items]
        singles.reshape(blocks, tiles.num_tail_heads)[:] = work[:, None]
    # Rounds run forwards and backwards in turn from the first one that holds no pair only.
    begin = tiles.num_pairs // num_ctas
    forward = table[:begin].sum(axis=0) + table[begin::2].sum(axis=0)
    most = int((forward + table[begin + 1 :: 2].sum(axis=0)[::-1]).max())
    return most >> _COUNT_BITS, most & ((1 << _COUNT_BITS) - 1)


@lru_cache(4096)
def most_rows(heads: int, blocks: int, last: int, whole: int, num_ctas: int) -> tuple[int, int]:
    """Tiles of the CTA that has the most rows of all heads, head by head, and how many of them are a head's last one.

    CTA c of n takes tiles c, n + c, 2n + c, ..., every second round backwards. If n is a multiple of a head's tiles,
    some CTAs get the last, short tile of many heads, and others of none.

    Parameters
    ----------
    heads : int
        Of all batch entries.
    blocks : int
        Tiles of a head; its last one comes first.
    last, whole : int
        Rows of a head's last tile, and of the others, in any unit.
    num_ctas : int
    """
    import numpy as np  # not at import: importing the package loads no library

    rounds = -(-heads * blocks // num_ctas)
    table = np.zeros((2, rounds, num_ctas), dtype=np.int64)
    counts = table.reshape(2, -1)[:, : heads * blocks]
    counts[0] = 1
    counts[1, ::blocks] = 1
    tiles, short = table[:, ::2].sum(axis=1) + table[:, 1::2].sum(axis=1)[:, ::-1]
    cta = int((whole * tiles - (whole - last) * short).argmax())
    return int(tiles[cta]), int(short[cta])
