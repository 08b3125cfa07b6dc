"""From the arguments of a call to a plan: everything validated, the problem described, the kernel chosen and loaded."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from . import arguments, arrays
from .arrays import Tensor
from .errors import ArgumentError, ShapeError
from .launch.attn_fwd import ForwardPlan, ForwardStrides
from .launch.attn_fwd_sm90 import ForwardSm90Plan
from .launch.attn_int8_sm80 import Int8Sm80Plan
from .launch.attn_int8_sm90 import Int8Sm90Plan
from .launch.quantize import QuantizePlan, QuantizeProblem
from .launch.quantized_attention import QuantizedAttentionPlan
from .problem import Problem
from .quantizer import FusedQuantizer, problem_for
from .registry import KernelSpec
from .repeat import RepeatedForward
from .runtime import LoadedKernel
from .select import Selection, Target, select_attention

Forward = ForwardPlan | ForwardSm90Plan | QuantizedAttentionPlan


class Plan:
    """A validated call: what to allocate, and how to run it.

    ``repeat`` is the short way for calls whose arrays `arrays.look` knows; None for all others.
    """

    __slots__ = ("forward", "lse_shape", "problem", "q_shape", "repeat", "selection")

    def __init__(
        self,
        problem: Problem,
        q_shape: tuple[int, ...],
        lse_shape: tuple[int, ...],
        selection: Selection | None,
        forward: Forward | None,
    ) -> None:
        self.problem = problem
        self.q_shape = q_shape
        self.lse_shape = lse_shape
        self.selection = selection
        self.forward = forward
        self.repeat: RepeatedForward | None = None


def make_plan(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: dict[str, Tensor],
    max_q: Any,
    max_k: Any,
    layout: Any,
    causal: Any,
    window: Any,
    softmax_scale: Any,
    softcap: Any,
    precision: Any,
    return_lse: Any,
    deterministic: Any,
    *,
    run: bool,
) -> Plan:
    """Validate everything but pointers; choose the kernel; load it if ``run``."""
    varlen = function == "attention_varlen"
    arguments.check_layout(layout, function)
    causal = arguments.check_bool(causal, "causal", function)
    return_lse = arguments.check_bool(return_lse, "return_lse", function)
    deterministic = arguments.check_bool(deterministic, "deterministic", function)
    left, right = arguments.check_window(window, causal, function)
    precision, low = arguments.check_precision(precision, function)
    softcap = arguments.check_softcap(softcap, function)
    arguments.check_qkv(q, k, v, 3 if varlen else 4, layout, function)
    arrays.require_same_device([q, k, v, *extra.values()])
    head_dim = q.shape[-1]
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    else:
        softmax_scale = arguments.check_number(softmax_scale, "softmax_scale", function)

    seq, head = (-3, -2) if layout == "NHD" else (-2, -3)
    heads_q, heads_kv = q.shape[head], k.shape[head]
    rows_q, rows_k = q.shape[seq], k.shape[seq]
    batch = q.shape[0]
    extent_q, extent_k = rows_q, rows_k
    if varlen:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if name not in extra:
                raise ArgumentError(name, "an int32 array of shape (batch + 1,)", "None", function=function)
            arguments.check_cu_seqlens(extra[name], name, function)
        batch = extra["cu_seqlens_q"].shape[0] - 1
        if extra["cu_seqlens_k"].shape[0] != batch + 1:
            raise ShapeError(
                "cu_seqlens_k",
                f"shape ({batch + 1},), like cu_seqlens_q",
                f"{tuple(extra['cu_seqlens_k'].shape)}",
                function=function,
            )
        extent_q = arguments.check_int(max_q, "max_seqlen_q", function)
        extent_k = arguments.check_int(max_k, "max_seqlen_k", function)
        for extent, rows, name, of in (
            (extent_q, rows_q, "max_seqlen_q", "q"),
            (extent_k, rows_k, "max_seqlen_k", "k"),
        ):
            if extent > arguments.MAX_ROWS:
                raise ArgumentError(name, f"at most {arguments.MAX_ROWS}", str(extent), function=function)
            if extent == 0 and rows > 0 and "mask" in extra:
                raise ArgumentError(name, f"the longest sequence of {of}", "0", function=function)

    most = arguments.MAX_PACKED_SEQUENCES if varlen else arguments.MAX_EXTENT
    if batch > most:
        name = "cu_seqlens_q" if varlen else "q"
        raise ShapeError(name, f"at most {most} sequences", str(batch), function=function)
    if heads_q > arguments.MAX_EXTENT:
        raise ShapeError("q", f"at most {arguments.MAX_EXTENT} heads", str(heads_q), function=function)

    mask_kind, mask_strides = "none", (0, 0, 0, 0)
    if "mask" in extra:
        full = (batch, heads_q, extent_q, extent_k)
        mask_kind = arguments.check_mask(extra["mask"], full, q.dtype, function)
        mask_strides = arguments.broadcast_strides(extra["mask"], full)
    sinks_kind = arguments.check_sinks(extra["sinks"], heads_q, q.dtype, function) if "sinks" in extra else "none"
    for t in (q, k, v):
        arguments.check_strides(t, function)
    o_strides = arrays.contiguous_strides(tuple(q.shape))
    if "out" in extra:
        arguments.check_like(extra["out"], q.shape, q.dtype, function)
        arguments.check_strides(extra["out"], function, written=True)
        o_strides = extra["out"].strides

    from . import runtime

    on_gpu = q.device == "cuda"
    problem = Problem(
        q.dtype, batch, rows_q, rows_k, heads_q, heads_kv, head_dim, left, right, softmax_scale, softcap, mask_kind,
        sinks_kind, varlen, precision, deterministic,
        # Quantized operands are the library's own.
        tensor_maps=on_gpu and (low is not None or all(map(_describable, (q, k, v)))) and runtime.has_tensor_maps(),
        low=low, lse=return_lse,
    )  # fmt: skip
    q_shape = tuple(q.shape)
    lse_shape = (heads_q, rows_q) if varlen else (batch, heads_q, rows_q)
    if not on_gpu:
        return Plan(problem, q_shape, lse_shape, None, None)

    def canonical(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int]:
        """(batch, seq, head) strides; 0 where the extent is 1, whatever the framework wrote there."""
        s = [0 if n == 1 else x for n, x in zip(shape, strides, strict=True)]
        return (0 if varlen else s[0], s[seq], s[head])

    device = runtime.device_info(q.ordinal)
    selection = select_attention(
        problem, Target(device.cc, device.max_smem_optin), os.environ.get("OMNIATTN_FORCE_KERNEL")
    )
    strides = ForwardStrides(
        canonical(q.shape, q.strides),
        canonical(k.shape, k.strides),
        canonical(v.shape, v.strides),
        canonical(q.shape, o_strides),
        (0 if varlen else heads_q * rows_q, rows_q),
        mask_strides,
    )
    kernel = runtime.load(selection.spec, q.ordinal) if run else None
    forward: Forward
    if low is not None:
        spec = selection.spec
        fused = FusedQuantizer(
            problem_for(
                replace(low, pv=spec.pv, pv_accumulator=spec.pv_accumulator), dtype=q.dtype, batch=batch, rows_q=rows_q,
                rows_k=rows_k, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, varlen=varlen,
                grouping=spec.grouping, max_seqlen_k=max(extent_k, 1), wide=spec.bits == 8,
                full_bias=return_lse or sinks_kind != "none" or softcap > 0,
            ),
            (strides.q, strides.k, strides.v),
            q.ordinal,
            run=run,
        )  # fmt: skip
        extents = (extent_q, extent_k)
        forward = quantized_forward(spec, kernel, fused.plan, problem, strides, device.sm_count, extents)
    elif selection.spec.family == "attn_fwd_sm90":
        forward = ForwardSm90Plan(selection.spec, kernel, problem, strides, device.sm_count)
    else:
        forward = ForwardPlan(selection.spec, kernel, problem, strides, (extent_q, extent_k))
    return Plan(problem, q_shape, lse_shape, selection, forward)


def quantized_forward(
    spec: KernelSpec,
    kernel: LoadedKernel | None,
    quantizer: QuantizePlan | QuantizeProblem,
    problem: Problem,
    strides: ForwardStrides,
    sm_count: int,
    mask_extent: tuple[int, int],
) -> QuantizedAttentionPlan:
    """The launch of a low-precision kernel, by its grouping; of operands that are given, ``quantizer`` is a problem."""
    if spec.grouping == "sm90":
        return Int8Sm90Plan(spec, kernel, quantizer, problem, strides, sm_count)
    return Int8Sm80Plan(spec, kernel, quantizer, problem, strides, mask_extent)


def _describable(t: Tensor) -> bool:
    """Whether a tensor map can describe the array: no zero, negative or huge strides."""
    return all(n <= 1 or 0 < s * t.itemsize < 2**40 for n, s in zip(t.shape[:-1], t.strides[:-1], strict=True))
