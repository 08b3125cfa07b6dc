"""What all selections share: the result, a row that the environment names, and whether a GPU can run a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ArgumentError
from ..problems import Target
from ..registry import KernelSpec, by_name

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


def unfit_target(spec: KernelSpec, target: Target) -> str | None:
    """Why the GPU cannot run ``spec``; None if it can."""
    if spec.arch_specific and target.cc != spec.min_arch:
        return f"it is for compute capability {dotted(spec.min_arch)} only, this GPU has {dotted(target.cc)}"
    if target.cc < spec.min_arch:
        return f"it needs compute capability {dotted(spec.min_arch)}, this GPU has {dotted(target.cc)}"
    if spec.smem_bytes > target.max_smem:
        return f"it needs {spec.smem_bytes} bytes of shared memory, this GPU gives {target.max_smem}"
    return None


def forced(force: str | None, ops: tuple[str, ...], unfit: Callable[[KernelSpec], str | None]) -> Selection | None:
    """The row of one of ``ops`` that ``OMNIATTN_FORCE_KERNEL`` names; None where it names none of them.

    Parameters
    ----------
    force : str, optional
        Names of registry rows, separated by commas. Rows of other operations do not matter here.
    ops : tuple of str
    unfit : callable
        Why a row cannot serve the call; None if it can.

    Raises
    ------
    ArgumentError
        A name that the registry does not have, two rows of one operation, a row that cannot serve the call.
    """
    if not force:
        return None
    found: KernelSpec | None = None
    for name in force.split(","):
        try:
            spec = by_name(name.strip())
        except KeyError as error:
            raise ArgumentError(
                VARIABLE, "names of registered kernels, separated by commas", repr(name.strip()), hint=error.args[0]
            ) from None
        if spec.op not in ops:
            continue
        if found is not None:
            received = f"{found.name!r} and {spec.name!r}"
            raise ArgumentError(VARIABLE, f"one kernel of {spec.op}", received)
        found = spec
    if found is None:
        return None
    reason = unfit(found)
    if reason:
        raise ArgumentError(VARIABLE, "a kernel that can serve this call", f"{found.name!r}: {reason}")
    return Selection(found, (f"{VARIABLE}={force}",))
