"""Whether a GPU gets the binaries of a call's kernels, found out once a process."""

from __future__ import annotations

from .. import runtime
from ..registry import KernelSpec
from ..runtime.driver import on_reset
from ..runtime.env import jit_policy
from .engine import Launches

#: By kernel, compute capability, and what the environment permits. A new length is planned anew, and `runtime.resolve`
#: reads files each time, or searches for NVRTC.
_known: dict[tuple[str, tuple[int, int], tuple[bool, bool]], bool] = {}
on_reset(_known.clear)


def has_binary(spec: KernelSpec, cc: tuple[int, int]) -> bool:
    """Whether a kernel is prebuilt, in the disk cache, or can be compiled."""
    key = spec.name, cc, jit_policy()
    known = _known.get(key)
    if known is None:
        known = _known[key] = runtime.resolve(spec, cc).kind != "unsupported"
    return known


def without_binary(launches: Launches, cc: tuple[int, int]) -> KernelSpec | None:
    """The first kernel that is neither prebuilt nor in the disk cache and cannot be compiled; None if all can load."""
    return next((record.spec for record in launches.records if not has_binary(record.spec, cc)), None)
