"""Launch of ``merge_states_sm80``."""

from __future__ import annotations

from ..problems import MergeProblem, Target
from ..problems.memory import ITEMSIZE
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .host_struct import At, strides
from .structs import MERGE_STATES

_THREADS = 256
# Enough CTAs to fill any GPU several times; the kernel strides over the rest.
_MAX_CTAS = 1 << 20
#: Operands by the names of the struct's pointers.
OPERANDS: dict[str, At | None] = {
    "o_a": At("o_a"),
    "o_b": At("o_b"),
    "o": At("o"),
    "lse_a": At("lse_a"),
    "lse_b": At("lse_b"),
    "lse": At("lse"),
    "seq_lens": None,
}


def build(
    spec: KernelSpec, problem: MergeProblem, target: Target, operands: dict[str, At | None] = OPERANDS
) -> tuple[LaunchRecord, ...]:
    """The launch of a call; none where there is nothing to merge.

    ``operands``: where the arrays are. With ``seq_lens``, side a does not count for sequences of length 0.
    """
    shape = problem.shape if len(problem.shape) == 4 else (1, *problem.shape)
    batch, seqlen, heads, head_dim = shape
    chunks = head_dim * ITEMSIZE[problem.dtype] // 16
    total = batch * seqlen * heads * chunks
    if total == 0:
        return ()
    values: dict[str, object] = dict(operands)
    for name, three in zip(("o_a", "o_b", "o"), problem.o_strides, strict=True):
        values |= strides(name, three)
    for name, (b, h, s) in zip(("lse_a", "lse_b", "lse"), problem.lse_strides, strict=True):
        values |= strides(name, (b, s, h))
    values |= {"total": total, "seqlen": seqlen, "num_heads": heads, "chunks": chunks, "reserved": 0}
    grid = (min(-(-total // _THREADS), _MAX_CTAS), 1, 1)
    return (LaunchRecord(spec, grid, _THREADS, *MERGE_STATES.pack(values)),)
