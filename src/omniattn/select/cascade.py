"""Whether keys that requests of a step share are worth a call of their own, and which.

A call without levels reads the keys of each request: from memory what is there once, the rest from L2. A level reads
them once for all rows of a group, but is a call more, whose results are merged. All numbers are coefficients of the
model of costs; nothing is tuned here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..kv.runs import SharedRun, SharedRuns
from ..problems import UNLIMITED, AttentionProblem, AttentionStrides, Pages, Target
from ..problems.costs import DecodeCosts
from ..problems.decode import MAX_Q_LEN
from ..problems.memory import ITEMSIZE
from ..problems.target import WARP_ROWS
from ..registry.decode import TILE_ROWS
from .choose import ranked
from .cost import copying_us, longest
from .model import coefficients_of, costs_of, rules

#: Counts are rounded up to so many steps between a power of two and the next: prices are remembered by them.
_STEPS = 8


class Keys(NamedTuple):
    """What calls over one cache have in common.

    Attributes
    ----------
    dtype : str
        Of queries.
    num_q_heads, num_kv_heads, head_dim, block_size : int
    token_bytes : float
        K and V of a token and kv head.
    quantized : bool
        Kernels of ``decode`` convert; others read keys that are made in 16 bits first.
    """

    dtype: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    token_bytes: float
    quantized: bool

    @property
    def few(self) -> int:
        """New tokens of a request at most that the kernels of ``decode`` run."""
        group = self.num_q_heads // self.num_kv_heads
        return max(MAX_Q_LEN, rules().rows_of_codes // group) if self.quantized else MAX_Q_LEN


class Price(NamedTuple):
    """A way to run a step, and the µs that it takes by the model."""

    us: float
    runs: SharedRuns


def prices(
    runs: SharedRuns, keys: Keys, target: Target, max_levels: int, max_groups: int | None = None
) -> tuple[Price, ...]:
    """A step without levels first, and with up to max_levels of them, in ways that leave few keys to read."""
    none: tuple[SharedRun, ...] = ()
    found = {none: Price(step_us(runs, none, keys, target), runs.keep(none))}
    for some in _thinned(runs, max_levels):
        for levels, most in enumerate(most_saving(some.runs, max_levels)):
            kept = _fewer(runs.keep(most), max_groups)
            if levels and kept.runs not in found:
                found[kept.runs] = Price(step_us(runs, kept.runs, keys, target), kept)
    return tuple(found.values())


def chosen(runs: SharedRuns, keys: Keys, target: Target, max_levels: int, max_groups: int | None = None) -> SharedRuns:
    """The runs of a step that are worth a level: none, where the step is the fastest without."""
    return min(prices(runs, keys, target, max_levels, max_groups), key=lambda price: price.us).runs


def _saved(run: SharedRun) -> int:
    """Blocks that are not read again."""
    return (run.count - 1) * (run.end - run.begin)


def _thinned(runs: SharedRuns, max_levels: int) -> Iterator[SharedRuns]:
    """All runs, and those that save more than any run of a level does.

    The fewest keys to read are not the fastest step where many small groups save a little each, nor do they fit into
    the groups of a captured graph.
    """
    yield runs
    for level in range(1, min(max_levels + 2, runs.num_levels)):
        least = max(_saved(run) for run in runs.runs if run.level == level)
        yield runs.keep([run for run in runs.runs if _saved(run) > least])


def _fewer(runs: SharedRuns, max_groups: int | None) -> SharedRuns:
    """Runs in no more groups of a level, without those that save least."""
    if max_groups is None or runs.num_groups <= max_groups:
        return runs
    order = sorted(range(len(runs.runs)), key=lambda i: -_saved(runs.runs[i]))
    # Of the runs that save most as many as fit, by halves: fewer runs have hardly ever more groups.
    low, high = 0, len(order)
    while high - low > 1:
        middle = (low + high) // 2
        if runs.keep([runs.runs[i] for i in sorted(order[:middle])]).num_groups <= max_groups:
            low = middle
        else:
            high = middle
    return runs.keep([runs.runs[i] for i in sorted(order[:low])])


# Which runs leave the fewest keys to read


def most_saving(runs: Sequence[SharedRun], levels: int) -> list[list[SharedRun]]:
    """For 0, 1, ... ``levels``: runs that leave the fewest blocks to read, none within as many others.

    A run that is left out is read by each of the runs within it, and by each request of it that is in none of them.
    """
    within: list[list[int]] = [[] for _ in runs]
    around: list[list[int]] = []  # of each run those that it is within, the innermost first
    stack: list[int] = []
    for i, run in enumerate(runs):
        del stack[run.level :]
        around.append(stack[::-1])
        if stack:
            within[stack[-1]].append(i)
        stack.append(i)
    alone = [run.count - sum(runs[j].count for j in within[i]) for i, run in enumerate(runs)]
    # Blocks to read for a run and all within it: by levels left, and by where the next run that is kept around it ends.
    blocks: list[dict[tuple[int, int], tuple[int, bool]]] = [{} for _ in runs]
    for i in range(len(runs) - 1, -1, -1):
        end = runs[i].end
        for begin in (*(runs[j].end for j in around[i]), 0):
            for left in range(levels + 1):
                apart = sum(blocks[j][left, begin][0] for j in within[i]) + alone[i] * (end - begin)
                best = apart, False
                if left:
                    once = sum(blocks[j][left - 1, end][0] for j in within[i]) + end - begin
                    best = min(best, (once, True), key=lambda found: found[0])
                blocks[i][left, begin] = best
    found = []
    for most in range(levels + 1):
        kept: list[SharedRun] = []
        places: dict[int, tuple[int, int]] = {}
        for i, run in enumerate(runs):
            left, begin = places[around[i][0]] if around[i] else (most, 0)
            if blocks[i][left, begin][1]:
                kept.append(run)
                left, begin = left - 1, run.end
            places[i] = left, begin
        found.append(kept)
    return found


# What a step costs


def step_us(runs: SharedRuns, kept: Sequence[SharedRun], keys: Keys, target: Target) -> float:
    """A step with these of its runs as levels."""
    c, size, with_levels = coefficients_of(target), runs.block_size, runs.keep(kept)
    own = [n - gone * size for n, gone in zip(runs.lengths, with_levels.shared(), strict=True)]
    once = sum(n - gone * size for n, gone in zip(runs.lengths, runs.shared(), strict=True))
    held = {(run.first, run.count) for run in kept}
    once += size * sum(run.end - run.begin for run in runs.runs if (run.first, run.count) not in held)
    time = _own_us(runs.rows, own, min(once, sum(own)), keys, target)
    for level in range(with_levels.num_levels):
        groups = [run for run in with_levels.runs if run.level == level]
        rows = [sum(runs.rows[run.first : run.first + run.count]) for run in groups]
        tokens = size * sum(run.end - run.begin for run in groups)
        time += _call_us(len(groups), sum(rows), max(rows), tokens, False, keys, target) - c.launch + c.launch_more
        merged = 3.0 * sum(runs.rows) * keys.num_q_heads * (keys.head_dim * ITEMSIZE[keys.dtype] + 4)
        time += c.launch_more + merged / c.memory
    return time


def _own_us(rows: Sequence[int], lengths: Sequence[int], once: int, keys: Keys, target: Target) -> float:
    """The call over the requests' own keys. ``once``: tokens of all of them, those that are shared counted once."""
    c = coefficients_of(target)
    few = [(n, length) for n, length in zip(rows, lengths, strict=True) if n <= keys.few]
    many = [(n, length) for n, length in zip(rows, lengths, strict=True) if n > keys.few]
    time = 0.0
    if few:
        time += _few_us(few, once * sum(x for _, x in few) / max(sum(lengths), 1), keys, target)
    if many:
        count, total = [n for n, _ in many], sum(x for _, x in many)
        time += _call_us(len(many), sum(count), max(count), total, True, keys, target) - (c.launch if few else 0.0)
    return time


def _few_us(requests: Sequence[tuple[int, int]], once: float, keys: Keys, target: Target) -> float:
    """The kernels of ``decode``: each request reads its own keys, of which memory gives ``once`` tokens."""
    c, costs = coefficients_of(target), costs_of("decode", target)
    group = keys.num_q_heads // keys.num_kv_heads
    of_head = sum(length for _, length in requests)
    tiles = sum(length * -(-n * group // TILE_ROWS) for n, length in requests)
    products = TILE_ROWS * tiles * keys.head_dim / WARP_ROWS
    busy = products * c.sync_product
    if keys.quantized and isinstance(costs, DecodeCosts):
        busy += 2 * of_head * keys.head_dim * costs.convert
    of_token = keys.num_kv_heads * keys.token_bytes
    busy *= keys.num_kv_heads / target.sm_count
    # What memory has given once comes from L2 afterwards; measured, the times of both add.
    moved = once * of_token / c.memory + (of_head - once) * of_token / c.l2
    return c.launch + c.merge + longest(busy, moved)


def _call_us(batch: int, rows: int, most: int, tokens: int, causal: bool, keys: Keys, target: Target) -> float:
    """Attention over pages of packed queries; infinite where no kernel does it."""
    return _remembered(batch, _rounded(rows), _rounded(most), _rounded(tokens), causal, keys, target)


@functools.lru_cache(4096)
def _remembered(batch: int, rows: int, most: int, tokens: int, causal: bool, keys: Keys, target: Target) -> float:
    heads, kv_heads, dim, size = keys.num_q_heads, keys.num_kv_heads, keys.head_dim, keys.block_size
    columns = -(-tokens // (batch * size))
    of_q, of_page = (0, heads * dim, dim), (size * kv_heads * dim, kv_heads * dim, dim)
    problem = AttentionProblem(
        keys.dtype, batch, rows, tokens, heads, kv_heads, dim, UNLIMITED, 0 if causal else UNLIMITED, dim**-0.5, 0.0,
        "none", "none", True, lse=True, max_seqlen_q=most, used=(False, True),
        strides=AttentionStrides(of_q, of_page, of_page, of_q, (0, rows), (0, 0, 0, 0)),
        pages=Pages(size, batch * columns, columns, columns),
    )  # fmt: skip
    made = 0.0
    if keys.quantized:
        of_key = kv_heads * (keys.token_bytes + 2 * dim * ITEMSIZE[keys.dtype]) / 2  # read in codes, written in 16 bits
        made = copying_us(tokens, of_key, 1, coefficients_of(target))
        own = (0, kv_heads * dim, dim)
        strides = AttentionStrides(of_q, own, own, of_q, (0, rows), (0, 0, 0, 0))
        problem = replace(problem, pages=None, max_seqlen_k=columns * size, strides=strides)
    found = ranked(problem, target)
    return made + found[0][0] if found else float("inf")


def _rounded(count: int) -> int:
    """Up to a number of few binary digits."""
    step = max(1, (1 << count.bit_length()) // (2 * _STEPS))
    return -(-count // step) * step
