"""Calls in a function that JAX traces, by their primitives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from ... import arguments, arrays
from ...checks.operands import ALL
from ...errors import ArgumentError, UnsupportedError
from ...kv.leaves import CacheFacts
from ...launch.score_mod import PREFIX
from ...plan.engine import Call
from ...problems import QuantizedQK, QuantizedV
from .. import FUNCTIONS
from . import caches
from .gradients import attend
from .primitives import bind, same_axes
from .signature import Signature, facts_of, problem_of, types_of, without_tracers


def run_call(call: Call) -> list[Any]:
    """A call on tracers, or on arrays of JAX where it traces; results as `plan.engine.run`.

    Raises
    ------
    ArgumentError, UnsupportedError
        As the public function, and for what a traced call cannot have: ``out``, ``stream``, arrays of other libraries,
        options that are traced, a cache that is no argument of the traced function.
    """
    signature, operands = _signature_of(call)
    operands = same_axes(operands)
    function = call.operation.name
    if call.operation.gradients is not None:
        try:
            results = list(attend(signature, tuple(operands)))
        except NotImplementedError:
            # JAX's shard_map outside of jit knows no such derivatives, of what is compiled it does.
            results = list(jax.jit(attend, static_argnums=0)(signature, tuple(operands)))
    else:
        results = bind(signature, operands)
    if function == "append":
        assert call.cache is not None
        assert signature.cache is not None
        call.cache.write(dict(zip(signature.cache.planes, results, strict=True)))
        return []
    facts = tuple(facts_of(x) for x in operands)
    call.problem = problem_of(signature, facts, "cpu", 0) if function.startswith("quantize") else None
    return results


def bind_call(call: Call) -> list[Any]:
    """A call by its primitive, whatever its arrays are."""
    signature, operands = _signature_of(call)
    return bind(signature, same_axes(operands))


def _signature_of(call: Call) -> tuple[Signature, list[Any]]:
    operation, function = call.operation, call.operation.name
    given = {name: x for name, x in zip(operation.arrays, call.objects, strict=True) if x is not None}
    for name in ("out", *operation.given.values()):
        if name in given:
            label = operation.labels.get(name, name)
            received = arguments.kind_of(given[name])
            raise ArgumentError(label, "None in a call that JAX traces", received, function=function)
    if call.stream is not None:
        raise ArgumentError("stream", "None in a call that JAX traces", repr(call.stream), function=function)
    for name in operation.required:
        if name not in given:
            label = operation.labels.get(name, name)
            raise ArgumentError(label, "an array", "None", function=function)
    operands = [_array(x, operation.labels.get(name, name), function) for name, x in given.items()]
    of_cache: CacheFacts | None = None
    if call.cache is not None:
        if call.cache.leaves is None or not arrays.has_tracer(tuple(call.cache.leaves.values())):
            raise UnsupportedError(
                f"{function}(): a cache that is no argument of the traced function, whose memory JAX does not follow",
                instead="passing the cache as an argument, and returning it after append()",
            )
        of_cache = caches.facts_of_cache(call.cache)
        operands += caches.leaves_of(call.cache, of_cache)
    options = without_tracers(function, call.options)
    key, subject = _subject(call, given)
    return Signature(
        operation, tuple(given), options, types_of(options), call.facts, of_cache, key, subject
    ), operands  # fmt: skip


def _array(x: Any, name: str, function: str) -> Any:
    if isinstance(x, (jax.Array, jax.core.Tracer)):
        return x
    if isinstance(x, np.ndarray):
        return jnp.asarray(x)
    raise UnsupportedError(
        f"{function}(): argument {name!r} is a {type(x).__name__} in a call that JAX traces",
        instead="JAX or NumPy arrays",
    )


@dataclass(frozen=True)
class _ModTexts:
    """A score modification without its arrays."""

    expression: str
    mask: str | None
    reference: Any
    grad: str | None
    reference_grad: Any
    arrays: tuple[str, ...]


def _subject(call: Call, given: dict[str, Any]) -> tuple[Any, Any]:
    """What `Call.subject` is equal by, and the subject without arrays."""
    subject = call.subject
    if subject is None:
        return None, None
    if call.operation.arrays == ALL:
        return _operands(subject, given)
    if isinstance(subject, FUNCTIONS["ScoreMod"]):  # type: ignore[arg-type]
        names = tuple(name.removeprefix(PREFIX) for name in call.operation.arrays if name.startswith(PREFIX))
        texts = _ModTexts(
            subject.expression, subject.mask, subject.reference, subject.grad, subject.reference_grad, names
        )
        return texts, texts
    raise AssertionError(type(subject).__name__)


def _operands(subject: Sequence[Any], given: dict[str, Any]) -> tuple[Any, Any]:
    """Quantized operands without arrays: the checks look at their problems, and at whether q has a delta_s."""
    q, k, v = subject
    pairs: dict[int, QuantizedQK] = {}
    for pair in (q.pair, k.pair):
        delta = None if pair.delta_s is None else True
        pairs.setdefault(id(pair), QuantizedQK(*(None,) * 7, delta, None, None, pair.problem, pair.layout))
    first, second = pairs[id(q.pair)], pairs[id(k.pair)]
    value = QuantizedV(None, None, None, None, v.problem, v.layout)
    return (first, second, first is second, value), (first.q, second.k, value)


FUNCTIONS["bind a call"] = bind_call
