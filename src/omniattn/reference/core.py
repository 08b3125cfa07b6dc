"""One sequence of attention, a block of query rows at a time: the arithmetic behind every operation of this package.

Arrays here are (heads, seq, dim), whatever the layout of the caller. Scores exist for one head and one block of rows
only, so memory is O(seqlen_k) and not O(seqlen_q * seqlen_k).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DtypeError, ShapeError
from .dropout import Dropout

Array = npt.NDArray[Any]

#: (score, b, h, q, k) to the new score, -inf where it hides the key. score: (rows, keys); q: (rows, 1), k: (1, keys).
ScoreFunction = Callable[[Array, int, int, Array, Array], Any]

# Scores of one block. 4 MB in float32 stays near the last-level cache, and its products are large enough for BLAS.
BLOCK_SCORES = 1 << 20
MIN_BLOCK_ROWS = 16


@dataclass(frozen=True)
class Options:
    """What is the same for every head and sequence of a call.

    Attributes
    ----------
    softmax_scale : float
        Factor of q.k.
    softcap : float
        0 leaves the scores as they are.
    left, right : int
        Window in keys around the diagonal, -1 = unlimited. `causal` has been folded into `right`.
    compute_dtype : np.dtype
        float32 or float64: scores, softmax and output.
    round_to : callable or None
        When given, scores, and probabilities after their normalization, go through it: the arithmetic of a framework
        that stores both in a 16-bit type. Used by `omniattn.testing.same_dtype_naive` only.
    score_mod : callable or None
        Makes new scores of those after softcap, see `ScoreFunction`.
    batch : int
        Number of the sequence, which `score_mod` and `dropout` are told.
    dropout : Dropout, optional
        What is kept of the probabilities.
    """

    softmax_scale: float
    softcap: float
    left: int
    right: int
    compute_dtype: np.dtype[Any]
    round_to: Callable[[Array], Array] | None = None
    score_mod: ScoreFunction | None = None
    batch: int = 0
    dropout: Dropout | None = None


def block_rows(seqlen_q: int, seqlen_k: int) -> int:
    """Rows of a block: as many as keep the block's scores below `BLOCK_SCORES`, at least `MIN_BLOCK_ROWS`."""
    return max(1, min(seqlen_q, max(MIN_BLOCK_ROWS, BLOCK_SCORES // max(seqlen_k, 1))))


def attend_sequence(
    q: Array, k: Array, v: Array, mask: Array | None, sinks: Array | None, options: Options, o: Array, lse: Array
) -> None:
    """Attention of one sequence, written into `o` and `lse`.

    Parameters
    ----------
    q : (heads_q, seqlen_q, dim)
    k : (heads_kv, seqlen_k, dim)
    v : (heads_kv, seqlen_k, dim_v)
    mask : (heads_q, seqlen_q, seqlen_k), bool or floating, or None
    sinks : (heads_q,) or None
    o : (heads_q, seqlen_q, dim_v), any strides, written
    lse : (heads_q, seqlen_q), any strides, written
    """
    heads_q, heads_kv = q.shape[0], k.shape[0]
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    if heads_q == 0 or seqlen_q == 0:
        return
    group = heads_q // heads_kv
    rows = block_rows(seqlen_q, seqlen_k)
    for kv_head in range(heads_kv):
        # One conversion per key/value head; a copy of the whole tensor would cost more memory than the scores.
        k_head = np.asarray(k[kv_head], dtype=options.compute_dtype)
        v_head = np.asarray(v[kv_head], dtype=options.compute_dtype)
        v_is_finite = bool(np.isfinite(v_head).all())
        for head in range(kv_head * group, (kv_head + 1) * group):
            sink = None if sinks is None else options.compute_dtype.type(sinks[head])
            for begin in range(0, seqlen_q, rows):
                end = min(begin + rows, seqlen_q)
                lo, hi = key_range(begin, end, seqlen_q, seqlen_k, options)
                o[head, begin:end], lse[head, begin:end] = _attend_block(
                    np.asarray(q[head, begin:end], dtype=options.compute_dtype),
                    k_head[lo:hi],
                    v_head[lo:hi],
                    None if mask is None else mask[head, begin:end, lo:hi],
                    outside_window(begin, end, lo, hi, seqlen_q, seqlen_k, options),
                    sink,
                    v_is_finite,
                    options,
                    (head, begin, lo),
                )


def key_range(begin: int, end: int, seqlen_q: int, seqlen_k: int, options: Options) -> tuple[int, int]:
    """Half-open range of the keys that at least one of the query rows [begin, end) may see; lo <= hi always."""
    diagonal = seqlen_k - seqlen_q
    lo = 0 if options.left < 0 else min(max(0, begin + diagonal - options.left), seqlen_k)
    hi = seqlen_k if options.right < 0 else max(0, min(seqlen_k, end + diagonal + options.right))
    return lo, max(lo, hi)


def outside_window(
    begin: int, end: int, lo: int, hi: int, seqlen_q: int, seqlen_k: int, options: Options
) -> Array | None:
    """True where the window hides key lo + column from query begin + row; None where it hides nothing."""
    diagonal = seqlen_k - seqlen_q
    cuts_left = options.left >= 0 and lo < end - 1 + diagonal - options.left
    cuts_right = options.right >= 0 and hi - 1 > begin + diagonal + options.right
    if not (cuts_left or cuts_right):
        return None
    centre = np.arange(begin, end, dtype=np.int64)[:, None] + diagonal
    key = np.arange(lo, hi, dtype=np.int64)[None, :]
    hidden = np.zeros((end - begin, hi - lo), dtype=np.bool_)
    if cuts_left:
        # A window wider than the sequences is the same as one that just spans them, and cannot overflow int64.
        hidden |= key < centre - min(options.left, seqlen_q + seqlen_k)
    if cuts_right:
        hidden |= key > centre + min(options.right, seqlen_q + seqlen_k)
    return hidden


def _attend_block(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    hidden: Array | None,
    sink: Any,
    v_is_finite: bool,
    options: Options,
    place: tuple[int, int, int],
) -> tuple[Array, Array]:
    """Rows of one head against a range of keys: (o, lse). `hidden` is consumed. place: head, first row, first key."""
    # NaN and infinity are legal values here, and -inf - -inf, 0 / 0 and log(0) are each caught below.
    with np.errstate(all="ignore"):
        scores = q @ k.T
        if options.round_to is not None:
            scores = options.round_to(scores)
        scores *= options.compute_dtype.type(options.softmax_scale)
        if options.softcap > 0:
            cap = options.compute_dtype.type(options.softcap)
            scores /= cap
            np.tanh(scores, out=scores)
            scores *= cap
        if options.score_mod is not None:
            scores = modified(options.score_mod, "score_mod", scores, options, *place)
            never = np.isneginf(scores)
            hidden = never if hidden is None else np.logical_or(hidden, never, out=hidden)
        if mask is not None:
            if mask.dtype == np.bool_:
                masked_out = ~mask
            else:
                scores += mask
                # An additive -inf hides the key like a boolean False, even where the score is NaN or +inf.
                masked_out = np.isneginf(mask)
            hidden = masked_out if hidden is None else np.logical_or(hidden, masked_out, out=hidden)
        if options.round_to is not None:
            scores = options.round_to(scores)
        if hidden is not None:
            np.copyto(scores, -np.inf, where=hidden)

        row_max = scores.max(axis=1, initial=-np.inf)
        if sink is not None:
            row_max = np.maximum(row_max, sink)
        # A row without any finite score has maximum -inf; 0 in its place makes every exp(-inf - 0) an exact 0.
        row_max = np.where(np.isneginf(row_max), options.compute_dtype.type(0), row_max)
        scores -= row_max[:, None]
        p = np.exp(scores, out=scores)
        denominator = p.sum(axis=1)
        if sink is not None:
            denominator = denominator + np.exp(sink - row_max)
        lse = row_max + np.log(denominator)  # log(0) = -inf: the row attends to nothing
        attends_to_nothing = denominator == 0
        divisor = np.where(attends_to_nothing, options.compute_dtype.type(1), denominator)[:, None]
        if options.dropout is not None:
            p *= dropped(options, p.shape, *place)

        if options.round_to is not None:
            o = _weighted_sum(options.round_to(p / divisor), v, hidden, v_is_finite)
        else:
            o = _weighted_sum(p, v, hidden, v_is_finite) / divisor
        if not v_is_finite:
            # Keys whose scores are all -inf are visible, but 0 * NaN must not decide what such a row gives.
            o[attends_to_nothing] = 0
        return o, lse


def modified(
    function: ScoreFunction, argument: str, scores: Array, options: Options, head: int, row: int, key: int
) -> Array:
    """What a user's function makes of scores."""
    rows = np.arange(row, row + scores.shape[0], dtype=np.int64)[:, None]
    keys = np.arange(key, key + scores.shape[1], dtype=np.int64)[None, :]
    made = np.asarray(function(scores, options.batch, head, rows, keys))
    if made.dtype.kind not in "fiuV":  # V: types of other packages, such as bfloat16
        what = "a reference that returns scores: numbers, -inf where a key is hidden"
        raise DtypeError(argument, what, repr(made[()]) if made.shape == () else f"an array of {made.dtype}")
    try:
        made = np.broadcast_to(made, scores.shape)
    except ValueError:
        raise ShapeError(
            argument, f"a reference whose result has the shape of score, {scores.shape}", f"shape {made.shape}"
        ) from None
    return np.array(made, dtype=scores.dtype)


def dropped(options: Options, shape: tuple[int, ...], head: int, row: int, key: int) -> Array:
    """What dropout multiplies the probabilities of a block by: 0, or its scale."""
    assert options.dropout is not None
    kept = options.dropout.kept(
        options.batch, head, np.arange(row, row + shape[0]), np.arange(key, key + shape[1])
    )  # fmt: skip
    return kept * options.compute_dtype.type(options.dropout.scale)


def _weighted_sum(p: Array, v: Array, hidden: Array | None, v_is_finite: bool) -> Array:
    """p @ v, except that a hidden key adds nothing even where v is NaN or infinite (0 * NaN would be NaN)."""
    if v_is_finite or hidden is None:
        # Keys outside the range were never passed in, so without `hidden` every row meets every key.
        return p @ v
    finite = np.isfinite(v)
    if finite.all():
        return p @ v
    total: Array = p @ np.where(finite, v, v.dtype.type(0))
    # Which rows meet a NaN, +inf or -inf in which column, by counting: exact in float32 up to 2**24 keys.
    met = (~hidden).astype(v.dtype)
    weighted = met * (p > 0)
    unweighted = met - weighted

    def meets(rows: Array, where: Array) -> Array:
        return np.asarray(rows @ where.astype(v.dtype) > 0)

    plus, minus = meets(weighted, np.isposinf(v)), meets(weighted, np.isneginf(v))
    nan = meets(met, np.isnan(v)) | meets(unweighted, np.isinf(v)) | (plus & minus)
    total[plus] = np.inf
    total[minus] = -np.inf
    total[nan] = np.nan
    return total
