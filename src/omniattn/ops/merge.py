"""``merge_states``: attention over two disjoint sets of keys from the results over each."""

from __future__ import annotations

from typing import Any

from . import arguments, arrays, runtime
from .arrays import Tensor
from .errors import ArgumentError, DtypeError, ShapeError
from .launch.merge_states import MergePlan
from .repeat import RepeatedMerge, repeated_merge
from .runtime.driver import on_reset
from .select import Target, select_merge_states

_NAME = "merge_states"
_MAX_PLANS = 1024
#: Plans by the facts of the arrays they have been checked for.
_plans: dict[Any, _Plan] = {}
# A plan holds a loaded kernel, which is worth nothing under another driver or in a forked child.
on_reset(_plans.clear)


class _Plan:
    """A validated call; ``repeat`` is the short way for arrays that `arrays.look` knows."""

    __slots__ = ("merge", "repeat")

    def __init__(self, merge: MergePlan) -> None:
        self.merge = merge
        self.repeat: RepeatedMerge | None = None


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, *, out: Any = None, stream: Any = None) -> tuple[Any, Any]:
    """Merge two partial attention results over disjoint keys (cascade and ring attention).

    ::

        lse = log(exp(lse_a) + exp(lse_b));   o = o_a * exp(lse_a - lse) + o_b * exp(lse_b - lse)

    Parameters
    ----------
    o_a, o_b : array, (batch, seqlen, heads, head_dim) or packed (rows, heads, head_dim)
        Partial outputs: float16, bfloat16 or float32 (on the CPU float64 too), head_dim a multiple of 8 up to 256, last
        dimension contiguous.
    lse_a, lse_b : array, (batch, heads, seqlen) or packed (heads, rows), float32
        Natural logarithm, as `attention` returns it. A side with -inf has seen no key and is not looked at.
    out : array, optional
        Where o goes; shape and dtype of o_a. It may be o_a or o_b itself.
    stream : optional
        As in `attention`.

    Returns
    -------
    o : array
        Of o_a's framework, shape and dtype; 0 where both sides are empty.
    lse : array
        float32, shape of lse_a; -inf where both sides are empty.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    GPUs: compute capability 8.0 and newer. Sinks count as a key: let only one side have them.
    """
    raw = None if stream is None else arrays.resolve_stream(stream)
    key: Any = None
    plan: _Plan | None = None
    seen = arrays.look((o_a, o_b, lse_a, lse_b, out))
    if seen is not None:
        key, addresses = seen
        plan = _plans.get(key)
        if plan is not None and plan.repeat is not None:
            merged = plan.repeat(o_a, lse_a, out, addresses, raw)
            if merged is not None:
                return merged
    a, b = arrays.describe(o_a, "o_a", raw), arrays.describe(o_b, "o_b", raw)
    log_a, log_b = arrays.describe(lse_a, "lse_a", raw), arrays.describe(lse_b, "lse_b", raw)
    given = None if out is None else arrays.describe(out, "out", raw)
    if seen is None:
        key = tuple(
            None if t is None else (t.dtype, t.device, t.ordinal, t.shape, t.strides)
            for t in (a, b, log_a, log_b, given)
        )
        plan = _plans.get(key)
    # Shapes, strides and dtypes that passed once pass again; addresses are looked at in every call.
    if plan is None or given is not None or (a.ptr | b.ptr) & 15 or (log_a.ptr | log_b.ptr) & 3:
        _check(a, log_a, b, log_b, given)
    shape, lse_shape = tuple(a.shape), tuple(log_a.shape)

    if a.device == "cpu":
        from . import reference

        arrays.prepare([a], stream)  # refuses a stream
        o, lse = reference.merge_states(
            *(arrays.to_numpy(t) for t in (a, log_a, b, log_b)),
            compute_dtype="float64" if a.dtype == "float64" else "float32",
        )
        o_out = given if given is not None else arrays.empty_like_framework(a, shape, a.dtype)
        lse_out = arrays.empty_like_framework(a, lse_shape, "float32")
        arrays.store(o_out, o)
        arrays.store(lse_out, lse)
        return arrays.finish(o_out, 0), arrays.finish(lse_out, 0)

    o_out = given if given is not None else arrays.empty_like_framework(a, shape, a.dtype)
    lse_out = arrays.empty_like_framework(a, lse_shape, "float32")
    if plan is None:
        plan = _make_plan(a, b, log_a, log_b, o_out, lse_out)
        if seen is not None:
            plan.repeat = repeated_merge(plan.merge, a, log_a)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    tensors = [a, b, log_a, log_b, o_out, lse_out]
    handle = arrays.prepare(tensors, stream)
    plan.merge.launch(handle, (a.ptr, b.ptr, o_out.ptr, log_a.ptr, log_b.ptr, lse_out.ptr))
    arrays.retire(tensors, handle)
    return arrays.finish(o_out, handle), arrays.finish(lse_out, handle)


def _make_plan(a: Tensor, b: Tensor, log_a: Tensor, log_b: Tensor, out: Tensor, lse: Tensor) -> _Plan:
    device = runtime.device_info(a.ordinal)
    selection = select_merge_states(a.dtype, Target(device.cc, device.max_smem_optin))
    shape = a.shape
    return _Plan(
        MergePlan(
            runtime.load(selection.spec, a.ordinal),
            (_three(a.strides[:-1]), _three(b.strides[:-1]), _three(out.strides[:-1])),
            (_three(log_a.strides), _three(log_b.strides), _three(lse.strides)),
            (shape[0] if len(shape) == 4 else 1, shape[-3], shape[-2], shape[-1]),
            a.itemsize,
        )
    )


def _three(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Strides (batch, x, y); those of a packed array have no batch."""
    return (0, strides[0], strides[1]) if len(strides) == 2 else (strides[0], strides[1], strides[2])


def _check(a: Tensor, log_a: Tensor, b: Tensor, log_b: Tensor, out: Tensor | None) -> None:
    allowed = ("float16", "bfloat16", "float32") + (("float64",) if a.device == "cpu" else ())
    if a.dtype not in allowed:
        raise DtypeError("o_a", " or ".join(allowed), a.dtype, function=_NAME)
    if len(a.shape) not in (3, 4):
        raise ShapeError(
            "o_a", "(batch, seqlen, heads, head_dim) or (rows, heads, head_dim)", f"{tuple(a.shape)}", function=_NAME
        )
    head_dim = a.shape[-1]
    if not (8 <= head_dim <= arguments.MAX_HEAD_DIM and head_dim % 8 == 0):
        raise ShapeError(
            "o_a", f"head_dim a multiple of 8 from 8 to {arguments.MAX_HEAD_DIM}", f"{head_dim}", function=_NAME
        )
    if a.shape[-3] > arguments.MAX_ROWS:
        raise ShapeError("o_a", f"at most {arguments.MAX_ROWS} rows", f"{a.shape[-3]}", function=_NAME)
    arguments.check_like(b, a.shape, a.dtype, _NAME)
    lse_shape = (*a.shape[:-3], a.shape[-2], a.shape[-3])
    arguments.check_like(log_a, lse_shape, "float32", _NAME)
    arguments.check_like(log_b, lse_shape, "float32", _NAME)
    tensors = [a, b, log_a, log_b]
    if out is not None:
        arguments.check_like(out, a.shape, a.dtype, _NAME)
        arrays.require_writable(out)
        tensors.append(out)
    arrays.require_same_device(tensors)
    for t in (a, b, out):
        if t is not None:
            arguments.check_strides(t, _NAME, written=t is out)
            if t.device == "cuda":
                arguments.check_alignment(t, _NAME)
    if a.device == "cuda":
        for t in (log_a, log_b):
            arguments.check_alignment(t, _NAME, t.itemsize)
    if out is not None and out.device == "cuda" and 0 not in out.shape:
        for t in (a, b):
            if t.ptr == out.ptr and tuple(t.strides) != tuple(out.strides):
                raise ArgumentError(
                    "out",
                    f"the strides of {t.argument}, whose memory it takes",
                    f"{tuple(out.strides)}",
                    function=_NAME,
                )
