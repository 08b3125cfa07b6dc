"""`jax.vmap`: a mapped dimension becomes part of the batch where that gives the same, and is a loop elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp

from ...checks.attention import DESCALES
from ...launch.dropout import RNG
from ...launch.score_mod import PREFIX
from .signature import Signature

#: Arrays whose first dimension is the batch.
_LEADING = {
    "attention": ("q", "k", "v"),
    "attention_backward": ("q", "k", "v", "do", "o", "lse", "dlse"),
    "merge_states": ("o_a", "lse_a", "o_b", "lse_b"),
    "quantize_qk": ("q", "k"),
    "quantize_v": ("v",),
}
#: Calls the primitive of a signature on operands.
Bind = Callable[[Signature, Sequence[Any]], list[Any]]
#: Those that broadcast to (batch, ...) in four dimensions.
_BROADCAST = ("mask", "block_mask")


def batch(bind: Bind, operands: Sequence[Any], dims: Sequence[Any], *, signature: Signature) -> tuple[Any, Any]:
    """The rule of every primitive, which ``bind`` calls; the mapped dimension of all results is their first."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    given = [None if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    names = signature.arrays
    mapped = {name for name, x in zip(names, given, strict=True) if x is not None}
    if size and _can_join(signature, mapped):
        packed = signature.operation.name == "merge_states" and _rank(names, operands, given, "o_a") == 3
        items = 0 if packed else _items(operands, given)
        joined = [
            _stack(x, of, size) if packed else _join(name, x, of, size, items)
            for name, x, of in zip(names, given, operands, strict=True)
        ]
        results = bind(signature, joined)
        if not packed:
            results = [x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results]
        return results, [0] * len(results)

    def one(parts: Any) -> Any:
        own = iter(parts)
        return tuple(bind(signature, [x if part is None else next(own) for x, part in zip(operands, given)]))

    results = jax.lax.map(one, tuple(x for x in given if x is not None))
    return list(results), [0] * len(results)


def _rank(names: Sequence[str], operands: Sequence[Any], given: Sequence[Any], name: str) -> int:
    """Dimensions of an array without the mapped one."""
    i = names.index(name)
    return int(operands[i].ndim) - (given[i] is not None)


def _can_join(signature: Signature, mapped: set[str]) -> bool:
    function = signature.operation.name
    leading = _LEADING.get(function, ())
    # Packed sequences have offsets, quantized operands facts of their own; a score modification and dropout see the
    # number of the sequence; gradients that are sums over the batch would mix.
    if mapped - {*leading, *_BROADCAST} or signature.subject is not None:
        return False
    if any(name.startswith(("cu_seqlens", "seqused", "block_table", PREFIX, RNG)) for name in signature.names):
        return False
    return not {"dsinks", "dmask"} & set(getattr(signature.options, "wanted", ()))


def _items(operands: Sequence[Any], given: Sequence[Any]) -> int:
    """The batch of one item: that of the first array, which always has one."""
    return int(operands[0].shape[0] if given[0] is None else given[0].shape[1])


def _join(name: str, x: Any, unmapped: Any, size: int, items: int) -> Any:
    """An operand with the mapped dimension as part of the batch."""
    if name in _BROADCAST:
        if x is None and (unmapped.ndim < 4 or unmapped.shape[0] == 1):
            return unmapped
        x = jnp.broadcast_to(unmapped, (size, *unmapped.shape)) if x is None else x
        x = x.reshape(size, *(1,) * (5 - x.ndim), *x.shape[1:])
        x = jnp.broadcast_to(x, (size, items, *x.shape[2:]))
    elif name == "sinks" or (name in DESCALES and x is None and unmapped.ndim < 2):
        return unmapped  # the same for all
    elif x is None:
        x = jnp.broadcast_to(unmapped, (size, *unmapped.shape))
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _stack(x: Any, unmapped: Any, size: int) -> Any:
    """A packed operand of merge_states with the mapped dimension as its batch."""
    return jnp.broadcast_to(unmapped, (size, *unmapped.shape)) if x is None else x
