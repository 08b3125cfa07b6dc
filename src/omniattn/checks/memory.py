"""Where the arrays of a call lie: alignment, and that what is written is nobody else's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .. import arrays
from ..arrays import Tensor
from ..errors import ArgumentError
from ..kv.cache import KVCache
from ..plan.engine import Call
from . import values


def check_memory(call: Call, tensors: dict[str, Tensor]) -> None:
    """Everything about the memory of a call's arrays.

    Kernels read all other arrays until the end, so arrays for results are nobody else's memory, with the exception of
    `Operation.same`. On the CPU everything is computed before anything is written: only two results must not be in one
    place. A cache is written step by step everywhere.
    """
    operation, cache = call.operation, call.cache
    own = [] if cache is None else cache.tensors
    on_gpu = (next(iter(tensors.values())) if tensors else own[0]).device == "cuda"
    given = [tensors[name] for name in operation.given.values() if name in tensors]
    if given:
        others = [t for name, t in tensors.items() if name not in operation.given.values()] if on_gpu else []
        same = [tensors[name] for name in operation.same]
        check_written(given, [*others, *own] if on_gpu else [], operation.name, same)
    if operation.writes_cache and cache is not None:
        _check_written_cache(cache, tensors, operation.name)
    if on_gpu:
        values.check_addresses(tensors, operation.aligned, operation.name)


def check_written(
    written: Sequence[Tensor], others: Iterable[Tensor], function: str, same: Sequence[Tensor] = ()
) -> None:
    """Arrays can be written, and share no element with each other and with ``others``.

    ``same``: of the others, those that a written one may be itself.
    """
    for t in written:
        arrays.require_writable(t)
    found = arrays.first_shared(written, others, same)
    if found is not None:
        t, other = found
        expected = "memory of its own" + "".join(f", or {x.argument} itself with its strides" for x in same)
        received = f"an array that shares memory with {other.argument!r}"
        raise ArgumentError(t.argument, expected, received, function=function)


def _check_written_cache(cache: KVCache, tensors: dict[str, Tensor], function: str) -> None:
    """The same of a cache's planes. The error names the array of the call that lies in one of them."""
    planes = list(cache.planes.values())
    check_written(planes, cache.key_arrays.values(), function)
    found = arrays.first_shared(planes, tensors.values())
    if found is not None:
        plane, t = found
        received = f"an array that shares memory with {plane.argument!r}, which is written"
        raise ArgumentError(t.argument, "memory of its own", received, function=function, hint="A copy has that")
