"""How evenly persistent CTAs share tiles of queries whose last one of each head is shorter."""

from __future__ import annotations

from functools import lru_cache

from .attention import UNLIMITED, AttentionProblem

#: Rounds beyond which one tile more or less on some SM no longer matters, and counting would take long.
_MAX_ROUNDS = 64
#: CTAs that may be left out for an even share, and what that has to gain.
_SPARE_CTAS, _EVEN = 3, 0.98


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

    A CTA takes every so manieth tile, head by head, every second round backwards. If their number is a multiple of a
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
    spans = {n: _busiest(heads, blocks, last, n) for n in range(num_ctas, max(num_ctas - _SPARE_CTAS, 1) - 1, -1)}
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
