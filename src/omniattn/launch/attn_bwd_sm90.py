"""Launch of ``attn_bwd_sm90``: tensor maps, persistent grid, order of the tiles of keys."""

from __future__ import annotations

from ..problems import UNLIMITED, Target
from ..problems.backward import BackwardProblem
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from . import tile_order
from .attn_bwd_sm80 import BackwardPlaces, backward_values, num_n_blocks
from .attn_fwd_sm90 import operand_map, tile_values
from .structs import ATTN_BWD_SM90, member


def tiles_of(problem: BackwardProblem, spec: KernelSpec, sm_count: int) -> tile_order.TileList:
    """In which order the persistent kernel ``spec`` takes the tiles of keys of every kv head.

    With causality a tile is the longer the nearer it is to key 0; the list's last block is the longest one.
    """
    f = problem.forward
    blocks, heads = num_n_blocks(f, spec.block_n), f.num_kv_heads * f.batch
    if heads * blocks and f.window_right != UNLIMITED and f.window_left == UNLIMITED:
        offset = f.seqlen_q - f.seqlen_k - f.window_right
        first_rows = (min(max(n * spec.block_n + offset, 0), f.seqlen_q) for n in reversed(range(blocks)))
        return tile_order.causal(heads, [1 - (-(f.seqlen_q - row) // spec.block_m) for row in first_rows], sm_count)
    return tile_order.head_by_head(heads, blocks)


def build(
    spec: KernelSpec, problem: BackwardProblem, at: BackwardPlaces, dq_columns: int, target: Target
) -> tuple[LaunchRecord, ...]:
    """The launch that makes dk and dv, and the sums of dq; none where there is no key.

    Without queries nothing is copied and the results are zeros, but a map of zero rows cannot be made: k stands in.
    """
    f, s = problem.forward, problem.strides
    assert s is not None and f.strides is not None
    tiles = tiles_of(problem, spec, target.sm_count)
    if tiles.num_items == 0:
        return ()
    q_shape = (f.batch, f.seqlen_q, f.num_q_heads, f.head_dim)
    kv_shape = (f.batch, f.seqlen_k, f.num_kv_heads, f.head_dim)
    k = operand_map("k", f.dtype, kv_shape, f.strides.k, spec.block_n)
    q = d_o = k
    if f.seqlen_q:
        q = operand_map("q", f.dtype, q_shape, f.strides.q, spec.block_m)
        d_o = operand_map("do", f.dtype, q_shape, s.d_o, spec.block_m)
    values = {
        "map_q": q,
        "map_k": k,
        "map_v": operand_map("v", f.dtype, kv_shape, f.strides.v, spec.block_n),
        "map_do": d_o,
        **member("bwd", backward_values(problem, at, dq_columns=dq_columns, n_blocks=num_n_blocks(f, spec.block_n))),
        **tile_values(tiles),
    }
    grid = (min(tiles.num_items, target.sm_count), 1, 1)
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *ATTN_BWD_SM90.pack(values)),)
