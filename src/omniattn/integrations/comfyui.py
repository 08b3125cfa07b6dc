"""Attention for ComfyUI: a function for ``transformer_options["optimized_attention_override"]`` of a model.

Nothing of ComfyUI is imported. examples/comfyui has a node that sets it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import omniattn

from ..checks import values
from ..errors import ArgumentError
from ..problems import Auto, Fp8, Int4, Int8
from .masks import taken

__all__ = ["make_override", "override", "override_int8"]

#: Keywords that ComfyUI passes and that are served, or do not concern the result.
_KNOWN = {
    "transformer_options", "scale", "enable_gqa", "low_precision_attention", "preferred_attention",
    "_inside_attn_wrapper",
}  # fmt: skip


def make_override(
    precision: str | Int8 | Int4 | Fp8 | Auto = "exact", *, devices: tuple[str, ...] = ("cuda",)
) -> Callable[..., torch.Tensor]:
    """A function that attends in place of ComfyUI's own.

    Parameters
    ----------
    precision : str, Int8, Int4, Fp8 or Auto
        As in `omniattn.attention`.
    devices : tuple of str
        Types of devices whose tensors are taken. The reference that runs on a CPU is slow, so "cpu" is for tests.

    Returns
    -------
    callable
        ``g(func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kw)``
        where func is ComfyUI's own function with the other arguments. q, k, v are (batch, length, heads * head_dim), or
        with skip_reshape (batch, heads, length, head_dim); the result likewise, with skip_output_reshape. A mask of 2
        dimensions is (queries, keys), of 3 (batch, queries, keys).

    Raises
    ------
    ArgumentError
        precision is not one of attention's, or devices is no tuple of str.

    Notes
    -----
    These calls go to func, with all their arguments, and no others do:

    - tensors on other devices, of more than one device (the mask's too) or dtype, or on a GPU neither float16 nor
      bfloat16;
    - heads that are no integer of at least 1, or with skip_reshape not those of q; q, k, v or a mask that is no tensor;
    - head_dim that is not a multiple of 8 up to 512 (in a low precision up to 256), or that k or v do not share;
    - a batch or number of heads of k and v that is not q's (fewer heads with ``enable_gqa`` are taken);
    - masks that are neither boolean nor of a floating-point dtype: torch refuses integers, other functions of ComfyUI
      add them as they are;
    - keywords that are not known here.

    With a low precision, tensors that need a gradient and calls with ``low_precision_attention=False`` run exactly.
    attn_precision asks for products of q and k in fp32, which the kernels accumulate in any case. Errors of attention
    itself are raised; nothing is tried again with func.
    """
    values.check_precision(precision, "make_override")
    if not isinstance(devices, (tuple, list, set, frozenset)) or not all(isinstance(x, str) for x in devices):
        raise ArgumentError("devices", "a tuple of str", repr(devices), function="make_override")

    def attention(
        func: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """o of one call of ComfyUI's attention."""
        split = _by_heads(q, k, v, heads, skip_reshape)
        unknown = any(value is not None for name, value in kwargs.items() if name not in _KNOWN)
        exact = kwargs.get("low_precision_attention") is False
        exact |= torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v, mask))
        most = values.most_head_dim("exact" if exact else precision)
        if unknown or split is None or not _served(*split, mask, bool(kwargs.get("enable_gqa")), devices, most):
            return func(
                q, k, v, heads, mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape,
                skip_output_reshape=skip_output_reshape, **kwargs,
            )  # fmt: skip
        out = omniattn.attention(
            *split, mask=_mask(mask, q), softmax_scale=kwargs.get("scale"), precision="exact" if exact else precision
        )
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    return attention


def _by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, skip_reshape: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """q, k, v as (batch, length, heads, head_dim); None if they are not what ComfyUI describes."""
    if not all(isinstance(x, torch.Tensor) for x in (q, k, v)) or not isinstance(heads, int) or heads < 1:
        return None
    if skip_reshape:
        if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or q.shape[1] != heads:
            return None
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or q.shape[2] % heads:
        return None
    head_dim = q.shape[2] // heads
    if head_dim == 0 or k.shape[2] % head_dim or v.shape[2] % head_dim:
        return None
    return q.unflatten(2, (-1, head_dim)), k.unflatten(2, (-1, head_dim)), v.unflatten(2, (-1, head_dim))


def _served(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    enable_gqa: bool,
    devices: tuple[str, ...],
    most: int,
) -> bool:
    """Whether attention takes the call: the rule of `make_override`. most: channels of a head."""
    dtypes = [torch.float16, torch.bfloat16]
    if q.device.type == "cpu":
        dtypes += [torch.float32, torch.float64]
    heads, heads_kv, head_dim = q.shape[2], k.shape[2], q.shape[3]
    return (
        q.device.type in devices
        and q.dtype in dtypes
        and all(x.dtype == q.dtype and x.device == q.device for x in (k, v))
        and 0 < head_dim <= most
        and head_dim % 8 == 0
        and k.shape == v.shape
        and k.shape[0] == q.shape[0]
        and k.shape[3] == head_dim
        and (heads == heads_kv or (enable_gqa and heads_kv > 0 and heads % heads_kv == 0))
        and (mask is None or (isinstance(mask, torch.Tensor) and mask.device == q.device and _is_mask(mask)))
    )


def _is_mask(mask: torch.Tensor) -> bool:
    return (mask.dtype == torch.bool or mask.is_floating_point()) and 2 <= mask.dim() <= 4


def _mask(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    if mask is not None and mask.dim() == 3:
        mask = mask[:, None]
    return taken(mask, q, "mask", "omniattn.integrations.comfyui")


override = make_override("exact")
override_int8 = make_override("int8")
