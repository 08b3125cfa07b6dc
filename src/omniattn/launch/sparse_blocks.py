"""Launches of ``block_means_sm80`` and ``choose_blocks_sm80``."""

from __future__ import annotations

from ..problems.quantize import carve
from ..problems.sparse_blocks import SparseBlocksProblem, count_of_share
from ..registry import KernelSpec
from ..registry.sparse_blocks import CHOSEN_ROWS, CHOSEN_SCORES, MAX_SHARES
from ..runtime.record import LaunchRecord
from .host_struct import At
from .structs import BLOCK_MEANS, CHOOSE_BLOCKS


def build(
    means: KernelSpec, choosing: KernelSpec, problem: SparseBlocksProblem, memory: At, blocks: At | None = None
) -> tuple[tuple[LaunchRecord, ...], int, At]:
    """The launches that predict, the bytes of memory that they need, and where the blocks are.

    Parameters
    ----------
    means, choosing : KernelSpec
    problem : SparseBlocksProblem
    memory : At
        At a multiple of `WORKSPACE_ALIGNMENT`.
    blocks : At, optional
        Where the blocks go; in that memory unless given.
    """
    p = problem
    q_blocks, k_blocks = p.blocks
    heads_q, heads_kv = p.batch * p.num_q_heads, p.batch * p.num_kv_heads
    if 0 in (heads_q, q_blocks, k_blocks):
        return (), 0, memory if blocks is None else blocks
    offsets, num_bytes = carve(
        {
            **({} if blocks is not None else {"blocks": ((heads_q, q_blocks, k_blocks), "bool")}),
            "q_means": ((heads_q, q_blocks, p.head_dim), "float32"),
            "k_means": ((heads_kv, p.head_dim, k_blocks), "float32"),
            "q_similar": ((heads_q, q_blocks), "float32"),
            "k_similar": ((heads_kv, k_blocks), "float32"),
        }
    )
    at = {name: At(memory.operand, memory.offset + offset) for name, offset in offsets.items()}
    made = at.pop("blocks") if blocks is None else blocks
    common: dict[str, object] = {
        **at,
        "num_q_heads": p.num_q_heads,
        "num_kv_heads": p.num_kv_heads,
        "head_dim": p.head_dim,
        "seqlen_q": p.seqlen_q,
        "seqlen_k": p.seqlen_k,
        "block_q": p.block_size[0],
        "block_k": p.block_size[1],
        "q_blocks": q_blocks,
        "k_blocks": k_blocks,
    }
    strides = {
        f"{x}_stride_{of}": stride
        for x, all_of in (("q", p.q_strides), ("k", p.k_strides))
        for of, stride in zip("bsh", all_of, strict=True)
    }
    first = {**common, "q": At("q"), "k": At("k"), **strides, "q_ctas": heads_q * q_blocks}
    grid = (heads_q * q_blocks + heads_kv * k_blocks, 1, 1)
    given = p.cdf if p.topk is None else p.topk
    assert given is not None
    shares = given if isinstance(given, tuple) else (given,)
    if p.topk is not None:
        shares = tuple(float(count_of_share(x, k_blocks)) for x in shares)
    rows = min(CHOSEN_ROWS, CHOSEN_SCORES // k_blocks)
    second = {
        **common,
        "blocks": made,
        "rows": rows,
        "by_count": int(p.topk is not None),
        "num_shares": len(shares),
        "causal": int(p.causal),
        "keep_first": p.keep_first,
        "similarity": p.similarity,
        "scale": p.head_dim**-0.5,
        "shares": shares + (0.0,) * (MAX_SHARES - len(shares)),
    }
    return (
        (
            LaunchRecord(means, grid, 32 * means.num_warps, *BLOCK_MEANS.pack(first)),
            LaunchRecord(
                choosing, (heads_q * -(-q_blocks // rows), 1, 1), 32 * choosing.num_warps, *CHOOSE_BLOCKS.pack(second)
            ),
        ),
        num_bytes,
        made,
    )
