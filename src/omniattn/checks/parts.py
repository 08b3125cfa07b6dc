"""What the division of packed sequences may be given; `ops.used` has looked at the caller's arrays before."""

from __future__ import annotations

from .. import arrays
from ..arrays import Tensor
from ..plan.engine import Call
from ..problems import PartsProblem
from . import values

#: The arrays of a call, in its order.
ARRAYS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


def check_parts(call: Call, tensors: dict[str, Tensor]) -> PartsProblem:
    """The problem of a call."""
    function = call.operation.name
    cu_q, cu_k = tensors["cu_seqlens_q"], tensors["cu_seqlens_k"]
    for t in (cu_q, cu_k):
        values.check_like(t, tuple(cu_q.shape[:1]), "int32", function)
    batch = cu_q.shape[0] - 1
    used = [tensors.get(name) for name in ARRAYS[2:]]
    for given in used:
        if given is not None:
            values.check_like(given, (batch,), "int32", function)
    arrays.require_same_device(tensors.values())
    steps = [None if t is None else t.strides[0] for t in used]
    return PartsProblem(batch, (cu_q.strides[0], cu_k.strides[0]), (steps[0], steps[1]))
