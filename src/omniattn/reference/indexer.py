"""The indexer of sparse attention in NumPy: its logits, and the positions of the largest of each row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.errors import ArgumentError, ShapeError
from omniattn.reference.core import Array

_LOGITS, _TOP_K = "reference.index_logits", "reference.top_k"


def index_logits(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    weights: npt.ArrayLike,
    k_scale: npt.ArrayLike,
    starts: npt.ArrayLike,
    ends: npt.ArrayLike,
    *,
    compute_dtype: npt.DTypeLike = np.float32,
) -> Array:
    r"""Scores of the keys of one sequence for each query.

    .. math:: \mathrm{logits}_{ts} = \mathrm{scale}_s \sum_h w_{th} \max(q_{th} \cdot k_s, 0)

    Parameters
    ----------
    q : array_like, (rows, heads, dim)
        Values, not bytes of e4m3.
    k : array_like, (keys, dim)
    weights : array_like, (rows, heads)
    k_scale : array_like, (keys,)
    starts, ends : array_like of int, (rows,)
        Row t sees the keys starts[t] <= s < ends[t].
    compute_dtype : dtype
        Of the arithmetic and the result.

    Returns
    -------
    ndarray, (rows, keys)
        -inf where a row does not see a key.

    Raises
    ------
    omniattn.errors.ShapeError
        Names the argument, what was expected and what came.

    Notes
    -----
    A NaN in q, k, a weight or a scale that takes part makes the logit NaN. Source: DeepSeek-V3.2 (2025), equation 1.
    """
    dtype = np.dtype(compute_dtype)
    queries, keys = (np.asarray(x, dtype=dtype) for x in (q, k))
    if queries.ndim != 3:
        raise ShapeError("q", "(rows, heads, dim)", f"shape {queries.shape}", function=_LOGITS)
    rows, heads, dim = queries.shape
    if keys.ndim != 2 or keys.shape[1] != dim:
        raise ShapeError("k", f"(keys, {dim})", f"shape {keys.shape}", function=_LOGITS)
    count = keys.shape[0]
    given = {"weights": (weights, (rows, heads), dtype), "k_scale": (k_scale, (count,), dtype)}
    given |= {name: (x, (rows,), np.dtype(np.int64)) for name, x in (("starts", starts), ("ends", ends))}
    found: dict[str, Any] = {}
    for name, (value, shape, kind) in given.items():
        found[name] = np.asarray(value, dtype=kind)
        if found[name].shape != shape:
            raise ShapeError(name, f"shape {shape}", f"shape {found[name].shape}", function=_LOGITS)
    out = np.empty((rows, count), dtype=dtype)
    with np.errstate(all="ignore"):
        for t in range(rows):
            products = queries[t] @ keys.T
            # maximum keeps NaN, as relu does.
            out[t] = (found["weights"][t] @ np.maximum(products, dtype.type(0))) * found["k_scale"]
    s = np.arange(count)
    seen = (s >= found["starts"][:, None]) & (s < found["ends"][:, None])
    out[~seen] = -np.inf
    return out


def top_k(logits: npt.ArrayLike, k: int, starts: npt.ArrayLike, lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Positions of the k largest of logits[t, starts[t] : starts[t] + lengths[t]], ascending, counted from starts[t].

    Parameters
    ----------
    logits : array_like, (rows, elements)
    k : int
    starts, lengths : array_like of int, (rows,)

    Returns
    -------
    ndarray, int32, (rows, k)
        -1 behind the last position where there are fewer. NaN counts as the largest; of equal numbers, 0 and -0
        included, the first ones are chosen; -inf is never chosen.

    Raises
    ------
    omniattn.errors.ArgumentError
        k is less than 1; a row's elements are not those of the array.
    """
    values = np.asarray(logits)
    if values.ndim != 2:
        raise ShapeError("logits", "(rows, elements)", f"shape {values.shape}", function=_TOP_K)
    if k < 1:
        raise ArgumentError("k", "1 or more", f"{k}", function=_TOP_K)
    out = np.full((values.shape[0], k), -1, dtype=np.int32)
    for t, (start, length) in enumerate(zip(np.asarray(starts), np.asarray(lengths), strict=True)):
        if not (start >= 0 and length >= 0 and start + length <= values.shape[1]):
            expected = f"elements of the {values.shape[1]} of row {t}"
            raise ArgumentError("lengths", expected, f"{length} from {start} on", function=_TOP_K)
        row = values[t, start : start + length]
        order = np.where(np.isnan(row), np.inf, row)
        # NaN ahead of inf; a stable sort keeps the first of equal ones first.
        ranked = np.lexsort((~np.isnan(row), -order))
        chosen = np.sort(ranked[~np.isneginf(row[ranked])][:k])
        out[t, : len(chosen)] = chosen
    return out


def pool_rows(positions: npt.NDArray[np.int32], table: npt.ArrayLike, block_size: int) -> npt.NDArray[np.int32]:
    """Rows of a pool at positions of `top_k`: table[t, position // block_size] * block_size + position % block_size.

    Parameters
    ----------
    positions : ndarray, int32, (rows, k)
        -1 stays.
    table : array_like of int, (rows, blocks)
    block_size : int
    """
    blocks = np.asarray(table)
    there = positions >= 0
    at = np.where(there, positions // block_size, 0)
    found = np.take_along_axis(blocks, at, axis=1) if blocks.shape[1] else np.zeros_like(at)
    return np.where(there, found * block_size + positions % block_size, -1).astype(np.int32)
