"""Gradients of `attention` and `attention_varlen` under JAX: their backwards, by `jax.custom_vjp`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from ...errors import UnsupportedError
from ...launch.score_mod import PREFIX
from ...plan.engine import Call
from .. import FUNCTIONS
from .primitives import bind
from .signature import Signature

#: What has a gradient, by the name of its gradient.
OF = {"q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks", "mask": "dmask"}


@jax.tree_util.register_static
class _Wanted(tuple[str, ...]):
    """Names of gradients, as a constant among the residuals."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(signature: Signature, operands: Sequence[Any]) -> tuple[Any, ...]:
    """A call of attention that can be differentiated in reverse mode.

    Parameters
    ----------
    signature : Signature
    operands : tuple of array
        In the order of its names.

    Returns
    -------
    (o,) or (o, lse)

    Raises
    ------
    UnsupportedError
        What has no gradient: predicted block masks, arrays of a score modification, and these without ``grad``.
    """
    return tuple(bind(signature, operands))


def _forward(signature: Signature, operands: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
    values = tuple(x.value for x in operands)
    moving = [
        name for name, x in zip(signature.names, operands, strict=True)
        if x.perturbed and jnp.issubdtype(x.value.dtype, jnp.inexact)
    ]  # fmt: skip
    if moving:
        _check(signature, moving)
        if values[0].dtype == jnp.float8_e4m3fn:
            raise UnsupportedError(
                f"{signature.operation.name}(): a gradient is asked for, and e4m3 arrays have none",
                instead="16-bit arrays with precision='fp8', whose gradients are those of exact attention",
            )
    # With the LSE, which the backward needs.
    o, lse = bind(signature.with_options(return_lse=True), values)
    # What a policy of jax.checkpoint saves by name need not be computed again.
    o, lse = checkpoint_name(o, "omniattn_o"), checkpoint_name(lse, "omniattn_lse")
    results = (o, lse) if signature.options.return_lse else (o,)
    return results, (values, o, lse, _Wanted(OF[name] for name in OF if name in moving))


def _backward(signature: Signature, residuals: Any, cotangents: Sequence[Any]) -> tuple[Any]:
    values, o, lse, wanted = residuals
    none = (None,) * len(values)
    do, dlse = (*cotangents, None)[:2]
    do, dlse = (None if isinstance(x, SymbolicZero) else x for x in (do, dlse))
    if not wanted or (do is None and dlse is None):
        return (none,)
    given = dict.fromkeys(signature.operation.arrays) | dict(zip(signature.names, values, strict=True))
    mod = signature.subject
    if mod is not None:
        own = {name: given[PREFIX + name] for name in mod.arrays}
        mod = FUNCTIONS["ScoreMod"](mod.expression, mod.mask, mod.reference, mod.grad, mod.reference_grad, **own)
    forward = Call(signature.operation, (), signature.options, None, None, signature.facts, mod)
    do = jnp.zeros(o.shape, o.dtype) if do is None else do
    call = FUNCTIONS["backward of a call"](forward, given, do, o, lse, dlse, tuple(wanted))
    made = dict(zip(wanted, FUNCTIONS["bind a call"](call), strict=True))
    gradients = []
    for name, x in zip(signature.names, values, strict=True):
        gradient = made.get(OF.get(name, ""))
        # Sums are float32, whatever sinks and masks are.
        gradients.append(None if gradient is None else _divided_as(gradient.astype(x.dtype), x))
    return (tuple(gradients),)


def _divided_as(gradient: Any, x: Any) -> Any:
    """The gradient, divided over the devices of an explicit mesh as its array is."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    return jax.sharding.reshard(gradient, sharding.spec) if sharding is not None and any(sharding.spec) else gradient


attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _check(signature: Signature, moving: Sequence[str]) -> None:
    function = signature.operation.name
    for name in moving:
        if name not in OF:
            raise UnsupportedError(
                f"{function}(): a gradient of {name.removeprefix(PREFIX)!r} is asked for, which only q, k, v, sinks "
                "and mask have",
                instead="jax.lax.stop_gradient of it",
            )
    if getattr(getattr(signature.options, "precision", None), "sparse", None) is not None:
        raise UnsupportedError(
            f"{function}(): a gradient is asked for, which sparse= of a precision does not have",
            instead="block_mask=sparse_blocks(...)",
        )
    if "block_table" in signature.names:
        raise UnsupportedError(
            f"{function}(): a gradient is asked for, which block_table does not have",
            instead="k and v as packed sequences, or jax.lax.stop_gradient of them",
        )
