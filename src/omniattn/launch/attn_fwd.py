"""Launch of the exact forward kernels: tiles, arguments (``kernels_cu/scheduler/fwd_params.cuh``), grids."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..problem import Problem
from ..registry import KernelSpec
from ..runtime import LoadedKernel
from .params import MAX_GRID_X, PARAMS

# The fields of AttnFwdParams in order, little-endian, no padding.
_POINTERS = struct.Struct("<9Q")  # q k v o lse cu_seqlens_q cu_seqlens_k mask sinks; 0 for what is absent
_REST = struct.Struct(
    "<12q"  # strides of q k v o: batch, seq, head
    "2q"  # lse: batch, head
    "4q"  # mask: batch, head, query, key
    "q"  # tile_offset
    "3i"  # batch, num_q_heads, num_kv_heads
    "2i"  # seqlen_q, seqlen_k
    "2i"  # mask_rows, mask_cols
    "i"  # head_dim
    "2i"  # window_left, window_right
    "i"  # num_m_blocks
    "2i"  # mask_kind, sinks_kind
    "2f"  # softmax_scale, softcap
    "i"  # zero; and the size is a multiple of 8
)
# The same struct where all behind the pointers is packed already.
_ARGUMENTS = struct.Struct(f"<9Q{_REST.size}s")
#: Bytes of AttnFwdParams behind the pointers.
REST_BYTES = _REST.size
_MASK_KINDS = {"none": 0, "bool": 1, "float32": 2, "io": 3}
_SINKS_KINDS = {"none": 0, "float32": 1, "io": 2}

Strides3 = tuple[int, int, int]


@dataclass(frozen=True)
class ForwardStrides:
    """Element strides of a call's arrays, in the order (batch, seq, head); extents of 1 have stride 0."""

    q: Strides3
    k: Strides3
    v: Strides3
    o: Strides3
    lse: tuple[int, int]
    mask: tuple[int, int, int, int]


def pack_rest(
    problem: Problem,
    strides: ForwardStrides,
    mask_extent: tuple[int, int],
    num_m_blocks: int,
    *,
    tile_offset: int = 0,
) -> bytes:
    """All fields of AttnFwdParams behind the pointers."""
    return _REST.pack(
        *strides.q,
        *strides.k,
        *strides.v,
        *strides.o,
        *strides.lse,
        *strides.mask,
        tile_offset,
        problem.batch,
        problem.num_q_heads,
        problem.num_kv_heads,
        problem.seqlen_q,
        problem.seqlen_k,
        *mask_extent,
        problem.head_dim,
        problem.window_left,
        problem.window_right,
        num_m_blocks,
        _MASK_KINDS[problem.mask],
        _SINKS_KINDS[problem.sinks],
        problem.softmax_scale,
        problem.softcap,
        0,
    )


def num_m_blocks(problem: Problem, block_m: int) -> int:
    """Blocks of query rows for each head: of one sequence, or for packed ones a bound that holds for any lengths."""
    blocks = -(-problem.seqlen_q // block_m)
    if problem.varlen and blocks:
        # One partly filled block a sequence, and one each before and behind all sequences.
        blocks += problem.batch + 2
    return blocks


class ForwardPlan:
    """Everything about a call but its pointers, packed once and used at every call with the same shapes."""

    __slots__ = ("kernel", "launches", "num_tiles", "threads")

    workspace_bytes = 0

    def __init__(
        self,
        spec: KernelSpec,
        kernel: LoadedKernel | None,
        problem: Problem,
        strides: ForwardStrides,
        mask_extent: tuple[int, int],
    ) -> None:
        self.kernel = kernel
        self.threads = spec.num_warps * 32
        blocks = num_m_blocks(problem, spec.block_m)
        self.num_tiles = blocks * problem.num_q_heads * (1 if problem.varlen else problem.batch)
        self.launches: list[tuple[tuple[int, int, int], bytes]] = []
        for offset in range(0, self.num_tiles, MAX_GRID_X):
            rest = pack_rest(problem, strides, mask_extent, blocks, tile_offset=offset)
            self.launches.append(((min(MAX_GRID_X, self.num_tiles - offset), 1, 1), rest))

    @property
    def num_ctas(self) -> int:
        """CTAs of all launches of a call."""
        return self.num_tiles

    def launch(self, stream: int, pointers: tuple[int, ...]) -> None:
        """Queue the kernel on ``stream``; ``pointers`` in the order of `_POINTERS`, 0 for what is absent."""
        kernel = self.kernel
        if kernel is None:
            raise RuntimeError("a plan without a loaded kernel describes a call, it cannot run one")
        for grid, rest in self.launches:
            _ARGUMENTS.pack_into(PARAMS.buffer, 0, *pointers, rest)
            kernel.launch(grid, self.threads, stream, PARAMS.address)
