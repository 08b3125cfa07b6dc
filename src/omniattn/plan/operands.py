"""Attention on quantized operands: `QuantizedQ`, `QuantizedK` and `QuantizedV` in the places of q, k and v.

They have been validated when they were made, but anybody may put others together, or arrays of another device into
them. So the first call with given facts checks everything; later calls find their plan by these facts.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from . import arguments, arrays
from .arrays import Tensor
from .errors import ArgumentError, DtypeError, UnsupportedError
from .launch.attn_fwd import ForwardStrides
from .launch.quantize import QuantizeProblem
from .launch.quantized_attention import QuantizedAttentionPlan
from .operand_checks import (
    ALL,
    ARGUMENT,
    ARRAYS,
    STARTS,
    check_aliasing,
    check_arrays,
    check_extents,
    check_kinds,
    check_precision,
    check_same_sequences,
    combine,
)
from .planning import quantized_forward
from .precision import GROUPINGS
from .problem import Problem
from .quantized import QuantizedK, QuantizedQ, QuantizedQK, QuantizedV
from .registry import REGISTRY
from .runtime.driver import on_reset
from .select import Selection, Target, select_attention

_MAX_PLANS = 1024
_plans: dict[Any, OperandsPlan] = {}
# A plan holds a loaded kernel, which is worth nothing under another driver or in a forked child.
on_reset(_plans.clear)

_OUT, _MASK, _SINKS = (ALL.index(name) for name in ("out", "mask", "sinks"))
_STARTS_Q, _STARTS_K = (ALL.index(name) for name in STARTS)
# Kernels copy 16 bytes at once.
_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class OperandsPlan:
    """A validated call."""

    problem: Problem
    operands: QuantizeProblem
    o_shape: tuple[int, ...]
    lse_shape: tuple[int, ...] | None
    selection: Selection | None
    forward: QuantizedAttentionPlan | None
    # The plan is found by the identity of these, which is theirs alone as long as they live.
    problems: tuple[QuantizeProblem, ...]
    new_o: Callable[[Any], Any] | None
    new_lse: Callable[[Any], Any] | None
    current_stream: Callable[[], int] | None


def run(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: Any,
    max_k: Any,
    layout: Any,
    causal: Any,
    window: Any,
    softmax_scale: Any,
    softcap: Any,
    mask: Any,
    sinks: Any,
    precision: Any,
    return_lse: Any,
    out: Any,
    stream: Any,
    deterministic: Any,
) -> Any:
    """``attention`` or ``attention_varlen`` where one of q, k, v is quantized."""
    check_kinds(function, q, k, v, cu_q, cu_k)
    of_q, of_k = q.pair, k.pair
    objects = _objects(of_q, of_k, v, (out, mask, sinks))
    raw = None if stream is None else arrays.resolve_stream(stream)
    seen, tensors = arrays.look(objects), None
    if seen is None:
        tensors = _describe(objects, raw)
        facts: Any = tuple((n, t.dtype, t.device, t.ordinal, t.shape, t.strides) for n, t in tensors.items())
    else:
        facts = seen[0]
    options = (layout, causal, window, softmax_scale, softcap, precision, return_lse, deterministic, max_q, max_k)
    key: Any = (
        function, facts, id(of_q.problem), id(of_k.problem), id(v.problem), of_q is of_k, of_q.layout, of_k.layout,
        v.layout, options, os.environ.get("OMNIATTN_FORCE_KERNEL"),
        # True == 1 == 1.0, but not every one of them is valid everywhere.
        causal.__class__, softmax_scale.__class__, softcap.__class__, return_lse.__class__, deterministic.__class__,
        max_q.__class__, max_k.__class__,
    )  # fmt: skip
    if window is not None:
        key += (window.__class__, *(x.__class__ for x in window)) if isinstance(window, tuple) else (window.__class__,)
    try:
        plan = _plans.get(key)
    except TypeError:  # an unhashable option: validation has the last word
        plan, key = None, None
    if plan is not None and seen is not None:
        result = _repeat(plan, of_q.q_int, out, seen[1], raw)
        if result is not None:
            return result
    if tensors is None:
        tensors = _describe(objects, raw)
    if plan is None:
        plan = make_plan(function, q, k, v, tensors, options, run=True)
        if key is not None:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
    given = tensors.get("out")
    if given is not None:
        arrays.require_writable(given)
        check_aliasing(function, given, tensors)
    if plan.forward is None:
        check_same_sequences(function, v, tensors)
        return _run_on_cpu(plan, tensors, layout, bool(return_lse), max_q, max_k, stream)
    return _run_on_gpu(plan, function, tensors, stream)


def _objects(of_q: QuantizedQK, of_k: QuantizedQK, v: QuantizedV, others: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    """In the order of `ALL`."""
    return (
        of_q.q_int, of_q.q_scale, of_q.row_bias, of_q.delta_s, of_k.k_int, of_k.k_scale, v.v, v.v_scale, v.v_mean,
        of_q.cu_seqlens_q, of_k.cu_seqlens_k, *others,
    )  # fmt: skip


def describe(
    function: str, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, others: tuple[Any, Any, Any], raw: int | None
) -> dict[str, Tensor]:
    """All arrays of a call by name; ``others`` are out, mask and sinks."""
    check_kinds(function, q, k, v, cu_q, cu_k)
    return _describe(_objects(q.pair, k.pair, v, others), raw)


def _describe(objects: tuple[Any, ...], raw: int | None) -> dict[str, Tensor]:
    found = {}
    for name, x in zip(ALL, objects, strict=True):
        if x is not None:
            of = ARGUMENT.get(name)
            found[name] = arrays.describe(x, name if of is None else f"{of}.{name}", raw)
    return found


def _repeat(plan: OperandsPlan, like: Any, out: Any, at: list[int], stream: int | None) -> Any:
    """The short way of a warm call; None where something is not the usual."""
    forward, new_o, current_stream = plan.forward, plan.new_o, plan.current_stream
    if forward is None or new_o is None or current_stream is None:
        return None
    current = current_stream()
    if stream is not None and stream != current:
        return None
    # Sinks and cu_seqlens too, of which less would do: the long way finds out.
    bits = 0
    for address in at:
        bits |= address
    if bits & (_ALIGNMENT - 1):
        return None
    if out is None:
        out = new_o(like)
        at_out = out.data_ptr()
    else:
        at_out = at[_OUT]
        if out.is_inference() or at_out in at[:_OUT]:
            return None
    lse = None if plan.new_lse is None else plan.new_lse(like)
    at_lse = 0 if lse is None else lse.data_ptr()
    pointers = (0, 0, 0, at_out, at_lse, at[_STARTS_Q], at[_STARTS_K], at[_MASK], at[_SINKS])
    forward.attend(current, dict(zip(ARRAYS, at, strict=False)), pointers)
    return out if lse is None else (out, lse)


def _run_on_gpu(plan: OperandsPlan, function: str, tensors: dict[str, Tensor], stream: Any) -> Any:
    assert plan.forward is not None
    ref = tensors["q_int"]
    for name, t in tensors.items():
        arguments.check_alignment(t, function, t.itemsize if name in (*STARTS, "mask", "sinks") else _ALIGNMENT)
    o = tensors.get("out") or arrays.empty_like_framework(ref, plan.o_shape, plan.problem.dtype)
    lse = None if plan.lse_shape is None else arrays.empty_like_framework(ref, plan.lse_shape, "float32")
    everything = [*(t for name, t in tensors.items() if name != "out"), o]
    if lse is not None:
        everything.append(lse)
    handle = arrays.prepare(everything, stream)
    at = {name: t.ptr for name, t in tensors.items()}
    pointers = (
        0, 0, 0, o.ptr, 0 if lse is None else lse.ptr, at.get("cu_seqlens_q", 0), at.get("cu_seqlens_k", 0),
        at.get("mask", 0), at.get("sinks", 0),
    )  # fmt: skip
    plan.forward.attend(handle, at, pointers)
    arrays.retire(everything, handle)
    result = arrays.finish(o, handle)
    return result if lse is None else (result, arrays.finish(lse, handle))


def _run_on_cpu(
    plan: OperandsPlan, tensors: dict[str, Tensor], layout: str, return_lse: bool, max_q: Any, max_k: Any, stream: Any
) -> Any:
    """The NumPy reference; computes all before it writes anything."""
    import numpy as np

    from .reference import checks, low_precision

    problem, operands, ref = plan.problem, plan.operands, tensors["q_int"]
    arrays.prepare([ref], stream)  # refuses a stream
    values = {name: arrays.to_numpy(t) for name, t in tensors.items() if name != "out"}
    starts = [values.get(name) for name in STARTS]
    options = checks.make_options(
        problem.head_dim, False, (problem.window_left, problem.window_right), problem.softmax_scale, problem.softcap,
        np.float32, "attention",
    )  # fmt: skip
    assert problem.low is not None
    low = problem.low.on_cpu
    product = low_precision.Product(low.pv, operands.key_tile, low.pv_accumulator)
    o, lse = low_precision.attend(
        operands, {name: values[name] for name in ARRAYS if name in values}, None, starts[0], starts[1],
        options=options, product=product, mask=values.get("mask"), sinks=values.get("sinks"), longest_q=max_q,
        longest_k=max_k,
    )  # fmt: skip
    result = tensors.get("out") or arrays.empty_like_framework(ref, plan.o_shape, problem.dtype)
    arrays.store(result, o.swapaxes(-3, -2) if layout == "NHD" else o)
    if plan.lse_shape is None:
        return arrays.finish(result, 0)
    lse_out = arrays.empty_like_framework(ref, plan.lse_shape, "float32")
    arrays.store(lse_out, lse)
    return arrays.finish(result, 0), arrays.finish(lse_out, 0)


def make_plan(
    function: str,
    q: QuantizedQ,
    k: QuantizedK,
    v: QuantizedV,
    tensors: dict[str, Tensor],
    options: tuple[Any, ...],
    *,
    run: bool,
) -> OperandsPlan:
    """Validate everything but pointers; choose the kernel; load it if ``run``.

    ``options``: layout, causal, window, softmax_scale, softcap, precision, return_lse, deterministic, max_seqlen_q,
    max_seqlen_k, as the caller gave them.
    """
    layout, causal, window, softmax_scale, softcap, precision, return_lse, deterministic, max_q, max_k = options
    arguments.check_layout(layout, function)
    causal = arguments.check_bool(causal, "causal", function)
    return_lse = arguments.check_bool(return_lse, "return_lse", function)
    deterministic = arguments.check_bool(deterministic, "deterministic", function)
    left, right = arguments.check_window(window, causal, function)
    softcap = arguments.check_softcap(softcap, function)
    operands = combine(function, q.pair, k.pair, v, layout)
    absolute = return_lse or softcap > 0 or "sinks" in tensors
    if absolute and operands.smooth_k and operands.row_bias != "full":
        raise ArgumentError(
            "q", "operands of quantize_qk(with_bias=True), because LSE, sinks and softcap need q . k_mean",
            "with_bias=False", function=function,
        )  # fmt: skip
    low = check_precision(function, precision, operands)
    if softmax_scale is None:
        softmax_scale = operands.head_dim**-0.5
    else:
        softmax_scale = arguments.check_number(softmax_scale, "softmax_scale", function)
    extents = check_extents(function, operands, max_q, max_k, "mask" in tensors)
    check_arrays(function, operands, tensors)

    heads, rows, batch = operands.heads_q, operands.rows_q, operands.batch
    lead = () if operands.varlen else (batch,)
    o_shape = (*lead, rows, heads, operands.head_dim) if layout == "NHD" else (*lead, heads, rows, operands.head_dim)
    lse_shape = (*lead, heads, rows)
    mask_kind, mask_strides = "none", (0, 0, 0, 0)
    if "mask" in tensors:
        full = (batch, heads, *extents)
        mask_kind = arguments.check_mask(tensors["mask"], full, operands.dtype, function)
        mask_strides = arguments.broadcast_strides(tensors["mask"], full)
    sinks_kind = "none"
    if "sinks" in tensors:
        sinks_kind = arguments.check_sinks(tensors["sinks"], heads, operands.dtype, function)
    o_strides = arrays.contiguous_strides(o_shape)
    if "out" in tensors:
        arguments.check_like(tensors["out"], o_shape, operands.dtype, function)
        arguments.check_strides(tensors["out"], function, written=True)
        o_strides = tuple(tensors["out"].strides)

    from . import runtime

    ref = tensors["q_int"]
    on_gpu = ref.device == "cuda"
    problem = Problem(
        operands.dtype, batch, rows, operands.rows_k, heads, operands.heads_kv, operands.head_dim, left, right,
        softmax_scale, softcap, mask_kind, sinks_kind, operands.varlen, f"int{operands.bits}", deterministic,
        tensor_maps=on_gpu and runtime.has_tensor_maps(), low=low,
        operands=(operands.grouping, operands.stored_bits), lse=return_lse,
    )  # fmt: skip
    problems = (q.pair.problem, k.pair.problem, v.problem)
    wanted = lse_shape if return_lse else None
    if not on_gpu:
        return OperandsPlan(problem, operands, o_shape, wanted, None, None, problems, None, None, None)

    device = runtime.device_info(ref.ordinal)
    target = Target(device.cc, device.max_smem_optin)
    selection = _select(function, problem, operands, target)
    own = [0 if n == 1 else s for n, s in zip(o_shape, o_strides, strict=True)]
    seq, head = (-3, -2) if layout == "NHD" else (-2, -3)
    unused = (0, 0, 0)
    strides = ForwardStrides(
        unused, unused, unused, (0 if operands.varlen else own[0], own[seq], own[head]),
        (0 if operands.varlen else heads * rows, rows), mask_strides,
    )  # fmt: skip
    kernel = runtime.load(selection.spec, ref.ordinal) if run else None
    forward = quantized_forward(selection.spec, kernel, operands, problem, strides, device.sm_count, extents)
    return OperandsPlan(
        problem, operands, o_shape, wanted, selection, forward, problems,
        arrays.allocator(ref, o_shape, operands.dtype),
        None if wanted is None else arrays.allocator(ref, wanted, "float32"), arrays.stream_query(ref),
    )  # fmt: skip


def _select(function: str, problem: Problem, operands: QuantizeProblem, target: Target) -> Selection:
    if operands.dtype not in arguments.GPU_DTYPES:
        raise DtypeError(
            "q", f"operands quantized from {' or '.join(arguments.GPU_DTYPES)} on a GPU", operands.dtype,
            function=function,
        )  # fmt: skip
    read = {
        spec.grouping
        for spec in REGISTRY
        if spec.op == "attention_int8" and (spec.min_arch == target.cc or not spec.arch_specific)
    }
    # Without any kernel for this GPU, select says so.
    if read and operands.grouping not in read:
        wanted = " or ".join(f"grouping={g!r}" for g in GROUPINGS if g in read)
        raise ArgumentError(
            "q", f"operands of quantize_qk({wanted}), which the kernels of this GPU read",
            f"grouping={operands.grouping!r}", function=function,
        )  # fmt: skip
    if not problem.tensor_maps and operands.grouping == "sm90":
        raise UnsupportedError(
            f"{function}(): quantized operands of this grouping need tensor maps, which CuPy cannot make",
            instead="quantize_qk(grouping='sm80'), or cuda-bindings as the driver",
        )
    return select_attention(problem, target, os.environ.get("OMNIATTN_FORCE_KERNEL"))


__all__ = ["OperandsPlan", "describe", "make_plan", "run"]
