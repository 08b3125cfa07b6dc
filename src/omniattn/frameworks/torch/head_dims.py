"""q, k and v of one head_dim, where v has one of its own and gradients are wanted, whose kernels have one for all."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F


class OneHeadDim(NamedTuple):
    """Tensors of one head_dim.

    Attributes
    ----------
    q, k, v : tensor
        Zeros behind the channels that were given: they change no score, and their gradients are dropped.
    softmax_scale : float or None
        That of the channels that were given.
    head_dim_v : int
        Channels of o; more than these are padding.
    """

    q: Any
    k: Any
    v: Any
    softmax_scale: float | None
    head_dim_v: int


def one_head_dim(q: Any, k: Any, v: Any, softmax_scale: float | None) -> OneHeadDim | None:
    """Tensors of one head_dim; None where they have one already, on the CPU, and where a check will refuse them."""
    if q.device.type != "cuda" or min(q.dim(), k.dim(), v.dim()) < 1:
        return None
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    if head_dim == head_dim_v or k.shape[-1] != head_dim or head_dim % 8 or head_dim_v % 8 or not head_dim:
        return None
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if head_dim_v < head_dim:
        return OneHeadDim(q, k, F.pad(v, (0, head_dim - head_dim_v)), scale, head_dim_v)
    fill = (0, head_dim_v - head_dim)
    return OneHeadDim(F.pad(q, fill), F.pad(k, fill), v, scale, head_dim_v)
