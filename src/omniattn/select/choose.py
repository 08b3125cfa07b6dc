"""The way in which an attention call is run: the fastest by the model of costs, and those that come next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..problems import AttentionProblem, Target
from ..problems.split import SplitKV, StreamK, TailSplit, Whole
from ..registry import KernelSpec
from .attention import facts, unserved
from .candidate import Candidate
from .candidates import candidates, views
from .choice import VARIABLE, forced, named_ops
from .cost import cost_us
from .features import Kept, features
from .fit import fit
from .model import coefficients_of, scaled_from
from .orders import best_balance, other_orders
from .partial import merge_op

#: Operations that merge.
_MERGES = {"attention_combine", "attention_combine_lse", "attention_combine_packed"}


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


def choices(problem: AttentionProblem, target: Target, force: str | None = None) -> tuple[Choice, ...]:
    """Ways to run a call, the best one first; of each kernel the best with each kind of schedule.

    The others are for where the binary of a kernel cannot be had.

    Parameters
    ----------
    problem : AttentionProblem
    target : Target
    force : str, optional
        ``OMNIATTN_FORCE_KERNEL``: of a row of ``attention`` or ``attention_split`` only the ways of that row.

    Raises
    ------
    ArgumentError
        ``force`` names a kernel that cannot serve the call.
    UnsupportedError
        No kernel serves it on this GPU.
    """
    row = forced_row(problem, target, force)
    ways = ranked(problem, target, row)
    if force and (named := named_ops(force) & _MERGES):
        # Of a kernel that merges the ways that leave it something, but for tails: a split of all tiles shows more.
        ways = [(us, way) for us, way in ways if not isinstance(way.schedule, TailSplit)]
        split = [(us, way) for us, way in ways if isinstance(way.schedule, (SplitKV, StreamK))]
        ways = [(us, way) for us, way in split if merge_op(way.row, problem) in named] or ways
    if not ways:
        raise unserved(problem, target)
    best: dict[object, tuple[float, Candidate]] = {}
    for us, way in ways:
        best.setdefault((way.row.name, type(way.schedule)), (us, way))
    said = force if row is not None else None
    return tuple(Choice(way, partial(_reasons, problem, target, ways, us, way, said)) for us, way in best.values())


def ranked(problem: AttentionProblem, target: Target, row: KernelSpec | None = None) -> list[tuple[float, Candidate]]:
    """The ways to run a call with the microseconds that they take by the model, the fastest first.

    Orders of tiles other than the usual ones are there for kernels that could be the fastest with one: looking for them
    takes most of the time. Of equally fast ways the first of `candidates` comes first. row: as `candidates` takes it.
    """
    coefficients = coefficients_of(target)
    kept: Kept = {}

    def priced(way: Candidate) -> tuple[float, Candidate]:
        return cost_us(features(way, problem, target, kept), coefficients), way

    found = [priced(way) for way in candidates(problem, target, row, every_order=False)]
    found.sort(key=_us)
    for us, way in tuple(found):
        if not isinstance(way.schedule, Whole) or way.schedule.tiles is None:
            continue
        told = way.told(problem)
        if us * best_balance(way.row, told, target) < found[0][0]:
            found += (priced(replace(way, schedule=order)) for order in other_orders(way.row, told, target))
            found.sort(key=_us)
    return found


def _us(found: tuple[float, Candidate]) -> float:
    return found[0]


def forced_row(problem: AttentionProblem, target: Target, force: str | None) -> KernelSpec | None:
    """The row that ``force`` names for the attention of a call, one that splits keys first; None if it names none.

    Raises
    ------
    ArgumentError
        A name that no kernel has; none of those named can serve the call.
    """
    if not force:
        return None
    told = views(problem)

    def unfit(spec: KernelSpec) -> str | None:
        reasons = [fit(spec, view, target) for view in told]
        return None if None in reasons else reasons[0]

    whole, split = (forced(force, (op,), unfit) for op in ("attention", "attention_split"))
    chosen = split or whole
    return None if chosen is None else chosen.spec


def _reasons(
    problem: AttentionProblem,
    target: Target,
    of_all: list[tuple[float, Candidate]],
    us: float,
    way: Candidate,
    force: str | None,
) -> tuple[str, ...]:
    """Why ``way``, which takes ``us``, was chosen of all that there are."""
    others = [f"{other.text}: {time:.1f} µs" for time, other in of_all[:3] if other != way][:2]
    place = next(i for i, (_, other) in enumerate(of_all, 1) if other == way)
    rank = "the fastest" if place == 1 else f"number {place}"
    tuning, scaled = target.tuning, scaled_from(target)
    if tuning is not None:
        measured = [f"tuned on this GPU: {tuning.device}, digest {tuning.digest[:12]}"]
    else:
        measured = [] if scaled is None else [f"not measured on this GPU: scaled from {scaled}'s"]
    return (
        *([f"{VARIABLE}={force}"] if force else []),
        *facts(way, problem, target),
        f"{rank} of {len(of_all)} ways by the model: {way.text}, {us:.1f} µs",
        *([f"others: {'; '.join(others)}"] if others else []),
        *measured,
    )
