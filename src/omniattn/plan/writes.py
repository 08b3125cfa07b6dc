"""What repeated calls write: whether they may, without a look at strides, and who is told that it has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import arrays
from ..arrays import Tensor
from ..kv.layout import ADDRESSES

if TYPE_CHECKING:
    from ..kv.cache import KVCache


#: A written array and another one of the call: (written, other, low, high, known).
#:
#: - written, other: places among the call's arrays, and behind these the cache's;
#: - low, high: between these differences of addresses, other - written, the extents of both overlap;
#: - known: the difference in a call that has been checked, where the elements are apart, or may be the same.
Pair = tuple[int, int, int, int, int]


class Writes:
    """The written arrays of calls with the same facts, which are torch's.

    Parameters
    ----------
    names : tuple of str
        The call's arrays.
    given : tuple of int
        Places of those that results are written to.
    cache : bool
        Whether the cache is written.

    Attributes
    ----------
    pairs : tuple of Pair or None
        None until a call has been checked.
    """

    __slots__ = ("_is_frozen", "_names", "cache", "given", "increment_version", "pairs")

    def __init__(self, names: tuple[str, ...], given: tuple[int, ...], cache: bool) -> None:
        from ..arrays import from_torch

        self._names = names
        self.given = given
        self.cache = cache
        self.pairs: tuple[Pair, ...] | None = None
        self._is_frozen = from_torch.is_frozen
        #: Takes what `changed` gives.
        self.increment_version: Callable[[Sequence[Any]], None] = from_torch.increment_version

    def allow(self, tensors: dict[str, Tensor], cache: KVCache | None) -> None:
        """Arrays may lie to each other as they do in this call, which `Operation.check_memory` has looked at."""
        own = {i: tensors[name] for i, name in enumerate(self._names) if name in tensors}
        planes: dict[int, Tensor] = {}
        keys: dict[int, Tensor] = {}
        if cache is not None:
            for i, name in enumerate(ADDRESSES, len(self._names)):
                if name in cache.planes:
                    planes[i] = cache.planes[name]
                elif name in cache.key_arrays:
                    keys[i] = cache.key_arrays[name]
        others = {**own, **planes, **keys}
        found = []
        for i in self.given:
            del others[i]
            found += [_pair(i, own[i], j, t) for j, t in others.items()]
        if self.cache:  # its own arrays are apart: `KVCache.written`
            found += [_pair(i, plane, j, t) for i, plane in planes.items() for j, t in own.items()]
        self.pairs = tuple(pair for pair in found if pair is not None)

    def changed(self, objects: Sequence[Any], addresses: Sequence[int], cache: KVCache | None) -> Sequence[Any] | None:
        """The tensors that a call changes; None where somebody has to look at them.

        ``addresses``: of all arrays, the cache's behind the call's.
        """
        pairs = self.pairs
        if pairs is None:
            return None
        for written, other, low, high, known in pairs:
            if low < (apart := addresses[other] - addresses[written]) < high and apart != known:
                return None
        if self.cache:
            planes = None if cache is None else cache.written
            # All of them are of inference mode, or none is.
            return None if planes is None or self._is_frozen(planes[0]) else planes
        made = []
        for i in self.given:
            x = objects[i]
            if not addresses[i] or self._is_frozen(x):
                return None
            made.append(x)
        return made


def _pair(i: int, written: Tensor, j: int, other: Tensor) -> Pair | None:
    """None for arrays without elements."""
    (low, high), (other_low, other_high) = arrays.span(written), arrays.span(other)
    if low == high or other_low == other_high:
        return None
    return i, j, low - other_high, high - other_low, other.ptr - written.ptr
