"""Strides of arrays that have none of their own."""

from __future__ import annotations

from collections.abc import Sequence


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of an array may share memory: of nested dimensions it is certain that they do not."""
    if 0 in shape:
        return False
    reach = 0
    for step, n in sorted((abs(s), n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


def has_plain_rows(shape: Sequence[int], strides: Sequence[int], itemsize: int, multiple: int) -> bool:
    """Whether rows are contiguous, begin at multiples of so many bytes and share no memory: no zero strides."""
    if shape[-1] > 1 and strides[-1] != 1:
        return False
    rows = zip(shape[:-1], strides[:-1], strict=True)
    return all(n <= 1 or (s > 0 and s * itemsize % multiple == 0) for n, s in rows)
