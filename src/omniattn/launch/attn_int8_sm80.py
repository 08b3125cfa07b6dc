"""Launch of attention on mma.sync, sm80 grouping: ``attn_int8_sm80``, ``attn_int8_mbarrier_sm90``."""

from __future__ import annotations

import struct
from dataclasses import replace

from ..problem import Problem
from ..registry import KernelSpec
from ..runtime import LoadedKernel
from .attn_fwd import REST_BYTES, ForwardStrides, Strides3, num_m_blocks, pack_rest
from .params import MAX_GRID_X, PARAMS
from .quantize import QuantizePlan, QuantizeProblem
from .quantized_attention import OPERANDS, QuantizedAttentionPlan

# AttnFwdParams and QuantizedOperands.
_ARGUMENTS = struct.Struct(f"<9Q{REST_BYTES}s{OPERANDS.size}s")


def operand_strides(quantized: QuantizeProblem) -> tuple[Strides3, Strides3, Strides3]:
    """Strides (batch, row, head) of q_int, k_int and v in units of 16 bits; of e4m3 v a row is a channel."""
    shapes = quantized.shapes()
    sizes = {"int8": 1, "uint8": 1, "float16": 2}
    found: list[Strides3] = []
    for name in ("q_int", "k_int", "v"):
        shape, dtype = shapes[name]
        row = shape[-1] * sizes[dtype] // 2
        head = shape[-2] * row
        found.append((0 if quantized.varlen else shape[-3] * head, row, head))
    return found[0], found[1], found[2]


class Int8Sm80Plan(QuantizedAttentionPlan):
    """A call in the sm80 grouping; of ``strides`` those of o, LSE and mask are used."""

    __slots__ = ("_launches",)

    def __init__(
        self,
        spec: KernelSpec,
        kernel: LoadedKernel | None,
        quantizer: QuantizePlan | QuantizeProblem,
        problem: Problem,
        strides: ForwardStrides,
        mask_extent: tuple[int, int],
    ) -> None:
        blocks = num_m_blocks(problem, spec.block_m)
        tiles = blocks * problem.num_q_heads * (1 if problem.varlen else problem.batch)
        super().__init__(spec, kernel, quantizer, tiles)
        of_q, of_k, of_v = operand_strides(self.operands)
        own = replace(strides, q=of_q, k=of_k, v=of_v)
        self._launches: list[tuple[tuple[int, int, int], bytes]] = []
        for offset in range(0, tiles, MAX_GRID_X):
            rest = pack_rest(problem, own, mask_extent, blocks, tile_offset=offset)
            self._launches.append(((min(MAX_GRID_X, tiles - offset), 1, 1), rest))

    @property
    def num_ctas(self) -> int:
        """CTAs of the attention kernel."""
        return self.num_tiles

    @property
    def _attention_launches(self) -> int:
        return len(self._launches)

    def _queue(
        self,
        kernel: LoadedKernel,
        stream: int,
        operands: tuple[int, int, int],
        rest: bytes,
        pointers: tuple[int, ...],
    ) -> None:
        for grid, forward in self._launches:
            _ARGUMENTS.pack_into(PARAMS.buffer, 0, *operands, *pointers[3:], forward, rest)
            kernel.launch(grid, self.threads, stream, PARAMS.address)
