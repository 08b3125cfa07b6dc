"""Attention of q, k and v that come in e4m3 with factors of the caller: FlashAttention-3's FP8 forward.

s_ij = scale descale_q descale_k (q_i . k_j);  p_ij = exp(s_ij - m);  o = sum e4m3(448 p_ij) descale_v v_j / (448 l)

With a factor f_j for each 128 keys of v: p_ij = exp(s_ij + log |f_j| - m);  l = sum p_ij / |f_j|;
o = sum e4m3(448 p_ij) sign(f_j) v_j / (448 l)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.errors import ShapeError
from omniattn.problems.quantize import BLOCK_ROWS, QuantizeProblem
from omniattn.reference import checks
from omniattn.reference.core import Array
from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.reference.low_precision import Product, attend, widened
from omniattn.reference.quantize import Sequence, sequences
from omniattn.reference.varlen import check_cu_seqlens

_NAME = "reference.e4m3_arrays.attention"
_F = np.float32


def attention(
    q: npt.NDArray[np.uint8],
    k: npt.NDArray[np.uint8],
    v: npt.NDArray[np.uint8],
    *,
    descale_q: npt.ArrayLike | None = None,
    descale_k: npt.ArrayLike | None = None,
    descale_v: npt.ArrayLike | None = None,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_k: npt.ArrayLike | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    key_tile: int = BLOCK_ROWS,
    accumulator: str = "fp32",
) -> tuple[Array, Array]:
    """Attention of e4m3 bytes.

    Parameters
    ----------
    q, k, v : ndarray, uint8
        Bytes of e4m3; shapes as in `omniattn.attention` and `omniattn.attention_varlen`.
    descale_q, descale_k, descale_v : array_like, optional
        1 unless given: (), (1,), (batch, num_kv_heads) or (batch, heads, blocks of 128 rows).
    key_tile : int
        Keys between two updates of the running maximum.
    accumulator : "fp32", "two_level" or "single_level"
        As in `low_precision.attention`.
    layout, causal, window, softmax_scale, softcap, mask, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in `omniattn.reference.attention` and `attention_varlen`.

    Returns
    -------
    o : ndarray, float32
        Shape and layout of q, with the head_dim of v.
    lse : ndarray, float32
    """
    checks.check_layout(layout, _NAME)
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    ndim, is_nhd = 3 if varlen else 4, layout == "NHD"
    named = ((q, "q"), (k, "k"), (v, "v"))
    qh, kh, vh = (checks.heads_first(decode_e4m3(x), name, _NAME, ndim, is_nhd) for x, name in named)
    checks.check_heads(qh, kh, vh, _NAME)
    starts_q = starts_k = None
    if varlen:
        starts_q = np.array(check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", qh.shape[1]))
        starts_k = np.array(check_cu_seqlens(cu_seqlens_k, "cu_seqlens_k", kh.shape[1]))
    batch = qh.shape[0] if starts_k is None else len(starts_k) - 1
    head_dim, head_dim_v = qh.shape[-1], vh.shape[-1]
    qh, kh, vh = (widened(x, max(head_dim, head_dim_v)) for x in (qh, kh, vh))
    problem = QuantizeProblem(
        "float32", batch, qh.shape[-2], kh.shape[-2], qh.shape[-3], kh.shape[-3], qh.shape[-1], varlen, "float8_e4m3",
        "per_block", smooth_k=False, row_bias="none", v=False,
    )  # fmt: skip
    all_q, all_k = sequences(problem, problem.rows_q, starts_q), sequences(problem, problem.rows_k, starts_k)
    shapes = problem.shapes()
    out = {
        "q_int": encode_e4m3(qh), "k_int": encode_e4m3(kh),
        "q_scale": _by_block(descale_q, "descale_q", problem, all_q, problem.heads_q, shapes["q_scale"][0]),
        "k_scale": _by_block(descale_k, "descale_k", problem, all_k, problem.heads_kv, shapes["k_scale"][0]),
    }  # fmt: skip
    of_v = _by_block(descale_v, "descale_v", problem, all_k, problem.heads_kv, shapes["k_scale"][0])
    by_block = np.ndim(0 if descale_v is None else descale_v) == 3
    o, lse = attend(
        problem, out, vh if by_block else _scaled(vh, of_v, problem, all_k), starts_q, starts_k,
        options=checks.make_options(head_dim, causal, window, softmax_scale, softcap, _F, _NAME),
        product=Product("fp8", key_tile, accumulator), mask=mask, sinks=sinks, longest_q=max_seqlen_q,
        longest_k=max_seqlen_k, v_factor=of_v if by_block else None,
    )  # fmt: skip
    o = o[..., :head_dim_v]
    return (np.ascontiguousarray(o.swapaxes(-3, -2)) if is_nhd else o), lse


def _by_block(
    factor: Any, name: str, problem: QuantizeProblem, rows: list[Sequence], heads: int, shape: tuple[int, ...]
) -> Array:
    """A factor for each block of 128 rows of each head, where `QuantizeProblem` has its scales."""
    out = np.ones(shape, dtype=_F)
    if factor is None:
        return out
    given, group = np.asarray(factor, dtype=_F), heads // max(problem.heads_kv, 1)
    if given.shape not in ((), (1,), (problem.batch, problem.heads_kv)) and (
        given.ndim != 3 or given.shape[:2] != (problem.batch, heads)
    ):
        expected = f"(), ({problem.batch}, {problem.heads_kv}) or ({problem.batch}, {heads}, blocks)"
        raise ShapeError(name, expected, f"shape {given.shape}", function=_NAME)
    for s in rows:
        first, count = s.slot(BLOCK_ROWS, problem.varlen), -(-s.length // BLOCK_ROWS)
        for head in range(heads):
            place = out[head] if problem.varlen else out[s.batch, head]
            if given.ndim < 2:
                place[first : first + count] = given
            elif given.ndim == 2:
                place[first : first + count] = given[s.batch, head // group]
            else:
                place[first : first + count] = given[s.batch, head, :count]
    return out


def _scaled(v: Array, factors: Array, problem: QuantizeProblem, rows: list[Sequence]) -> Array:
    """V times its factors; what belongs to no sequence stays as it is."""
    out = np.array(v, dtype=_F)
    for s in rows:
        block = s.slot(BLOCK_ROWS, problem.varlen) + np.arange(s.length) // BLOCK_ROWS
        span = slice(s.begin, s.begin + s.length)
        for head in range(problem.heads_kv):
            place, own = (out[head], factors[head]) if problem.varlen else (out[s.batch, head], factors[s.batch, head])
            place[span] *= own[block][:, None]
    return out
