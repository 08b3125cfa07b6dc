"""Calls as kernels are told of them: one query as more queries of fewer heads, and numbers a key as tiles."""

from __future__ import annotations

from dataclasses import replace

from .attention import UNLIMITED, AttentionProblem
from .split import shared_rows, tiles_of_group
from .target import Target

#: Compute capability of the kernels whose heads can share tiles that have a bias, and the keys for each query from
#: which on that gains: those of few queries are split.
_HOPPER, _KEYS_FOR_EACH = (9, 0), 16
#: Of the tile that one query's heads share.
_ROWS = 64


def _shares_no_tiles(problem: AttentionProblem, group: int) -> bool:
    """Whether the heads that can share a tile of 64 rows are so few that it takes more than twice as many tiles."""
    return tiles_of_group(problem, _ROWS, shared_rows(problem, _ROWS)) > 2 * -(-group // _ROWS)


def heads_as_queries(problem: AttentionProblem) -> AttentionProblem:
    """The same call with the query heads of a kv head as queries of one head; ``problem`` where that is not the same.

    Kernels that form scores one by one have a head's queries in a tile: of one query they would read K and V for each
    query head, with one row in a tile. The plain ones share tiles among heads by themselves where they split keys
    (`problems.split`), but for groups like Falcon's 71, which no number of rows divides.
    """
    p, s = problem, problem.strides
    group = p.num_q_heads // max(p.num_kv_heads, 1)
    alike = p.window_left == p.window_right == UNLIMITED and p.sinks == "none"
    alike = alike and p.score_mod is None and p.block_mask is None
    if p.varlen or p.seqlen_q != 1 or group <= 1 or s is None or p.precision.quantized or not alike:
        return problem
    if not p.score_mods and not _shares_no_tiles(p, group):
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
    # Rows of a mask that differs between heads are those of a head's queries now.
    return replace(
        p, seqlen_q=group, num_q_heads=heads, strides=folded, mask_map=p.mask_map or p.keys_map, keys_map=False
    )


def keys_as_tiles(problem: AttentionProblem, target: Target) -> AttentionProblem:
    """The same call with an additive mask of numbers a key, which differ between heads, read as tiles of queries and
    keys; ``problem`` where that gains nothing.

    Heads with other numbers a key cannot share the rows of a tile, as those of a kv head do where queries are few;
    those with other tiles of a bias can. A tensor map repeats the numbers for every query.
    """
    p, s = problem, problem.strides
    if target.cc != _HOPPER or p.varlen or s is None or p.precision.quantized or p.operands is not None:
        return problem
    if p.mask_form != "keys" or not p.keys_map or p.score_mod is not None:
        return problem
    few = p.num_q_heads > p.num_kv_heads and p.seqlen_k >= _KEYS_FOR_EACH * p.seqlen_q > 0
    return replace(p, keys_as_tiles=True, mask_map=True) if few else problem
