"""Arrays that lie otherwise than contiguously, as data: a larger array, and which of its elements are meant.

A view is a dict of literals, so that a program can hold it; ``{}`` is a contiguous array:

``order``
    The array's dimensions in the order in which memory has them, slowest first.
``before``, ``after``
    Elements of the larger array in front of and behind the ones meant, for each dimension.
``step``
    Distance of neighbours in each dimension; -1: the dimension is flipped.
``expand``
    Dimensions with a stride of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

View = dict[str, tuple[int, ...]]


def stored(shape: Sequence[int], view: View) -> tuple[int, ...]:
    """Extents that have values of their own: 1 where the view is expanded."""
    expand = view.get("expand", ())
    return tuple(1 if d in expand else n for d, n in enumerate(shape))


def base_shape(shape: Sequence[int], view: View) -> tuple[int, ...]:
    """Shape of the larger array."""
    own = stored(shape, view)
    zeros = (0,) * len(own)
    before, after, step = view.get("before", zeros), view.get("after", zeros), view.get("step", (1,) * len(own))
    extents = [b + n * abs(s) + a for n, b, a, s in zip(own, before, after, step, strict=True)]
    return tuple(extents[d] for d in view.get("order", range(len(own))))


def slices(shape: Sequence[int], view: View, flips: bool) -> tuple[slice, ...]:
    """Elements of the larger array, in its order. flips: whether the library has negative strides."""
    own = stored(shape, view)
    before, step = view.get("before", (0,) * len(own)), view.get("step", (1,) * len(own))
    found = []
    for d in view.get("order", tuple(range(len(own)))):
        begin, n, s = before[d], own[d], step[d]
        if s == -1 and flips and n:
            found.append(slice(begin + n - 1, begin - 1 if begin else None, -1))
        else:
            found.append(slice(begin, begin + n * abs(s), abs(s)))
    return tuple(found)


def inverse(view: View, ndim: int) -> tuple[int, ...]:
    """Which dimension of the larger array each one of the view is."""
    order = view.get("order", tuple(range(ndim)))
    return tuple(order.index(d) for d in range(ndim))


def marked(shape: Sequence[int], view: View, flips: bool, base: Any) -> Any:
    """A NumPy array of the larger array's shape: True where an element is meant."""
    import numpy as np

    marks = np.zeros(base, dtype=bool)
    marks[slices(shape, view, flips)] = True
    return marks
