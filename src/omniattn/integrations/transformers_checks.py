"""Checks of what a model hands to an attention function of transformers, before anything of it is cut or combined.

`omniattn.attention` checks what it gets. What is expanded, added or cut to fit before that call is checked here.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import import_utils

from ..arguments import check_bool, check_int, check_number
from ..errors import ArgumentError, DeviceError, DtypeError, ShapeError

__all__ = [
    "addend", "check_addends", "check_broadcasts", "check_causal", "check_dropout", "check_tensors", "check_window",
    "longest", "starts_of",
]  # fmt: skip

_FUNCTION = "omniattn.integrations.transformers"
_MOST = 2**31 - 1


def check_tensors(query: Any, key: Any, value: Any) -> None:
    """Refuse q, k and v that are not (batch, heads, length, head_dim) each, with batches and keys that fit."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(name, "a tensor", repr(x), function=_FUNCTION)
        if x.dim() != 4:
            raise ShapeError(name, "(batch, heads, length, head_dim)", tuple(x.shape), function=_FUNCTION)
    if value.shape[:3] != key.shape[:3]:
        expected = f"{tuple(key.shape[:3])} before head_dim, as key has it"
        raise ShapeError("value", expected, tuple(value.shape), function=_FUNCTION)
    if query.shape[0] != key.shape[0] and 1 not in (query.shape[0], key.shape[0]):
        raise ShapeError("key", f"a batch of {query.shape[0]}, as query has it", tuple(key.shape), function=_FUNCTION)


def check_dropout(dropout: Any) -> float:
    """The share of the probabilities that is dropped: at least 0 and less than 1."""
    share = check_number(dropout, "dropout", _FUNCTION, least=0.0)
    if not share < 1.0:
        raise ArgumentError("dropout", "a number of at least 0 and less than 1", repr(dropout), function=_FUNCTION)
    return share


def check_causal(is_causal: Any) -> bool | None:
    """Whether a query sees the keys behind its own; None where its module says it."""
    return None if is_causal is None else check_bool(is_causal, "is_causal", _FUNCTION)


def check_window(sliding_window: Any) -> int | None:
    """Keys that a query sees, its own included."""
    return None if sliding_window is None else check_int(sliding_window, "sliding_window", _FUNCTION, least=1)


def check_addends(mask: Any, bias: Any, shape: tuple[int, int, int, int], device: torch.device) -> None:
    """Refuse a mask that is no tensor, and with a bias what cannot be added to scores of a shape on a device."""
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise ArgumentError("attention_mask", "a tensor or None", repr(mask), function=_FUNCTION)
    if bias is None:
        # A mask alone goes to attention as it is.
        return
    for name, x in (("position_bias", bias), ("attention_mask", mask)):
        if x is not None:
            check_broadcasts(x, name, shape, device)


def check_broadcasts(x: Any, name: str, shape: tuple[int, int, int, int], device: torch.device) -> None:
    """Refuse what is no tensor on the device of query, or does not broadcast to (batch, heads, q_len, kv_len)."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(name, "a tensor or None", repr(x), function=_FUNCTION)
    extents = zip(reversed(x.shape), reversed(shape), strict=False)
    if not 1 <= x.dim() <= 4 or any(extent not in (1, whole) for extent, whole in extents):
        raise ShapeError(name, f"a shape that broadcasts to {shape}", tuple(x.shape), function=_FUNCTION)
    if x.device != device:
        raise DeviceError(name, f"a tensor on {device}, as query is", str(x.device), function=_FUNCTION)


def longest(length: Any, name: str) -> int:
    """A length that came as an integer, or as a tensor of one."""
    if isinstance(length, torch.Tensor):
        if length.numel() != 1 or not _is_integer(length.dtype) or length.device.type == "meta":
            received = f"{length.dtype} {tuple(length.shape)} on {length.device}"
            raise ArgumentError(name, "an integer, or a tensor of one", received, function=_FUNCTION)
        length = int(length)
    return check_int(length, name, _FUNCTION)


def _is_integer(dtype: torch.dtype) -> bool:
    """Whether an element type is one of integers; bool is none."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def starts_of(x: Any, name: str) -> torch.Tensor:
    """Where packed sequences begin, as kernels read it: the tensor itself where it is int32."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(name, "a tensor of integers", repr(x), function=_FUNCTION)
    if not _is_integer(x.dtype):
        raise DtypeError(name, "a tensor of integers", x.dtype, function=_FUNCTION)
    if x.dtype is torch.int32:
        return x
    # Of a GPU's tensors the values are not read, which would wait for it.
    if x.device.type == "cpu" and not import_utils.is_tracing(x) and bool((x.abs() > _MOST).any()):
        raise ArgumentError(name, f"integers up to {_MOST}", str(int(x.abs().max())), function=_FUNCTION)
    return x.to(torch.int32)


def addend(x: Any, query: torch.Tensor, name: str) -> torch.Tensor | None:
    """A bias that is added, or sinks, in a dtype that attention takes."""
    if x is None:
        return None
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(name, "a tensor or None", repr(x), function=_FUNCTION)
    if x.dtype.is_complex:
        raise DtypeError(name, "a tensor of real numbers", x.dtype, function=_FUNCTION)
    return x if x.dtype in (query.dtype, torch.float32) else x.to(torch.float32)
