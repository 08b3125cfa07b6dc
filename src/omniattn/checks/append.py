"""What ``append``, ``copy_blocks`` and ``copy_recent`` may be given."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import arguments, arrays
from ..arrays import Tensor
from ..errors import ArgumentError, DtypeError, ShapeError
from ..kv.formats import KV_ARRAY_DTYPES
from ..plan.engine import Call
from ..problems import AppendProblem
from ..problems.append import ROPE_STYLES
from ..problems.precision import check_choice
from . import values
from .caches import check_int32, check_slots, check_table

_NAME = "append"
#: The caller's arrays, in the order of a call.
ARRAYS = ("k", "v", "seq_lens", "cu_seqlens", "block_table", "cos", "sin", "recent_slots")
#: Those that kernels access 16 bytes at a time.
ALIGNED = frozenset({"k", "v"})


class AppendOptions(NamedTuple):
    """Everything that is no array, as the caller gave it."""

    rope: Any


def check_append(call: Call, tensors: dict[str, Tensor]) -> AppendProblem:
    """The problem of a call."""
    rope, cache = call.options.rope, call.cache
    assert cache is not None
    k, v = tensors["k"], tensors["v"]
    check_choice(rope, "rope", ROPE_STYLES, _NAME)
    arrays.require_same_device([k, *(t for n, t in tensors.items() if n != "k"), *cache.tensors])
    packed = "cu_seqlens" in tensors
    allowed = values.CPU_DTYPES if k.device == "cpu" else values.GPU_DTYPES
    if k.dtype not in allowed:
        raise DtypeError("k", f"{' or '.join(allowed)} on {k.device}", k.dtype, function=_NAME)
    if len(k.shape) != (3 if packed else 4):
        names = "(rows, num_kv_heads, head_dim)" if packed else "(batch, tokens, num_kv_heads, head_dim)"
        raise ShapeError("k", f"{3 if packed else 4} dimensions {names}", f"shape {tuple(k.shape)}", function=_NAME)
    if tuple(k.shape[-2:]) != (cache.num_kv_heads, cache.head_dim):
        expected = f"the cache's (num_kv_heads, head_dim) = {(cache.num_kv_heads, cache.head_dim)} at the end"
        raise ShapeError("k", expected, f"shape {tuple(k.shape)}", function=_NAME)
    values.check_like(v, k.shape, k.dtype, _NAME)
    lengths = tensors["seq_lens"]
    # The batch of packed rows is that of seq_lens, 0 included.
    extent = None if packed and len(lengths.shape) != 1 else lengths.shape[0] if packed else k.shape[0]
    check_int32(lengths, (extent,), "(batch,)" if packed else f"({extent},)", _NAME)
    batch = lengths.shape[0]
    if packed:
        check_int32(tensors["cu_seqlens"], (batch + 1,), f"({batch + 1},)", _NAME)
    capacity = check_table(cache, tensors.get("block_table"), batch, _NAME)
    check_slots(cache, tensors.get("recent_slots"), batch, _NAME)
    for t in (k, v):
        values.check_strides(t, _NAME)
    style, pairs, positions = "none", 0, 0
    if ("cos" in tensors) != ("sin" in tensors):
        missing, there = ("sin", "cos") if "cos" in tensors else ("cos", "sin")
        raise ArgumentError(missing, f"an array, like {there}", "None", function=_NAME)
    if "cos" in tensors:
        style, cos = rope, tensors["cos"]
        if cos.dtype != "float32":
            raise DtypeError("cos", "float32", cos.dtype, function=_NAME)
        if len(cos.shape) != 2 or not 1 <= cos.shape[1] <= cache.head_dim // 2 or cos.shape[0] < 1:
            expected = f"(positions, pairs) with 1 to {cache.head_dim // 2} pairs"
            raise ShapeError("cos", expected, f"shape {tuple(cos.shape)}", function=_NAME)
        values.check_like(tensors["sin"], cos.shape, "float32", _NAME)
        for name in ("cos", "sin"):
            if tuple(tensors[name].strides) != arrays.contiguous_strides(tuple(cos.shape)):
                received = f"strides {tuple(tensors[name].strides)}"
                raise ArgumentError(name, "a contiguous array", received, function=_NAME)
        positions, pairs = cos.shape
    rows = k.shape[0] if packed else k.shape[0] * k.shape[1]
    if batch == 0:
        rows = 0  # packed rows of no sequence
    if rows > arguments.MAX_ROWS:
        raise ShapeError("k", f"at most {arguments.MAX_ROWS} tokens", f"{rows}", function=_NAME)
    if k.device == "cuda":
        for fmt in (cache.k_format, cache.v_format, cache.recent_format):
            if fmt is not None and not fmt.quantized and KV_ARRAY_DTYPES[fmt.dtype] != k.dtype:
                raise DtypeError("k", f"{KV_ARRAY_DTYPES[fmt.dtype]}, like the cache", k.dtype, function=_NAME)
    return AppendProblem(
        k.dtype, cache.facts, batch, rows, 0 if packed else k.shape[1], cache.head_dim, cache.num_kv_heads, capacity,
        cache.block_size, cache.num_blocks, tensors["block_table"].shape[1] if "block_table" in tensors else 0, style,
        pairs, positions, tuple(k.strides), tuple(v.strides),
    )  # fmt: skip


def check_pairs(copies: Any, count: int, what: str, function: str) -> list[tuple[int, int]]:
    """Pairs (source, destination) of numbers below ``count``."""
    pairs: list[tuple[int, int]] = []
    try:
        given = list(copies)
    except TypeError:
        expected = "a sequence of pairs (source, destination)"
        raise ArgumentError("copies", expected, repr(copies), function=function) from None
    for pair in given:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentError("copies", "pairs (source, destination)", repr(pair), function=function)
        numbers = [arguments.check_int(x, "copies", function) for x in pair]
        if max(numbers) >= count:
            raise ArgumentError("copies", f"{what} 0 to {count - 1}", repr(pair), function=function)
        pairs.append((numbers[0], numbers[1]))
    destinations = {d for _, d in pairs}
    if len(destinations) < len(pairs) or destinations & {s for s, _ in pairs}:
        expected = "destinations that come once and are no sources"
        raise ArgumentError("copies", expected, repr(pairs), function=function)
    return pairs
