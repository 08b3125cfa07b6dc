"""Arrays that a call makes, known from its problem alone: what fake tensors and tracing ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Output:
    """An array that a call returns.

    Attributes
    ----------
    name : str
        ``"o"``, ``"lse"``, or a field of the result.
    shape : tuple of int
        Row-major.
    dtype : str
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
