"""Launches from inside of a compiled program by C: the native module's handler of XLA's FFI, where the module is there.

A program holds a number. It is a digest of all that the launches are made of, so that a program that JAX found in its
persistent cache finds the launches that this process planned when it lowered the same call.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ...errors import DriverError
from ...plan import native
from ...problems.memory import WORKSPACE_ALIGNMENT
from ...runtime.driver import get_driver
from .callbacks import Launcher, Planned
from .signature import Facts

TARGET = "omniattn_launch"

#: Addresses of aligned arrays are multiples of so many bytes.
_MULTIPLE = 16

#: Digests by number: two that share one would be a program with the launches of another.
_digests: dict[int, str] = {}


@functools.cache
def module() -> Any:
    """The native module with its handler made known to JAX; None where there is none."""
    found = native.library() if sys.platform == "linux" else None
    if found is None or not hasattr(found, "jax_handler"):
        return None
    # XLA asks the handler itself whether its launches may be recorded into CUDA graphs.
    jax.ffi.register_ffi_target(TARGET, found.jax_handler(), platform="CUDA")
    return found


def number_of(launcher: Launcher, num_args: int, num_results: int) -> int | None:
    """The number of a call's launches, which the handler has from now on; None where it cannot take them.

    Parameters
    ----------
    launcher : Launcher
    num_args, num_results : int
        Operands and results of the call in the program, with scratch memory.
    """
    found = module()
    if found is None or get_driver().name != "cuda":
        return None
    digest = hashlib.sha256()
    plans: list[tuple[Any, ...]] = []
    for ordinal, planned in launcher.plans.items():
        try:
            launches = native.launches_of(planned.program)
        except DriverError:  # a tensor map that the driver refuses without memory behind it
            return None
        if launches is None:
            return None
        facts = _facts(launcher, planned, num_args, num_results)
        records = [(r.spec.name, *(getattr(r, name) for name in _RECORD)) for r in planned.program.records]
        digest.update(repr((ordinal, facts, records)).encode())
        plans.append((ordinal, num_args, num_results, *facts, launches, planned.program))
    for ordinal, error in launcher.failed.items():
        digest.update(repr((ordinal, str(error))).encode())
    number = int.from_bytes(digest.digest()[:8], "little") >> 1  # attributes of programs have signs
    if _digests.setdefault(number, digest.hexdigest()) != digest.hexdigest():
        return None
    try:
        taken = all(found.jax_plan(number, *plan) for plan in plans)
    except ValueError:  # more than the module holds
        return None
    for ordinal, error in launcher.failed.items():
        found.jax_failed(number, ordinal, str(error))
    return number if taken else None


_RECORD = ("grid", "threads", "arguments", "pointers", "tensor_maps", "cluster", "overlap")


def _facts(launcher: Launcher, planned: Planned, num_args: int, num_results: int) -> tuple[Any, ...]:
    """Where the address of each operand of the program is: among operands of the call, and results behind them."""
    first = num_args - planned.cache_arrays

    def place(i: int) -> int:
        # Planes that are written are results: the same memory as the operands, unless the compiler had to copy.
        return num_args + i - first if first <= i < first + launcher.written else i

    outputs = range(num_args + launcher.written, num_args + launcher.written + planned.outputs)
    sources = (*(place(i) if i >= 0 else -1 for i in planned.places), *outputs)
    workspace = num_args + num_results - 1 if planned.workspace_bytes else -1
    aligned = tuple((place(i), _MULTIPLE, name) for i, name in planned.aligned)
    return sources, workspace, WORKSPACE_ALIGNMENT, aligned


def lower(
    ctx: Any, operands: Sequence[Any], number: int, made: Sequence[Facts], num_results: int, aliases: dict[int, int]
) -> Any:
    """The call in a program; ``made``: facts of the results, scratch memory behind those that the caller sees."""
    scratch = [jax.core.ShapedArray(shape, np.dtype(dtype)) for shape, dtype in made[num_results:]]
    rule = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=aliases or None)
    results = rule(ctx.replace(avals_out=[*ctx.avals_out, *scratch]), *operands, plan=np.int64(number))
    return list(results)[:num_results]
