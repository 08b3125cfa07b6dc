"""Values of the caller's arrays that change K."""

from __future__ import annotations

from typing import Any

from .. import arguments, arrays
from ..arrays import Tensor
from ..errors import ArgumentError, DtypeError, ShapeError
from .formats import KVFormat


def describe_key_arrays(
    given: dict[str, Any], num_kv_heads: int, fmt: KVFormat, ref: Tensor, function: str
) -> dict[str, Tensor]:
    """The caller's arrays that change K, which is in ``fmt``, checked; ``ref`` is where the cache is."""
    found: dict[str, Tensor] = {}
    shape = (num_kv_heads, fmt.head_dim)
    for argument, value in given.items():
        if value is None:
            continue
        if not fmt.quantized:
            expected = f"None with k_dtype {fmt.dtype!r}, which is exact"
            raise ArgumentError(argument, expected, arguments.kind_of(value), function=function)
        t = arrays.describe_of(function, value, argument)
        if t.dtype != "float32":
            raise DtypeError(argument, "float32", t.dtype, function=function)
        if tuple(t.shape) != shape:
            raise ShapeError(argument, f"(num_kv_heads, head_dim) = {shape}", f"{tuple(t.shape)}", function=function)
        if tuple(t.strides) != arrays.contiguous_strides(shape):
            raise ArgumentError(argument, "a contiguous array", f"strides {tuple(t.strides)}", function=function)
        if t.device == "cuda":
            arguments.check_alignment(t, function)
        else:
            check_values(t, function)
        found[argument] = t
    if found:
        arrays.require_same_device([ref, *found.values()])
    return found


def check_values(t: Tensor, function: str) -> None:
    """Numbers of ``k_mean`` or ``k_channel_scale``, on the CPU."""
    import numpy as np

    values = arrays.to_numpy(t)
    positive = t.argument == "k_channel_scale"
    bad = values[~(np.isfinite(values) & ((values > 0) | (not positive)))]
    if bad.size:
        expected = "finite numbers" + (" above 0" if positive else "")
        raise ArgumentError(t.argument, expected, f"{bad[0]}", function=function)
