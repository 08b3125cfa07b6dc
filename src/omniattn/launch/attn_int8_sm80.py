"""Launch of attention on mma.sync and operands in the sm80 grouping."""

from __future__ import annotations

from dataclasses import replace

from ..problems import AttentionProblem
from ..problems.quantize import Strides3, operand_strides
from ..problems.tile_order import num_m_blocks
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .attn_fwd import forward_values, tile_launches
from .attn_int8 import OperandPlaces
from .host_struct import member
from .structs import ATTN_FP8_FACTORS_SM89, ATTN_INT8_SM80


def build(spec: KernelSpec, problem: AttentionProblem, places: OperandPlaces) -> tuple[LaunchRecord, ...]:
    """The launches of a call; of its strides those of o, LSE and mask are used."""
    blocks = num_m_blocks(problem, spec.block_m)
    tiles = blocks * problem.num_q_heads * (1 if problem.varlen else problem.batch)
    assert problem.strides is not None
    # In units of 16 bits.
    of_q, of_k, of_v = (_halves(s) for s in (*places.strides, operand_strides(places.problem)[2]))
    own = replace(problem, strides=replace(problem.strides, q=of_q, k=of_k, v=of_v))
    at = places.at
    records = []
    for first, count in tile_launches(tiles):
        forward = forward_values(
            own, blocks, mask_extent=problem.mask_extent, tile_offset=first,
            operands=(at["q_int"], at["k_int"], at["v"]), starts=places.starts,
        )  # fmt: skip
        values = member("fwd", forward) | member("operands", places.values()) | member("scales", places.block_scales())
        layout = ATTN_INT8_SM80
        if spec.value_factors:
            layout = ATTN_FP8_FACTORS_SM89
            values |= member("factors", places.value_factors())
        records.append(LaunchRecord(spec, (count, 1, 1), 32 * spec.num_warps, *layout.pack(values)))
    return tuple(records)


def _halves(strides_bytes: Strides3) -> Strides3:
    batch, row, head = strides_bytes
    return batch // 2, row // 2, head // 2
