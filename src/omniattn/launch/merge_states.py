"""Launch of ``merge_states_sm80`` (arguments: ``kernels_cu/entry/merge_states_sm80.cu``)."""

from __future__ import annotations

import struct

from ..runtime import LoadedKernel
from .params import PARAMS

_PARAMS = struct.Struct(
    "<6Q"  # o_a o_b o lse_a lse_b lse
    "9q"  # strides of o_a, o_b, o: batch, seq, head
    "9q"  # strides of lse_a, lse_b, lse: batch, head, seq
    "q"  # total: rows * chunks
    "4i"  # seqlen, num_heads, chunks, reserved
)
# The same struct where all behind the pointers is packed already.
_REST_BYTES = _PARAMS.size - 48
_ARGUMENTS = struct.Struct(f"<6Q{_REST_BYTES}s")
_THREADS = 256
# Enough CTAs to fill any GPU several times; the kernel strides over the rest.
_MAX_CTAS = 1 << 20

Strides3 = tuple[int, int, int]


class MergePlan:
    """Everything about a call but its pointers, packed once and used at every call with the same shapes and strides.

    Parameters
    ----------
    kernel : LoadedKernel
    o_strides : (batch, seq, head) strides in elements of o_a, o_b, o.
    lse_strides : (batch, head, seq) strides in elements of lse_a, lse_b, lse.
    extents : (batch, seq, heads, head_dim).
    itemsize : int
        Bytes per element of o.
    """

    __slots__ = ("_grid", "_rest", "kernel")

    def __init__(
        self,
        kernel: LoadedKernel,
        o_strides: tuple[Strides3, Strides3, Strides3],
        lse_strides: tuple[Strides3, Strides3, Strides3],
        extents: tuple[int, int, int, int],
        itemsize: int,
    ) -> None:
        self.kernel = kernel
        batch, seqlen, heads, head_dim = extents
        chunks = head_dim * itemsize // 16
        total = batch * seqlen * heads * chunks
        packed = _PARAMS.pack(
            *(0, 0, 0, 0, 0, 0),
            *(s for strides in o_strides for s in strides),
            *(s for strides in lse_strides for s in strides),
            total,
            seqlen,
            heads,
            chunks,
            0,
        )
        self._rest = packed[-_REST_BYTES:]
        self._grid = (min(-(-total // _THREADS), _MAX_CTAS), 1, 1)

    def launch(self, stream: int, pointers: tuple[int, int, int, int, int, int]) -> None:
        """Queue the kernel on ``stream``; ``pointers`` are o_a, o_b, o, lse_a, lse_b, lse."""
        if self._grid[0] == 0:
            return
        _ARGUMENTS.pack_into(PARAMS.buffer, 0, *pointers, self._rest)
        self.kernel.launch(self._grid, _THREADS, stream, PARAMS.address)
