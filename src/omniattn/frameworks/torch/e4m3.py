"""Attention of tensors in e4m3 with factors, as an operator. It has no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import FUNCTIONS
from .library import LIBRARY, TAGS, fail

LIBRARY.define(
    "attention_e4m3(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, Tensor? mask, Tensor? sinks, Tensor? descale_q, "
    "Tensor? descale_k, Tensor? descale_v, "
    "str layout, bool causal, SymInt[]? window, float? softmax_scale, float softcap, bool deterministic, "
    "str out_dtype, bool return_lse) -> (Tensor, Tensor)",
    tags=TAGS,
)

_OUT_DTYPES = ("bfloat16", "float16")


def check_out_dtype(function: str, out_dtype: Any, dtype: str) -> None:
    """``out_dtype`` of a call whose o has one possible element type."""
    if out_dtype is not None and _name(out_dtype) != dtype:
        fail("argument", "out_dtype", f"{dtype!r}, like q, or None", str(out_dtype), function=function)


def _name(dtype: Any) -> str:
    return dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")


def as_factor(x: Any, q: Any) -> Any:
    """A factor without dimensions in a traced or compiled call, a number or a tensor, as a tensor in float32."""
    return x.to(torch.float32) if isinstance(x, torch.Tensor) else q.new_full((), float(x), dtype=torch.float32)


def trace(
    function: str, qkv: Sequence[Any], sequences: Sequence[Any], mask: Any, sinks: Any, descales: Sequence[Any],
    options: Any,
) -> Any:  # fmt: skip
    """The call by its operator: o, or (o, lse). sequences: those of packed tensors, or None six times."""
    for name, x in zip(("q", "k", "v"), qkv, strict=True):
        if not isinstance(x, torch.Tensor) or x.dtype is not torch.float8_e4m3fn:
            found = str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__
            fail("argument", name, "a torch tensor in float8_e4m3fn, with descales or q in it", found,
                 function=function)  # fmt: skip
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*qkv, *descales, mask, sinks)):
        fail(
            "unsupported", f"{function}(): an argument requires a gradient, and e4m3 tensors have none",
            instead="16-bit tensors with precision='fp8', whose gradients are those of exact attention",
        )  # fmt: skip
    if options.precision not in ("exact", "fp8"):
        fail("argument", "precision", "'fp8' or nothing, because q, k and v are e4m3", str(options.precision),
             function=function)  # fmt: skip
    out_dtype = "bfloat16" if options.out_dtype is None else _name(options.out_dtype)
    if out_dtype not in _OUT_DTYPES:
        fail("argument", "out_dtype", " or ".join(map(repr, _OUT_DTYPES)), out_dtype, function=function)
    factors = tuple(descales) or (None, None, None)
    o, lse = torch.ops.omniattn.attention_e4m3.default(
        *qkv, *sequences, mask, sinks, *factors, options.layout, options.causal,
        None if options.window is None else list(options.window), options.softmax_scale, float(options.softcap),
        options.deterministic, out_dtype, options.return_lse,
    )  # fmt: skip
    return (o, lse) if options.return_lse else o


def _attention(
    q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, used_q: Any, used_k: Any, max_q: Any, max_k: Any, mask: Any,
    sinks: Any, descale_q: Any, descale_k: Any, descale_v: Any, layout: str, causal: bool, window: Any,
    softmax_scale: Any, softcap: float, deterministic: bool, out_dtype: str, return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    packed = {}
    if starts_q is not None:
        packed = {
            "cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "seqused_q": used_q, "seqused_k": used_k,
            "max_seqlen_q": max_q, "max_seqlen_k": max_k,
        }  # fmt: skip
    results = FUNCTIONS["attention_varlen" if packed else "attention"](
        q, k, v, mask=mask, sinks=sinks, descale_q=descale_q, descale_k=descale_k, descale_v=descale_v, layout=layout,
        causal=causal, window=None if window is None else tuple(window), softmax_scale=softmax_scale, softcap=softcap,
        deterministic=deterministic, out_dtype=out_dtype, return_lse=return_lse, **packed,
    )  # fmt: skip
    return results if return_lse else (results, q.new_empty((0,), dtype=torch.float32))


def _shapes(q: Any, k: Any, v: Any, starts_q: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    layout, out_dtype, return_lse = others[10], others[16], others[17]
    seq, head = (-3, -2) if layout == "NHD" else (-2, -3)
    lse: tuple[Any, ...] = (0,)
    if return_lse:
        lse = (*q.shape[: q.ndim - 3], q.shape[head], q.shape[seq])
    o = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=getattr(torch, out_dtype))
    return o, q.new_empty(lse, dtype=torch.float32)


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("attention_e4m3", _attention, _key)
torch.library.register_fake("omniattn::attention_e4m3", _shapes, lib=LIBRARY)
