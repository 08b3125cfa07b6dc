"""`quantize_qk` and `quantize_v` as operators, and attention on what they give.

A quantized operand is arrays and a problem, the facts about them. Operators take and give the arrays; the problem of
arrays without memory comes of their shapes, which are constants of what is compiled.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...arrays import Tensor
from ...checks import quantize as checks
from ...checks.operands import arrays_of, check_kinds
from ...plan.engine import Call
from ...problems import OPERANDS, QuantizeCall, QuantizedQK, QuantizedV, QuantizeProblem
from .. import FUNCTIONS
from .e4m3 import check_out_dtype
from .library import LIBRARY, TAGS, fail, plain, precision_of, precision_text

LIBRARY.define(
    "quantize_qk(Tensor q, Tensor k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, str layout, str dtype, "
    "str? granularity, str grouping, bool? smooth_k, bool smooth_q, int? max_seqlen_q, int? max_seqlen_k, "
    "bool with_bias, bool? hadamard, int seed) -> Tensor[]",
    tags=TAGS,
)
LIBRARY.define(
    "quantize_v(Tensor v, Tensor? cu_seqlens_k, str layout, str dtype, bool smooth_v, str pv_accumulator, "
    "int? max_seqlen_k) -> Tensor[]",
    tags=TAGS,
)
LIBRARY.define(
    "attention_quantized(Tensor q_int, Tensor q_scale, Tensor? row_bias, Tensor? delta_s, Tensor k_int, "
    "Tensor k_scale, Tensor v, Tensor v_scale, Tensor v_mean, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? mask, Tensor? sinks, "
    "str[] problems, bool one_pair, int[] longest, str layout, bool causal, SymInt[]? window, float? softmax_scale, "
    "float softcap, bool deterministic, str precision, bool return_lse) -> (Tensor, Tensor)",
    tags=TAGS,
)

_ARRAYS = {"quantize_qk": checks.ARRAYS_QK, "quantize_v": checks.ARRAYS_V}
_CHECKS = {"quantize_qk": checks.check_quantize_qk, "quantize_v": checks.check_quantize_v}
_OPTIONS: dict[str, Any] = {"quantize_qk": checks.QuantizeQKOptions, "quantize_v": checks.QuantizeVOptions}


# --- Quantizers ------------------------------------------------------------------------------------------------------


def _facts(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Facts of a tensor as constants: torch.compile makes another graph for another shape."""
    if x is None:
        return None
    shape, strides = tuple(int(n) for n in x.shape), tuple(int(n) for n in x.stride())
    return shape, strides, str(x.dtype), x.device.type, x.device.index or 0


@torch.compiler.assume_constant_result
def _problem(function: str, options: tuple[Any, ...], facts: tuple[Any, ...]) -> QuantizeCall:
    """The problem of a call, from facts of its arrays; raises as the call itself."""
    tensors = {}
    for name, x in zip(_ARRAYS[function], facts, strict=True):
        if x is not None:
            t = Tensor.__new__(Tensor)
            t.shape, t.strides, dtype, t.device, t.ordinal = x
            t.dtype, t.ptr, t.argument, t.framework = dtype.removeprefix("torch."), 0, name, "torch"
            tensors[name] = t
    call = Call(FUNCTIONS[f"operation of {function}"], (), _OPTIONS[function](*options))  # type: ignore[arg-type]
    return _CHECKS[function](call, tensors)


@torch.compiler.assume_constant_result
def _names(function: str, options: tuple[Any, ...], facts: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(o.name for o in _problem(function, options, facts).outputs)


@torch.compiler.assume_constant_result
def _inner(function: str, options: tuple[Any, ...], facts: tuple[Any, ...]) -> QuantizeProblem:
    return _problem(function, options, facts).problem


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _quantizer_shapes(function: str) -> Any:
    count = len(_ARRAYS[function])

    def shapes(*arguments: Any) -> list[torch.Tensor]:
        tensors, options = arguments[:count], arguments[count:]
        problem = _problem(function, options, tuple(_facts(x) for x in tensors))
        return [tensors[0].new_empty(o.shape, dtype=_dtype(o.dtype)) for o in problem.outputs]

    return shapes


def _quantizer_kernel(function: str) -> Any:
    count = len(_ARRAYS[function])

    def kernel(*arguments: Any) -> list[torch.Tensor]:
        return list(FUNCTIONS[f"run {function}"](arguments[:count], _OPTIONS[function](*arguments[count:])))

    return kernel


#: Objects that are constants of a graph; torch.compile of older versions fails over the first number in one.
_KEEPS_OBJECTS = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 8)


def trace(function: str, objects: Sequence[Any], options: Any) -> tuple[dict[str, Any], QuantizeProblem]:
    """A call of a quantizer by its operator: the arrays of the problem's outputs by name, and the problem."""
    if not _KEEPS_OBJECTS and torch.compiler.is_dynamo_compiling():
        fail("unsupported", f"{function} inside torch.compile of torch {torch.__version__}",
             instead="torch 2.8 or newer, or a call outside of the compiled function")  # fmt: skip
    for name, x in zip(_ARRAYS[function], objects, strict=True):
        if x is not None and not isinstance(x, torch.Tensor):
            fail("argument", name, "a torch tensor in a traced or compiled call", type(x).__name__, function=function)
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            fail("unsupported", f"argument {name!r} requires a gradient, which this call does not compute",
                 instead="calling under torch.no_grad() or torch.inference_mode(), or passing tensor.detach()"
                 )  # fmt: skip
    options = plain(options)
    asked = function, tuple(options), tuple(_facts(x) for x in objects)
    results = getattr(torch.ops.omniattn, function).default(*objects, *options)
    return dict(zip(_names(*asked), results, strict=True)), _inner(*asked)


# --- Attention on quantized operands ---------------------------------------------------------------------------------


_FIELDS = tuple(x.name for x in dataclasses.fields(QuantizeProblem))


def _text(problem: QuantizeProblem) -> str:
    """A problem as text, made of what torch.compile can read; `_problem_of` reads it."""
    return "f(" + ", ".join([f"{name}={getattr(problem, name)!r}" for name in _FIELDS]) + ")"


@functools.lru_cache(maxsize=256)
def _problem_of(text: str) -> QuantizeProblem:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    return QuantizeProblem(**{x.arg: ast.literal_eval(x.value) for x in call.keywords if x.arg})


def is_quantized(*operands: Any) -> bool:
    """Whether one of q, k, v is a quantized operand."""
    return any(x.__class__ in OPERANDS for x in operands)


def trace_attention(
    function: str, q: Any, k: Any, v: Any, sequences: Sequence[Any], longest: tuple[Any, Any], mask: Any, sinks: Any,
    options: Any,
) -> Any:  # fmt: skip
    """Attention on quantized operands by its operator: o, or (o, lse)."""
    check_kinds(function, q, k, v, *sequences)
    of_q, of_k = q.pair, k.pair
    check_out_dtype(function, options.out_dtype, of_q.problem.dtype)
    *arrays, _, mask, sinks = arrays_of(of_q, of_k, v, None, mask, sinks)
    o, lse = torch.ops.omniattn.attention_quantized.default(
        *arrays, mask, sinks, [_text(of_q.problem), _text(of_k.problem), _text(v.problem)], of_q is of_k,
        [int(n or 0) for n in longest], options.layout, options.causal,
        None if options.window is None else list(options.window), options.softmax_scale, float(options.softcap),
        options.deterministic, precision_text(options.precision, function), options.return_lse,
    )  # fmt: skip
    return (o, lse) if options.return_lse else o


def _attention_quantized(
    q_int: Any, q_scale: Any, row_bias: Any, delta_s: Any, k_int: Any, k_scale: Any, v: Any, v_scale: Any, v_mean: Any,
    starts_q: Any, starts_k: Any, mask: Any, sinks: Any, problems: list[str], one_pair: bool, longest: list[int],
    layout: str, causal: bool, window: Any, softmax_scale: Any, softcap: float, deterministic: bool, precision: str,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    of_q, of_k, of_v = map(_problem_of, problems)
    # Attention reads neither K of the pair that it takes Q of, nor the means of Q and K.
    first = QuantizedQK(
        q_int, k_int, q_scale, k_scale, row_bias, None, None, delta_s, starts_q, starts_k, of_q, layout
    )  # fmt: skip
    second = first
    if not one_pair:
        second = QuantizedQK(
            q_int, k_int, q_scale, k_scale, row_bias, None, None, None, starts_q, starts_k, of_k, layout
        )  # fmt: skip
    value = QuantizedV(v, v_scale, v_mean, starts_k, of_v, layout)
    packed = {"max_seqlen_q": longest[0] or None, "max_seqlen_k": longest[1] or None} if of_q.varlen else {}
    results = FUNCTIONS["attention_varlen" if of_q.varlen else "attention"](
        first.q, second.k, value, layout=layout, causal=causal, window=None if window is None else tuple(window),
        softmax_scale=softmax_scale, softcap=softcap, mask=mask, sinks=sinks, precision=precision_of(precision),
        return_lse=return_lse, deterministic=deterministic, **packed,
    )  # fmt: skip
    return results if return_lse else (results, q_int.new_empty((0,), dtype=torch.float32))


def _attention_quantized_shapes(q_int: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    problems, layout, return_lse = others[12], others[15], others[-1]
    problem = _problem_of(problems[0])
    rows, heads, dim = problem.rows_q, problem.heads_q, problem.head_dim
    shape: tuple[int, ...] = (rows, heads, dim) if layout == "NHD" else (heads, rows, dim)
    lse: tuple[int, ...] = (heads, rows)
    if not problem.varlen:
        shape, lse = (problem.batch, *shape), (problem.batch, *lse)
    o = q_int.new_empty(shape, dtype=_dtype(problem.dtype))
    return o, q_int.new_empty(lse if return_lse else (0,), dtype=torch.float32)


for _name, _kernel, _shapes in (
    *((name, _quantizer_kernel(name), _quantizer_shapes(name)) for name in _ARRAYS),
    ("attention_quantized", _attention_quantized, _attention_quantized_shapes),
):
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _key)
    torch.library.register_fake(f"omniattn::{_name}", _shapes, lib=LIBRARY)


def run(call: Call) -> list[Any]:
    """A call of a quantizer, or of attention on quantized operands, by its operator."""
    if call.stream is not None:
        fail("argument", "stream", "None in a traced or compiled call", "one", function=call.operation.name)
    if call.operation.name in _ARRAYS:
        arrays, _ = trace(call.operation.name, call.objects, call.options)
        facts = tuple(_facts(x) for x in call.objects)
        call.problem = _problem(call.operation.name, tuple(call.options), facts)
        return list(arrays.values())
    given = dict(zip(call.operation.arrays, call.objects, strict=True))
    if given["out"] is not None:
        fail("argument", "out", "None in a traced or compiled call", "one", function=call.operation.name)
    x = call.options
    q, k, v = call.subject
    made = trace_attention(
        call.operation.name, q, k, v, (None, None), (x.max_seqlen_q, x.max_seqlen_k), given["mask"],
        given["sinks"], x,
    )  # fmt: skip
    return list(made) if x.return_lse else [made]
