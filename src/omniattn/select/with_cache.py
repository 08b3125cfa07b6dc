"""How packed queries over caches are divided between attention over pages and the kernels of ``decode``."""

from __future__ import annotations

from dataclasses import replace

from ..problems import UNLIMITED, AttentionProblem, DequantizeProblem, Target
from ..problems.dequantize import PAGE
from ..problems.memory import ITEMSIZE
from ..problems.split import SplitKV, Whole
from .candidate import Candidate
from .choose import ranked
from .cost import copying_us
from .model import coefficients_of, page_factors, rules
from .orders import usual_order


def is_divided(problem: AttentionProblem, *, always: bool = False) -> bool:
    """Whether sequences of few queries run on the kernels of ``decode``, beside the others.

    ``always``: so that a sequence runs on the same kernels, whatever the others are.
    """
    p = problem
    if p.max_seqlen_q == 0:  # there is nothing to compute
        return False
    return always or (p.batch > 1 and p.seqlen_q <= rules().mixed_rows * p.batch * p.max_seqlen_q)


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


def is_copied(problem: AttentionProblem, keys: DequantizeProblem, target: Target) -> bool:
    """Whether it is faster to copy keys and values out of their pages first.

    They have to be waited for, but kernels over what is contiguous are faster: those over pages of some head dims and
    with softcap have smaller tiles, and pages of few tokens are copied row by row.
    """
    if problem.deterministic or not problem.batch or not problem.seqlen_q:
        return False
    over_pages, copied = ranked(problem, target), ranked(keys.attention(problem), target)
    copied = [found for found in copied if not keys.is_part or isinstance(found[1].schedule, Whole)]
    if not copied:
        return False
    bytes_of_key = 2.0 * problem.num_kv_heads * problem.head_dim * ITEMSIZE[problem.dtype]
    count = float(problem.seqlen_k)
    if problem.window_left != UNLIMITED:  # what no query sees is left where it is
        count = min(count, problem.seqlen_q + float(problem.batch) * (problem.window_left + PAGE))
    cost = copying_us(count, bytes_of_key, keys.rounds, coefficients_of(target))
    if not over_pages:
        return True
    us, way = over_pages[0]
    factors = page_factors(target.cc).get(way.row.twin, (1.0, 1.0))
    in_chunks = problem.pages is None or not problem.pages.has_table or problem.pages.page_size % rules().page_rows == 0
    return copied[0][0] + cost < us * factors[0 if in_chunks else 1]


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
    ctas = min(order.tiles.num_items, rules().waves * target.sm_count * way.row.ctas_per_sm)
    return replace(way, schedule=Whole(order.tiles, ctas))
