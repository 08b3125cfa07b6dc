"""A call of one query, told to kernels as one of more queries and fewer heads."""

from __future__ import annotations

from dataclasses import replace

from .attention import UNLIMITED, AttentionProblem


def heads_as_queries(problem: AttentionProblem) -> AttentionProblem:
    """The same call with the query heads of a kv head as queries of one head; ``problem`` where that is not the same.

    Kernels that form scores one by one have a head's queries in a tile: of one query they would read K and V for each
    query head, with one row in a tile. The plain ones share tiles among heads by themselves where they split keys
    (`problems.split`).
    """
    p, s = problem, problem.strides
    group = p.num_q_heads // max(p.num_kv_heads, 1)
    alike = p.window_left == p.window_right == UNLIMITED and p.sinks == "none"
    alike = alike and p.score_mod is None and p.block_mask is None
    if p.varlen or p.seqlen_q != 1 or group <= 1 or s is None or p.precision.quantized or not (p.score_mods and alike):
        return problem
    heads = p.num_kv_heads

    def rows(strides: tuple[int, int, int]) -> tuple[int, int, int]:
        """(batch, seq, head) of the rows."""
        return strides[0], strides[2], strides[2] * group if heads > 1 else 0

    of_batch, of_head, _, of_key = s.mask
    folded = replace(
        s, q=rows(s.q), o=rows(s.o), lse=(s.lse[0], group if heads > 1 else 0),
        mask=(of_batch, of_head * group if heads > 1 else 0, of_head, of_key),
    )  # fmt: skip
    return replace(p, seqlen_q=group, num_q_heads=heads, strides=folded)
