"""How packed queries over caches are divided between attention over pages and the kernels of ``decode``."""

from __future__ import annotations

from dataclasses import replace

from ..problems import AttentionProblem, Target, WithCacheProblem
from ..problems.split import Whole
from .candidate import Candidate
from .choose import ranked
from .orders import usual_order

#: Rows of all sequences, as a part of those that they would have if all were as long as the longest, up to which some
#: are expected to be single tokens: two launches more cost a few microseconds.
_PART = 1 / 4
#: Persistent CTAs of attention for each place on the GPU. Those that find no place before ``decode``'s have ended begin
#: late: the more there are, the less each of them has to do.
_WAVES = 4


def is_divided(problem: WithCacheProblem, target: Target) -> bool:
    """Whether sequences of few queries run on the kernels of ``decode``, beside the others."""
    kernels = problem.kernels
    if problem.few is None or not isinstance(kernels, AttentionProblem):
        return False
    if kernels.max_seqlen_q <= problem.few.q_len:  # 0: there is nothing to compute
        return False
    return kernels.batch > 1 and kernels.seqlen_q <= _PART * kernels.batch * kernels.max_seqlen_q


def way_of_others(problem: AttentionProblem, target: Target) -> Candidate | None:
    """How attention over pages runs the sequences of many queries; None if only with their keys split.

    As if there were so few sequences that all are as long as the longest one.
    """
    p = problem
    long = max(1, -(-p.seqlen_q // p.max_seqlen_q))
    typical = replace(p, batch=long, seqlen_k=-(-p.seqlen_k // p.batch) * long)
    ways = (way for _, way in ranked(typical, target) if isinstance(way.schedule, Whole))
    way = next(ways, None)
    if way is None or not way.row.arch_specific:
        return way
    order = usual_order(way.row, way.told(p), target)
    assert order.tiles is not None
    ctas = min(order.tiles.num_items, _WAVES * target.sm_count * way.row.ctas_per_sm)
    return replace(way, schedule=Whole(order.tiles, ctas))
