"""A user's score modification as a call has it: texts, and facts of its arrays. No pointers, no framework objects."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Arrays of a score modification, and their dimensions, at most (``kernels_cu/params/score_mod.cuh``).
MAX_ARRAYS, MAX_DIMS = 8, 4
#: Queries and keys: positions are floats too, which are exact up to here.
MAX_POSITIONS = 1 << 24

_WORD = re.compile(r"[A-Za-z_]\w*")


def words(text: str) -> frozenset[str]:
    """Names in an expression."""
    return frozenset(_WORD.findall(text))


@dataclass(frozen=True)
class ModArray:
    """An array of a score modification.

    Attributes
    ----------
    name : str
        What the expressions call it.
    dtype : str
    shape, strides : tuple of int
        Elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class ScoreModProblem:
    """A score modification.

    Attributes
    ----------
    expression : str
        The new score, in CUDA C++.
    mask : str or None
        Whether a key is visible.
    arrays : tuple of ModArray
    checked : bool
        Indices are compared with the arrays' extents.
    """

    expression: str
    mask: str | None
    arrays: tuple[ModArray, ...]
    checked: bool = False


@dataclass(frozen=True)
class BlockMaskProblem:
    """A map of visible blocks.

    Attributes
    ----------
    size : (int, int)
        Queries and keys of a block, in tiles of 64.
    strides : (int, int, int, int)
        Of the map over (batch, heads, blocks of queries, blocks of keys); 0 where it is broadcast.
    """

    size: tuple[int, int]
    strides: tuple[int, int, int, int]
