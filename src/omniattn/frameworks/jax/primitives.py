"""One primitive for each public function. Its operands are arrays; all else is its one parameter, the signature."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from ...errors import UnsupportedError
from . import lowering
from .batching import batch
from .signature import Signature, check_now, facts_of


@functools.cache
def primitive(function: str) -> Any:
    """The primitive of a public function."""
    p = Primitive(f"omniattn_{function}")
    p.multiple_results = True
    p.def_impl(lambda *operands, signature: _compiled(p, signature)(*operands))
    p.def_abstract_eval(_shapes)
    ad.primitive_jvps[p] = functools.partial(_no_derivative, function)
    batching.primitive_batchers[p] = functools.partial(batch, bind)
    mlir.register_lowering(p, functools.partial(_other_platform, function))
    mlir.register_lowering(p, lowering.lower_cpu, platform="cpu")
    mlir.register_lowering(p, lowering.lower_cuda, platform="cuda")
    return p


def bind(signature: Signature, operands: Sequence[Any]) -> list[Any]:
    """A call by its primitive, checked; its results."""
    check_now(signature, tuple(facts_of(x) for x in operands))
    return list(primitive(signature.operation.name).bind(*operands, signature=signature))


@functools.lru_cache(maxsize=1024)
def _compiled(p: Any, signature: Signature) -> Any:
    """The primitive on arrays: what a transformation that is not inside of jit runs."""
    return jax.jit(lambda *operands: p.bind(*operands, signature=signature))


def _shapes(*operands: Any, signature: Signature) -> list[Any]:
    made = signature.outputs(tuple(facts_of(x) for x in operands))
    first = operands[0]
    mesh = getattr(getattr(first, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty:
        return [jax.core.ShapedArray(shape, jax.numpy.dtype(dtype)) for shape, dtype in made]
    # On a mesh: of the operands' axes, which `same_axes` made the same for all, and not divided otherwise.
    return [
        first.update(
            shape=shape, dtype=jax.numpy.dtype(dtype), weak_type=False,
            sharding=first.sharding.update(spec=PartitionSpec(*(None,) * len(shape))),
        )
        for shape, dtype in made
    ]  # fmt: skip


def varying_axes(values: Sequence[Any]) -> frozenset[Any]:
    """Axes of a `jax.shard_map` mesh along which one of these differs from device to device."""
    found: frozenset[Any] = frozenset()
    for x in values:
        aval = jax.typeof(x) if hasattr(jax, "typeof") else x.aval
        # JAX 0.10 has them inside of another attribute than those before it.
        kind = getattr(aval, "manual_axis_type", None)
        found |= getattr(aval, "vma", frozenset()) if kind is None else kind.varying
    return found


def same_axes(values: Sequence[Any]) -> list[Any]:
    """The arrays, all of them varying along the same axes: a primitive wants that inside of `jax.shard_map`."""
    axes = varying_axes(values)
    if not axes:
        return list(values)
    made = []
    for x in values:
        missing = tuple(axes - varying_axes([x]))
        made.append(_varying(x, missing) if missing else x)
    return made


def _varying(x: Any, axes: tuple[Any, ...]) -> Any:
    # The name of JAX 0.7.
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)


def _no_derivative(function: str, primals: Any, tangents: Any, **params: Any) -> Any:
    if function.endswith("_backward") or params["signature"].operation.gradients is not None:
        what, instead = "no second derivatives", "attention written out in jax.numpy"
    elif function in ("attention", "attention_varlen"):
        what, instead = "no derivative by quantized operands", "precision= and arrays that are not quantized"
    else:
        what, instead = "no derivative", "jax.lax.stop_gradient of its arguments"
    raise UnsupportedError(f"{function}(): {what}", instead=instead)


def _other_platform(function: str, ctx: Any, *operands: Any, **params: Any) -> Any:
    platforms = ", ".join(ctx.module_context.platforms)
    raise UnsupportedError(f"{function}(): a JAX program for {platforms}", instead="an NVIDIA GPU, or the CPU")
