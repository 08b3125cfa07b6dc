"""KV caches and quantized operands as pytrees: what a compiled function takes and gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ...kv.cache import KVCache, PagedKVCache
from ...kv.leaves import CacheFacts
from ...problems import QuantizedK, QuantizedQ, QuantizedQK, QuantizedV


def facts_of_cache(cache: KVCache) -> CacheFacts:
    """A cache without its arrays."""
    known: CacheFacts | None = cache.__dict__.get("_of")
    if known is not None:
        return known
    layout = dataclasses.replace(cache.facts, device="cpu", ordinal=0)
    arrays = {**cache.planes, **cache.key_arrays}
    shapes = tuple((tuple(t.shape), t.dtype) for t in arrays.values())
    return CacheFacts(type(cache), layout, tuple(cache.planes), shapes)


def leaves_of(cache: KVCache, facts: CacheFacts) -> tuple[Any, ...]:
    """Arrays of a cache, in the order of ``facts.arrays``."""
    if cache.leaves is not None:
        return tuple(cache.leaves[name] for name in facts.arrays)
    keys = cache.key_arrays
    leaves = {name: keys[name].obj if name in keys else cache._array(name) for name in facts.arrays}
    if all(isinstance(x, jax.Array) for x in leaves.values()):
        cache.let_go(facts, leaves)
    return tuple(leaves.values())


def _flatten(cache: KVCache) -> tuple[tuple[Any, ...], CacheFacts]:
    facts = facts_of_cache(cache)
    return leaves_of(cache, facts), facts


def _unflatten(facts: CacheFacts, leaves: Sequence[Any]) -> Any:
    return facts.holding(dict(zip(facts.arrays, leaves, strict=True)))


def _register() -> None:
    for cls in (KVCache, PagedKVCache):
        jax.tree_util.register_pytree_node(cls, _flatten, _unflatten)
    for operand in (QuantizedQK, QuantizedV):
        names = [x.name for x in dataclasses.fields(operand) if x.name not in ("problem", "layout")]
        jax.tree_util.register_dataclass(operand, data_fields=names, meta_fields=["problem", "layout"])
    for part in (QuantizedQ, QuantizedK):
        jax.tree_util.register_dataclass(part, data_fields=["pair"], meta_fields=[])


_register()
