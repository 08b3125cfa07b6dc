"""Launch of ``attn_fwd_sm90``: tensor maps, persistent grid, order of the tiles."""

from __future__ import annotations

import struct
from dataclasses import replace

from ..problem import UNLIMITED, Problem
from ..registry import KernelSpec
from ..runtime import LoadedKernel
from . import tile_order
from .attn_fwd import REST_BYTES, ForwardStrides, num_m_blocks, pack_rest
from .params import PARAMS
from .tensor_maps import MappedOperand

_TILE_LIST = struct.Struct("<4I16x")  # and the padding of a struct that is aligned to 64 bytes
# Three tensor maps, the pointers, and all that is packed already.
_ARGUMENTS = struct.Struct(f"<128s128s128s9Q{REST_BYTES + _TILE_LIST.size}s")
_GROUP_ROWS = 64  # query rows of a warpgroup
_PANEL = 64  # columns of one copy: 128 bytes, the width of the swizzle


def _tile_lengths(problem: Problem, spec: KernelSpec, blocks: int, lead_rows: int) -> list[int]:
    """Tiles of keys that each block of query rows looks at, and one for what it costs to begin and end a block."""
    offset = problem.seqlen_k - problem.seqlen_q + problem.window_right
    last_rows = (min((m + 1) * spec.block_m - lead_rows, problem.seqlen_q) for m in range(blocks))
    keys = (min(max(row + offset, 0), problem.seqlen_k) for row in last_rows)
    return [1 - (-n // spec.block_n) for n in keys]


def tiles_of(problem: Problem, spec: KernelSpec, blocks: int, sm_count: int) -> tile_order.TileList:
    """In which order the persistent kernel ``spec`` takes its ``blocks`` blocks of query rows of every head."""
    heads = problem.num_q_heads * (1 if problem.varlen else problem.batch)
    causal = problem.window_right != UNLIMITED and problem.window_left == UNLIMITED
    if heads * blocks and causal and not problem.varlen:
        # Tiles grow with their row. Rows that fill up the last tile go before the first one, where keys are few; whole
        # warpgroups of them, and not with delta_s, whose blocks of 128 rows start at row 0.
        spare = blocks * spec.block_m - problem.seqlen_q
        lead_rows = 0 if "smooth_q" in spec.features else spare // _GROUP_ROWS * _GROUP_ROWS
        order = tile_order.causal(heads, _tile_lengths(problem, spec, blocks, lead_rows), sm_count)
        return replace(order, lead_rows=lead_rows)
    return tile_order.head_by_head(heads, blocks)


def _operand(dtype: str, shape: tuple[int, int, int, int], strides: tuple[int, int, int], rows: int) -> MappedOperand:
    """One of q, k, v: (batch, seq, heads, head_dim) with the strides (batch, seq, head) in elements of two bytes."""
    batch, seqlen, heads, head_dim = shape
    strides_bytes = (2 * strides[1], 2 * strides[2], 2 * strides[0])
    return MappedOperand(dtype, (head_dim, seqlen, heads, batch), strides_bytes, (_PANEL, rows, 1, 1))


class ForwardSm90Plan:
    """Everything about a call but its pointers; the same interface as `ForwardPlan`."""

    __slots__ = ("_grid", "_k", "_q", "_rest", "_v", "kernel", "num_tiles", "threads")

    workspace_bytes = 0

    def __init__(
        self,
        spec: KernelSpec,
        kernel: LoadedKernel | None,
        problem: Problem,
        strides: ForwardStrides,
        sm_count: int,
    ) -> None:
        self.kernel = kernel
        self.threads = spec.num_warps * 32
        blocks, batch = num_m_blocks(problem, spec.block_m), 1 if problem.varlen else problem.batch
        heads = batch * problem.num_q_heads
        self.num_tiles = blocks * heads
        tiles = tiles_of(problem, spec, blocks, sm_count)
        self._grid = (min(tiles.num_items, sm_count), 1, 1)
        self._rest = pack_rest(problem, strides, (0, 0), blocks)
        self._rest += _TILE_LIST.pack(tiles.num_items, tiles.num_pairs, tiles.num_tail_heads, tiles.lead_rows)
        q_shape = (batch, problem.seqlen_q, problem.num_q_heads, problem.head_dim)
        kv_shape = (batch, problem.seqlen_k, problem.num_kv_heads, problem.head_dim)
        self._q = _operand(problem.dtype, q_shape, strides.q, spec.block_m)
        # Without keys nothing is copied, but a map of zero rows cannot be made: the rows of q stand in.
        empty = problem.seqlen_k == 0
        self._k = self._q if empty else _operand(problem.dtype, kv_shape, strides.k, spec.block_n)
        self._v = self._q if empty else _operand(problem.dtype, kv_shape, strides.v, spec.block_n)

    @property
    def num_ctas(self) -> int:
        """CTAs of a launch."""
        return self._grid[0]

    def launch(self, stream: int, pointers: tuple[int, ...]) -> None:
        """Queue the kernel on ``stream``; ``pointers`` as `ForwardPlan.launch` takes them."""
        if self.num_tiles == 0:
            return
        kernel = self.kernel
        if kernel is None:
            raise RuntimeError("a plan without a loaded kernel describes a call, it cannot run one")
        q, k, v = pointers[:3]
        if self._k is self._q:
            k = v = q
        _ARGUMENTS.pack_into(
            PARAMS.buffer, 0, self._q.at(q, kernel), self._k.at(k, kernel), self._v.at(v, kernel), *pointers, self._rest
        )
        kernel.launch(self._grid, self.threads, stream, PARAMS.address)
