"""Packed sequences of which only the first rows are used, as packed sequences of these rows alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from omniattn.errors import ArgumentError
from omniattn.reference.core import Array
from omniattn.reference.varlen import check_cu_seqlens


class UsedRows:
    """Which rows of packed arrays are used.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : ndarray, (batch + 1,)
    seqused_q, seqused_k : ndarray, (batch,), or None
        Rows of each sequence that are used; None: all of them.
    rows : (int, int)
        Of the packed queries, and of the keys.
    nhd : bool
        Whether arrays are (rows, heads, head_dim), and not (heads, rows, head_dim).

    Raises
    ------
    ArgumentError
        A number of rows that a sequence does not have.
    """

    def __init__(
        self, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any, *, rows: tuple[int, int], nhd: bool
    ) -> None:
        self._axis = 0 if nhd else 1
        self._rows = rows
        self._q, starts_q = _indices(cu_seqlens_q, seqused_q, rows[0], "q")
        self._k, starts_k = _indices(cu_seqlens_k, seqused_k, rows[1], "k")
        #: cu_seqlens of the used rows.
        self.starts: dict[str, Array] = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}

    def take_q(self, x: Array, rows: int | None = None) -> Array:
        """The used queries of an array. rows: its axis of rows, where that is not the layout's."""
        return np.take(x, self._q, self._axis if rows is None else rows)

    def take_k(self, x: Array) -> Array:
        """The used keys of an array."""
        return np.take(x, self._k, self._axis)

    def spread_q(self, x: Array, fill: float, rows: int | None = None) -> Array:
        """An array of all queries: those of ``x`` where they are used, else ``fill``."""
        return _spread(x, self._q, self._rows[0], self._axis if rows is None else rows, fill)

    def spread_k(self, x: Array, fill: float) -> Array:
        """The same of keys."""
        return _spread(x, self._k, self._rows[1], self._axis, fill)


def _indices(cu_seqlens: Any, used: Any, rows: int, side: str) -> tuple[Array, Array]:
    """Numbers of the used rows, and where each sequence begins among them."""
    starts = check_cu_seqlens(cu_seqlens, f"cu_seqlens_{side}", rows)
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    counts = lengths if used is None else [int(n) for n in used]
    for b, (count, most) in enumerate(zip(counts, lengths, strict=True)):
        if not 0 <= count <= most:
            expected = f"from 0 to {most}, the rows of sequence {b}"
            raise ArgumentError(f"seqused_{side}", expected, str(count))
    found = [np.arange(begin, begin + count) for begin, count in zip(starts, counts, strict=False)]
    indices = np.concatenate(found) if found else np.zeros(0, np.int64)
    return indices, np.cumsum([0, *counts]).astype(np.int32)


def _spread(x: Array, indices: Array, rows: int, axis: int, fill: float) -> Array:
    shape = list(x.shape)
    shape[axis] = rows
    made = np.full(shape, fill, x.dtype)
    np.moveaxis(made, axis, 0)[indices] = np.moveaxis(x, axis, 0)
    return made
