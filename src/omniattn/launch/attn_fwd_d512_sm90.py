"""Launch of ``attn_fwd_d512_sm90``: clusters of two CTAs, tensor maps, list of tiles."""

from __future__ import annotations

from ..problems import AttentionProblem
from ..problems.split import Whole
from ..problems.tile_order import num_m_blocks
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .attn_fwd import forward_values
from .attn_fwd_sm90 import operand_map, tile_values
from .host_struct import member
from .masks import MaskPlaces
from .score_mod import array_values
from .score_mods import bias_map, score_mod_values
from .structs import ATTN_FWD_MODS_SM90, ATTN_FWD_SM90, ATTN_FWD_USER_MOD_SM90

#: Rows of one copy of v (``kUnitKeysV`` of kernels_cu/attention/halved_o_producer.cuh).
_ROWS_OF_V = 32


def build(
    spec: KernelSpec, problem: AttentionProblem, order: Whole, masks: MaskPlaces | None = None
) -> tuple[LaunchRecord, ...]:
    """The launch of a call; none where there is no query.

    order: the list of tiles, and the clusters that share it. masks: what was made of the mask.
    """
    p, s = problem, problem.strides
    blocks, batch = num_m_blocks(p, spec.block_m), 1 if p.varlen else p.batch
    if blocks * batch * p.num_q_heads == 0:
        return ()
    assert s is not None
    assert order.tiles is not None, "persistent kernels have a list of tiles"
    q = operand_map("q", p.dtype, (batch, p.seqlen_q, p.num_q_heads, p.head_dim), s.q, spec.block_m)
    k = v = q  # without keys nothing is copied, but a map of no rows cannot be made
    if p.seqlen_k > 0:
        rows = spec.block_n // spec.cluster  # a CTA's keys of a step
        k = operand_map("k", p.dtype, (batch, p.seqlen_k, p.num_kv_heads, p.head_dim), s.k, rows)
        v = operand_map("v", p.dtype, (batch, p.seqlen_k, p.num_kv_heads, p.head_dim_v), s.v, _ROWS_OF_V)
    values = {"map_q": q, "map_k": k, "map_v": v, **tile_values(order.tiles)}
    layout = ATTN_FWD_SM90
    if spec.masks == "none":
        values |= member("fwd", forward_values(p, blocks))
    else:
        layout = ATTN_FWD_MODS_SM90
        values |= member("fwd", forward_values(p, blocks, mask_extent=p.mask_extent))
        values |= {"map_bias": bias_map(spec, p, q, masks), **member("mods", score_mod_values(p, masks))}
    if p.score_mod is not None:
        layout = ATTN_FWD_USER_MOD_SM90
        values |= member("arrays", array_values(p.score_mod))
    grid = (spec.cluster * order.ctas, 1, 1)
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *layout.pack(values)),)
