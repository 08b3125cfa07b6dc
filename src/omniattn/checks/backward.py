"""What ``attention_backward`` and ``attention_varlen_backward`` may be given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from .. import arrays, runtime
from ..arrays import Tensor
from ..errors import ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError
from ..plan.engine import Call
from ..problems import GRADIENTS, AttentionProblem, BackwardProblem, BackwardStrides
from ..problems.score_mod import ScoreModProblem
from . import attention as checks
from . import extras, values

#: What a gradient that the caller gives an array for is called among the arrays of a call.
GIVEN = {"dq": "given.dq", "dk": "given.dk", "dv": "given.dv"}
#: The caller's arrays, in the order of a call.
ARRAYS = ("q", "k", "v", "do", "o", "lse", "dlse", "cu_seqlens_q", "cu_seqlens_k", "mask", "sinks", *GIVEN.values())
#: Those of calls of packed sequences.
PACKED_ARRAYS = (*ARRAYS, *checks.USED)
#: Those that have to be there.
REQUIRED = ("q", "k", "v", "do", "o", "lse")
#: Those that kernels access 16 bytes at a time.
ALIGNED = frozenset({"q", "k", "v", "do", "o", *GIVEN.values()})
#: Names of arrays in errors.
LABELS = {array: name for name, array in GIVEN.items()}


class BackwardOptions(NamedTuple):
    """Everything that is no array: the fields of `checks.attention.AttentionOptions`, and what is wanted."""

    layout: Any
    causal: Any
    window: Any
    softmax_scale: Any
    softcap: Any
    deterministic: Any
    wanted: tuple[str, ...]
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    precision: str = "exact"
    return_lse: bool = True
    out_dtype: Any = None


def check_wanted(wanted: Any, with_sinks: bool, function: str) -> tuple[str, ...]:
    """Names of gradients, in the caller's order; all but dmask unless given."""
    if wanted is None:
        return GRADIENTS[:4] if with_sinks else GRADIENTS[:3]
    expected = "a tuple of names, each once: " + ", ".join(map(repr, GRADIENTS))
    names = tuple(wanted) if isinstance(wanted, (tuple, list)) else ()
    if not names or any(name not in GRADIENTS for name in names) or len(set(names)) < len(names):
        raise ArgumentError("wanted", expected, repr(wanted), function=function)
    return names


def check_backward(call: Call, tensors: dict[str, Tensor]) -> BackwardProblem:
    """The problem of a call."""
    function, wanted = call.operation.name, call.options.wanted
    forward = checks.check_attention(call, tensors)
    q, mask = tensors["q"], tensors.get("mask")
    if "dsinks" in wanted and forward.sinks == "none":
        raise ArgumentError("wanted", "no 'dsinks' without sinks", repr(wanted), function=function)
    if "dmask" in wanted and forward.mask in ("none", "bool"):
        kind = "a boolean mask" if mask is not None else "no mask"
        raise ArgumentError("wanted", "'dmask' with an additive mask only", f"{kind}", function=function)
    for name, array in GIVEN.items():
        if array in tensors and name not in wanted:
            raise ArgumentError(name, f"None, because {name!r} is not in wanted", "an array", function=function)
    forward = _with_rows(forward, tensors, function)
    if call.facts.__class__ is tuple:
        forward = extras.with_extras(forward, call, tensors, _check_score_mod)
    problem = BackwardProblem(
        forward, tuple(name for name in GRADIENTS if name in wanted), "dlse" in tensors,
        tuple(mask.shape) if mask is not None and "dmask" in wanted else (), forward.deterministic,
    )  # fmt: skip
    shapes = {output.name: output.shape for output in problem.outputs}
    strides = {}
    for name, array in GIVEN.items():
        shape = shapes.get(name, ())
        given = tensors.get(array)
        if given is not None:
            values.check_like(given, shape, q.dtype, function)
            values.check_strides(given, function, written=True)
        own = arrays.contiguous_strides(shape) if given is None else tuple(given.strides)
        strides[name] = checks.canonical_strides(shape, own, forward.layout, forward.varlen) if shape else (0, 0, 0)
    do, dlse = tensors["do"], tensors.get("dlse")
    dmask = [0] * (4 - len(problem.dmask_shape))
    dmask += [
        s if n > 1 else 0
        for n, s in zip(problem.dmask_shape, arrays.contiguous_strides(problem.dmask_shape), strict=True)
    ]
    return replace(
        problem,
        strides=BackwardStrides(
            checks.canonical_strides(do.shape, do.strides, forward.layout, forward.varlen),
            strides["dq"], strides["dk"], strides["dv"], (0, 0) if dlse is None else _row_strides(dlse),
            (dmask[0], dmask[1], dmask[2], dmask[3]),
        ),
    )  # fmt: skip


def _with_rows(forward: AttentionProblem, tensors: dict[str, Tensor], function: str) -> AttentionProblem:
    """The forward with the facts of o, do, lse and dlse."""
    q, o, do = tensors["q"], tensors["o"], tensors["do"]
    of_rows = [tensors[name] for name in ("lse", "dlse") if name in tensors]
    for t in (o, do):
        values.check_like(t, forward.o_shape, q.dtype, function)
    values.check_strides(o, function)
    dtypes = ("float32", "float64") if q.dtype == "float64" else ("float32",)
    for t in of_rows:
        if t.dtype not in dtypes:
            raise DtypeError(t.argument, " or ".join(dtypes), t.dtype, function=function)
        if tuple(t.shape) != forward.lse_shape:
            raise ShapeError(t.argument, f"shape {forward.lse_shape}", f"{tuple(t.shape)}", function=function)
    maps = forward.tensor_maps
    if q.device == "cuda":
        values.check_strides(do, function)
        for t in of_rows:
            # Libraries may give any strides to an array without elements.
            if 0 not in t.shape and t.shape[-1] > 1 and t.strides[-1] != 1:
                raise StrideError(
                    t.argument, "stride 1 along the sequence", f"strides {tuple(t.strides)}", function=function,
                    hint="A contiguous copy has such strides",
                )  # fmt: skip
        maps = maps and all(map(checks.describable, (o, do))) and runtime.has_tensor_maps()
    assert forward.strides is not None
    of_o = checks.canonical_strides(o.shape, o.strides, forward.layout, forward.varlen)
    strides = replace(forward.strides, o=of_o, lse=_row_strides(tensors["lse"]))
    return replace(forward, lse=True, tensor_maps=maps, strides=strides)


def _check_score_mod(forward: AttentionProblem, call: Call, tensors: dict[str, Tensor], texts: Any) -> ScoreModProblem:
    function, mod, on_cpu = call.operation.name, call.subject, tensors["q"].device == "cpu"
    if mod.grad is None and not (on_cpu and mod.reference_grad is not None):
        raise UnsupportedError(
            f"{function}(): a score_mod without its derivative",
            instead="ScoreMod(..., grad=the derivative of the new score by the old one, an expression over the same "
            "names)",
        )
    if on_cpu and mod.reference is not None and mod.reference_grad is None:
        raise UnsupportedError(
            f"{function}(): arrays on the CPU, and a score_mod whose derivative only a GPU can compute",
            instead="ScoreMod(..., reference_grad=a NumPy function of the same), or arrays on a GPU",
        )
    found = extras.check_score_mod(forward, call, tensors, texts)
    return replace(found, grad=mod.grad)


def _row_strides(t: Tensor) -> tuple[int, int]:
    """Strides (batch, head) of an LSE; 0 where the extent is 1."""
    own = [0 if n == 1 else s for n, s in zip(t.shape, t.strides, strict=True)]
    return (0 if len(own) == 2 else own[0], own[-2])
