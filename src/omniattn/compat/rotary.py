"""Rotary embedding of queries and new keys before they meet a cache, as ``flash_attn_with_kvcache`` has it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import arguments
from ..errors import ArgumentError, DtypeError, ShapeError
from . import common


def rotation(
    function: str, capacity: int, cos: Any, sin: Any, interleaved: Any, q: torch.Tensor, k: Any
) -> functools.partial[torch.Tensor] | None:
    """(tensor, positions) -> tensor, rotated; ``capacity``: tokens that a sequence can have."""
    interleaved = arguments.check_bool(interleaved, "rotary_interleaved", function)
    if cos is None and sin is None:
        return None
    if cos is None or sin is None or k is None:
        expected = "rotary_cos, rotary_sin, k and v together"
        raise ArgumentError("rotary_cos", expected, "some of them without the others", function=function)
    common.check_tensors(function, rotary_cos=cos, rotary_sin=sin)
    if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[0] < capacity or not 0 < 2 * cos.shape[1] <= q.shape[-1]:
        expected = f"two of one shape, at least {capacity} positions and at most {q.shape[-1] // 2} pairs"
        received = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        raise ShapeError("rotary_cos", expected, received, function=function)
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.device != q.device:
            raise ArgumentError(name, f"a tensor on {q.device}, like q", f"{x.device}", function=function)
        if not x.is_floating_point():  # others would be taken without a word, complex ones without half of them
            raise DtypeError(name, "a floating-point type", x.dtype, function=function)
    return functools.partial(_rotate, cos=cos, sin=sin, interleaved=interleaved)


def check_angles(function: str, start: torch.Tensor, cos: torch.Tensor, counts: torch.Tensor | int) -> None:
    """Angles for ``counts`` positions from ``start`` on. On a GPU that would need a synchronization."""
    if start.device.type == "cpu" and len(start):
        ends = start + counts
        if not (int(start.min()) >= 0 and int(ends.max()) <= len(cos)):
            expected = f"angles of the positions from each of {start.tolist()} to {ends.tolist()}"
            raise ShapeError("rotary_cos", expected, f"those of 0 to {len(cos) - 1}", function=function)


def _rotate(
    x: torch.Tensor, positions: torch.Tensor, *, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Channels in pairs, turned by the angle of their positions; computed in fp32.

    x is (batch, tokens, heads, dim) and positions (batch, tokens) or (batch, 1), or they have no batch.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    at = positions.long().clamp(0, cos.shape[0] - 1)
    cos, sin = (t[at].unsqueeze(-2).to(wide) for t in (cos, sin))
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs].to(wide), x[..., 2 * pairs :]
    shape = (*x.shape[:-1], pairs, 2) if interleaved else (*x.shape[:-1], 2, pairs)
    one, two = turned.reshape(shape).unbind(-1 if interleaved else -2)
    made = torch.stack((one * cos - two * sin, one * sin + two * cos), dim=-1 if interleaved else -2)
    return torch.cat((made.flatten(-2).to(x.dtype), rest), dim=-1)
