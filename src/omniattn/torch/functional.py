"""``sdpa`` and ``use_sdpa``: the function ``torch.nn.functional.scaled_dot_product_attention`` on this package's
kernels."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import bias as torch_bias

from ..arguments import MAX_HEAD_DIM
from ..checks import values
from ..checks.dropout import MOST_CHANNELS
from ..errors import AlignmentError, ArgumentError, StrideError, UnsupportedError, told_of
from ..ops import attention
from ..problems import Auto, Fp8, Int4, Int8
from . import shapes
from .shapes import FUNCTION

Sdpa = Callable[..., torch.Tensor]

#: What torch had when this module was imported: where `sdpa` sends what kernels do not take.
_BEFORE: Sdpa = F.scaled_dot_product_attention

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_HALF = (torch.bfloat16, torch.float16)
_ON_CPU = (*_HALF, torch.float32, torch.float64)
_LEAST_CAPABILITY = (8, 0)
_is_compiling = torch.compiler.is_dynamo_compiling


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    precision: str | Int8 | Int4 | Fp8 | Auto = "exact",
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with its signature and semantics, by `attention`.

    ::

        softmax(scale * query @ key.T + attn_mask) @ value

    Parameters
    ----------
    query : tensor, (..., heads, L, E)
        float16 or bfloat16 on a GPU; on the CPU float32 and float64 too, by the NumPy reference. Any number of batch
        dimensions, any strides: what kernels cannot read is copied. E need not be a multiple of 8: it is padded.
    key : tensor, (..., heads, S, E)
        Batch dimensions and heads broadcast with the query's. A single head is not repeated in memory.
    value : tensor, (..., heads, S, Ev)
        E and Ev are padded to the larger one, where they differ.
    attn_mask : tensor, optional
        Broadcastable to (..., heads, L, S): bool (True: takes part), or float32 or query's dtype (added to the scores).
        Or a ``torch.nn.attention.bias.CausalBias``, which is not materialized.
    dropout_p : float
        As in `attention`, which draws from the default generator of query's device. What its kernels have no dropout
        for, and 1, goes to torch's function; with a low precision it raises.
    is_causal : bool
        Query i sees the keys j <= i (aligned at the top left, as torch does). No mask is made for it. With attn_mask
        both hold, as in torch's fused kernels; its unfused one raises.
    scale : float, optional
        1 / sqrt(E) unless given.
    enable_gqa : bool
        The heads of key and value divide the query's.
    precision : str, Int8, Int4, Fp8 or Auto
        As in `attention`.

    Returns
    -------
    tensor, (..., heads, L, Ev)
        In the memory layout of the query: where (batch, L, heads, E) lies behind it, ``transpose(1, 2)`` of the result
        is contiguous. A row that attends to nothing is 0.

    Raises
    ------
    ArgumentError
        Or its subclasses: shapes that do not broadcast, dtypes or devices that differ, a CausalBias with is_causal.
    UnsupportedError
        dropout_p > 0 with a low precision; with a gradient what `attention` has none for. All of them are
        RuntimeErrors, as torch raises.

    Notes
    -----
    What the kernels do not take goes to torch's function, at every precision: dtypes without kernels (float32 on a GPU,
    unless autocast makes it 16-bit), head dimensions above 512 (of a low precision above 256), GPUs before compute
    capability 8.0, other devices, nested tensors, DTensor and other subclasses. `fallback_reason` tells for a call.
    Torch's function is the one that was there when this module was imported; in `use_sdpa`, when that was entered.
    """
    return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision, _BEFORE)


# What replaces a function by its name, as context_parallel does, finds this one by the name of torch's.
sdpa.__name__ = _BEFORE.__name__


def fallback_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    precision: str | Int8 | Int4 | Fp8 | Auto = "exact",
) -> str | None:
    """Why `sdpa` sends a call to torch's function.

    Parameters
    ----------
    query, key, value, attn_mask : tensor
    precision : str, Int8, Int4, Fp8 or Auto
        As in `sdpa`.

    Returns
    -------
    str or None
        One sentence; None where this package's kernels run the call, or raise.
    """
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if x.__class__ in _PLAIN or (name == "attn_mask" and (x is None or isinstance(x, torch_bias.CausalBias))):
            continue
        if not isinstance(x, torch.Tensor):
            return f"{name} is not a tensor"
        if not _is_traced(x.__class__):
            return f"{name} is a {type(x).__name__}, a subclass of torch.Tensor"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested:
            return f"{name} is a nested tensor"
        if x.layout is not torch.strided:
            return f"{name} is not strided"
        if x.device.type not in ("cpu", "cuda"):
            return f"{name} is on device {x.device}"
    dtype = _dtype(query)
    if dtype not in (_HALF if query.is_cuda else _ON_CPU):
        return f"{dtype} has no kernels on {query.device.type}"
    if min(query.dim(), value.dim()) > 0:
        sizes = query.shape[-1], value.shape[-1]
        most = values.most_head_dim(precision)
        if not (min(sizes) > 0 and max(sizes) <= most):
            of = "" if most == MAX_HEAD_DIM else ", the most of a low precision"
            return f"head dimensions {sizes} are not from 1 to {most}{of}"
    if query.is_cuda and not _has_kernels(query.get_device()):
        return "the GPU has a compute capability below 8.0"
    return None


class use_sdpa(ContextDecorator):
    """Within the block, ``torch.nn.functional.scaled_dot_product_attention`` is `sdpa`.

    ::

        with omniattn.torch.use_sdpa(precision="int8"):
            model(x)

    It may be nested, entered again, and used as a decorator. Leaving restores the function that was there before, also
    by an exception. For good: ``torch.nn.functional.scaled_dot_product_attention = omniattn.torch.sdpa``.

    Parameters
    ----------
    precision : str, Int8, Int4, Fp8 or Auto
        As in `sdpa`.

    Raises
    ------
    ArgumentError, UnsupportedError
        A precision that is none: when it is made.

    Notes
    -----
    The function belongs to the process, so that all threads see the replacement. Where blocks of several threads
    overlap, each block's function passes calls on to the one before as soon as its own block is left. Code that has
    taken the function out of torch.nn.functional before (``from torch.nn.functional import
    scaled_dot_product_attention``) keeps what it took.
    """

    def __init__(self, precision: str | Int8 | Int4 | Fp8 | Auto = "exact") -> None:
        values.check_precision(precision, "use_sdpa")
        self.precision = precision
        self._entered = threading.local()

    def __enter__(self) -> None:
        function = _replacement(self.precision, F.scaled_dot_product_attention)
        stack = self._entered.__dict__.setdefault("stack", [])
        stack.append(function)
        F.scaled_dot_product_attention = function

    def __exit__(self, *error: Any) -> None:
        function: Any = self._entered.stack.pop()
        function.active[0] = False
        # What somebody else has put there since stays; it may still call this function, which passes the call on.
        before: Any = function.before
        if F.scaled_dot_product_attention is function:
            while not getattr(before, "active", (True,))[0]:
                before = before.before
            F.scaled_dot_product_attention = before


def _replacement(precision: Any, before: Any) -> Any:
    """SDPA with its signature, which passes calls on to ``before`` when its list ``active`` says so."""
    active = [True]

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if not active[0]:
            return before(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision, before)

    function: Any = scaled_dot_product_attention
    function.active, function.before = active, before
    return function


def _sdpa(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any,
    precision: Any, before: Sdpa,
) -> torch.Tensor:  # fmt: skip
    # The common call costs a microsecond more than `attention`, which raises for what is not plain in it.
    if (
        attn_mask is None
        and dropout_p == 0.0
        and query.__class__ in _PLAIN
        and key.__class__ in _PLAIN
        and value.__class__ in _PLAIN
        and query.dtype in _HALF
        and query.is_cuda
        and not _is_compiling()
        and query.is_contiguous()
        and _is_common(query.shape, key.shape, value.shape, is_causal, enable_gqa)
        and (precision == "exact" or max(query.shape[3], value.shape[3]) <= values.most_head_dim(precision))
        and _all_gpus_have_kernels()
    ):
        try:
            return attention(
                query, key, value, layout="HND", causal=is_causal, softmax_scale=scale, precision=precision
            )
        except (StrideError, AlignmentError):
            pass
        except (ArgumentError, UnsupportedError) as error:
            raise told_of(error, FUNCTION, shapes.NAMES) from None
    return _general(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision, before)


def _serves(head_dim: int) -> bool:
    """Whether `attention` takes tensors of this head_dim."""
    return head_dim % 8 == 0 and 0 < head_dim <= MAX_HEAD_DIM


def _is_common(q: Any, k: Any, v: Any, is_causal: bool, enable_gqa: bool) -> bool:
    """Whether shapes are those of `attention` already."""
    if not (len(q) == 4 and len(v) == 4 and k[:3] == v[:3] and _serves(q[3]) and _serves(v[3])):
        return False
    if q == k:
        return True
    return (
        len(k) == 4
        and k[0] == q[0]
        and (k[1] == q[1] or (enable_gqa and k[1] > 0 and q[1] % k[1] == 0))
        and k[3] == q[3]
        and (k[2] == q[2] or not is_causal)
    )


def _general(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any,
    precision: Any, before: Sdpa,
) -> torch.Tensor:  # fmt: skip
    shapes.check_arguments(attn_mask, dropout_p, is_causal, enable_gqa)
    reason = fallback_reason(query, key, value, attn_mask, precision=precision)
    if reason is not None or _drops_elsewhere(query, value, dropout_p):
        values.check_precision(precision, FUNCTION)
        if isinstance(attn_mask, torch_bias.CausalBias):
            # It knows torch's function by its place in torch.nn.functional, which may be taken by now.
            attn_mask = attn_mask._materialize(query.device)
        return before(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    bottom_right = False
    if isinstance(attn_mask, torch_bias.CausalBias):
        bottom_right = attn_mask.variant == torch_bias.CausalVariant.LOWER_RIGHT
        is_causal, attn_mask = not bottom_right, None
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (x.to(dtype) if x.dtype == torch.float32 else x for x in (query, key, value))
    q, k, v, mask, scale, lead, head_dim_v = shapes.operands(query, key, value, attn_mask, scale, bool(enable_gqa))
    causal, window = bottom_right, None
    if is_causal:
        k, v, mask, causal, window = shapes.causal_window(q, k, v, mask)
    options: dict[str, Any] = {
        "softmax_scale": scale, "mask": mask, "precision": precision, "causal": causal, "window": window,
    }  # fmt: skip
    if dropout_p:
        options["dropout_p"] = float(dropout_p)
    q, k, v = map(shapes.readable, (q, k, v))
    # The result lies in memory as the query does: models take (batch, seq, heads, head_dim) out of it.
    if q.stride(1) < q.stride(2):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = shapes.call(FUNCTION, attention, q, k, v, layout="NHD", **options).transpose(1, 2)
    else:
        o = shapes.call(FUNCTION, attention, q, k, v, layout="HND", **options)
    if o.shape[-1] != head_dim_v:
        o = o[..., :head_dim_v]
    return o if len(lead) == 2 else o.reshape(*lead, *o.shape[-2:])


def _drops_elsewhere(query: torch.Tensor, value: torch.Tensor, dropout_p: float) -> bool:
    """Whether torch's function drops: everything, or probabilities of a head_dim without kernels that do."""
    if not 0 < dropout_p < 1:
        return dropout_p == 1
    return any(x.dim() > 0 and x.shape[-1] > MOST_CHANNELS for x in (query, value))


def _dtype(query: torch.Tensor) -> torch.dtype:
    """The type that attention runs in: under autocast, torch's function makes float32 a 16-bit type."""
    kind = query.device.type
    if query.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return query.dtype


@torch.compiler.assume_constant_result
def _has_kernels(ordinal: int) -> bool:
    """Whether a GPU is new enough."""
    return torch.cuda.get_device_capability(ordinal) >= _LEAST_CAPABILITY


@functools.cache
def _all_gpus_have_kernels() -> bool:
    """One question for all calls: the GPU of a tensor takes longer to find."""
    return all(map(_has_kernels, range(torch.cuda.device_count())))


@functools.cache
def _is_traced(cls: type) -> bool:
    """Whether a class of tensors stands for plain ones in a trace: `attention` has operators for these."""
    return cls.__module__.startswith("torch._subclasses.") and cls.__name__ in ("FakeTensor", "FunctionalTensor")
