"""``attention`` and ``attention_varlen``: validate, describe the problem, run.

The first call with given shapes, strides, dtypes and options validates them and builds a plan (kernel, grid, packed
arguments); later calls find the plan by the same facts and pay for pointers only.
"""

from __future__ import annotations

import os
from typing import Any

from . import arguments, arrays, operands
from .arrays import Tensor
from .errors import ArgumentError, UnsupportedError
from .planning import Plan, make_plan
from .precision import Int8
from .problem import Problem
from .quantized import OPERANDS
from .repeat import repeated_forward
from .runtime.driver import on_reset

_MAX_PLANS = 4096
_plans: dict[Any, Plan] = {}
# A plan holds a loaded kernel, which is worth nothing under another driver or in a forked child.
on_reset(_plans.clear)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: Any = None,
    sinks: Any = None,
    precision: str | Int8 = "exact",
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    deterministic: bool = False,
) -> Any:
    """Attention of a batch of equally long sequences.

    ::

        S = softmax_scale * q @ k.T;  if softcap: S = softcap * tanh(S / softcap);  S += mask
        o = softmax(S) @ v            lse = log(sum(exp(S)))

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_q_heads, head_dim) for "NHD", (batch, num_q_heads, seqlen_q, head_dim) for "HND"
        torch, CuPy, JAX or NumPy array, or any DLPack exporter; float16 or bfloat16, on the CPU float32 and float64
        too. head_dim is a multiple of 8 from 8 to 256 and contiguous; the other strides are free (on a GPU multiples
        of 8 elements, addresses multiples of 16 bytes).
    k, v : array
        The same with seqlen_k and num_kv_heads, which divides num_q_heads: query head h reads kv head
        h // (num_q_heads // num_kv_heads).
        Or all three quantized: ``quantize_qk(...).q``, ``quantize_qk(...).k`` and ``quantize_v(...)``, with the result
        that ``precision`` of the same knobs gives for the arrays they were made of, bit for bit.
    layout : "NHD" or "HND"
    causal : bool
        Query i sees the keys j <= i + seqlen_k - seqlen_q (aligned at the bottom right).
    window : (left, right), optional
        Query i sees the keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right; -1 is unlimited.
    softmax_scale : float, optional
        1 / sqrt(head_dim) unless given.
    softcap : float
        0 for none.
    mask : array, optional
        Broadcastable to (batch, num_q_heads, seqlen_q, seqlen_k) in either layout. bool (True: visible), or float32 or
        q's dtype (added to the scores; -inf hides).
    sinks : array, (num_q_heads,), float32 or q's dtype, optional
        One more logit a head that takes part in the softmax and has no value; LSE counts it.
    precision : str, Int8 or Int4
        "exact": the inputs' dtype with fp32 accumulation. "int8": 8-bit Q and K, P V in fp8 or fp16, whichever suits
        the GPU, with smoothing of K and V (SageAttention2); "int4": 4-bit Q and K, Q smoothed too. `Int8` and `Int4`
        have the knobs. Quantized operands have their precision, and it may be left out.
    return_lse : bool
        Also return the log-sum-exp.
    out : array, optional
        Where o goes; q's shape and dtype. It may be q itself, with the same strides, but neither k nor v.
    stream : optional
        Stream to run on: an integer handle, a torch or CuPy stream, or an object with ``__cuda_stream__``. Unless
        given, the current stream of q's framework.
    deterministic : bool
        Same bits at every run. The kernels of this version give them in any case, quantization included.

    Returns
    -------
    o : array
        Of q's framework, shape, layout and dtype. A row that attends to nothing is 0.
    lse : array, (batch, num_q_heads, seqlen_q), float32, natural logarithm
        Only with ``return_lse``. A row that attends to nothing has -inf (with sinks: the sink).

    Raises
    ------
    ArgumentError
        Or its subclasses DtypeError, ShapeError, StrideError, AlignmentError, DeviceError: names the argument, what was
        expected and what came. Nothing has been launched or written then.
    UnsupportedError
        A precision or GPU that this version lacks, a tensor that needs a gradient, a traced JAX array.
    KernelNotFoundError, CompileError, DriverError
        The kernel could not be had or launched: says what was tried and what to do.

    Notes
    -----
    GPUs: compute capability 8.0 and newer; arrays on the CPU run the NumPy reference. FlashAttention-2 (Dao 2023),
    algorithm 1; sinks as in GPT-OSS; softcap as in Gemma 2.
    """
    return _run(
        "attention", q, k, v, None, None, 0, 0, layout, causal, window, softmax_scale, softcap, mask, sinks, precision,
        return_lse, out, stream, deterministic,
    )  # fmt: skip


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: Any = None,
    sinks: Any = None,
    precision: str | Int8 = "exact",
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    deterministic: bool = False,
) -> Any:
    """Attention of sequences of different lengths, packed one behind the other.

    Sequence b owns the query rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the key rows cu_seqlens_k[b] to
    cu_seqlens_k[b + 1]; causal and window align at the end of each sequence.

    Parameters
    ----------
    q : array, (total_q, num_q_heads, head_dim) for "NHD", (num_q_heads, total_q, head_dim) for "HND"
        Dtypes, strides and frameworks as in `attention`.
    k, v : array
        The same with total_k and num_kv_heads. Or all three quantized, as in `attention`.
    cu_seqlens_q, cu_seqlens_k : array, (batch + 1,), int32, on q's device
        Row at which each sequence begins, and the end of the last one: 0 first, never decreasing. Checked on the CPU;
        on a GPU that would need a synchronization: values outside the tensors are clamped to them, and where values
        decrease the results of "exact" are unspecified (a low precision takes a value for at least as large as those
        before it). To be left out for quantized operands, which bring theirs.
    max_seqlen_q, max_seqlen_k : int
        At least the longest sequence; less raises on the CPU. They give the mask its extent, and with smooth_q ("int4")
        a GPU's workspace, where too small a max_seqlen_k makes NaN. The result does not depend on them otherwise. For
        quantized operands needed only with a mask.
    mask : array, optional
        Broadcastable to (batch, num_q_heads, max_seqlen_q, max_seqlen_k), indexed from the start of each sequence.
    layout, causal, window, softmax_scale, softcap, sinks, precision, return_lse, out, stream, deterministic
        As in `attention`.

    Returns
    -------
    o : array
        Of q's framework, shape, layout and dtype. Rows that attend to nothing, or belong to no sequence, are 0.
    lse : array, (num_q_heads, total_q), float32, natural logarithm
        Only with ``return_lse``. -inf for rows that attend to nothing (with sinks: the sink) or belong to no sequence.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.
    """
    return _run(
        "attention_varlen", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, layout, causal, window,
        softmax_scale, softcap, mask, sinks, precision, return_lse, out, stream, deterministic,
    )  # fmt: skip


def _run(
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
    raw = None if stream is None else arrays.resolve_stream(stream)
    plain = out is None and mask is None and sinks is None and function == "attention"
    seen = arrays.look((q, k, v) if plain else (q, k, v, out, cu_q, cu_k, mask, sinks))
    if seen is None:
        if q.__class__ in OPERANDS or k.__class__ in OPERANDS or v.__class__ in OPERANDS:
            return operands.run(
                function, q, k, v, cu_q, cu_k, max_q, max_k, layout, causal, window, softmax_scale, softcap, mask,
                sinks, precision, return_lse, out, stream, deterministic,
            )  # fmt: skip
        tq, tk, tv, extra = _describe(q, k, v, cu_q, cu_k, mask, sinks, out, raw)
        facts = tuple(
            (name, t.dtype, t.device, t.ordinal, t.shape, t.strides)
            for name, t in (("q", tq), ("k", tk), ("v", tv), *extra.items())
        )
    else:
        facts, addresses = seen
    key: Any = (
        function, facts, layout, causal, window, softmax_scale, softcap, precision, return_lse, deterministic, max_q,
        max_k, os.environ.get("OMNIATTN_FORCE_KERNEL"),
        # True == 1 == 1.0, but not every one of them is valid everywhere.
        causal.__class__, softmax_scale.__class__, softcap.__class__, return_lse.__class__, deterministic.__class__,
        max_q.__class__, max_k.__class__,
    )  # fmt: skip
    if window is not None:
        key += (window.__class__, *(x.__class__ for x in window)) if isinstance(window, tuple) else (window.__class__,)
    try:
        plan = _plans.get(key)
    except TypeError:  # an unhashable option, a list for window say: validation has the last word
        plan, key = None, None
    if seen is not None:
        if plan is not None and plan.repeat is not None:
            result = plan.repeat(q, out, addresses, raw)
            if result is not None:
                return result
        tq, tk, tv, extra = _describe(q, k, v, cu_q, cu_k, mask, sinks, out, raw)
    if plan is None:
        plan = make_plan(
            function, tq, tk, tv, extra, max_q, max_k, layout, causal, window, softmax_scale, softcap, precision,
            return_lse, deterministic, run=True,
        )  # fmt: skip
        if seen is not None:
            lse_shape = plan.lse_shape if return_lse else None
            plan.repeat = repeated_forward(plan.forward, plan.problem, tq, plan.q_shape, lse_shape)
        if key is not None:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[key] = plan

    given = extra.get("out")
    if given is not None:
        arrays.require_writable(given)
        _check_aliasing(function, given, tq, tk, tv)
    if plan.forward is None:
        return _run_on_cpu(plan, tq, tk, tv, extra, max_q, max_k, layout, bool(return_lse), stream)
    if (tq.ptr | tk.ptr | tv.ptr | (given.ptr if given is not None else 0)) & 15:
        for t in (tq, tk, tv) if given is None else (tq, tk, tv, given):
            arguments.check_alignment(t, function)

    o = given if given is not None else arrays.empty_like_framework(tq, plan.q_shape, tq.dtype)
    lse = arrays.empty_like_framework(tq, plan.lse_shape, "float32") if return_lse else None
    tensors = [tq, tk, tv, o]
    if lse is not None:
        tensors.append(lse)
    workspace = None
    if plan.forward.workspace_bytes:
        if tq.framework == "dlpack":
            raise UnsupportedError(
                f"{function}(): precision={plan.problem.precision!r} needs memory that only the arrays' own library "
                "can give, and DLPack has no way to ask for it",
                instead="torch, CuPy or JAX arrays, or precision='exact'",
            )
        workspace = arrays.empty_like_framework(tq, (plan.forward.workspace_bytes,), "uint8")
        tensors.append(workspace)
    pointers = [tq.ptr, tk.ptr, tv.ptr, o.ptr, 0 if lse is None else lse.ptr, 0, 0, 0, 0]
    if extra:
        for at, name in enumerate(("cu_seqlens_q", "cu_seqlens_k", "mask", "sinks"), start=5):
            if name in extra:
                t = extra[name]
                if t.ptr % t.itemsize:
                    arguments.check_alignment(t, function, t.itemsize)
                tensors.append(t)
                pointers[at] = t.ptr
    if workspace is not None:
        pointers.append(workspace.ptr)
    handle = arrays.prepare(tensors, stream)
    plan.forward.launch(handle, tuple(pointers))
    arrays.retire(tensors, handle)
    result = arrays.finish(o, handle)
    return result if lse is None else (result, arrays.finish(lse, handle))


def _describe(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, mask: Any, sinks: Any, out: Any, raw: int | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """q, k, v, and by name those of the others that were given."""
    describe = arrays.describe
    tq, tk, tv = describe(q, "q", raw), describe(k, "k", raw), describe(v, "v", raw)
    others = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "mask": mask, "sinks": sinks, "out": out}
    return tq, tk, tv, {name: describe(x, name, raw) for name, x in others.items() if x is not None}


def _check_aliasing(function: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """o may take q's place exactly (each row of q is read before it is written), and nobody else's."""
    if 0 in out.shape or out.device == "cpu":
        return
    for t in (k, v):
        if t.ptr == out.ptr:
            raise ArgumentError("out", f"memory of its own, not that of {t.argument}", hex(out.ptr), function=function)
    if q.ptr == out.ptr and tuple(q.strides) != tuple(out.strides):
        raise ArgumentError(
            "out", "q's own strides, where it takes q's memory", f"strides {tuple(out.strides)}", function=function
        )


def _run_on_cpu(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: dict[str, Tensor],
    max_q: int,
    max_k: int,
    layout: str,
    return_lse: bool,
    stream: Any,
) -> Any:
    """The NumPy reference on the very arguments; computes all before it writes anything."""
    arrays.prepare([q], stream)  # refuses a stream
    try:
        o, lse = _reference(plan.problem, q, k, v, extra, max_q, max_k, layout)
    except ArgumentError as error:  # in the contents of an array
        raise error.named("attention_varlen" if plan.problem.varlen else "attention") from None
    result = extra["out"] if "out" in extra else arrays.empty_like_framework(q, plan.q_shape, q.dtype)
    arrays.store(result, o)
    if not return_lse:
        return arrays.finish(result, 0)
    lse_out = arrays.empty_like_framework(q, plan.lse_shape, "float32")
    arrays.store(lse_out, lse)
    return arrays.finish(result, 0), arrays.finish(lse_out, 0)


def _reference(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: dict[str, Tensor],
    max_q: int,
    max_k: int,
    layout: str,
) -> tuple[Any, Any]:
    """o and LSE as NumPy arrays."""
    from . import reference

    options: dict[str, Any] = {
        "layout": layout,
        "window": (problem.window_left, problem.window_right),
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "mask": arrays.to_numpy(extra["mask"]) if "mask" in extra else None,
        "sinks": arrays.to_numpy(extra["sinks"]) if "sinks" in extra else None,
        "compute_dtype": "float64" if q.dtype == "float64" else "float32",
    }
    inputs = [arrays.to_numpy(t) for t in (q, k, v)]
    if problem.low is not None:
        from .reference import low_precision

        del options["compute_dtype"]
        if problem.varlen:
            options |= {name: arrays.to_numpy(extra[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
            options |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
        return low_precision.attention(*inputs, precision=problem.low, **options)
    if problem.varlen:
        return reference.attention_varlen(
            *inputs,
            cu_seqlens_q=arrays.to_numpy(extra["cu_seqlens_q"]),
            cu_seqlens_k=arrays.to_numpy(extra["cu_seqlens_k"]),
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            **options,
        )
    return reference.attention(*inputs, **options)
