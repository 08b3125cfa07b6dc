"""The ways to run a backward of attention: which kernels make dk, dv and dq; what they have to do and what that costs.

dq is summed up in global memory by the kernel of dk and dv, or made by a kernel of its own, which multiplies two
products once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..problems import BackwardProblem, Target
from ..problems.costs import BackwardCosts
from ..problems.memory import ITEMSIZE
from ..problems.target import WARP_ROWS, WARPGROUP_ROWS, Coefficients
from ..registry import REGISTRY, KernelSpec
from ..registry.targets import is_carried
from .backward import BACKWARD, DQ, select_backward, select_dq, selected
from .choice import Selection
from .cost import longest
from .features import sequences, tile_steps
from .fit import fit
from .ways import Asked

#: Gradients that the kernel of dk and dv makes.
_OTHERS = frozenset({"dk", "dv", "dmask"})


@dataclass(frozen=True)
class BackwardWay:
    """One way to run a call.

    Attributes
    ----------
    main : Selection or None
        The kernel of dk and dv, and of dq where ``dq`` is None and it is wanted; None: neither is wanted.
    dq : Selection or None
        The kernel of dq alone.
    """

    main: Selection | None
    dq: Selection | None

    @property
    def text(self) -> str:
        """The way in one line."""
        return " and ".join(one.spec.name for one in (self.main, self.dq) if one is not None) or "no kernel"


def asked_of_backward(problem: BackwardProblem, target: Target) -> Asked[BackwardWay]:
    """What there is to choose among in a call."""
    return Asked(
        "backward",
        lambda force: _by_rule(problem, target, force),
        lambda: backward_ways(problem, target),
        lambda way: backward_work(way, problem, target),
        backward_us,
        frozenset({BACKWARD, DQ}),
    )


# The ways


def _wants_others(problem: BackwardProblem) -> bool:
    return not _OTHERS.isdisjoint(problem.wanted)


def _has_sums(main: KernelSpec, problem: BackwardProblem) -> bool:
    """Whether ``main`` may make dq: sums in global memory come in no fixed order, unless the kernel has one."""
    return main.dq and (main.ordered_dq or not problem.deterministic)


def _by_rule(problem: BackwardProblem, target: Target, force: str | None) -> BackwardWay:
    """The narrowest kernel made for the GPU with the largest tile, with dq where it makes it: fewer products."""
    main = select_backward(problem, target, force) if _wants_others(problem) else None
    alone = "dq" in problem.wanted and (main is None or not _has_sums(main.spec, problem))
    return BackwardWay(main, select_dq(problem, target, force) if alone else None)


def backward_ways(problem: BackwardProblem, target: Target) -> tuple[BackwardWay, ...]:
    """Every way to run a call that could be the fastest, in a fixed order: with dq, and with a kernel for it.

    Of kernels that the wheel carries for the GPU; where it carries none that serves, of all. A kernel that does more
    than the call needs (columns beyond head_dim, scores one by one, an order) is left out where another one has its
    tile.
    """
    wants_dq = "dq" in problem.wanted
    alone = tuple(selected(row, problem) for row in _rows(DQ, problem, target)) if wants_dq else ()
    if not _wants_others(problem):
        return tuple(BackwardWay(None, dq) for dq in alone or (None,))
    found = []
    for row in _rows(BACKWARD, problem, target):
        main = selected(row, problem)
        if not wants_dq or _has_sums(row, problem):
            found.append(BackwardWay(main, None))
        if wants_dq and not row.ordered_dq:
            found += [BackwardWay(main, dq) for dq in alone]
    return tuple(found)


def _rows(op: str, problem: BackwardProblem, target: Target) -> Iterator[KernelSpec]:
    fitting = [row for row in REGISTRY if row.op == op and fit(row, problem, target) is None]
    if not fitting:
        select = select_backward if op == BACKWARD else select_dq
        select(problem, target)  # says why
    carried = [row for row in fitting if is_carried(row, target.cc)] or fitting
    for row in carried:
        alike = [other for other in carried if _kind(other) == _kind(row)]
        if _excess(row) == min(map(_excess, alike)):
            yield row


def _kind(row: KernelSpec) -> tuple[object, ...]:
    """What rows have in common of which the one that does least is compared; additions in an order are a kind."""
    return row.arch_specific, row.ordered_dq


def _excess(row: KernelSpec) -> tuple[int, bool]:
    return row.head_dim, row.score_mods


# What they have to do


class BackwardPass(NamedTuple):
    """One kernel with products.

    Attributes
    ----------
    kind : str
        ``"wgmma"`` or ``"mma.sync"``.
    products : int
        Of a step.
    resident : int
        CTAs of an SM that have something to do.
    items, steps : float
        Of the busiest CTA: tiles, and steps.
    is_uneven : bool
        Tiles differ, so that no CTA is as busy as the mean.
    pairs : float
        Of a step: query rows in units of a product's times keys.
    channels : int
    scores : str
        As of `features.Pass`.
    is_ordered : bool
        Additions to dq have an order.
    sums : float
        Bytes added to dq.
    read, reread : float
        Bytes from memory or to it, and from L2.
    """

    kind: str
    products: int
    resident: int
    items: float
    steps: float
    is_uneven: bool
    pairs: float
    channels: int
    scores: str
    is_ordered: bool
    sums: float
    read: float
    reread: float


class BackwardWork(NamedTuple):
    """A way of running a call.

    Attributes
    ----------
    passes : tuple of BackwardPass
    launches : int
        Kernels, those before and behind the passes too.
    rows : float
        Bytes that these read and write: o and do, and sums of dq.
    """

    passes: tuple[BackwardPass, ...]
    launches: int
    rows: float


def backward_work(way: BackwardWay, problem: BackwardProblem, target: Target) -> BackwardWork:
    """Count what a way of running a call has to do."""
    f = problem.forward
    passes = []
    columns = 0
    if way.main is not None:
        columns = way.main.spec.head_dim if way.dq is None and "dq" in problem.wanted else 0
        passes.append(_of_keys(way.main.spec, problem, target, columns))
    if way.dq is not None:
        passes.append(_of_queries(way.dq.spec, problem, target))
    queries = float((1 if f.varlen else f.batch) * f.seqlen_q * f.num_q_heads)
    # o and do are read; sums are cleared, read again, and leave dq.
    rows = queries * 2 * f.head_dim * ITEMSIZE[f.dtype]
    rows += queries * (8 * columns + f.head_dim * ITEMSIZE[f.dtype]) if columns else 0.0
    return BackwardWork(tuple(passes), len(passes) + 1 + (1 if columns else 0), rows)


def _of_keys(row: KernelSpec, problem: BackwardProblem, target: Target, columns: int) -> BackwardPass:
    """dk and dv: a CTA has a tile of keys, and visits those of the queries that see it, of every head of its group."""
    f = problem.forward
    group = f.num_q_heads // max(f.num_kv_heads, 1)
    # A query sees keys to its right as a key is seen by queries to its left.
    window = f.window_right, f.window_left
    pairs = ((keys, queries) for queries, keys in sequences(f))
    counts = [tile_steps(*pair, 1, row.block_n, row.block_m, *window) for pair in pairs]
    return _pass(row, problem, target, counts, f.num_kv_heads, group, 5 if columns else 4, columns, row.block_m)


def _of_queries(row: KernelSpec, problem: BackwardProblem, target: Target) -> BackwardPass:
    """dq alone: a CTA has a tile of queries."""
    f = problem.forward
    window = f.window_left, f.window_right
    counts = [tile_steps(*pair, 1, row.block_m, row.block_n, *window) for pair in sequences(f)]
    return _pass(row, problem, target, counts, f.num_q_heads, 1, 3, 0, row.block_n)


def _pass(
    row: KernelSpec,
    problem: BackwardProblem,
    target: Target,
    counts: Iterable[tuple[int, float, float]],
    heads: int,
    group: int,
    products: int,
    columns: int,
    rows_of_step: int,
) -> BackwardPass:
    """counts: tiles, steps and longest tile of sequences that stand for all. rows_of_step: that a step loads."""
    f = problem.forward
    counts = list(counts)
    of_each = max(f.batch, 1) / len(counts) * heads
    tiles = of_each * sum(count for count, _, _ in counts)
    steps = of_each * group * sum(total for _, total, _ in counts)
    most = group * max(most for _, _, most in counts)
    is_even = len(counts) == 1 and steps == most * tiles
    resident = max(1, min(-(-int(tiles) // target.sm_count), row.ctas_per_sm))
    busy = max(min(float(target.sm_count * row.ctas_per_sm), tiles), 1.0)
    items, mean = tiles / busy, steps / busy
    own = float(math.ceil(items)) if is_even else items
    of_wgmma, itemsize = row.arch_specific, ITEMSIZE[f.dtype]
    batch = 1 if f.varlen else f.batch
    read = batch * itemsize * f.head_dim * (2.0 * f.seqlen_q * f.num_q_heads + 4.0 * f.seqlen_k * f.num_kv_heads)
    return BackwardPass(
        kind="wgmma" if of_wgmma else "mma.sync",
        products=products,
        resident=resident,
        items=own,
        steps=own * most if is_even else max(mean, most),
        is_uneven=not is_even and mean > most,
        pairs=-(-row.block_m // (WARPGROUP_ROWS if of_wgmma else WARP_ROWS)) * float(row.block_n),
        channels=row.head_dim,
        scores="functions" if f.softcap or f.score_mod is not None else "masks" if f.mask != "none" else "as they are",
        is_ordered=row.ordered_dq and columns > 0,
        sums=4.0 * steps * row.block_m * columns,
        read=float(read),
        reread=2.0 * steps * rows_of_step * f.head_dim * itemsize,
    )


# What that costs


def backward_us(found: BackwardWork, own: BackwardCosts, c: Coefficients) -> float:
    """µs that a way of running a call takes."""
    time = c.launch + c.launch_more * (found.launches - 1) + found.rows / c.memory
    return time + sum(_pass_us(one, own, c) for one in found.passes)


def _pass_us(one: BackwardPass, own: BackwardCosts, c: Coefficients) -> float:
    if one.items == 0:
        return 0.0
    # A step of attention has two products.
    part = one.products / 2
    longer = {"masks": c.masks, "functions": c.functions}.get(one.scores, 1.0)
    if one.kind == "wgmma":
        item, wait = c.item, own.wait
        busy = (part * c.product * one.channels + own.scores * longer) * one.pairs
    else:
        item, wait = c.sync_item, own.sync_wait
        busy = (part * c.sync_product * one.channels + own.sync_scores * longer) * one.pairs * one.resident
    step = busy + wait + (own.order if one.is_ordered else 0.0)
    uneven = 1.0 + (c.uneven if one.is_uneven else 0.0)
    work = one.items * item + one.steps * step * uneven
    return longest(work, one.read / c.memory, one.reread / c.l2 + own.sums * one.sums / c.l2)
