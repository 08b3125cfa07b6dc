"""`sparse_blocks` as an operator."""

from __future__ import annotations

from typing import Any

import torch

from ...plan.engine import Call
from .. import FUNCTIONS
from .caches import check_no_gradient
from .library import LIBRARY, TAGS, fail, plain

LIBRARY.define(
    "sparse_blocks(Tensor q, Tensor k, float[]? topk, float[]? cdf, float similarity, SymInt[] block_size, "
    "bool causal, SymInt keep_first, str layout) -> Tensor",
    tags=TAGS,
)


def _sparse_blocks(
    q: Any, k: Any, topk: Any, cdf: Any, similarity: float, size: Any, causal: bool, keep_first: int, layout: str
) -> torch.Tensor:
    made: torch.Tensor = FUNCTIONS["sparse_blocks"](
        q, k, topk=_given(topk), cdf=_given(cdf), similarity=similarity, block_size=tuple(size), causal=causal,
        keep_first=keep_first, layout=layout,
    )  # fmt: skip
    return made


def _given(shares: Any) -> Any:
    """What a caller gives for a list of shares."""
    return None if shares is None else shares[0] if len(shares) == 1 else tuple(shares)


def _listed(shares: Any, heads: int, name: str, function: str) -> Any:
    """The list of a share, or of one for each head."""
    if shares is None or not isinstance(shares, tuple):
        return None if shares is None else [shares]
    if len(shares) != heads:
        expected = f"a number, or {heads} of them, one for each query head"
        fail("argument", name, expected, f"{len(shares)} numbers", function=function)
    return list(shares)


def _shape(
    q: Any, k: Any, topk: Any, cdf: Any, similarity: Any, size: Any, causal: Any, keep_first: Any, layout: str
) -> torch.Tensor:
    seq, head = (1, 2) if layout == "NHD" else (2, 1)
    blocks = ((x.shape[seq] + n - 1) // n for x, n in zip((q, k), size, strict=True))
    made: torch.Tensor = q.new_empty((q.shape[0], q.shape[head], *blocks), dtype=torch.bool)
    return made


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("sparse_blocks", _sparse_blocks, _key)
torch.library.register_fake("omniattn::sparse_blocks", _shape, lib=LIBRARY)


def run(call: Call) -> list[Any]:
    """A call by its operator; results as `plan.engine.run`."""
    function = call.operation.name
    given = dict(zip(call.operation.arrays, call.objects, strict=True))
    if call.stream is not None:
        fail("argument", "stream", "None in a traced or compiled call", "one", function=function)
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            fail("argument", name, "a tensor", type(x).__name__, function=function)
    check_no_gradient(given)
    x = plain(call.options)
    size = x.block_size if isinstance(x.block_size, tuple) else (x.block_size, x.block_size)
    heads = given["q"].shape[2 if x.layout == "NHD" else 1]
    shares = (_listed(of, heads, name, function) for name, of in (("topk", x.topk), ("cdf", x.cdf)))
    options = (*shares, x.similarity, size, x.causal, x.keep_first, x.layout)
    return [torch.ops.omniattn.sparse_blocks.default(given["q"], given["k"], *options)]
