"""How the ways of operations beside attention are chosen: by what they cost where that was measured, else by rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ..problems import AppendProblem, Target
from ..problems.costs import OperationCosts
from ..problems.target import Coefficients
from ..registry import by_name
from .cache import select_append
from .choice import Selection, names_in
from .model import coefficients_of, costs_of


class Way(Protocol):
    """One way to run a call, as a value that can be compared."""

    @property
    def text(self) -> str:
        """The way in one line."""


W = TypeVar("W", bound=Way)


@dataclass(frozen=True)
class Asked(Generic[W]):
    """What there is to choose among in a call of an operation.

    Attributes
    ----------
    op : str
        A key of `problems.costs.COSTS`, or an operation whose calls have one way each.
    rule : callable
        (``OMNIATTN_FORCE_KERNEL`` or None) -> the way that is taken where costs were not measured. It is one of `ways`,
        unless kernels are named.
    ways : callable
        () -> every way, in a fixed order.
    count : callable
        (way) -> what it has to do.
    cost : callable
        (what it has to do, costs of the operation, attention's coefficients) -> µs.
    kernels : frozenset of str
        Operations of the registry that ways differ in: who names a kernel of theirs, has chosen.
    """

    op: str
    rule: Callable[[str | None], W]
    ways: Callable[[], tuple[W, ...]]
    count: Callable[[W], Any]
    cost: Callable[[Any, Any, Coefficients], float]
    kernels: frozenset[str]


@dataclass(frozen=True)
class Chosen(Generic[W]):
    """A way, and why it was chosen beside what its kernels say."""

    way: W
    why: tuple[str, ...] = ()


def ranked_ways(
    asked: Asked[W], costs: OperationCosts, coefficients: Coefficients, ways: Sequence[W] | None = None
) -> list[tuple[float, W]]:
    """The ways with the µs that they take by the model, the fastest first; of equally fast ones the first stays so."""
    found = [
        (asked.cost(asked.count(way), costs, coefficients), way) for way in (asked.ways() if ways is None else ways)
    ]
    return sorted(found, key=lambda pair: pair[0])


def chosen_ways(asked: Asked[W], target: Target, force: str | None = None) -> tuple[Chosen[W], ...]:
    """Ways to run a call, the best one first; the others are for where the binary of a kernel cannot be had.

    This is the place where it is decided whether rules choose: they do until the file of coefficients, or the one of
    ``omniattn tune``, has those of the operation, and wherever ``force`` names a kernel of it.
    """
    costs = costs_of(asked.op, target)
    if costs is None or _is_named(force, asked.kernels):
        return (Chosen(asked.rule(force)),)
    ways = ranked_ways(asked, costs, coefficients_of(target))
    return tuple(
        Chosen(way, (f"number {place} of {len(ways)} ways by the model: {way.text}, {us:.1f} µs",))
        for place, (us, way) in enumerate(ways, 1)
    )


def _is_named(force: str | None, kernels: frozenset[str]) -> bool:
    """Whether ``force`` names a kernel of these operations, listed or not, or one that there is not: a rule says so."""
    for name in names_in(force):
        try:
            if by_name(name).op in kernels:
                return True
        except KeyError:
            return True
    return False


def possible_ways(asked: Asked[W], target: Target) -> tuple[W, ...]:
    """The ways that calls like this one may be run in, whatever their lengths."""
    return (asked.rule(None),) if costs_of(asked.op, target) is None else asked.ways()


@dataclass(frozen=True)
class OnlyWay:
    """The way of a call that can be run in one way only."""

    kernel: Selection

    @property
    def text(self) -> str:
        """The kernel's name."""
        return self.kernel.spec.name


def asked_of_append(problem: AppendProblem, target: Target) -> Asked[OnlyWay]:
    """``append``: a kernel for each pair of formats, whose CTAs have 2048 elements each."""

    def rule(force: str | None) -> OnlyWay:
        return OnlyWay(select_append(problem, target, force))

    kernels = frozenset({"append", "latent_append"})
    return Asked("append", rule, lambda: (rule(None),), lambda _: None, lambda *_: 0.0, kernels)
