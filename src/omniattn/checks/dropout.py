"""What dropout of a call may be given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import arguments
from ..arrays import Tensor
from ..errors import ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError
from ..launch.dropout import RNG
from ..problems import AttentionProblem
from ..problems.dropout import DropoutProblem, dropout_of

#: Elements of a seed and an offset, by dtype.
ELEMENTS = {"int64": 2, "uint64": 2, "int32": 4, "uint32": 4}
#: What `dropout_rng` may be.
EXPECTED = (
    "(seed, offset), integers from 0 to 2**64 - 1, or an array of them: (2,) of int64 or uint64, or (4,) of int32 or "
    "uint32, the lower words first"
)
#: What comes without it, and how to pass it. Other libraries than torch have no generator to draw it from.
NOTHING_DRAWN = "None, which only torch, with a generator of its own, can draw"
EXAMPLE = "For example dropout_rng=(1234, 0), with another offset for each call"
#: The same of a backward.
FROM_FORWARD = "It is what the forward was given, dropout_rng=(1234, 0) say, or returned with return_rng=True"
#: Channels of a head at most.
MOST_CHANNELS = 256


def check_p(value: Any, function: str) -> float:
    """``dropout_p``: a share of the probabilities, at least 0 and less than 1."""
    p = arguments.check_number(value, "dropout_p", function, least=0.0)
    if not p < 1.0:
        raise ArgumentError("dropout_p", "a number of at least 0 and less than 1", repr(value), function=function)
    return p


def check_dropout(
    problem: AttentionProblem, tensors: Mapping[str, Tensor], p: float, with_score_mod: bool, function: str
) -> DropoutProblem | None:
    """The dropout of a call by p, which `check_p` has seen."""
    t = tensors.get(RNG)
    if t is None:
        raise ArgumentError("dropout_rng", EXPECTED, "None", function=function)
    if t.dtype not in ELEMENTS:
        raise DtypeError("dropout_rng", " or ".join(ELEMENTS), t.dtype, function=function)
    if tuple(t.shape) != (ELEMENTS[t.dtype],):
        expected = f"shape ({ELEMENTS[t.dtype]},) of {t.dtype}: seed and offset, the lower words first"
        raise ShapeError("dropout_rng", expected, f"{tuple(t.shape)}", function=function)
    if t.strides[0] != 1:
        raise StrideError("dropout_rng", "stride 1", f"{t.strides[0]}", function=function, hint="A copy has that")
    what = ""
    if problem.precision.quantized:
        what = "e4m3 arrays" if problem.descales is not None else f"precision={problem.precision.name!r}"
    elif problem.pages is not None:
        what = "block_table"
    elif with_score_mod:
        what = "score_mod"
    elif max(problem.head_dim, problem.head_dim_v) > MOST_CHANNELS and t.device == "cuda":
        what = f"a head_dim above {MOST_CHANNELS} on a GPU"
    elif problem.block_mask is not None and t.device == "cuda":
        what = "block_mask on a GPU"  # whose kernels could be compiled so, and have not run
    if what:
        raise UnsupportedError(f"{function}(): dropout_p={p:g} with {what}", instead="dropout_p=0.0")
    return dropout_of(p)
