"""Dense attention in NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.reference import checks
from omniattn.reference.core import Array, ScoreFunction, attend_sequence
from omniattn.reference.dropout import Dropout

_NAME = "reference.attention"


def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    score_mod: ScoreFunction | None = None,
    dropout: Dropout | None = None,
    compute_dtype: npt.DTypeLike = np.float32,
    _round_to: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    r"""Attention of a batch of sequences of one length, the definition that every backend is held to.

    For query i and key j of one head, with :math:`\delta` = seqlen_k - seqlen_q,

    .. math::
        s_{ij} &= \mathrm{scale} \; q_i \cdot k_j, \qquad
        s_{ij} \leftarrow \mathrm{cap} \tanh(s_{ij} / \mathrm{cap}) \text{ if softcap} > 0, \qquad
        s_{ij} \leftarrow s_{ij} + \mathrm{mask}_{ij} \\
        \mathrm{lse}_i &= \log\bigl(e^{\mathrm{sink}} + \sum_{j \text{ visible}} e^{s_{ij}}\bigr), \qquad
        o_i = \sum_{j \text{ visible}} e^{s_{ij} - \mathrm{lse}_i} v_j

    Parameters
    ----------
    q : array_like, floating
        (batch, seqlen_q, heads_q, head_dim) for "NHD", (batch, heads_q, seqlen_q, head_dim) for "HND". Any
        strides. NumPy has no bfloat16: hand such values over as float32.
    k, v : array_like, floating
        The same with heads_kv and seqlen_k; query head h reads head h // (heads_q // heads_kv). The last dimension of v
        may differ from head_dim.
    layout : {"NHD", "HND"}
        Order of the dimensions of q, k, v and o.
    causal : bool
        Key j is visible to query i only if j <= i + seqlen_k - seqlen_q.
    window : (int, int), optional
        (left, right), -1 = unlimited: visible only if i + delta - left <= j <= i + delta + right. With `causal`, right
        is 0.
    softmax_scale : float, optional
        1 / sqrt(head_dim) unless given.
    softcap : float
        0 turns it off.
    mask : array_like, optional
        Broadcastable to (batch, heads_q, seqlen_q, seqlen_k) in either layout. bool: True = attend; floating: added to
        the score, and -inf hides the key.
    sinks : array_like, optional
        (heads_q,): a logit for each head that enters the denominator only, in natural units, not scaled.
    score_mod : callable, optional
        ``score_mod(score, b, h, q, k)`` makes new scores of those after softcap; -inf hides the key. score: (rows,
        keys), q: (rows, 1), k: (1, keys).
    dropout : Dropout, optional
        Which of the terms of o are kept, times its scale; the others are 0. lse does not change.
    compute_dtype : dtype
        float32 or float64: all arithmetic, and the results.

    Returns
    -------
    o : ndarray
        Shape and layout of q (with the last dimension of v), `compute_dtype`.
    lse : ndarray
        (batch, heads_q, seqlen_q), natural logarithm, `compute_dtype`. Includes the sink.

    Raises
    ------
    omniattn.errors.ArgumentError
        Or its ShapeError or DtypeError: names the argument, what was expected and what came.

    Notes
    -----
    A row that attends to nothing has o = 0 and lse = -inf (lse = sink when there are sinks). NaN and infinity in q, k
    and v follow IEEE arithmetic over the visible keys; a key that a row does not see never reaches that row. No warning
    is issued. Scores are formed for a block of query rows of one head, and only for keys inside the causal or window
    range, so that memory does not grow with seqlen_q * seqlen_k.
    """
    checks.check_layout(layout, _NAME)
    is_nhd = layout == "NHD"
    qh, kh, vh = (checks.heads_first(x, name, _NAME, 4, is_nhd) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    checks.check_heads(qh, kh, vh, _NAME)
    options = checks.make_options(qh.shape[-1], causal, window, softmax_scale, softcap, compute_dtype, _NAME)
    options = dataclasses.replace(options, round_to=_round_to, score_mod=score_mod, dropout=dropout)
    batch, heads_q, seqlen_q = qh.shape[:3]
    full_mask = None if mask is None else checks.broadcast_mask(mask, (batch, heads_q, seqlen_q, kh.shape[2]), _NAME)
    sink_logits = None if sinks is None else checks.check_sinks(sinks, heads_q, _NAME)

    o, o_heads_first = _empty_output(batch, heads_q, seqlen_q, vh.shape[-1], is_nhd, options.compute_dtype)
    lse = np.empty((batch, heads_q, seqlen_q), dtype=options.compute_dtype)
    for b in range(batch):
        block_mask = None if full_mask is None else full_mask[b]
        own = dataclasses.replace(options, batch=b)
        attend_sequence(qh[b], kh[b], vh[b], block_mask, sink_logits, own, o_heads_first[b], lse[b])
    return o, lse


def _empty_output(
    batch: int, heads: int, seqlen: int, dim: int, nhd: bool, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Contiguous output in the caller's layout, and its (batch, heads, seq, dim) view."""
    if nhd:
        o = np.empty((batch, seqlen, heads, dim), dtype=dtype)
        return o, o.swapaxes(1, 2)
    o = np.empty((batch, heads, seqlen, dim), dtype=dtype)
    return o, o
