"""The list of tiles of a persistent kernel (``kernels_cu/scheduler/persistent.cuh``): its order and its balance."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..problems import UNLIMITED, AttentionProblem

# Beyond this many rounds one item more or less on some SM no longer matters, and simulating the list would take long.
_MAX_ROUNDS = 64
# Heads whose tiles are handed out one by one find less of each other's K and V in L2: the bytes that they may have of
# both, what so many cost, and how many numbers of heads are tried besides those that leave whole rounds of pairs
# (docs/performance/attn_fwd_sm90.md).
_TAIL_BYTES, _TAIL_COST, _TAILS = 64e6, 0.047, 32
# What interleaved heads have to gain, up to so many of them and of more: tiles find less of each other's K and V in L2
# (docs/performance/windows.md).
_FEW_HEADS, _INTERLEAVED, _MANY_INTERLEAVED = 64, 0.96, 0.88
# CTAs that may be left out for an even share, and what that has to gain (docs/performance/tail.md).
SPARE_CTAS, _EVEN = 3, 0.98


@dataclass(frozen=True)
class TileList:
    """``TileList`` of the kernels.

    Attributes
    ----------
    num_items : int
        Pairs and single tiles.
    num_pairs : int
        Items that are a long and a short tile of one head.
    num_tail_heads : int
        Heads, the last ones, whose tiles follow one by one, the longest first.
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


def interleave(heads: int, blocks: int) -> TileList:
    """A tile of each head in turn, the last tiles first."""
    return TileList(heads * blocks, 0, heads)


def lengths(rows: int, columns: int, block: int, step: int, left: int, right: int, lead_rows: int = 0) -> list[int]:
    """Work of each tile: the steps that its rows see, and one for what it costs to begin and end it.

    Parameters
    ----------
    rows, columns : int
        Of a head's scores: queries and keys for tiles of queries, keys and queries for tiles of keys.
    block, step : int
        Rows of a tile, columns of a step.
    left, right : int
        Columns that a row sees besides its own, which is the last one for the last row.
    lead_rows : int
        Rows of the first tile that lie before row 0.

    Returns
    -------
    list of int
    """
    found = []
    for row in range(-lead_rows, rows, block):
        first, last = row + columns - rows, min(row + block, rows) + columns - rows
        begin = 0 if left == UNLIMITED else min(max(first - left, 0), columns)
        end = columns if right == UNLIMITED else min(max(last + right, 0), columns)
        found.append(1 + max(-(-end // step) - begin // step, 0))
    return found


def causal(heads: int, lengths: list[int], num_ctas: int, head_bytes: float, spare: int = 0) -> TileList:
    """The list that ends first, among pairs with or without a tail of single tiles.

    Parameters
    ----------
    heads : int
        Heads of all batch entries.
    lengths : list of int
        Work of each block of query rows, in any unit, not decreasing.
    num_ctas : int
        SMs.
    head_bytes : float
        Of the K and V of a head; of those that share them, its part.
    spare : int
        CTAs that pairs without a tail may leave out (`paired_ctas`).

    Returns
    -------
    TileList
    """
    blocks = len(lengths)
    per_head = (blocks + 1) // 2
    pairs = heads * per_head
    best = TileList(pairs, pairs, 0)
    if pairs > _MAX_ROUNDS * num_ctas:
        return best
    # So many heads are under way in pairs, too.
    anyway = min(heads, -(-num_ctas // per_head))
    most = min(heads, max(anyway, int(_TAIL_BYTES / max(head_bytes, 1.0))))
    # Heads that leave whole rounds of pairs, and numbers in between.
    whole = (heads - rounds * num_ctas // per_head for rounds in range(pairs // num_ctas + 1))
    tails = sorted({n for n in (*whole, *range(0, heads + 1, -(-heads // _TAILS))) if 0 < n <= most})
    # A tail costs L2 traffic: it has to gain more than that, and one per cent.
    _, in_pairs = paired_ctas(best, heads, lengths, num_ctas, spare)
    shortest = in_pairs
    for tail in tails:
        num_pairs = (heads - tail) * per_head
        candidate = TileList(num_pairs + tail * blocks, num_pairs, tail)
        span = makespan(candidate, heads, lengths, num_ctas)
        cost = 1 + _TAIL_COST * max(tail - anyway, 0) * head_bytes / _TAIL_BYTES
        if span < 0.99 * in_pairs and cost * span < shortest:
            best, shortest = candidate, cost * span
    return best


def paired_ctas(
    tiles: TileList, heads: int, lengths: list[int], num_ctas: int, spare: int = SPARE_CTAS
) -> tuple[int, float]:
    """How many CTAs share pairs most evenly, all or a few less, and the work of the busiest.

    If the number of CTAs is a multiple of a head's pairs, a CTA has the same pair of all its heads. Of an odd number of
    tiles the middle one is alone, and some CTAs would have half of what the others have.
    """
    few = tiles.num_pairs > _MAX_ROUNDS * num_ctas or len(lengths) % 2 == 0
    fewest = num_ctas if few else max(num_ctas - spare, 1)
    spans = {n: makespan(tiles, heads, lengths, n) for n in range(num_ctas, fewest - 1, -1)}
    best = min(spans, key=lambda n: spans[n])
    return best, spans[best]


def windowed(heads: int, lengths: list[int], num_ctas: int) -> TileList:
    """Head by head, or heads interleaved where some tiles are shorter than others and rounds do not even out.

    Parameters
    ----------
    heads : int
        Heads of all batch entries.
    lengths : list of int
        Work of each block of query rows, in any unit.
    num_ctas : int
        SMs, times the CTAs of one.

    Returns
    -------
    TileList
    """
    blocks = len(lengths)
    by_head, interleaved = head_by_head(heads, blocks), interleave(heads, blocks)
    if by_head.num_items > _MAX_ROUNDS * num_ctas:
        return by_head
    gain = _INTERLEAVED if heads <= _FEW_HEADS else _MANY_INTERLEAVED
    spans = [makespan(tiles, heads, lengths, num_ctas) for tiles in (by_head, interleaved)]
    return interleaved if spans[1] < gain * spans[0] else by_head


def makespan(tiles: TileList, heads: int, lengths: list[int], num_ctas: int) -> float:
    """Work of the busiest CTA."""
    import numpy as np  # not at import: importing the package loads no library

    work = np.asarray(lengths, dtype=np.float64)
    blocks = len(lengths)
    per_head = (blocks + 1) // 2
    pair = work[::-1][:per_head].copy()
    pair[: blocks // 2] += work[: blocks // 2]
    if tiles.num_pairs == 0 and tiles.num_tail_heads == 0:
        items = np.tile(work[::-1], heads)
    else:
        items = np.concatenate(
            [np.tile(pair, tiles.num_pairs // per_head), np.repeat(work[::-1], tiles.num_tail_heads)]
        )
    rounds = -(-items.size // num_ctas)
    padded = np.zeros(rounds * num_ctas)
    padded[: items.size] = items
    table = padded.reshape(rounds, num_ctas)
    # Rounds run forwards and backwards in turn from the first one that holds no pair only.
    first = tiles.num_pairs // num_ctas
    table[first + 1 :: 2] = table[first + 1 :: 2, ::-1]
    return float(table.sum(axis=0).max())


def short_tile(rows: int, block_m: int) -> float:
    """Time of a head's last tile, as a part of a whole one's: some of its warpgroups of 64 rows may have none.

    Measured: docs/performance/tail.md.
    """
    last = -(-((rows - 1) % block_m + 1) // 64)
    return 0.5 + 0.5 * last / (block_m // 64)


def takes_even_share(problem: AttentionProblem) -> bool:
    """Whether all tiles of a head but the last one take the same time."""
    p = problem
    return p.window_left == p.window_right == UNLIMITED and not (p.varlen or p.score_mods)


@lru_cache(1024)
def even_share(heads: int, blocks: int, last: float, num_ctas: int) -> tuple[int, float]:
    """How many CTAs share the tiles of all heads most evenly, all or a few less, and the time of the busiest.

    CTA c of n takes tiles c, c + n, c + 2n, ..., head by head, every second round backwards. If n is a multiple of a
    head's tiles, some CTAs get the last, short tile of many heads, and others of none.

    Parameters
    ----------
    heads : int
        Of all batch entries.
    blocks : int
        Tiles of a head.
    last : float
        Time of a head's last tile, which comes first; whole ones take 1. Of heads with one tile all are alike.
    num_ctas : int
        SMs.

    Returns
    -------
    (int, float)
    """
    items = heads * blocks
    if last == 1.0 or blocks <= 1 or not num_ctas < items <= _MAX_ROUNDS * num_ctas:
        return num_ctas, float(-(-items // num_ctas))
    spans = {n: _busiest(heads, blocks, last, n) for n in range(num_ctas, max(num_ctas - SPARE_CTAS, 1) - 1, -1)}
    best = min(spans, key=lambda n: spans[n])
    best = best if spans[best] < _EVEN * spans[num_ctas] else num_ctas
    return best, spans[best]


def _busiest(heads: int, blocks: int, last: float, num_ctas: int) -> float:
    import numpy as np  # not at import: importing the package loads no library

    work = np.ones(blocks)
    work[0] = last
    rounds = -(-heads * blocks // num_ctas)
    times = np.zeros(rounds * num_ctas)
    times[: heads * blocks] = np.tile(work, heads)
    table = times.reshape(rounds, num_ctas)
    table[1::2] = table[1::2, ::-1]
    return float(table.sum(axis=0).max())
