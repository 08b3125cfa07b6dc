"""Packed sequences whose first rows alone are used, or whose keys lie in pages, as packed sequences of these rows."""

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
    block_table : ndarray, (batch, max_blocks), or None
        Pages of each sequence's keys; ``seqused_k`` counts these then, and cu_seqlens_k is None.
    nhd : bool
        Whether arrays are (rows, heads, head_dim), and not (heads, rows, head_dim).
    pages : (int, int), optional
        Pages of the pool, and keys of a page.

    Raises
    ------
    ArgumentError
        A number of rows that a sequence does not have, a page that the pool does not have.
    """

    def __init__(
        self, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any, block_table: Any = None, *,
        rows: tuple[int, int], nhd: bool, pages: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self._axis = 0 if nhd else 1
        self._rows = rows
        self._q, starts_q = _indices(cu_seqlens_q, seqused_q, rows[0], "q")
        self._pages = pages
        if pages is None:
            self._k, starts_k = _indices(cu_seqlens_k, seqused_k, rows[1], "k")
        else:
            self._k, starts_k = _keys_in_pages(block_table, seqused_k, *pages)
        #: cu_seqlens of the used rows.
        self.starts: dict[str, Array] = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}

    def take_q(self, x: Array, rows: int | None = None) -> Array:
        """The used queries of an array. rows: its axis of rows, where that is not the layout's."""
        return np.take(x, self._q, self._axis if rows is None else rows)

    def take_k(self, x: Array) -> Array:
        """The used keys of an array."""
        if self._pages is not None:  # (pages, tokens, heads, dim) or (pages, heads, tokens, dim) -> one row a token
            x = x if self._axis == 0 else x.swapaxes(1, 2)
            x = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
            return x[self._k] if self._axis == 0 else x[self._k].swapaxes(0, 1)
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


def _keys_in_pages(table: Any, used: Any, num_pages: int, page_size: int) -> tuple[Array, Array]:
    """Tokens of the pool that are each sequence's keys, and where each sequence begins among them."""
    counts, most = [int(n) for n in used], table.shape[1] * page_size
    found = [np.zeros(0, np.int64)]
    for b, count in enumerate(counts):
        if not 0 <= count <= most:
            expected = f"from 0 to {most}, the keys that block_table has room for"
            raise ArgumentError("seqused_k", expected, f"{count} of sequence {b}")
        keys = np.arange(count)
        pages = np.asarray(table[b], np.int64)[keys // page_size]
        if count and not (pages.min() >= 0 and pages.max() < num_pages):
            wrong = pages[(pages < 0) | (pages >= num_pages)][0]
            expected = f"pages from 0 to {num_pages - 1} for the {count} keys of sequence {b}"
            raise ArgumentError("block_table", expected, str(wrong))
        found.append(pages * page_size + keys % page_size)
    return np.concatenate(found), np.cumsum([0, *counts]).astype(np.int32)


def _spread(x: Array, indices: Array, rows: int, axis: int, fill: float) -> Array:
    shape = list(x.shape)
    shape[axis] = rows
    made = np.full(shape, fill, x.dtype)
    np.moveaxis(made, axis, 0)[indices] = np.moveaxis(x, axis, 0)
    return made
