"""Whether the tiles that are left over when all CTAs have had as many as each other have their keys split.

A persistent kernel takes its tiles of queries in rounds, one to each SM. What does not fill a round would take as long
as one: 56 tiles of 132 leave more than half of the GPU idle. Split over all SMs they take their share of a round
(docs/performance/tail.md). Source: Stream-K (Osama et al. 2023).
"""

from __future__ import annotations

from ..problems import UNLIMITED, AttentionProblem, Target
from ..problems.split import ONE_HEAD, TailSplit
from ..registry import REGISTRY, KernelSpec
from .choice import Selection, named_ops
from .fit import fitting_rows
from .split import SplitSelection
from .split_model import COMBINE_US, ITEM_US, LAUNCH_US, PARTIAL_BYTES, step_us

#: What a split has to gain by the model: of the whole call, and microseconds.
_GAIN, _LEAST_US = 0.985, 4.0
#: Of kernels that attend, or merge what others leave.
_OPS = {"attention", "attention_split", "attention_combine", "attention_combine_lse"}
#: Splits of a tile, at most: more of them would gain a few per cent of a round.
_MAX_SPLITS = 11


def select_tail(
    problem: AttentionProblem, target: Target, whole: Selection, force: str | None = None
) -> SplitSelection | None:
    """Choose a split of the keys for the last tiles, where that is faster.

    Parameters
    ----------
    problem : AttentionProblem
    target : Target
    whole : Selection
        The kernel of the call, of which `select_split` has found no split.
    force : str, optional
        ``OMNIATTN_FORCE_KERNEL``: where it names a kernel that attends or merges, one has all tiles.

    Returns
    -------
    SplitSelection or None
        Of the kernel that goes on; its schedule is a `TailSplit`. None where the kernel of the call has all tiles.
    """
    p, spec = problem, whole.spec
    # All tiles have to be equal, and one to an SM.
    if p.varlen or p.score_mods or not (p.window_left == p.window_right == UNLIMITED):
        return None
    if not spec.arch_specific or spec.ctas_per_sm > 1 or p.seqlen_k == 0:
        return None
    if named_ops(force) & _OPS:
        return None
    tiles = p.batch * p.num_q_heads * -(-p.seqlen_q // spec.block_m)
    rounds, rest = divmod(tiles, target.sm_count)
    if rounds == 0 or rest == 0:
        return None
    saved = _saved_us(p, spec, target, rounds, rest)
    if saved is None:
        return None
    row = tail_row(spec, p, target)
    if row is None:
        return None
    splits, us = saved
    first = rounds * target.sm_count
    why = (
        f"{rest} of {first + rest} tiles do not fill a round of {target.sm_count}: their keys are split {splits} ways, "
        f"{us:.0f} µs less by the model",
    )
    return SplitSelection(Selection(row, why), ONE_HEAD, TailSplit(splits, first, rest))


def tail_row(spec: KernelSpec, problem: AttentionProblem, target: Target) -> KernelSpec | None:
    """The row that splits the keys of the tiles that ``spec`` leaves; None where there is none."""
    fitting = fitting_rows(REGISTRY, "attention_split", problem, target)
    return min((row for row in fitting if _goes_on(row, spec)), key=lambda row: row.options, default=None)


def _goes_on(row: KernelSpec, spec: KernelSpec) -> bool:
    """Whether ``row`` has the tiles of ``spec``, to which a tail is counted."""
    same = (row.family, row.block_m, row.head_dim, row.head_dim_v)
    return not row.score_mods and same == (spec.family, spec.block_m, spec.head_dim, spec.head_dim_v)


def _saved_us(
    p: AttentionProblem, spec: KernelSpec, target: Target, rounds: int, rest: int
) -> tuple[int, float] | None:
    """The best number of splits and what it saves; None where that is too little."""
    steps, step = -(-p.seqlen_k // spec.block_n), step_us(spec, spec.block_m, 1)
    one_round = ITEM_US + steps * step
    partial = 2 * 4 * rest * spec.block_m * (p.head_dim_v + 2) / PARTIAL_BYTES

    def tail_us(splits: int) -> float:
        items = -(-rest * splits // target.sm_count)
        return LAUNCH_US + items * (ITEM_US + -(-steps // splits) * step) + COMBINE_US + splits * partial

    time, splits = min((tail_us(n), n) for n in range(2, _MAX_SPLITS + 1))
    saved = one_round - time
    if saved < max(_LEAST_US, (1 - _GAIN) * (rounds + 1) * one_round):
        return None
    return splits, saved
