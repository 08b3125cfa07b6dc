"""From what SDPA takes to what `attention` takes: dimensions, heads, head_dim, masks, top-left causality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias

from .. import arguments
from ..errors import ArgumentError, DeviceError, DtypeError, ShapeError
from ..frameworks.torch import told

FUNCTION = "sdpa"
#: What torch's functions call arguments of `attention`.
NAMES = {
    "q": "query", "k": "key", "v": "value", "mask": "attn_mask", "softmax_scale": "scale", "causal": "is_causal",
}  # fmt: skip


class Operands(NamedTuple):
    """A call of `attention`, and how its result becomes SDPA's.

    Attributes
    ----------
    q, k, v : tensor, (batch, heads, seq, head_dim)
    mask : tensor or None
    scale : float or None
    lead : tuple of int
        Batch dimensions and heads of the result.
    head_dim_v : int
        Channels of the result; more than these are padding.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scale: float | None
    lead: tuple[int, ...]
    head_dim_v: int


def padded_head_dim(head_dim: int) -> int:
    """The multiple of 8 that holds it."""
    return -(-head_dim // 8) * 8


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """What SDPA asks of its three tensors, besides dimensions that broadcast."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            raise ShapeError(name, "at least 2 dimensions (..., seq, head_dim)", tuple(x.shape), function=FUNCTION)
        if x.dtype != query.dtype:
            raise DtypeError(name, f"{query.dtype}, like query", x.dtype, function=FUNCTION)
        if x.device != query.device:
            raise DeviceError(name, f"{query.device}, like query", x.device, function=FUNCTION)
    if key.shape[-1] != query.shape[-1]:
        raise ShapeError("key", f"head_dim {query.shape[-1]}, like query", key.shape[-1], function=FUNCTION)
    if value.shape[-2] != key.shape[-2]:
        raise ShapeError("value", f"{key.shape[-2]} rows, like key", value.shape[-2], function=FUNCTION)


def operands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float | None,
    enable_gqa: bool,
) -> Operands:
    """The call of `attention` that SDPA's arguments mean; views where memory allows."""
    check(query, key, value)
    lead, (q, k, v) = _with_same_batch(query, key, value, enable_gqa)
    mask = None if attn_mask is None else _mask(attn_mask, query, lead, key.shape[-2])
    head_dim, head_dim_v = query.shape[-1], value.shape[-1]
    size, size_v = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    if head_dim != size:
        # Zeros change no score; the scale is that of the channels that were given.
        scale = head_dim**-0.5 if scale is None else scale
        q, k = F.pad(q, (0, size - head_dim)), F.pad(k, (0, size - head_dim))
    if head_dim_v != size_v:
        v = F.pad(v, (0, size_v - head_dim_v))
    return Operands(q, k, v, mask, scale, lead, head_dim_v)


def causal_window(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool, tuple[int, int] | None]:
    """(k, v, mask, causal, window) of `attention` for causality aligned at the top left: query i sees the keys j <= i.

    `attention` aligns at the bottom right. With more keys than queries nobody sees the last ones: they are cut off.
    With more queries, the difference of the lengths is the right side of a window. A mask, if there is one, hides more.
    """
    rows, columns = q.shape[-2], k.shape[-2]
    if rows == columns:
        return k, v, mask, True, None
    if rows < columns:
        return k[..., :rows, :], v[..., :rows, :], None if mask is None else mask[..., :rows], True, None
    return k, v, mask, False, (-1, rows - columns)


def _with_same_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Batch dimensions and heads of the result, and the tensors in four dimensions with one batch."""
    tensors = {"query": query, "key": key, "value": value}
    if enable_gqa:
        key, value = _grouped(query, key, value)
        batch = _broadcast({name: x.shape[:-3] for name, x in tensors.items()})
        lead = (*batch, query.shape[-3])
    else:
        lead = _broadcast({name: x.shape[:-2] for name, x in tensors.items()})
        batch = lead[:-1]
    heads = lead[-1] if lead else 1
    # One head of keys for all queries is grouped attention: no need to repeat it.
    same = key.shape[:-2][-1:] == value.shape[:-2][-1:]
    made = []
    for x in (query, key, value):
        own = x.shape[-3] if x.dim() > 2 else 1
        if not (enable_gqa or (own == 1 and x is not query and same)):
            own = heads
        shape = (*batch, own, *x.shape[-2:])
        made.append(_four(x if tuple(x.shape) == shape else x.expand(shape), len(batch)))
    return lead, made


def _grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """key and value with as many heads each, a number that divides the query's."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 3:
            expected = "at least 3 dimensions (..., heads, seq, head_dim), with enable_gqa"
            raise ShapeError(name, expected, tuple(x.shape), function=FUNCTION)
        if x.shape[-3] == 0 or query.shape[-3] % x.shape[-3] != 0:
            expected = f"a number of heads that divides query's {query.shape[-3]}"
            raise ShapeError(name, expected, x.shape[-3], function=FUNCTION)
    if key.shape[-3] == value.shape[-3]:
        return key, value
    heads = query.shape[-3]
    return key.repeat_interleave(heads // key.shape[-3], -3), value.repeat_interleave(heads // value.shape[-3], -3)


def _broadcast(shapes: dict[str, Sequence[int]]) -> tuple[int, ...]:
    """The shape that all broadcast to."""
    try:
        return tuple(torch.broadcast_shapes(*shapes.values()))
    except RuntimeError:
        text = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ShapeError("key", "batch dimensions that broadcast with query's", text, function=FUNCTION) from None


def _four(x: torch.Tensor, batch_dims: int) -> torch.Tensor:
    """(batch, heads, seq, head_dim)."""
    if batch_dims == 1:
        return x
    return x.unsqueeze(0) if batch_dims == 0 else x.flatten(0, batch_dims - 1)


def _mask(mask: torch.Tensor, query: torch.Tensor, lead: tuple[int, ...], columns: int) -> torch.Tensor:
    """The mask in at most four dimensions."""
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        expected = " or ".join(dict.fromkeys(("bool (True: takes part)", "torch.float32", str(query.dtype))))
        raise DtypeError("attn_mask", expected, mask.dtype, function=FUNCTION)
    if mask.device != query.device:
        raise DeviceError("attn_mask", f"{query.device}, like query", mask.device, function=FUNCTION)
    full = (*lead, query.shape[-2], columns)
    if mask.dim() > len(full) or any(
        m not in (1, n) for m, n in zip(reversed(mask.shape), reversed(full), strict=False)
    ):
        expected = f"a shape that broadcasts to (..., L, S) = {full}"
        raise ShapeError("attn_mask", expected, tuple(mask.shape), function=FUNCTION)
    batch_dims = len(lead) - 1
    if batch_dims <= 1 or mask.dim() <= 3:
        return mask
    mask = mask[(None,) * (len(full) - mask.dim())]
    if any(n != 1 for n in mask.shape[:batch_dims]):
        mask = mask.expand(*lead[:-1], *mask.shape[batch_dims:])
    return mask.flatten(0, batch_dims - 1)


def readable(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy where kernels cannot read it: rows that are not contiguous or not aligned to 16 bytes."""
    return x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def is_readable(x: torch.Tensor) -> bool:
    """Whether kernels can read x, which may have zero strides."""
    if not x.is_cuda:
        return has_readable_rows(x, 1)
    if not has_readable_rows(x, 16 // x.element_size()):
        return False
    # torch.compile knows no address: where one is not aligned, the operator raises when the graph runs.
    return torch.compiler.is_dynamo_compiling() or _address(x) % 16 == 0


def has_readable_rows(x: torch.Tensor, multiple: int) -> bool:
    """Whether rows are contiguous, and as many elements apart as multiples of ``multiple``."""
    shape, strides = x.shape, x.stride()
    if shape[-1] > 1 and strides[-1] != 1:
        return False
    return all(n <= 1 or s % multiple == 0 for n, s in zip(shape[:-1], strides[:-1], strict=True))


def _address(x: torch.Tensor) -> int:
    try:
        return x.data_ptr()
    except RuntimeError:  # wrapped by a transform, or without memory
        return x.storage_offset() * x.element_size()


def check_arguments(attn_mask: Any, dropout_p: Any, is_causal: Any, enable_gqa: Any) -> None:
    """Flags and numbers, as torch takes them; arguments that exclude each other."""
    if not isinstance(dropout_p, (float, torch.SymFloat)):
        dropout_p = arguments.check_number(dropout_p, "dropout_p", FUNCTION)
    if not 0.0 <= dropout_p <= 1.0:
        raise ArgumentError("dropout_p", "a probability", dropout_p, function=FUNCTION)
    for name, x in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(x, (bool, torch.SymBool)):
            arguments.check_bool(x, name, FUNCTION)
    if is_causal and isinstance(attn_mask, CausalBias):
        raise ArgumentError("attn_mask", "no CausalBias, because is_causal is True", "one", function=FUNCTION)


def call(function: str, do: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``do(*args, **options)``, whose errors name torch's arguments, and ``function``."""
    return told.call(function, do, *args, names=NAMES, **options)
