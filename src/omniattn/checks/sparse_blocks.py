"""What ``sparse_blocks`` may be given."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import arguments, arrays
from ..arrays import Tensor
from ..errors import ArgumentError
from ..plan.engine import Call
from ..problems.sparse import check_heads, shares_of
from ..problems.sparse_blocks import SparseBlocksProblem
from . import values
from .attention import canonical_strides, check_kernels
from .extras import check_block_size

_NAME = "sparse_blocks"
#: The caller's arrays, in the order of a call.
ARRAYS = ("q", "k")
#: Those that kernels access 16 bytes at a time.
ALIGNED = frozenset({"q", "k"})


class SparseBlocksOptions(NamedTuple):
    """Everything that is no array, as the caller gave it."""

    topk: Any
    cdf: Any
    similarity: Any
    block_size: Any
    causal: Any
    keep_first: Any
    layout: Any


def check_sparse_blocks(call: Call, tensors: dict[str, Tensor]) -> SparseBlocksProblem:
    """The problem of a call."""
    options, q, k = call.options, tensors["q"], tensors["k"]
    layout = options.layout
    values.check_layout(layout, _NAME)
    topk, cdf = (shares_of(getattr(options, name), name, _NAME) for name in ("topk", "cdf"))
    if (topk is None) == (cdf is None):
        received = "neither" if topk is None else "both"
        raise ArgumentError("topk", "a share of the blocks, or cdf, a share of their weights", received, function=_NAME)
    similarity = arguments.check_number(options.similarity, "similarity", _NAME)
    size = check_block_size(options.block_size, _NAME)
    causal = arguments.check_bool(options.causal, "causal", _NAME)
    keep_first = arguments.check_int(options.keep_first, "keep_first", _NAME, most=arguments.MAX_ROWS)
    values.check_qkv(q, k, k, 4, layout, _NAME)
    arrays.require_same_device(tensors.values())
    for t in (q, k):
        values.check_strides(t, _NAME)
    seq, head = (1, 2) if layout == "NHD" else (2, 1)
    strides_q, strides_k = (canonical_strides(tuple(t.shape), tuple(t.strides), layout, False) for t in (q, k))
    for name, shares in (("topk", topk), ("cdf", cdf)):
        check_heads(shares, q.shape[head], name, _NAME)
    problem = SparseBlocksProblem(
        q.dtype, q.shape[0], q.shape[seq], k.shape[seq], q.shape[head], k.shape[head], q.shape[-1], size, topk, cdf,
        similarity, causal, keep_first, layout, strides_q, strides_k,
    )  # fmt: skip
    if q.device == "cuda":
        check_kernels(problem, _NAME)
    return problem
