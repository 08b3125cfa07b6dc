"""Gradients of attention in NumPy: what every backward kernel is held to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.errors import ArgumentError, ShapeError
from omniattn.reference import checks
from omniattn.reference.core import (
    Array,
    Options,
    ScoreFunction,
    block_rows,
    dropped,
    key_range,
    modified,
    outside_window,
)
from omniattn.reference.dropout import Dropout
from omniattn.reference.varlen import check_cu_seqlens, check_max_seqlen, longest

#: Gradients by name, in the order in which they are returned.
GRADIENTS = ("dq", "dk", "dv", "dsinks", "dmask")


@dataclass(frozen=True)
class SequenceArrays:
    """One sequence: arrays are (heads, seq, dim) views, whatever the caller's layout.

    Attributes
    ----------
    q, o, d_o : (heads_q, seqlen_q, dim)
    k, v : (heads_kv, seqlen_k, dim)
    lse : (heads_q, seqlen_q)
    dlse : the same, or None
    mask : (heads_q, seqlen_q, seqlen_k), or None
    sinks : (heads_q,), or None
    """

    q: Array
    k: Array
    v: Array
    o: Array
    d_o: Array
    lse: Array
    dlse: Array | None
    mask: Array | None
    sinks: Array | None


def attention_backward(
    do: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    o: npt.ArrayLike,
    lse: npt.ArrayLike,
    *,
    dlse: npt.ArrayLike | None = None,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    score_mod: ScoreFunction | None = None,
    score_mod_grad: ScoreFunction | None = None,
    dropout: Dropout | None = None,
    wanted: Sequence[str] = ("dq", "dk", "dv"),
    compute_dtype: npt.DTypeLike = np.float32,
) -> dict[str, Array]:
    r"""Gradients of a sum over the outputs of `attention`, weighted with ``do`` and ``dlse``.

    With the scores s of `attention`, after softcap, score_mod and mask,

    .. math::
        p_{ij} &= e^{s_{ij} - \mathrm{lse}_i}, \qquad dv_j = \sum_i p_{ij} \, do_i, \qquad
        D_i = do_i \cdot o_i - dlse_i \\
        ds_{ij} &= p_{ij} (do_i \cdot v_j - D_i), \qquad dmask = ds, \qquad
        dsink = - \sum_i e^{\mathrm{sink} - \mathrm{lse}_i} D_i \\
        dq_i &= \mathrm{scale} \sum_j ds_{ij} f'_{ij} k_j, \qquad dk_j = \mathrm{scale} \sum_i ds_{ij} f'_{ij} q_i

    where f' is the derivative of what softcap and score_mod make of a score. With dropout each p of dv, and each
    do . v, is multiplied by 0 or the scale of what is kept.

    Parameters
    ----------
    do : array_like
        Shape of o.
    q, k, v, layout, causal, window, softmax_scale, softcap, mask, sinks, score_mod, dropout, compute_dtype
        As in `attention`.
    o, lse : array_like
        What `attention` returned; or those of a larger attention, of whose keys k and v are a part.
    dlse : array_like, optional
        Shape of lse.
    score_mod_grad : callable, optional
        ``score_mod_grad(score, b, h, q, k)``: derivative of the new score by the old one; needed with score_mod.
    wanted : sequence of str
        What is computed, of `GRADIENTS`.

    Returns
    -------
    dict
        Arrays of `compute_dtype` by name: those of q, k, v in their shapes and layout, dsinks (heads_q,), dmask in the
        mask's own shape, summed over what is broadcast.

    Notes
    -----
    A row whose lse is -inf attends to nothing: it adds 0 to every gradient, whatever its o, do and dlse are. A key that
    a row does not see and that row add nothing to each other's gradients, NaN and infinity included. Scores exist for
    one block of rows of one head, as in `attention`.
    """
    name = "reference.attention_backward"
    checks.check_layout(layout, name)
    is_nhd = layout == "NHD"
    qh, kh, vh, oh, doh = (
        checks.heads_first(x, n, name, 4, is_nhd) for x, n in ((q, "q"), (k, "k"), (v, "v"), (o, "o"), (do, "do"))
    )
    checks.check_heads(qh, kh, vh, name)
    batch, heads_q, seqlen_q = qh.shape[:3]
    lse_, dlse_ = _check_rows(oh, doh, lse, dlse, (*qh.shape[:-1], vh.shape[-1]), name)
    options = checks.make_options(qh.shape[-1], causal, window, softmax_scale, softcap, compute_dtype, name)
    options = dataclasses.replace(options, score_mod=score_mod, dropout=dropout)
    full_mask = None if mask is None else checks.broadcast_mask(mask, (batch, heads_q, seqlen_q, kh.shape[2]), name)
    sink_logits = None if sinks is None else checks.check_sinks(sinks, heads_q, name)
    made = _Made(wanted, qh.shape, kh.shape, vh.shape, mask, heads_q, is_nhd, score_mod_grad, options, name)
    for b in range(batch):
        one = SequenceArrays(
            qh[b], kh[b], vh[b], oh[b], doh[b], lse_[b], None if dlse_ is None else dlse_[b],
            None if full_mask is None else full_mask[b], sink_logits,
        )  # fmt: skip
        _add_sequence(one, dataclasses.replace(options, batch=b), score_mod_grad, made.at((b,)))
    return made.results()


def attention_varlen_backward(
    do: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    o: npt.ArrayLike,
    lse: npt.ArrayLike,
    *,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dlse: npt.ArrayLike | None = None,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    score_mod: ScoreFunction | None = None,
    score_mod_grad: ScoreFunction | None = None,
    dropout: Dropout | None = None,
    wanted: Sequence[str] = ("dq", "dk", "dv"),
    compute_dtype: npt.DTypeLike = np.float32,
) -> dict[str, Array]:
    """Gradients of `attention_varlen`; see `attention_backward`. Rows that belong to no sequence have gradient 0."""
    name = "reference.attention_varlen_backward"
    checks.check_layout(layout, name)
    is_nhd = layout == "NHD"
    qh, kh, vh, oh, doh = (
        checks.heads_first(x, n, name, 3, is_nhd) for x, n in ((q, "q"), (k, "k"), (v, "v"), (o, "o"), (do, "do"))
    )
    checks.check_heads(qh, kh, vh, name)
    heads_q, total_q = qh.shape[:2]
    lse_, dlse_ = _check_rows(oh, doh, lse, dlse, (*qh.shape[:-1], vh.shape[-1]), name)
    options = checks.make_options(qh.shape[-1], causal, window, softmax_scale, softcap, compute_dtype, name)
    options = dataclasses.replace(options, score_mod=score_mod, dropout=dropout)
    starts_q = check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", total_q)
    starts_k = check_cu_seqlens(cu_seqlens_k, "cu_seqlens_k", kh.shape[1])
    if len(starts_q) != len(starts_k):
        raise ShapeError("cu_seqlens_k", f"{len(starts_q)} elements", f"{len(starts_k)} elements", function=name)
    extent = (
        len(starts_q) - 1, heads_q, check_max_seqlen(max_seqlen_q, longest(starts_q), "max_seqlen_q", name),
        check_max_seqlen(max_seqlen_k, longest(starts_k), "max_seqlen_k", name),
    )  # fmt: skip
    full_mask = None if mask is None else checks.broadcast_mask(mask, extent, name)
    sink_logits = None if sinks is None else checks.check_sinks(sinks, heads_q, name)
    made = _Made(wanted, qh.shape, kh.shape, vh.shape, mask, heads_q, is_nhd, score_mod_grad, options, name)
    for b in range(extent[0]):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
        one = SequenceArrays(
            qh[:, rows], kh[:, keys], vh[:, keys], oh[:, rows], doh[:, rows], lse_[:, rows],
            None if dlse_ is None else dlse_[:, rows],
            None if full_mask is None else full_mask[b, :, :seqlen_q, :seqlen_k], sink_logits,
        )  # fmt: skip
        own = dataclasses.replace(options, batch=b)
        _add_sequence(one, own, score_mod_grad, made.at((slice(None), rows), (slice(None), keys), b))
    return made.results()


def _check_rows(
    o: Array, d_o: Array, lse: Any, dlse: Any, shape: tuple[int, ...], function: str
) -> tuple[Array, Array | None]:
    """Shapes of what belongs to the rows of q; lse and dlse as arrays."""
    for name, x in (("o", o), ("do", d_o)):
        if x.shape != shape:
            raise ShapeError(name, f"(..., heads, seq, dim) = {shape}", f"{x.shape}", function=function)
    found: list[Array | None] = []
    for name, value in (("lse", lse), ("dlse", dlse)):
        rows = None if value is None else checks.as_array(value, name, function, ndim=len(shape) - 1)
        if rows is not None and rows.shape != shape[:-1]:
            raise ShapeError(name, f"shape {shape[:-1]}", f"{rows.shape}", function=function)
        found.append(rows)
    assert found[0] is not None
    return found[0], found[1]


class _Made:
    """The results of a call, and views of them for one sequence."""

    def __init__(
        self, wanted: Sequence[str], of_q: tuple[int, ...], of_k: tuple[int, ...], of_v: tuple[int, ...], mask: Any,
        heads_q: int, is_nhd: bool, derivative: ScoreFunction | None, options: Options, function: str,
    ) -> None:  # fmt: skip
        for name in wanted:
            if name not in GRADIENTS:
                raise ArgumentError("wanted", f"some of {GRADIENTS}", repr(name), function=function)
        own = None if mask is None else np.asarray(mask)
        if "dmask" in wanted and (own is None or own.dtype == np.bool_):
            raise ArgumentError("wanted", "no 'dmask' without an additive mask", "'dmask'", function=function)
        if options.score_mod is not None and derivative is None and {"dq", "dk"} & set(wanted):
            raise ArgumentError("score_mod_grad", "a function, with score_mod", "None", function=function)
        self._nhd = is_nhd
        self._mask_shape = () if own is None else own.shape
        shapes = {"dq": of_q, "dk": of_k, "dv": of_v, "dsinks": (heads_q,)}
        shapes["dmask"] = (1,) * (4 - len(self._mask_shape)) + self._mask_shape
        self._arrays: dict[str, Array] = {}
        for name in wanted:
            shape = shapes[name]
            if is_nhd and name in ("dq", "dk", "dv"):
                shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
            self._arrays[name] = np.zeros(shape, dtype=options.compute_dtype)

    def at(self, rows: Any, keys: Any = None, batch: int | None = None) -> dict[str, Array]:
        """Views of one sequence, heads first; that of dmask has the extents 1 of what is broadcast."""
        keys = rows if keys is None else keys
        b = rows[0] if batch is None else batch
        views = {}
        for name, x in self._arrays.items():
            if name == "dsinks":
                views[name] = x
            elif name == "dmask":
                views[name] = x[b if x.shape[0] > 1 else 0]
            else:
                heads_first = x.swapaxes(-3, -2) if self._nhd else x
                views[name] = heads_first[rows if name == "dq" else keys]
        return views

    def results(self) -> dict[str, Array]:
        """By name, in the caller's shapes."""
        if "dmask" in self._arrays:
            self._arrays["dmask"] = self._arrays["dmask"].reshape(self._mask_shape)
        return self._arrays


def _add_sequence(
    x: SequenceArrays, options: Options, derivative: ScoreFunction | None, made: dict[str, Array]
) -> None:
    """Add the gradients of one sequence to the arrays ``made``."""
    heads_q, seqlen_q, seqlen_k = x.q.shape[0], x.q.shape[1], x.k.shape[1]
    if heads_q == 0 or seqlen_q == 0:
        return
    dtype = options.compute_dtype
    group = heads_q // x.k.shape[0]
    rows = block_rows(seqlen_q, seqlen_k)
    # NaN and infinity are legal values, and each 0 * infinity that means nothing is caught.
    with np.errstate(all="ignore"):
        for head in range(heads_q):
            k, v = (np.asarray(y[head // group], dtype=dtype) for y in (x.k, x.v))
            for begin in range(0, seqlen_q, rows):
                end = min(begin + rows, seqlen_q)
                q, o, d_o, lse = (np.asarray(y[head, begin:end], dtype=dtype) for y in (x.q, x.o, x.d_o, x.lse))
                empty = np.isneginf(lse)
                delta = (d_o * o).sum(axis=-1)
                if x.dlse is not None:
                    delta -= x.dlse[head, begin:end]
                delta[empty] = 0
                if x.sinks is not None and "dsinks" in made:
                    sink = dtype.type(x.sinks[head])
                    part = np.where(empty, 0, np.exp(sink - lse))
                    made["dsinks"][head] -= np.where(part == 0, 0, part * delta).sum()
                lo, hi = key_range(begin, end, seqlen_q, seqlen_k, options)
                if hi == lo or not {"dq", "dk", "dv", "dmask"} & made.keys():
                    continue
                block = _Block(head, head // group, begin, end, lo, hi)
                mask = None if x.mask is None else x.mask[head, begin:end, lo:hi]
                hidden = outside_window(begin, end, lo, hi, seqlen_q, seqlen_k, options)
                hidden = np.zeros((end - begin, hi - lo), dtype=np.bool_) if hidden is None else hidden
                hidden |= empty[:, None]
                _add_block(block, (q, k[lo:hi], v[lo:hi], d_o, lse, delta), mask, hidden, options, derivative, made)


@dataclass(frozen=True)
class _Block:
    """Rows and keys of one head."""

    head: int
    kv_head: int
    begin: int
    end: int
    lo: int
    hi: int


def _add_block(
    at: _Block,
    arrays: tuple[Array, ...],
    mask: Array | None,
    hidden: Array,
    options: Options,
    derivative: ScoreFunction | None,
    made: dict[str, Array],
) -> None:
    """Add what a block of rows of one head gives. ``hidden`` is consumed."""
    q, k, v, d_o, lse, delta = arrays
    scale = options.compute_dtype.type(options.softmax_scale)
    scores = q @ k.T * scale
    factor: Array | None = None  # derivative of what becomes of scale * q.k
    if options.softcap > 0:
        cap = options.compute_dtype.type(options.softcap)
        scores = np.tanh(scores / cap)
        factor = 1 - scores * scores
        scores *= cap
    if options.score_mod is not None:
        place = (at.head, at.begin, at.lo)
        if derivative is not None:
            own = modified(derivative, "score_mod_grad", scores, options, *place)
            factor = own if factor is None else factor * own
        scores = modified(options.score_mod, "score_mod", scores, options, *place)
        hidden |= np.isneginf(scores)
    if mask is not None:
        if mask.dtype == np.bool_:
            hidden |= ~mask
        else:
            scores = scores + mask.astype(scores.dtype, copy=False)
            hidden |= np.isneginf(mask)
    p = np.exp(scores - lse[:, None])
    p[hidden] = 0
    kept = None if options.dropout is None else dropped(options, p.shape, at.head, at.begin, at.lo)
    if "dv" in made:
        made["dv"][at.kv_head, at.lo : at.hi] += _product((p if kept is None else p * kept).T, d_o, hidden.T)
    if not {"dq", "dk", "dmask"} & made.keys():
        return
    dp = d_o @ v.T
    if kept is not None:
        dp *= kept
    ds = p * (dp - delta[:, None])
    ds[hidden] = 0
    if "dmask" in made:
        _add_to_mask(made["dmask"], ds, at)
    if factor is not None:
        ds *= factor
        ds[hidden] = 0
    ds *= scale
    if "dq" in made:
        made["dq"][at.head, at.begin : at.end] += _product(ds, k, hidden)
    if "dk" in made:
        made["dk"][at.kv_head, at.lo : at.hi] += _product(ds.T, q, hidden.T)


def _product(weights: Array, values: Array, hidden: Array) -> Array:
    """weights @ values, to which a hidden pair adds nothing even where its value is NaN or infinite."""
    finite = np.isfinite(values)
    if finite.all():
        return np.asarray(weights @ values)
    total = np.asarray(weights @ np.where(finite, values, values.dtype.type(0)))
    # Which sums have such a value in them, by counting: exact in float32 up to 2**24 keys.
    total[(~hidden).astype(values.dtype) @ (~finite).astype(values.dtype) > 0] = np.nan
    return total


def _add_to_mask(dmask: Array, ds: Array, at: _Block) -> None:
    """dmask: (heads, queries, keys) of one sequence, with the extents 1 of what is broadcast."""
    head = at.head if dmask.shape[0] > 1 else 0
    by_row, by_key = dmask.shape[1] > 1, dmask.shape[2] > 1
    if not by_row:
        ds = ds.sum(axis=0, keepdims=True)
    if not by_key:
        ds = ds.sum(axis=1, keepdims=True)
    rows = slice(at.begin, at.end) if by_row else slice(0, 1)
    keys = slice(at.lo, at.hi) if by_key else slice(0, 1)
    dmask[head, rows, keys] += ds
