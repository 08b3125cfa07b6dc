"""What repeated calls write: whether they may, without a look at strides, and who is told that it has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import arrays
from ..arrays import Tensor
from ..kv.layout import ADDRESSES

if TYPE_CHECKING:
    from ..kv.cache import KVCache


class Pair(NamedTuple):
    """A written array and another one. Of calls with the same facts, the difference of addresses says what they share.

    Attributes
    ----------
    written, other : int
        Places among the call's arrays, and behind these the cache's.
    low, high : int
        Between these differences, other - written, the extents of both overlap.
    known : int
        The difference in a call that has been checked: the elements are apart then, or may be the same.
    """

    written: int
    other: int
    low: int
    high: int
    known: int


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

    __slots__ = ("_is_inference_mode", "_names", "cache", "given", "increment_version", "pairs")

    def __init__(self, names: tuple[str, ...], given: tuple[int, ...], cache: bool) -> None:
        from ..arrays import from_torch

        self._names = names
        self.given = given
        self.cache = cache
        self.pairs: tuple[Pair, ...] | None = None
        self._is_inference_mode = from_torch.is_inference_mode
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
        self.pairs = tuple(pair for pair in found if pair.high > pair.low)

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
        made: Sequence[Any] | None
        if self.cache:
            made = None if cache is None else cache.written
            looked_at = () if made is None else made[:1]  # all of one kind
        else:
            made = looked_at = [objects[i] for i in self.given]
            if not all([addresses[i] for i in self.given]):
                return None
        for x in looked_at:
            if x.is_inference() and not self._is_inference_mode():
                return None
        return made


def _pair(i: int, written: Tensor, j: int, other: Tensor) -> Pair:
    (low, high), (other_low, other_high) = arrays.span(written), arrays.span(other)
    if low == high or other_low == other_high:
        return Pair(i, j, 0, 0, 0)  # no elements: nothing to overlap
    return Pair(i, j, low - other_high, high - other_low, other.ptr - written.ptr)
