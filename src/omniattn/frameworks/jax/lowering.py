"""What a call becomes in a compiled program.

On the CPU a callback into Python, which runs the NumPy reference. On a GPU the launches of the call's plan: by the
native module's handler where there is one, else by a callback that gets the addresses of operands and results. Scratch
memory is the last result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.buffer_callback import buffer_callback
from jax.interpreters import mlir

from . import handler
from .callbacks import Launcher, on_cpu
from .signature import Facts, Signature, default_place, facts_of

#: Whether XLA may record the launches into CUDA graphs, which it replays without Python.
COMMAND_BUFFERS = True


def lower_cpu(ctx: Any, *operands: Any, signature: Signature) -> Any:
    """The lowering on the CPU."""
    facts, results = _facts(ctx)
    return _lower(ctx, operands, on_cpu(signature, facts), results, results, _aliases(signature), False)


def lower_cuda(ctx: Any, *operands: Any, signature: Signature) -> Any:
    """The lowering on CUDA."""
    facts, results = _facts(ctx)
    launcher = Launcher(signature, facts, _ordinals())
    made = results
    if launcher.workspace_bytes:
        made = (*results, ((launcher.workspace_bytes,), "uint8"))
    number = handler.number_of(launcher, len(facts), len(made))
    if number is not None:
        return handler.lower(ctx, operands, number, made, len(results), _aliases(signature))
    return _lower(ctx, operands, launcher, made, results, _aliases(signature), COMMAND_BUFFERS)


def _ordinals() -> list[int]:
    """CUDA's numbers of the GPUs of this process, that on which a program most likely runs first."""
    place, first = default_place()
    found = [first] if place == "cuda" else []
    return list(dict.fromkeys(found + [int(device.local_hardware_id) for device in jax.local_devices(backend="cuda")]))


def _facts(ctx: Any) -> tuple[tuple[Facts, ...], tuple[Facts, ...]]:
    """Facts of operands and results."""
    return tuple(facts_of(x) for x in ctx.avals_in), tuple(facts_of(x) for x in ctx.avals_out)


def _aliases(signature: Signature) -> dict[int, int]:
    """Results of a call that writes a cache, by the operands whose memory they are."""
    if signature.operation.name != "append":
        return {}
    assert signature.cache is not None
    return {len(signature.names) + i: i for i in range(len(signature.cache.planes))}


def _lower(
    ctx: Any,
    operands: Sequence[Any],
    callback: Callable[..., None],
    made: tuple[Facts, ...],
    results: tuple[Facts, ...],
    aliases: dict[int, int],
    command_buffer: bool,
) -> Any:
    more: dict[str, Any] = {}
    if command_buffer and "command_buffer_compatible" in inspect.signature(buffer_callback).parameters:
        more["command_buffer_compatible"] = True
    shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in made)
    call = buffer_callback(callback, shapes, input_output_aliases=aliases or None, **more)
    return mlir.lower_fun(lambda *xs: call(*xs)[: len(results)], multiple_results=True)(ctx, *operands)
