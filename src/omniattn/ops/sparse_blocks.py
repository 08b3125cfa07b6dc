"""``sparse_blocks``: which blocks of attention are worth computing."""

from __future__ import annotations

from typing import Any

from .. import arguments, arrays
from ..arrays import Tensor
from ..checks import sparse_blocks as checks
from ..checks.memory import check_memory
from ..checks.sparse_blocks import SparseBlocksOptions
from ..frameworks import FUNCTIONS, compiling
from ..plan.engine import Call, Operation, repeated, run, store_results
from ..plan.others import plan_sparse_blocks
from ..problems.sparse_blocks import SparseBlocksProblem
from .traced import run_traced


def _on_cpu(call: Call, problem: SparseBlocksProblem, tensors: dict[str, Tensor]) -> list[Any]:
    from ..reference.sparse_blocks import blocks_of

    arrays.prepare([tensors["q"]], call.stream)  # refuses a stream
    found = blocks_of(problem, *(arrays.to_numpy(tensors[name]) for name in ("q", "k")))
    return store_results(call, problem, tensors, [found])


_SPARSE_BLOCKS = Operation(
    "sparse_blocks", checks.ARRAYS, checks.check_sparse_blocks, check_memory, plan_sparse_blocks, _on_cpu, ("q", "k"),
    checks.ALIGNED, given={}, traced=run_traced,
)  # fmt: skip


def sparse_blocks(
    q: Any,
    k: Any,
    *,
    topk: Any = None,
    cdf: Any = None,
    similarity: float = -0.1,
    block_size: int | tuple[int, int] = (128, 64),
    causal: bool = False,
    keep_first: int = 0,
    layout: str = "NHD",
    stream: Any = None,
) -> Any:
    """A block mask for `attention`: the blocks that are predicted to have the largest weights (SpargeAttn).

    ::

        score[i, j] = mean(q[block i]) . mean(k[block j]) / sqrt(head_dim);  weight = exp(score - max of the row)

    Of each block of queries those blocks of keys are kept that have the largest scores: a share ``topk`` of all, or as
    many as make up at most a share ``cdf`` of the weights; at least one. A block whose rows do not resemble each other
    is not represented by its mean: blocks of keys whose similarity is not above ``similarity`` are kept by all queries
    and have no weight, blocks of queries keep all keys. Similarity is the mean cosine of all pairs of rows of a block,
    a number from 0 to 1.

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_q_heads, head_dim) for "NHD", (batch, num_q_heads, seqlen_q, head_dim) for "HND"
        As that of `attention`, not in e4m3. On a GPU head_dim is at most 256.
    k : array
        As that of `attention`.
    topk : float or sequence of float, optional
        A share of all blocks of keys, above 0, at most 1: of n blocks floor(topk * n), in float32, and at least one.
        With ``causal`` n counts hidden blocks too, as SpargeAttn has it. Or one for each query head, in a tuple, a list
        or an array, whose numbers are read now; on a GPU of up to 256 heads.
    cdf : float or sequence of float, optional
        In its place a share of the weights, above 0, at most 1, or one for each query head.
    similarity : float
        With the default, below 0, all blocks resemble themselves.
    block_size : int or (int, int)
        Queries and keys of a block, multiples of 64; the last blocks may be smaller. On a GPU there may be 12288 blocks
        of keys.
    causal : bool
        Blocks that no query of the block sees are not kept (aligned at the bottom right, as in `attention`).
    keep_first : int
        So many blocks of keys, from the first one on, are always kept: 1 for attention sinks.
    layout : "NHD" or "HND"
    stream : optional
        As in `attention`.

    Returns
    -------
    blocks : array, (batch, num_q_heads, blocks of queries, blocks of keys), bool
        Of q's framework. With the same ``block_size`` a block_mask of `attention`.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    Source: SpargeAttn (Zhang et al. 2025), section 3.2. K is taken as it is, not minus its mean, which changes
    similarities alone. Blocks with NaN or infinity in q or k are kept. Of equal scores those of the first blocks are
    kept. The CPU computes in double precision, a GPU in float32: of nearly equal scores they may keep others. GPUs:
    compute capability 8.0 and newer; arrays on the CPU run the NumPy reference. Nothing is synchronized. No gradients.
    """
    objects = (q, k)
    topk, cdf = (arguments.listed(x) for x in (topk, cdf))
    options = SparseBlocksOptions(topk, cdf, similarity, block_size, causal, keep_first, layout)
    if compiling():
        return run_traced(Call(_SPARSE_BLOCKS, objects, options, stream))[0]
    known = repeated(_SPARSE_BLOCKS, objects, options, stream)
    return (run(Call(_SPARSE_BLOCKS, objects, options, stream), is_asked=True) if known is None else known)[0]


FUNCTIONS["sparse_blocks"] = sparse_blocks
