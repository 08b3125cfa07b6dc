"""In which order persistent CTAs may take tiles, and how many of them: what is worth comparing.

Each order is simulated as kernels walk it (`problems.tile_order`), and what it gains is left to the model of costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from ..problems import UNLIMITED, AttentionProblem, BackwardProblem, Target
from ..problems.memory import ITEMSIZE
from ..problems.split import WHOLE, Whole
from ..problems.target import WARPGROUP_ROWS
from ..problems.tile_order import (
    HeadTiles,
    TileList,
    busiest,
    head_by_head,
    in_pairs,
    interleave,
    most_rows,
    num_m_blocks,
    num_n_blocks,
)
from ..registry import KernelSpec
from .model import coefficients_of, rules

#: What an order has to gain over the usual one, as a fraction of the busiest CTA's work: no smaller gain was measured
#: to pay (docs/performance/tail.md).
_GAIN = 0.02
#: Rounds beyond which an item more or less on some SM no longer matters, and a simulation would take long.
MAX_ROUNDS = 64
#: Such numbers of heads that are tried besides those that leave whole rounds of pairs.
_TAILS = 32


def usual_order(row: KernelSpec, problem: AttentionProblem, target: Target) -> Whole:
    """The order in which ``row`` takes the tiles of a call as a rule, by all the CTAs that the GPU has places for.

    Parameters
    ----------
    row : KernelSpec
        Of the operation ``attention``.
    problem : AttentionProblem
        As the kernel is told of it.
    target : Target
    """
    if not row.arch_specific:
        return WHOLE
    p, places = problem, places_of(row, target)
    heads, blocks = heads_of(p), num_m_blocks(p, row.block_m)
    if p.varlen or heads * blocks == 0 or p.window_right == UNLIMITED == p.window_left:
        return _listed(places, head_by_head(heads, blocks))
    if p.window_left == UNLIMITED:
        return _listed(places, in_pairs(heads, blocks, 0, lead_rows_of(row, p)))
    if row.rotates_heads and row.ctas_per_sm == 1 and p.mask == "none" and not p.finds_tiles:
        # Head by head these kernels begin each at another tile: without a mask that is no better than chance.
        return _listed(places, interleave(heads, blocks))
    return _listed(places, head_by_head(heads, blocks))


def best_balance(row: KernelSpec, problem: AttentionProblem, target: Target) -> float:
    """What other orders leave the busiest CTA at least, as a fraction of what it has in the usual one.

    Arguments as those of `usual_order`.
    """
    p, usual = problem, usual_order(row, problem, target)
    tiles, heads, places = usual.tiles, heads_of(p), places_of(row, target)
    if tiles is None or p.varlen or not 0 < tiles.num_items <= MAX_ROUNDS * places:
        return 1.0
    if p.window_left == p.window_right == UNLIMITED:
        last = _last_rows(row, p)
        if last == row.block_m or row.ctas_per_sm > 1 or p.score_mods:
            return 1.0
        blocks = tiles.num_items // heads
        most = _most_rows(heads, blocks, last, row.block_m, places)
        return heads * ((blocks - 1) * row.block_m + last) / places / most
    if p.window_left != UNLIMITED and (row.ctas_per_sm > 1 or tiles.num_tail_heads > 0):
        return 1.0
    lengths = head_tiles(row, p).lengths
    return _least_work(heads, lengths, places) / busiest(tiles, heads, lengths, places, row.rotates_heads)


def other_orders(row: KernelSpec, problem: AttentionProblem, target: Target) -> Iterator[Whole]:
    """Others, two at most, that leave the busiest CTA less to do; arguments as those of `usual_order`."""
    if best_balance(row, problem, target) >= 1 - _GAIN:
        return
    p, usual = problem, usual_order(row, problem, target)
    tiles, heads, places = usual.tiles, heads_of(p), places_of(row, target)
    assert tiles is not None
    if p.window_left == p.window_right == UNLIMITED:
        blocks, last = tiles.num_items // heads, _last_rows(row, p)
        total = heads * ((blocks - 1) * row.block_m + last)
        fewer = _fewer_ctas(lambda n: _most_rows(heads, blocks, last, row.block_m, n), total, tiles, places)
        yield from (_listed(places, tiles, n) for n in fewer)
        return
    of = head_tiles(row, p)
    lengths = of.lengths
    if p.window_left != UNLIMITED:
        interleaved = interleave(heads, len(lengths))
        most = busiest(tiles, heads, lengths, places, row.rotates_heads)
        if busiest(interleaved, heads, lengths, places) < (1 - _GAIN) * most:
            yield _listed(places, interleaved)
        return
    # Of an even number of tiles all pairs are alike.
    if row.ctas_per_sm == 1 and len(lengths) % 2:
        total = heads * sum(lengths)
        fewer = _fewer_ctas(lambda n: busiest(tiles, heads, lengths, n), total, tiles, places)
        yield from (_listed(places, tiles, n) for n in fewer)
    if tail := _tail(of, heads, places, seen_bytes(of, row_bytes(p)), coefficients_of(target).apart):
        yield _listed(places, in_pairs(heads, len(lengths), tail, of.lead_rows))


def _listed(places: int, tiles: TileList, ctas: int | None = None) -> Whole:
    """A list and its CTAs: all that the GPU has places for, or ``ctas``."""
    count = places if ctas is None else ctas
    return Whole(tiles, min(tiles.num_items, count), places - count)


def handed_out(order: Whole) -> Whole:
    """The list of ``order`` by a CTA for each item, which begins where an SM becomes free: for a GPU that is shared."""
    return order if order.tiles is None else Whole(order.tiles, order.tiles.num_items)


def places_of(row: KernelSpec, target: Target) -> int:
    """CTAs of a kernel that a GPU has places for at one time; of kernels in clusters the clusters."""
    return max(1, target.sm_count * row.ctas_per_sm // row.cluster)


def heads_of(problem: AttentionProblem) -> int:
    """Query heads of all batch entries; of packed sequences, which have a list in common, those of one."""
    return problem.num_q_heads * (1 if problem.varlen else problem.batch)


def head_tiles(row: KernelSpec, problem: AttentionProblem) -> HeadTiles:
    """The tiles of queries of a head, as ``row`` has them."""
    p = problem
    return HeadTiles(
        p.seqlen_q, p.seqlen_k, row.block_m, row.block_n, p.window_left, p.window_right, lead_rows_of(row, p)
    )


def lead_rows_of(row: KernelSpec, problem: AttentionProblem) -> int:
    """Rows of a head's first tile that lie before row 0, in causal calls of persistent kernels.

    Tiles grow with their row. Rows that fill up the last tile go before the first one, where keys are few: whole
    warpgroups of them, and not with delta_s, whose blocks of 128 rows start at row 0.
    """
    p = problem
    if p.window_left != UNLIMITED or p.window_right == UNLIMITED or p.varlen:
        return 0
    if row.smooth_q == "always" or (row.smooth_q == "any" and p.precision.smooth_q):
        return 0
    return -p.seqlen_q % row.block_m // WARPGROUP_ROWS * WARPGROUP_ROWS


def _last_rows(row: KernelSpec, problem: AttentionProblem) -> int:
    """Rows of a head's last tile in whole warpgroups; all of it where a head has one tile, as then all are alike."""
    if problem.seqlen_q <= row.block_m:
        return row.block_m
    rows = (problem.seqlen_q - 1) % row.block_m + 1
    return min(-(-rows // WARPGROUP_ROWS) * WARPGROUP_ROWS, row.block_m)


def row_bytes(problem: AttentionProblem) -> float:
    """Of a key and its value, for each query head; of heads that share them, its part."""
    p = problem
    itemsize = 1 if p.precision.quantized else ITEMSIZE[p.dtype]
    return itemsize * (p.head_dim + p.head_dim_v) * p.num_kv_heads / p.num_q_heads


def seen_bytes(of: HeadTiles, row_bytes: float) -> float:
    """Bytes that the longest tile of a head reads, of rows of K and V with so many."""
    return row_bytes * min(of.columns, (max(of.lengths, default=1) - 1) * of.step)


def heads_apart(tiles: TileList, blocks: int, places: int, is_window: bool) -> int:
    """Heads that are under way at one time because their tiles follow one by one, beyond those that are anyway."""
    if tiles.num_tail_heads == 0:
        return 0
    per_head = blocks if is_window else (blocks + 1) // 2
    return max(tiles.num_tail_heads - -(-places // per_head), 0)


def tiles_of_busiest(row: KernelSpec, problem: AttentionProblem, order: Whole) -> tuple[float, float, int]:
    """Of full attention: tiles of the busiest CTA, how many are a head's last one, and the warpgroups that these have.

    The two are 0 where all tiles are alike, or far too many for it to matter.
    """
    heads, blocks = heads_of(problem), num_m_blocks(problem, row.block_m)
    items, last = heads * blocks, _last_rows(row, problem)
    if last == row.block_m or problem.score_mods or not order.ctas < items <= MAX_ROUNDS * order.ctas:
        return float(-(-items // order.ctas)), 0.0, 0
    tiles, short = most_rows(heads, blocks, last, row.block_m, order.ctas)
    return float(tiles), float(short), last // WARPGROUP_ROWS


def _most_rows(heads: int, blocks: int, last: int, whole: int, ctas: int) -> int:
    """Rows of the CTA that has most of them."""
    tiles, short = most_rows(heads, blocks, last, whole, ctas)
    return tiles * whole - short * (whole - last)


def _fewer_ctas(work: Callable[[int], int], total: int, tiles: TileList, places: int) -> Iterator[int]:
    """One CTA less than places, if the busiest one then has less to do.

    If the number of CTAs is a multiple of a head's items, a CTA has the same one of all its heads: the last, short tile
    of full attention, or of an odd number of causal tiles the middle one, which is in no pair. Some CTAs would have far
    less than others.

    Parameters
    ----------
    work : callable
        CTAs -> what the busiest one has to do.
    total : int
        What all have to do.
    tiles : TileList
    places : int
        CTAs of the GPU.
    """
    gained = (1 - _GAIN) * work(places)
    fewer = places - 1
    if 0 < fewer < tiles.num_items - 1 and total / fewer < gained and work(fewer) < gained:
        yield fewer


@lru_cache(4096)
def _tail(of: HeadTiles, heads: int, places: int, head_bytes: float, apart: float) -> int:
    """Heads of the tail with which a list ends first; 0: it is no better without one."""
    lengths = of.lengths
    blocks = len(lengths)
    per_head = (blocks + 1) // 2
    num_pairs = heads * per_head
    usual = busiest(in_pairs(heads, blocks), heads, lengths, places)
    gained, floor = (1 - _GAIN) * usual, _least_work(heads, lengths, places)
    if floor >= gained:
        return 0
    # So many heads are under way in pairs, too.
    anyway = min(heads, -(-places // per_head))
    # L2 holds K and V of so many heads whose tiles follow one by one.
    most = min(heads, max(anyway, int(rules().tail_bytes / max(head_bytes, 1.0))))
    # Heads that leave whole rounds of pairs, and numbers in between.
    whole = (heads - rounds * places // per_head for rounds in range(num_pairs // places + 1))
    tails = sorted({n for n in (*whole, *range(0, heads + 1, -(-heads // _TAILS))) if 0 < n <= most})
    best, least = 0, float(usual)
    for tail in tails:
        cost = 1 + apart * head_bytes * max(tail - anyway, 0)
        # Of CTAs that have all pairs of a head among them some one has no less than their mean.
        rounds, more = divmod((heads - tail) * per_head, places)
        bound = max(floor, (rounds + (more >= per_head)) * sum(lengths) / per_head)
        if bound >= gained or cost * bound >= least:
            continue
        work = busiest(in_pairs(heads, blocks, tail), heads, lengths, places)
        if work < gained and cost * work < least:
            best, least = tail, cost * work
    return best


def _least_work(heads: int, lengths: tuple[int, ...], places: int) -> float:
    """What the busiest CTA has at least, whatever the order: the mean; n tiles that are no shorter than tile number
    (n - 1) * places + 1 of all, the longest first.
    """
    ranks = range(-(-heads * len(lengths) // places))
    longest = sorted(lengths, reverse=True)
    return max(heads * sum(lengths) / places, *((n + 1) * longest[n * places // heads] for n in ranks))


def order_of_keys(row: KernelSpec, problem: BackwardProblem, target: Target) -> TileList:
    """In which order the persistent kernel ``row`` takes the tiles of keys of every kv head.

    With causality a tile is the longer the nearer it is to key 0; the list's last block is the longest one. Of packed
    sequences, whose lengths are on the device, the list is a bound. An ordered kernel has an order of its own.
    """
    f = problem.forward
    heads, blocks = f.num_kv_heads * (1 if f.varlen else f.batch), num_n_blocks(f, row.block_n)
    if f.varlen:
        return head_by_head(heads, blocks)
    # A query sees keys to its right as a key is seen by queries to its left.
    of = HeadTiles(f.seqlen_k, f.seqlen_q, row.block_n, row.block_m, f.window_right, f.window_left, 0, True)
    if row.ordered_dq:
        return _by_draws(row, f, of, heads, blocks, target)
    return _ends_first(f, of, heads, blocks, f.num_q_heads / max(f.num_kv_heads, 1), target)


def _by_draws(row: KernelSpec, f: AttentionProblem, of: HeadTiles, heads: int, blocks: int, target: Target) -> TileList:
    """Heads whose tiles are drawn in turn (``DrawnBwdTiles``), as ``num_tail_heads``.

    So many that a head's next tile begins some steps behind the one before, which adds to dq ahead of it; not more, as
    what they read and add to has to stay in L2 until the next tile comes by.
    """
    if heads * blocks == 0:
        return head_by_head(heads, blocks)
    parts = 2 if f.window_right != UNLIMITED and f.window_left == UNLIMITED else 1
    steps = max(sum(of.lengths) / blocks * f.num_q_heads / f.num_kv_heads, 1.0)
    apart, ends = rules().order_steps[row.head_dim]
    wanted = max(1, round(apart * target.sm_count / (parts * (steps + ends))))
    groups = -(-heads // min(wanted, heads))
    return TileList(heads * blocks, 0, -(-heads // groups))


def order_of_queries(row: KernelSpec, problem: BackwardProblem, target: Target) -> TileList:
    """In which order the persistent kernel ``row`` takes the tiles of queries of every query head."""
    f = problem.forward
    of = HeadTiles(f.seqlen_q, f.seqlen_k, row.block_m, row.block_n, f.window_left, f.window_right)
    heads, blocks = f.num_q_heads * f.batch, num_m_blocks(f, row.block_m)
    return _ends_first(f, of, heads, blocks, f.num_kv_heads / max(f.num_q_heads, 1), target)


def _ends_first(
    f: AttentionProblem, of: HeadTiles, heads: int, blocks: int, sharing: float, target: Target
) -> TileList:
    """The order of a gradient's tiles that ends first.

    sharing: heads of the two arrays that all tiles of a head read, for each of the heads that have tiles.
    """
    usual, places, lengths = head_by_head(heads, blocks), target.sm_count, of.lengths
    if heads * blocks == 0 or f.window_left == f.window_right == UNLIMITED:
        return usual
    apart = coefficients_of(target).apart
    read = seen_bytes(of, ITEMSIZE[f.dtype] * (f.head_dim + f.head_dim_v) * sharing)
    if f.window_left == UNLIMITED:
        pairs = in_pairs(heads, blocks)
        listed = pairs.num_pairs <= MAX_ROUNDS * places
        return in_pairs(heads, blocks, _tail(of, heads, places, read, apart)) if listed else pairs
    if usual.num_items > MAX_ROUNDS * places:
        return usual
    found = interleave(heads, blocks)
    cost = 1 + apart * read * heads_apart(found, blocks, places, is_window=True)
    gained = (1 - _GAIN) * busiest(usual, heads, lengths, places)
    return found if cost * busiest(found, heads, lengths, places) < gained else usual
