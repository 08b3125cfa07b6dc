"""Score modifications by number: an operator takes text and arrays, and finds the object's NumPy functions by it."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

_numbers = itertools.count(1)
_by_key: WeakValueDictionary[int, Any] = WeakValueDictionary()


def key_of(mod: Any) -> int:
    """A number for a new object."""
    key = next(_numbers)
    _by_key[key] = mod
    return key


def of_key(key: int) -> Any:
    """The object of a number; None where there is none any more, or it was made by another process."""
    return _by_key.get(key)
