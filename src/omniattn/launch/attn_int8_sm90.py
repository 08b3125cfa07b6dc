"""Launch of ``attn_int8_sm90``: quantization first, unless that has been done; then attention on the integers."""

from __future__ import annotations

import struct

from ..problem import Problem
from ..registry import KernelSpec
from ..runtime import LoadedKernel
from .attn_fwd import REST_BYTES, ForwardStrides, num_m_blocks, pack_rest
from .attn_fwd_sm90 import tiles_of
from .params import PARAMS
from .quantize import QuantizePlan, QuantizeProblem
from .quantized_attention import OPERANDS, QuantizedAttentionPlan
from .tensor_maps import MappedOperand

# Behind QuantizedOperands: TileList; flush_keys.
_TAIL = struct.Struct("<4Ii")
# Tensor maps, AttnFwdParams, QuantizedOperands, the tail; a multiple of 64, as the struct is.
_ARGUMENTS = struct.Struct(f"<128s128s128s9Q{REST_BYTES}s{OPERANDS.size}s{_TAIL.size}s60x")
#: Keys whose products with V the tensor cores sum by themselves, with 13 bits and by truncation. If V has one sign,
#: outputs shrink by 0.4 % over 256 keys, by 4 % over 2048. V without its mean has no such loss
#: (docs/performance/attn_int8_sm90.md).
FLUSH_KEYS = 256
FLUSH_KEYS_SMOOTH_V = 2048


class Int8Sm90Plan(QuantizedAttentionPlan):
    """A call in the sm90 grouping; of ``strides`` those of o and LSE are used."""

    __slots__ = ("_grid", "_k", "_q", "_rest", "_tail", "_v")

    def __init__(
        self,
        spec: KernelSpec,
        kernel: LoadedKernel | None,
        quantizer: QuantizePlan | QuantizeProblem,
        problem: Problem,
        strides: ForwardStrides,
        sm_count: int,
    ) -> None:
        blocks, batch = num_m_blocks(problem, spec.block_m), 1 if problem.varlen else problem.batch
        super().__init__(spec, kernel, quantizer, blocks * batch * problem.num_q_heads)
        operands, shapes = self.operands, self.operands.shapes()
        tiles = tiles_of(problem, spec, blocks, sm_count)
        self._grid = (min(tiles.num_items, sm_count), 1, 1)
        self._rest = pack_rest(problem, strides, (0, 0), blocks)
        pad = operands.head_dim_pad
        flush_keys = FLUSH_KEYS_SMOOTH_V if operands.smooth_v else FLUSH_KEYS
        self._tail = _TAIL.pack(tiles.num_items, tiles.num_pairs, tiles.num_tail_heads, tiles.lead_rows, flush_keys)
        row = min(spec.head_dim, 128)
        rows_q, rows_k = problem.seqlen_q, problem.seqlen_k
        self._q = MappedOperand(
            "uint8",
            (pad, rows_q, problem.num_q_heads, batch),
            (pad, pad * rows_q, pad * rows_q * problem.num_q_heads),
            (row, spec.block_m, 1, 1),
        )
        self._k = self._v = self._q  # without keys nothing is copied, but a map of zero rows cannot be made
        if rows_k:
            heads, keys = problem.num_kv_heads, shapes["v"][0][-1]
            self._k = MappedOperand(
                "uint8",
                (pad, rows_k, heads, batch),
                (pad, pad * rows_k, pad * rows_k * heads),
                (row, spec.block_n, 1, 1),
            )
            self._v = MappedOperand(
                "uint8",
                (keys, pad, heads, batch),
                (keys, keys * pad, keys * pad * heads),
                (spec.block_n, spec.head_dim, 1, 1),
            )

    @property
    def num_ctas(self) -> int:
        """CTAs of the attention kernel."""
        return self._grid[0]

    @property
    def _attention_launches(self) -> int:
        return 1

    def _queue(
        self,
        kernel: LoadedKernel,
        stream: int,
        operands: tuple[int, int, int],
        rest: bytes,
        pointers: tuple[int, ...],
    ) -> None:
        at_q, at_k, at_v = operands
        if self._k is self._q:
            at_k = at_v = at_q
        _ARGUMENTS.pack_into(
            PARAMS.buffer, 0, self._q.at(at_q, kernel), self._k.at(at_k, kernel), self._v.at(at_v, kernel),
            *pointers, self._rest, rest, self._tail,
        )  # fmt: skip
        kernel.launch(self._grid, self.threads, stream, PARAMS.address)
