"""What ``merge_states`` may be given."""

from __future__ import annotations

from typing import NamedTuple

from .. import arguments, arrays
from ..arrays import Tensor
from ..errors import DtypeError, ShapeError
from ..plan.engine import Call
from ..problems import MergeProblem
from . import values

_NAME = "merge_states"
#: The caller's arrays, in the order of a call.
ARRAYS = ("o_a", "o_b", "lse_a", "lse_b", "out")
#: Those that kernels access 16 bytes at a time.
ALIGNED = frozenset({"o_a", "o_b", "out"})


class MergeOptions(NamedTuple):
    """There are none."""


def check_merge(call: Call, tensors: dict[str, Tensor]) -> MergeProblem:
    """The problem of a call."""
    a, b, out = tensors["o_a"], tensors["o_b"], tensors.get("out")
    log_a, log_b = tensors["lse_a"], tensors["lse_b"]
    allowed = ("float16", "bfloat16", "float32") + (("float64",) if a.device == "cpu" else ())
    if a.dtype not in allowed:
        raise DtypeError("o_a", " or ".join(allowed), a.dtype, function=_NAME)
    if len(a.shape) not in (3, 4):
        expected = "(batch, seqlen, heads, head_dim) or (rows, heads, head_dim)"
        raise ShapeError("o_a", expected, f"{tuple(a.shape)}", function=_NAME)
    head_dim = a.shape[-1]
    if not (8 <= head_dim <= arguments.MAX_HEAD_DIM and head_dim % 8 == 0):
        expected = f"head_dim a multiple of 8 from 8 to {arguments.MAX_HEAD_DIM}"
        raise ShapeError("o_a", expected, f"{head_dim}", function=_NAME)
    if a.shape[-3] > arguments.MAX_ROWS:
        raise ShapeError("o_a", f"at most {arguments.MAX_ROWS} rows", f"{a.shape[-3]}", function=_NAME)
    values.check_like(b, a.shape, a.dtype, _NAME)
    lse_shape = (*a.shape[:-3], a.shape[-2], a.shape[-3])
    values.check_like(log_a, lse_shape, "float32", _NAME)
    values.check_like(log_b, lse_shape, "float32", _NAME)
    if out is not None:
        values.check_like(out, a.shape, a.dtype, _NAME)
    arrays.require_same_device([a, b, log_a, log_b, *([] if out is None else [out])])
    for t in (a, b, out):
        if t is not None:
            values.check_strides(t, _NAME, written=t is out)
    shape = tuple(a.shape)
    o = arrays.contiguous_strides(shape) if out is None else tuple(out.strides)
    return MergeProblem(
        a.dtype, shape, (_three(a.strides[:-1]), _three(b.strides[:-1]), _three(o[:-1])),
        (_three(log_a.strides), _three(log_b.strides), _three(arrays.contiguous_strides(lse_shape))),
    )  # fmt: skip


def _three(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Strides (batch, x, y); those of a packed array have no batch."""
    return (0, strides[0], strides[1]) if len(strides) == 2 else (strides[0], strides[1], strides[2])
