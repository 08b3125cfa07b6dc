"""How the keys of a call with few queries are split over CTAs."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from .attention import AttentionProblem


@dataclass(frozen=True)
class KeySplit:
    """A split of the keys.

    Attributes
    ----------
    pack : int
        Query heads of one kv head that share the rows of a tile: row r is query ``r // pack`` of head ``r % pack``.
    num_splits : int
        Parts that the keys of a tile are divided into.
    blocks : int
        Tiles of rows of a packed head.
    """

    pack: int
    num_splits: int
    blocks: int


def packed_heads(problem: AttentionProblem, block_m: int) -> int:
    """Query heads that share the rows of a tile: as many of a kv head as divide both its group and the tile."""
    return gcd(problem.num_q_heads // problem.num_kv_heads, block_m)


def tile_keys(problem: AttentionProblem, block_m: int, block_n: int, pack: int) -> list[int]:
    """Tiles of keys that each tile of packed rows sees, as the kernels count them (``KeyTiles`` of mask.cuh)."""
    p, rows = problem, problem.seqlen_q * pack
    found = []
    for m0 in range(0, rows, block_m):
        first_row, last_row = m0 // pack, (min(m0 + block_m, rows) - 1) // pack
        offset = p.seqlen_k - p.seqlen_q
        lo = 0 if p.window_left < 0 else max(min(first_row + offset - p.window_left, p.seqlen_k), 0)
        hi = p.seqlen_k if p.window_right < 0 else max(min(last_row + offset + p.window_right + 1, p.seqlen_k), 0)
        found.append(max(-(-hi // block_n) - lo // block_n, 0))
    return found
