"""The way in which an attention call is run, and those that come next if its kernels cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..problems import AttentionProblem, Target
from ..problems.split import gqa_packing, tiles_of_group
from .attention import select_attention
from .by_cost import ranked, reasons
from .candidate import (
    Candidate,
    can_have_heads_as_queries,
    can_have_keys_as_tiles,
    heads_as_queries,
    keys_as_tiles,
    mask_inputs,
)
from .choice import forced, named_ops
from .split import select_split
from .tail import select_tail

#: Compute capability of the kernels whose heads can share tiles that have a bias, and the keys for each query from
#: which on that gains: those of few queries are split.
_HOPPER, _KEYS_FOR_EACH = (9, 0), 16
#: Of the tile that one query's heads share.
_ROWS = 64


@dataclass(frozen=True)
class Choice:
    """A way to run a call.

    Attributes
    ----------
    candidate : Candidate
    reasons : callable
        () -> one sentence for each fact that decided. Of most ways nobody asks.
    """

    candidate: Candidate
    reasons: Callable[[], tuple[str, ...]]

    @property
    def why(self) -> tuple[str, ...]:
        """One sentence for each fact that decided."""
        return self.reasons()


def _because(candidate: Candidate, *why: str) -> Choice:
    return Choice(candidate, lambda: why)


def choices(problem: AttentionProblem, target: Target, force: str | None = None) -> tuple[Choice, ...]:
    """Ways to run a call, the best one first.

    Parameters
    ----------
    problem : AttentionProblem
    target : Target
    force : str, optional
        ``OMNIATTN_FORCE_KERNEL``.

    Raises
    ------
    ArgumentError
        ``force`` names a kernel that cannot serve the call.
    UnsupportedError
        No kernel serves it on this GPU.
    """
    of_attention = {op for op in named_ops(force) if op.startswith("attention") and "backward" not in op}
    named = of_attention & {"attention", "attention_split"}
    if target.tuning is not None and not of_attention:
        forced(force, (), lambda spec: None)  # an unknown name is an error here too
        ways = ranked(problem, target, target.tuning.coefficients)
        if ways:
            return tuple(Choice(way, partial(reasons, problem, target, ways, us, way)) for us, way in ways)
    folds = _folds(problem)
    told = heads_as_queries(problem) if folds else problem
    more = (f"one query: the {told.seqlen_q} query heads of a kv head are the rows of a tile",) if folds else ()
    whole = select_attention(told, target, force)
    # A forced kernel gets the mask as it is.
    as_tiles = not named and _takes_keys_as_tiles(told, target)
    of_split = keys_as_tiles(told) if as_tiles else told
    split = select_split(of_split, target, whole, force)
    row = whole.spec
    usual = _because(Candidate(row, mask=mask_inputs(row, told)[0], heads_as_queries=folds), *whole.why, *more)
    if split is not None:
        row, pack_gqa = split.main.spec, split.pack_gqa
        mask = mask_inputs(row, of_split, pack_gqa)[0]
        first = _because(Candidate(row, pack_gqa, split.schedule, mask, folds), *split.main.why, *more)
        return (first,) if named else (first, usual)
    tail = select_tail(told, target, whole, force)
    if tail is None:
        return (usual,)
    of_tail = replace(usual.candidate, schedule=tail.schedule)
    return _because(of_tail, *whole.why, *tail.main.why, *more), usual


def _folds(problem: AttentionProblem) -> bool:
    """Whether query heads of a kv head become queries of one head.

    The plain kernels share tiles among heads by themselves where they split keys, but for groups like Falcon's 71,
    which no number of rows divides.
    """
    p = problem
    if not can_have_heads_as_queries(p):
        return False
    group = p.num_q_heads // p.num_kv_heads
    return p.score_mods or tiles_of_group(p, _ROWS, gqa_packing(p, _ROWS)) > 2 * -(-group // _ROWS)


def _takes_keys_as_tiles(problem: AttentionProblem, target: Target) -> bool:
    p = problem
    few = p.num_q_heads > p.num_kv_heads and p.seqlen_k >= _KEYS_FOR_EACH * p.seqlen_q > 0
    return target.cc == _HOPPER and few and can_have_keys_as_tiles(p)
