"""How packed queries over caches are divided between attention over pages and the kernels of ``decode``."""

from __future__ import annotations

from dataclasses import replace

from ..problems import AttentionProblem, Target
from ..problems.split import SplitKV, Whole
from .candidate import Candidate
from .choose import ranked
from .orders import usual_order

#: Rows of all sequences, as a part of those that they would have if all were as long as the longest, up to which some
#: are expected to be single tokens. Measured (docs/performance/serving.md): with a third of the rows 0 to 18 % are
#: gained, with half of them 1 to 9 %, with nearly all of them up to 5 % are lost.
_PART = 0.4
#: Persistent CTAs of attention for each place on the GPU. Those that find no place before ``decode``'s have ended begin
#: late: the more there are, the less each of them has to do, and the more often a pipeline is filled.
_WAVES = 2


def is_divided(problem: AttentionProblem, *, always: bool = False) -> bool:
    """Whether sequences of few queries run on the kernels of ``decode``, beside the others.

    ``always``: so that a sequence runs on the same kernels, whatever the others are.
    """
    p = problem
    if p.max_seqlen_q == 0:  # there is nothing to compute
        return False
    return always or (p.batch > 1 and p.seqlen_q <= _PART * p.batch * p.max_seqlen_q)


def one_way(problem: AttentionProblem, target: Target) -> Candidate | None:
    """How attention over pages runs a sequence, whatever the batch is: on the largest tile, all keys in one CTA."""
    ways = [way for _, way in ranked(problem, target) if isinstance(way.schedule, Whole)]
    return max(
        ways, key=lambda way: (way.row.arch_specific, way.row.block_m * way.row.block_n, way.row.name), default=None
    )


def whole_way(problem: AttentionProblem, target: Target) -> Candidate | None:
    """The best way in which all keys of a row are in one CTA."""
    return split_way(problem, target, 1)


def split_way(problem: AttentionProblem, target: Target, most: int) -> Candidate | None:
    """The best way in which keys of a row are in up to ``most`` CTAs."""

    def fits(way: Candidate) -> bool:
        schedule = way.schedule
        return isinstance(schedule, Whole) or (isinstance(schedule, SplitKV) and schedule.splits <= most)

    return next((way for _, way in ranked(problem, target) if fits(way)), None)


def way_of_others(problem: AttentionProblem, target: Target) -> Candidate | None:
    """How attention over pages runs the sequences of many queries; None if only with their keys split.

    As if there were so few sequences that all are as long as the longest one; with ``deterministic`` `one_way`.
    """
    p = problem
    long = max(1, -(-p.seqlen_q // p.max_seqlen_q))
    typical = replace(p, batch=long, seqlen_k=-(-p.seqlen_k // p.batch) * long)
    way = one_way(p, target) if p.deterministic else whole_way(typical, target)
    if way is None or not way.row.arch_specific:
        return way
    order = usual_order(way.row, way.told(p), target)
    assert order.tiles is not None
    ctas = min(order.tiles.num_items, _WAVES * target.sm_count * way.row.ctas_per_sm)
    return replace(way, schedule=Whole(order.tiles, ctas))
