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
_THREADS = 256
# Enough CTAs to fill any GPU several times; the kernel strides over the rest.
_MAX_CTAS = 1 << 20

Strides3 = tuple[int, int, int]


def launch_merge_states(
    kernel: LoadedKernel,
    stream: int,
    pointers: tuple[int, int, int, int, int, int],
    o_strides: tuple[Strides3, Strides3, Strides3],
    lse_strides: tuple[Strides3, Strides3, Strides3],
    extents: tuple[int, int, int, int],
    itemsize: int,
) -> None:
    """Queue the kernel on ``stream``.

    Parameters
    ----------
    pointers : tuple of int
        o_a, o_b, o, lse_a, lse_b, lse.
    o_strides : (batch, seq, head) strides in elements of o_a, o_b, o.
    lse_strides : (batch, head, seq) strides in elements of lse_a, lse_b, lse.
    extents : (batch, seq, heads, head_dim).
    itemsize : int
        Bytes per element of o.
    """
    batch, seqlen, heads, head_dim = extents
    chunks = head_dim * itemsize // 16
    total = batch * seqlen * heads * chunks
    if total == 0:
        return
    data = _PARAMS.pack(
        *pointers,
        *(s for strides in o_strides for s in strides),
        *(s for strides in lse_strides for s in strides),
        total,
        seqlen,
        heads,
        chunks,
        0,
    )
    ctas = min(-(-total // _THREADS), _MAX_CTAS)
    kernel.launch((ctas, 1, 1), _THREADS, stream, PARAMS.write(data))
