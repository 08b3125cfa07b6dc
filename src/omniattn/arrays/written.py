"""Arrays of the caller that a call writes: whether it may, whether others share their memory, and who is told.

Kernels read their inputs while they write their results, in any order. Two arrays may lie in one buffer, as parts of
packed q, k and v do, as long as no element of a written one is also an element of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ArgumentError
from .host import Memory
from .tensor import Tensor

#: NumPy's search for an element that two arrays share ends after so many candidates: a millisecond. Parts of one
#: buffer need a few; what has not been found apart then counts as shared.
_MOST_CANDIDATES: Any = 20_000


def require_writable(t: Tensor) -> None:
    """Check that a user's array may be written.

    Raises
    ------
    ArgumentError
        A read-only array; every JAX array is one. A torch inference tensor outside inference mode.
    """
    if t.readonly:
        received = "a jax.Array, which never changes" if t.framework == "jax" else "a read-only array"
        hint = "Leave it out: the result is then a new array" if t.framework == "jax" else None
        raise ArgumentError(t.argument, "a writable array", received, hint=hint)
    if t.framework == "torch":
        from . import from_torch

        from_torch.check_out(t)


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Have torch count a change in place of its own arrays: autograd then sees that what it kept has changed."""
    changed = [t.obj for t in tensors if t.framework == "torch"]
    if changed:
        from . import from_torch

        from_torch.increment_version(changed)


def span(t: Tensor) -> tuple[int, int]:
    """First byte of an array's elements, and the one behind their last, both from its address on; (0, 0) for none."""
    low = high = 0
    for extent, stride in zip(t.shape, t.strides, strict=True):
        if extent == 0:
            return 0, 0
        reach = (extent - 1) * stride
        if reach < 0:
            low += reach
        else:
            high += reach
    return low * t.itemsize, (high + 1) * t.itemsize


def first_shared(
    written: Sequence[Tensor], others: Iterable[Tensor] = (), same: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor] | None:
    """A written array and another one, of either kind, that has one of its elements; None if there are none.

    Parameters
    ----------
    written, others : sequence of Tensor
        On one device. Others may share memory with each other.
    same : sequence of Tensor
        Of ``others``: those that a written one may be itself, with the same elements in the same order.
    """
    spans = [(t, t.ptr + low, t.ptr + high) for t in (*written, *others) for low, high in (span(t),) if high > low]
    count = sum(1 for t in written if 0 not in t.shape)
    for i, (t, low, high) in enumerate(spans[:count]):
        for other, other_low, other_high in spans[i + 1 :]:
            if low >= other_high or other_low >= high or not _share(t, other):
                continue
            if not (_is_same(t, other) and any(other is x for x in same)):
                return t, other
    return None


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether a byte belongs to elements of both; addresses are compared, and no memory is read."""
    import numpy as np

    most: Any = _MOST_CANDIDATES  # numpy's annotations know two numbers only
    try:
        return bool(np.shares_memory(np.asarray(Memory(a)), np.asarray(Memory(b)), max_work=most))
    except RuntimeError:  # too many candidates: numpy moved the error's own name between its versions
        return True


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same elements in the same order."""
    if a.ptr != b.ptr or a.dtype != b.dtype or tuple(a.shape) != tuple(b.shape):
        return False
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.strides, b.strides, strict=True))
