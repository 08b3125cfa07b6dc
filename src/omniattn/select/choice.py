"""What all selections share: the result, and a row that the environment names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ArgumentError, UnsupportedError
from ..problems import Target
from ..registry import REGISTRY, KernelSpec, by_name
from .fit import fit

VARIABLE = "OMNIATTN_FORCE_KERNEL"


@dataclass(frozen=True)
class Selection:
    """A chosen kernel.

    Attributes
    ----------
    spec : KernelSpec
        The registry row.
    why : tuple of str
        One sentence for each fact that decided.
    """

    spec: KernelSpec
    why: tuple[str, ...]


def dotted(cc: tuple[int, int]) -> str:
    """A compute capability as people write it."""
    return f"{cc[0]}.{cc[1]}"


def names_in(force: str | None) -> list[str]:
    """The kernels that ``OMNIATTN_FORCE_KERNEL`` names."""
    return [name for part in (force or "").split(",") if (name := part.strip())]


def named_ops(force: str | None) -> set[str]:
    """The operations of these kernels, of names that there are."""
    names = names_in(force)
    return {spec.op for spec in REGISTRY if spec.name in names} if names else set()


def forced(force: str | None, ops: tuple[str, ...], unfit: Callable[[KernelSpec], str | None]) -> Selection | None:
    """The first row of ``ops`` that ``OMNIATTN_FORCE_KERNEL`` names and that fits; None where it names none of them.

    Parameters
    ----------
    force : str, optional
        Names of kernels, separated by commas. Those of other operations do not matter here.
    ops : tuple of str
    unfit : callable
        Why a row cannot serve the call; None if it can.

    Raises
    ------
    ArgumentError
        A name that no kernel has; none of those named can serve the call.
    """
    if not force:
        return None
    named = []
    for name in names_in(force):
        try:
            named.append(by_name(name))
        except KeyError as error:
            expected = "names of kernels, separated by commas"
            raise ArgumentError(VARIABLE, expected, repr(name), hint=error.args[0]) from None
    reasons = []
    for spec in named:
        if spec.op not in ops:
            continue
        reason = unfit(spec)
        if not reason:
            return Selection(spec, (f"{VARIABLE}={force}",))
        reasons.append(f"{spec.name!r}: {reason}")
    if reasons:
        raise ArgumentError(VARIABLE, "a kernel that can serve this call", "; ".join(reasons))
    return None


def the_one(spec: KernelSpec, what: str, target: Target, force: str | None) -> Selection:
    """``spec``, the one kernel that can serve; another one that is forced raises."""

    def unfit(other: KernelSpec) -> str | None:
        if other.name != spec.name:
            return f"the call takes {spec.name!r}: {what}"
        return fit(other, None, target)

    if (chosen := forced(force, (spec.op,), unfit)) is not None:
        return chosen
    if (reason := fit(spec, None, target)) is not None:
        raise UnsupportedError(f"{spec.op}: {reason}", instead="arrays on the CPU, or a newer GPU")
    return Selection(spec, (what,))


def only(op: str, fits: Callable[[KernelSpec], bool] = lambda spec: True) -> KernelSpec:
    """The one listed row of an operation that fits."""
    return next(spec for spec in REGISTRY if spec.op == op and fits(spec))
