"""The optional C module `omniattn._native`: repeated calls on torch tensors without Python code in between.

Under JAX its handler takes the place of a callback: `omniattn.frameworks.jax.handler`.

It runs calls with the facts of one that the fast path (`repeat.Repeat`) has run, and leaves all others to the engine.
Without the module, with a torch that has no C functions to read tensors by (before 2.10), in a Python without a global
lock, and with ``OMNIATTN_NATIVE=0``, everything works as it does with it.

Workspaces come from the table's allocator; results from torch's own functions, because torch's ``record_stream`` passes
over memory that a tensor got by DLPack: a result used on another stream could be freed too early.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..arrays.identity import Same
from ..errors import DriverError
from ..problems.memory import WORKSPACE_ALIGNMENT
from ..runtime import env
from ..runtime.driver import get_driver
from ..runtime.record import Program

if TYPE_CHECKING:
    from .repeat import Repeat

#: (call or None, and its operation, objects, options, stream, cache and facts) -> its results, or None where the engine
#: has to look at it; None until there is something to look for.
run: Callable[..., list[Any] | None] | None = None
#: (operation, options, arrays) -> results of launches that `learn_as` was told, or None.
run_as: Callable[[Any, Any, tuple[Any, ...]], list[Any] | None] | None = None

#: The first run of a call by Python, and each so many runs on, has the module told of it: it may have had to forget it.
OFFERED = 256

#: Whether the module is told of calls with gradients.
RUNS_GRADIENTS = True

_module: Any = None
_is_asked = False

#: Of the bindings: stream 0 is then another stream than the one that the module would launch on.
_PER_THREAD = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"


def module() -> Any:
    """The C module, ready for torch's tensors; None where there is none, or it shall not be used."""
    global _module, _is_asked
    if not _is_asked and "torch" in sys.modules:
        _is_asked = True
        _module = _open()
    return _module


def library() -> Any:
    """The C module; None where there is none, or it shall not be used."""
    if not env.get("OMNIATTN_NATIVE") or os.environ.get(_PER_THREAD, "0") not in ("", "0"):
        return None
    # The module's tables are guarded by the global lock.
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    try:
        return importlib.import_module("omniattn._native")
    except ImportError:
        return None


def _open() -> Any:
    found = library()
    if found is None or env.environment is None:
        return None
    import torch

    from ..arrays import from_torch

    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    ready = found.setup(
        from_torch.PLAIN, capsule, torch.Tensor.is_neg, torch.is_grad_enabled, *from_torch.WRITERS,
        *from_torch.WATCHERS, env.environment, env.FORCE, _fail, Same,
    )  # fmt: skip
    return found if ready else None


def _fail(call: str, code: int, kernel: int, launch: str) -> None:
    from ..runtime.driver_cuda import raise_failure

    raise_failure(call, code, kernel, launch)


def learn(call: Any, problem: Any, program: Program, repeat: Repeat) -> None:
    """Have calls like this `engine.Call`, which ``repeat`` has run, run by the module."""
    cache = None if call.cache is None else call.cache.facts
    _learn(
        call.operation, call.options, call.facts, cache, problem, call.objects, program, repeat, call.operation.placed
    )


def learn_as(
    operation: Any, options: tuple[Any, ...], objects: tuple[Any, ...], program: Program, repeat: Repeat
) -> None:
    """Have `run_as` run what ``repeat`` has run on these arrays: by two values that nothing else goes by."""
    if RUNS_GRADIENTS:
        _learn(operation, options, None, None, None, objects, program, repeat, None)


def learn_gradients(call: Any, differentiate: Callable[[tuple[Any, ...]], list[Any] | None]) -> None:
    """Have ``differentiate(arrays)`` asked first for calls like this one, which wants gradients."""
    found = _usable() if RUNS_GRADIENTS else None
    if found is None:
        return
    try:
        entry = found.Entry(
            call.operation, call.options, call.facts, None, None, None, tuple(call.objects), (), (), 0,
            WORKSPACE_ALIGNMENT, (), None, differentiate, (), False,
        )  # fmt: skip
    except ValueError:
        return
    _keep(found, entry)


def _learn(
    operation: Any,
    options: tuple[Any, ...],
    facts: Any,
    cache: Any,
    problem: Any,
    objects: tuple[Any, ...],
    program: Program,
    repeat: Repeat,
    placed: tuple[int, int] | None,
) -> None:
    found = _usable()
    if found is None:
        return
    if placed is not None and objects[placed[0]] is None:
        placed = None
    try:  # options as they are: the module compares classes too
        launches = launches_of(program)
        if launches is None:
            return
        writes = repeat.writes
        entry = found.Entry(
            operation, options, facts, cache, problem, program, tuple(objects), repeat.masks, repeat.makers,
            repeat.workspace_bytes, WORKSPACE_ALIGNMENT, launches, placed, None,
            () if writes is None else writes.pairs, writes is not None and writes.cache,
        )  # fmt: skip
    except (ValueError, DriverError):  # more than the module holds, or no map without memory behind it
        return
    _keep(found, entry)


def _usable() -> Any:
    """The module, if a call that has run can be repeated by it."""
    found = module()
    if found is None or env.forced_kernels() is not None or get_driver().name != "cuda":
        return None
    return found


def _keep(found: Any, entry: Any) -> None:
    global run, run_as
    if found.learn(entry):
        run, run_as = found.run, found.run_as


def launches_of(program: Program) -> tuple[tuple[Any, ...], ...] | None:
    """A program's launches as the module takes them; None for kernels of another driver."""
    index = {name: i for i, name in enumerate(program.operands)}
    made = []
    for record, kernel, text in zip(program.records, program.kernels, program.texts, strict=True):
        function = getattr(kernel, "function", None)
        if function is None:
            return None
        attributes = kernel.attributes(record.cluster, record.overlap)
        cluster, overlap = (None, False) if attributes is None else attributes
        # The address is another one at every call; this one is only aligned.
        maps = tuple(
            (m.offset, index[m.operand], m.add,
             kernel.encode_tensor_map(m.dtype, 1 << 20, m.dims, m.strides_bytes, m.box))
            for m in record.tensor_maps
        )  # fmt: skip
        made.append(
            (function, record.grid, record.threads, record.smem_bytes, cluster, overlap, record.arguments,
             tuple((p.offset, index[p.operand], p.add) for p in record.pointers), maps, text)
        )  # fmt: skip
    return tuple(made)


def clear() -> None:
    """Forget all calls."""
    global run, run_as
    run = run_as = None
    if _module is not None:
        _module.clear()
