"""Which blocks of attention are worth computing, predicted from the means of blocks (SpargeAttn, Zhang et al. 2025)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.problems.sparse import Shares
from omniattn.problems.sparse_blocks import SparseBlocksProblem, count_of_share

Array = npt.NDArray[Any]


def block_means(x: Array, size: int) -> tuple[Array, Array]:
    """(means, similarities) of blocks of ``size`` rows; the last one may have fewer.

    Parameters
    ----------
    x : array, (..., rows, head_dim)
    size : int

    Returns
    -------
    means : array, (..., blocks, head_dim), float64
    similarities : array, (..., blocks), float64
        The mean cosine of all pairs of rows of a block, a row with itself included: the square of the length of the
        mean of the rows' directions. Rows of zeros have no direction, and count as a cosine of 0.
    """
    rows = x.shape[-2]
    starts = np.arange(0, rows, size)
    x = x.astype(np.float64)
    if not rows:
        return np.zeros((*x.shape[:-2], 0, x.shape[-1])), np.zeros((*x.shape[:-2], 0))
    counts = np.minimum(size, rows - starts)[:, None]
    with np.errstate(invalid="ignore"):
        lengths = np.sqrt((x * x).sum(-1, keepdims=True))
        directions = np.divide(x, lengths, out=np.zeros_like(x), where=lengths != 0)
        means, mean_directions = (np.add.reduceat(y, starts, axis=-2) / counts for y in (x, directions))
        return means, (mean_directions**2).sum(-1)


def visible_blocks(seqlen_q: int, seqlen_k: int, size: tuple[int, int], causal: bool) -> npt.NDArray[np.bool_]:
    """(blocks of queries, blocks of keys): those in which some query sees some key, aligned at the bottom right."""
    last_query = np.minimum(np.arange(0, seqlen_q, size[0]) + size[0], seqlen_q)[:, None] - 1
    first_key = np.arange(0, seqlen_k, size[1])[None]
    every = np.ones((last_query.size, first_key.size), dtype=np.bool_)
    return first_key <= last_query + seqlen_k - seqlen_q if causal else every


def sparse_blocks(
    q: Array,
    k: Array,
    *,
    topk: Shares | None = None,
    cdf: Shares | None = None,
    similarity: float = -0.1,
    block_size: tuple[int, int] = (128, 64),
    causal: bool = False,
    keep_first: int = 0,
    layout: str = "NHD",
) -> npt.NDArray[np.bool_]:
    """The block mask; arguments as those of `omniattn.sparse_blocks`, one of topk and cdf given."""
    of_q, of_k = (x.swapaxes(1, 2) if layout == "NHD" else x for x in (q, k))
    batch, heads, seqlen_q, head_dim = of_q.shape
    heads_kv, seqlen_k = of_k.shape[1:3]
    group = heads // max(heads_kv, 1)
    means_q, similar_q = block_means(of_q, block_size[0])
    means_k, similar_k = (np.repeat(x, group, axis=1) for x in block_means(of_k, block_size[1]))
    visible = visible_blocks(seqlen_q, seqlen_k, block_size, causal)
    kept = np.zeros((batch, heads, *visible.shape), dtype=np.bool_)
    if not kept.size:
        return kept
    # Comparisons that NaN fails: what nothing is known of is kept.
    odd_q, odd_k = ~(similar_q > similarity), ~(similar_k > similarity)
    with np.errstate(invalid="ignore"):
        scores = means_q @ np.swapaxes(means_k, -1, -2) * head_dim**-0.5
    candidates = visible & ~odd_k[:, :, None]
    kept |= odd_q[..., None] | odd_k[:, :, None]
    kept |= ~np.isfinite(scores)
    candidates &= np.isfinite(scores)
    scores = np.where(candidates, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    # Of equal scores those with the lowest numbers come first.
    order = np.argsort(-scores, axis=-1, kind="stable")
    if topk is not None:
        n = visible.shape[1]
        counts = np.array([count_of_share(x, n) for x in (topk if isinstance(topk, tuple) else (topk,))])
        chosen = np.broadcast_to(np.arange(n) < counts[:, None, None], scores.shape)
    else:
        assert cdf is not None
        ordered = np.take_along_axis(weights, order, -1)
        sums = np.cumsum(ordered, -1)
        chosen = sums <= np.reshape(cdf, (-1, 1, 1)) * sums[..., -1:]
        chosen[..., 0] = True
    of_block = np.zeros_like(kept)
    np.put_along_axis(of_block, order, chosen, -1)
    kept |= of_block & candidates
    kept[..., :keep_first] = True
    return kept & visible


def blocks_of(problem: SparseBlocksProblem, q: Array, k: Array) -> npt.NDArray[np.bool_]:
    """The block mask of a call that has been checked."""
    p = problem
    return sparse_blocks(
        q, k, topk=p.topk, cdf=p.cdf, similarity=p.similarity, block_size=p.block_size, causal=p.causal,
        keep_first=p.keep_first, layout=p.layout,
    )  # fmt: skip
