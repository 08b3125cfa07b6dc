"""Scales of a caller's 8-bit arrays, and where kernels find them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import arguments, arrays
from ..arrays import Tensor
from ..arrays.strides import overlaps_itself
from ..errors import ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError
from .layout import ScalePlaces
from .places import MAX_PLACES

_SHAPES = "(1,), (heads,), (sequences of a call, heads), or the shape of k without its last dimension"


def describe_latent_scale(k_scale: Any, k: Tensor, function: str) -> Tensor:
    """The one scale of a latent cache's rows ``k``, checked."""
    scale = arrays.describe_of(function, k_scale, "k_scale")
    if k.itemsize == 1 and tuple(scale.shape) not in ((), (1,)):
        expected = "shape (1,), one for all rows, with head_dim_v"
        raise ShapeError("k_scale", expected, f"{tuple(scale.shape)}", function=function)
    return describe_scales({"k_scale": k_scale, "v_scale": k_scale}, k, 1, function)["k_scale"]


def describe_scales(given: Mapping[str, Any], k: Tensor, heads: int, function: str) -> dict[str, Tensor]:
    """The scales ``k_scale`` and ``v_scale`` of arrays like ``k``, checked; nothing for None and None."""
    there = {name: x for name, x in given.items() if x is not None}
    if not there:
        return {}
    if len(there) < len(given):
        missing = next(name for name in given if name not in there)
        raise ArgumentError(missing, "an array, as the other one's scales are given", "None", function=function)
    if k.itemsize != 1:
        received = arguments.kind_of(there["k_scale"])
        raise ArgumentError("k_scale", f"None with {k.dtype} arrays, which are exact", received, function=function)
    scales = {name: arrays.describe_of(function, x, name) for name, x in there.items()}
    arrays.require_same_device([k, *scales.values()])
    rows = tuple(k.shape[:3])
    for name, t in scales.items():
        if t.dtype != "float32":
            raise DtypeError(name, "float32", t.dtype, function=function)
        shape = tuple(t.shape)
        if shape not in ((), (1,), (heads,), rows) and not (len(shape) == 2 and shape[0] >= 1 and shape[1] == heads):
            raise ShapeError(name, f"{_SHAPES}; here {heads} heads, {rows}", f"{shape}", function=function)
        if any(s < 0 for s in t.strides):
            raise StrideError(name, "strides of 0 or more", f"{tuple(t.strides)}", function=function)
        if len(shape) == 3 and overlaps_itself(t.shape, t.strides):
            raise StrideError(name, "elements that do not share memory", f"{tuple(t.strides)}", function=function)
    first, second = scales["k_scale"], scales["v_scale"]
    if tuple(first.shape) != tuple(second.shape):
        raise ShapeError("v_scale", f"{tuple(first.shape)}, like k_scale", f"{tuple(second.shape)}", function=function)
    if tuple(first.strides) != tuple(second.strides):
        received = f"{tuple(second.strides)}"
        raise StrideError("v_scale", f"strides {tuple(first.strides)}, like k_scale", received, function=function)
    if sum((n - 1) * s for n, s in zip(first.shape, first.strides, strict=True)) >= MAX_PLACES:
        raise UnsupportedError(
            f"{function}(): scales with strides {tuple(first.strides)}, whose places are no numbers of 32 bits",
            instead="scales that lie closer together",
        )
    return scales


def places_of_scales(tensors: Mapping[str, Tensor], order: str | None) -> ScalePlaces | None:
    """Where the scales among a cache's arrays are, which are in ``order``; None where there are none."""
    t = tensors.get("k_scale")
    if t is None:
        return None
    steps = [s if n > 1 else 0 for n, s in zip(t.shape, t.strides, strict=True)]
    if len(steps) == 3:
        head, token = (2, 1) if order == "NHD" else (1, 2)
        return ScalePlaces(steps[0], steps[head], steps[token], True, 0)
    if len(steps) == 2:
        return ScalePlaces(steps[0], steps[1], 0, False, t.shape[0])
    return ScalePlaces(0, sum(steps), 0, False, 0)
