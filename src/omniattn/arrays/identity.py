"""Objects by their identity."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary


class Same:
    """An object by its identity, for facts: the key that holds it keeps the object alive."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.of is other.of


_numbers = itertools.count(1)
_by_key: WeakValueDictionary[int, Any] = WeakValueDictionary()


def key_of(obj: Any) -> int:
    """A number for a new object. Operators of a framework take tensors, numbers and text; the rest is found by it."""
    key = next(_numbers)
    _by_key[key] = obj
    return key


def of_key(key: int) -> Any:
    """The object of a number; None where there is none any more, or it was made by another process."""
    return _by_key.get(key)
