"""Caches without their arrays, and caches that hold arrays whose memory nobody has looked at yet.

A framework that takes objects apart and puts them together again (JAX's pytrees) makes caches of arrays, of tracers,
or of anything else. Such a cache asks for addresses when a call needs them: one that only goes through compiled steps
is never exported, and can be donated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import arrays
from ..arrays import Tensor
from ..errors import DtypeError, ShapeError, StrideError, UnsupportedError
from .layout import CacheLayout

#: What a cache knows of its arrays' memory.
_OF_MEMORY = frozenset(
    (
        "_planes", "_key_arrays", "_device", "_ordinal", "_device_name", "_order", "_plain_torch", "_addresses",
        "_facts", "_identity", "_key", "_operands", "_written", "_apart",
    )
)  # fmt: skip
_EXTENTS = (
    "num_blocks", "block_size", "num_kv_heads", "head_dim", "k_format", "v_format", "hadamard", "recent_window",
    "recent_slots", "recent_format", "array_order",
)  # fmt: skip


@dataclass(frozen=True)
class CacheFacts:
    """A cache without its arrays.

    Attributes
    ----------
    kind : type
        `KVCache` or `PagedKVCache`.
    layout : CacheLayout
        Said to be on the CPU, wherever the arrays will be.
    planes : tuple of str
        Planes that it has, which `append` writes.
    shapes : tuple of (shape, dtype)
        Of all arrays, which are row-major.
    """

    kind: type[Any]
    layout: CacheLayout
    planes: tuple[str, ...]
    shapes: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of all arrays: planes, then the caller's."""
        return (*self.planes, *self.layout.key_arrays)

    def on(self, tensors: dict[str, Tensor]) -> Any:
        """A cache of these facts on arrays by name.

        Raises
        ------
        ShapeError, DtypeError, StrideError
            An array that the cache was not made with: kernels would read what lies behind it.
        """
        for name, (shape, dtype) in zip(self.arrays, self.shapes, strict=True):
            t = tensors[name]
            if t.dtype != dtype:
                raise DtypeError(f"cache.{name}", dtype, t.dtype)
            if tuple(t.shape) != shape:
                raise ShapeError(f"cache.{name}", f"shape {shape}", f"{tuple(t.shape)}")
            if tuple(t.strides) != arrays.contiguous_strides(shape):
                raise StrideError(f"cache.{name}", "a contiguous array", f"strides {tuple(t.strides)}")
        cache, place = self._empty(), tensors[self.planes[0]]
        cache.__dict__.update(
            _device=place.device, _ordinal=place.ordinal, _device_name=place.device_name,
            _key_arrays={name: tensors[name] for name in self.layout.key_arrays},
        )  # fmt: skip
        cache._settle({name: tensors[name] for name in self.planes})
        return cache

    def holding(self, leaves: dict[str, Any]) -> Any:
        """A cache of these facts that holds arrays by name as they are."""
        cache = self._empty()
        cache.__dict__.update(_of=self, _leaves=leaves)
        return cache

    def _empty(self) -> Any:
        cache: Any = object.__new__(self.kind)
        cache.__dict__.update((name, getattr(self.layout, name)) for name in _EXTENTS)
        return cache


class WithLeaves:
    """What a cache does that `CacheFacts.holding` made: ``_leaves`` are its arrays, ``_of`` its facts."""

    def __getattr__(self, name: str) -> Any:
        """Look at the memory of the arrays; called for attributes that are not there."""
        leaves = self.__dict__.get("_leaves")
        if leaves is None or name not in _OF_MEMORY:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if arrays.has_tracer(tuple(leaves.values())):
            if name == "_device_name":
                return "traced by JAX"
            raise UnsupportedError(
                "a KV cache whose arrays are traced, in a call that is not",
                instead="append() and decode() inside of the traced function, everything else outside of it",
            )
        tensors, of = {}, self.__dict__["_of"]
        for array, x in leaves.items():
            t = tensors[array] = arrays.describe(x, array if array in of.layout.key_arrays else f"cache.{array}")
            t.readonly = False
        self.__dict__.update(of.on(tensors).__dict__)
        return self.__dict__[name]

    @property
    def leaves(self) -> dict[str, Any] | None:
        """Arrays by name, as long as nobody has looked at their memory; None afterwards."""
        found: dict[str, Any] | None = self.__dict__.get("_leaves")
        return None if "_planes" in self.__dict__ else found

    @property
    def traced(self) -> bool:
        """Whether JAX has to see calls on the cache, see `arrays.traced_by_jax`."""
        leaves = self.leaves
        found = [t.obj for t in self._planes.values()] if leaves is None else list(leaves.values())
        return arrays.traced_by_jax(found)

    @property
    def layout(self) -> CacheLayout:
        """The facts, also where arrays are traced; said to be on the CPU until somebody looks at their memory."""
        found: CacheLayout = self._facts if self.leaves is None else self.__dict__["_of"].layout
        return found

    def let_go(self, of: CacheFacts, leaves: dict[str, Any]) -> None:
        """Hold these arrays and know nothing of their memory: nobody can donate what is exported.

        ``leaves`` are the cache's arrays, safe to use in their library.
        """
        for name in _OF_MEMORY:
            self.__dict__.pop(name, None)
        self.__dict__.update(_of=of, _leaves=leaves)

    def write(self, planes: dict[str, Any]) -> None:
        """Hold other planes from now on: those that `append` made in a trace."""
        self.__dict__["_leaves"] = {**self.__dict__["_leaves"], **planes}
