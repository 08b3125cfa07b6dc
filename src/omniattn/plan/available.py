"""The first of several ways to run a call whose kernels this GPU gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..problems import Target
from ..registry import KernelSpec
from ..select.ways import Chosen, W
from .binaries import without_binary
from .engine import Launches


def first_that_loads(ways: Sequence[Chosen[W]], launches_of: Callable[[W], Launches], target: Target) -> Launches:
    """The launches of the best way whose kernels can be loaded or compiled; of the best one if there is none.

    A call with one way does not look for its kernels before it loads them.
    """
    first: Launches | None = None
    missing: KernelSpec | None = None
    for chosen in ways:
        launches = launches_of(chosen.way)
        more = chosen.why
        if len(ways) > 1:
            lacking = without_binary(launches, target.cc)
            if lacking is not None:
                first, missing = first or launches, missing or lacking
                continue
            if missing is not None:
                reason = f"not the fastest way: {missing.name} is not prebuilt and cannot be compiled here"
                more = (*more, reason)
        return replace(launches, selection=replace(launches.selection, why=(*launches.selection.why, *more)))
    assert first is not None, "there is a way to run a call, or an error"
    return first  # whose kernels cannot be loaded: the error says why
