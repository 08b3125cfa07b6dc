"""Attention over packed sequences of different lengths, in NumPy."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.errors import ArgumentError, DtypeError, ShapeError
from omniattn.reference import checks
from omniattn.reference.core import Array, ScoreFunction, attend_sequence
from omniattn.reference.dropout import Dropout

_NAME = "reference.attention_varlen"


def attention_varlen(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
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
) -> tuple[Array, Array]:
    """Attention of sequences that lie one behind the other in one tensor; see `attention` for the equation.

    Sequence b has the query rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the key rows cu_seqlens_k[b] to
    cu_seqlens_k[b + 1]; `causal` and `window` align to the end of each sequence on its own.

    Parameters
    ----------
    q : array_like, floating
        (total_q, heads_q, head_dim) for "NHD", (heads_q, total_q, head_dim) for "HND".
    k, v : array_like, floating
        The same with total_k and heads_kv.
    cu_seqlens_q, cu_seqlens_k : array_like, integer
        (batch + 1,), first element 0, never decreasing, last element at most the number of rows.
    max_seqlen_q, max_seqlen_k : int, optional
        At least the longest sequence, the longest itself unless given. They fix the shape of `mask`.
    mask : array_like, optional
        Broadcastable to (batch, heads_q, max_seqlen_q, max_seqlen_k); indexed from the start of each sequence.
    layout, causal, window, softmax_scale, softcap, sinks, score_mod, dropout, compute_dtype
        As in `attention`.

    Returns
    -------
    o : ndarray
        Shape and layout of q, `compute_dtype`.
    lse : ndarray
        (heads_q, total_q), natural logarithm, `compute_dtype`.

    Raises
    ------
    omniattn.errors.ArgumentError
        Or its ShapeError or DtypeError: names the argument, what was expected and what came.

    Notes
    -----
    Rows behind the last sequence belong to nothing: o = 0 and lse = -inf, with sinks too.
    """
    checks.check_layout(layout, _NAME)
    is_nhd = layout == "NHD"
    qh, kh, vh = (checks.heads_first(x, name, _NAME, 3, is_nhd) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    checks.check_heads(qh, kh, vh, _NAME)
    options = checks.make_options(qh.shape[-1], causal, window, softmax_scale, softcap, compute_dtype, _NAME)
    heads_q, total_q = qh.shape[:2]
    starts_q = check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", total_q)
    starts_k = check_cu_seqlens(cu_seqlens_k, "cu_seqlens_k", kh.shape[1])
    if len(starts_q) != len(starts_k):
        raise ShapeError(
            "cu_seqlens_k",
            f"{len(starts_q)} elements as in cu_seqlens_q",
            f"{len(starts_k)} elements",
            function=_NAME,
        )
    longest_q = check_max_seqlen(max_seqlen_q, longest(starts_q), "max_seqlen_q", _NAME)
    longest_k = check_max_seqlen(max_seqlen_k, longest(starts_k), "max_seqlen_k", _NAME)
    batch = len(starts_q) - 1
    full_mask = None if mask is None else checks.broadcast_mask(mask, (batch, heads_q, longest_q, longest_k), _NAME)
    sink_logits = None if sinks is None else checks.check_sinks(sinks, heads_q, _NAME)

    shape = (total_q, heads_q, vh.shape[-1]) if is_nhd else (heads_q, total_q, vh.shape[-1])
    o = np.zeros(shape, dtype=options.compute_dtype)
    o_heads_first = o.swapaxes(0, 1) if is_nhd else o
    lse = np.full((heads_q, total_q), -np.inf, dtype=options.compute_dtype)
    for b in range(batch):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
        block_mask = None if full_mask is None else full_mask[b, :, :seqlen_q, :seqlen_k]
        attend_sequence(
            qh[:, rows],
            kh[:, keys],
            vh[:, keys],
            block_mask,
            sink_logits,
            dataclasses.replace(options, score_mod=score_mod, dropout=dropout, batch=b),
            o_heads_first[:, rows],
            lse[:, rows],
        )
    return o, lse


def check_cu_seqlens(value: Any, argument: str, total: int) -> list[int]:
    """The cumulative lengths as Python ints, once they are known to describe sequences inside `total` rows."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise DtypeError(argument, "an integer array", f"dtype {array.dtype}", function=_NAME)
    if array.ndim != 1 or array.shape[0] < 1:
        raise ShapeError(argument, "shape (batch + 1,)", f"shape {array.shape}", function=_NAME)
    starts = [int(x) for x in array]
    if starts[0] != 0:
        raise ArgumentError(argument, "a first element of 0", str(starts[0]), function=_NAME)
    for index in range(1, len(starts)):
        if starts[index] < starts[index - 1]:
            raise ArgumentError(
                argument,
                "elements that never decrease",
                f"{starts[index]} after {starts[index - 1]} at index {index}",
                function=_NAME,
            )
    if starts[-1] > total:
        raise ArgumentError(
            argument, f"a last element of at most {total}, the number of rows", str(starts[-1]), function=_NAME
        )
    return starts


def longest(starts: list[int]) -> int:
    return max((end - begin for begin, end in itertools.pairwise(starts)), default=0)


def check_max_seqlen(value: int | None, longest: int, argument: str, function: str) -> int:
    """The given maximum, if the longest sequence is not longer; its length where there is none."""
    if value is None:
        return longest
    if int(value) < longest:
        raise ArgumentError(argument, f"at least {longest}, the longest sequence", str(value), function=function)
    return int(value)
