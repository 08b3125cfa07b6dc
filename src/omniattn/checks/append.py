"""What ``append``, ``copy_blocks`` and ``copy_recent`` may be given."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import arguments, arrays
from ..arrays import Tensor
from ..errors import ArgumentError, DtypeError, ShapeError
from ..kv.cache import KVCache
from ..kv.formats import KV_ARRAY_DTYPES
from ..plan.engine import Call
from ..problems import AppendProblem
from ..problems.append import ROPE_STYLES
from ..problems.precision import check_choice
from . import values
from .caches import check_int32, check_slots, check_table

_NAME = "append"
#: The caller's arrays, in the order of a call.
ARRAYS = (
    "k", "v", "seq_lens", "cu_seqlens", "block_table", "cos", "sin", "recent_slots", "slot_mapping", "positions",
    "k_pe",
)  # fmt: skip
#: Those that say where tokens go by sequences, which slot_mapping takes the place of.
_BY_SEQUENCE = ("seq_lens", "cu_seqlens", "block_table", "recent_slots")
#: Those that kernels access 16 bytes at a time.
ALIGNED = frozenset({"k", "v", "k_pe"})


class AppendOptions(NamedTuple):
    """Everything that is no array, as the caller gave it."""

    rope: Any


def check_append(call: Call, tensors: dict[str, Tensor]) -> AppendProblem:
    """The problem of a call."""
    rope, cache = call.options.rope, call.cache
    assert cache is not None
    k = tensors["k"]
    check_choice(rope, "rope", ROPE_STYLES, _NAME)
    if cache.facts.scales is not None and cache.facts.scales.sequences:
        expected = "scales that do not depend on the sequence: one, one a head, or one a token and head"
        received = "k_scale and v_scale of from_arrays() of shape (sequences, heads)"
        raise ArgumentError("cache", expected, received, function=_NAME)
    if not {"seq_lens", "slot_mapping"} & tensors.keys():
        raise ArgumentError("seq_lens", "an int32 array (batch,), or slot_mapping", "None", function=_NAME)
    arrays.require_same_device([k, *(t for n, t in tensors.items() if n != "k"), *cache.tensors])
    by_slot = "slot_mapping" in tensors
    packed = "cu_seqlens" in tensors or by_slot
    allowed = values.CPU_DTYPES if k.device == "cpu" else values.GPU_DTYPES
    if k.dtype not in allowed:
        raise DtypeError("k", f"{' or '.join(allowed)} on {k.device}", k.dtype, function=_NAME)
    k_strides, v_strides, k_pe_strides = (_latent_strides if cache.facts.is_latent else _strides)(
        cache, tensors, packed
    )
    if by_slot:
        rows, batch, capacity = _check_slot_mapping(cache, tensors), 0, cache.block_size
    else:
        batch, capacity = _check_sequences(cache, tensors)
        rows = k.shape[0] if packed else k.shape[0] * k.shape[1]
        if batch == 0:
            rows = 0  # packed rows of no sequence
    for name in ("k", "v", "k_pe"):
        if name in tensors:
            values.check_strides(tensors[name], _NAME)
    style, pairs, positions = "none", 0, 0
    if ("cos" in tensors) != ("sin" in tensors):
        missing, there = ("sin", "cos") if "cos" in tensors else ("cos", "sin")
        raise ArgumentError(missing, f"an array, like {there}", "None", function=_NAME)
    if "cos" in tensors:
        style, cos = rope, tensors["cos"]
        if cos.dtype != "float32":
            raise DtypeError("cos", "float32", cos.dtype, function=_NAME)
        most = cache.head_dim // 2
        if cache.facts.is_latent:
            most = (cache.head_dim - cache.v_format.head_dim) // 2
        if len(cos.shape) != 2 or not 1 <= cos.shape[1] <= most or cos.shape[0] < 1:
            expected = f"(positions, pairs) with 1 to {most} pairs"
            raise ShapeError("cos", expected, f"shape {tuple(cos.shape)}", function=_NAME)
        values.check_like(tensors["sin"], cos.shape, "float32", _NAME)
        for name in ("cos", "sin"):
            if tuple(tensors[name].strides) != arrays.contiguous_strides(tuple(cos.shape)):
                received = f"strides {tuple(tensors[name].strides)}"
                raise ArgumentError(name, "a contiguous array", received, function=_NAME)
        positions, pairs = cos.shape
    _check_positions(tensors, rows)
    if rows > arguments.MAX_ROWS:
        raise ShapeError("k", f"at most {arguments.MAX_ROWS} tokens", f"{rows}", function=_NAME)
    if k.device == "cuda":
        for fmt in (cache.k_format, cache.v_format, cache.recent_format):
            if fmt is not None and not fmt.quantized and KV_ARRAY_DTYPES[fmt.dtype] != k.dtype:
                raise DtypeError("k", f"{KV_ARRAY_DTYPES[fmt.dtype]}, like the cache", k.dtype, function=_NAME)
    return AppendProblem(
        k.dtype, cache.facts, batch, rows, 0 if packed else k.shape[1], cache.head_dim, cache.num_kv_heads, capacity,
        cache.block_size, cache.num_blocks, tensors["block_table"].shape[1] if "block_table" in tensors else 0, style,
        pairs, positions, k_strides, v_strides, _dtype_of(tensors, "slot_mapping"), _dtype_of(tensors, "positions"),
        k_pe_strides,
    )  # fmt: skip


def _dtype_of(tensors: dict[str, Tensor], name: str) -> str:
    return tensors[name].dtype if name in tensors else ""


#: Strides of k, v and k_pe, of k and k_pe with those of heads.
_Strides = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _strides(cache: KVCache, tensors: dict[str, Tensor], packed: bool) -> _Strides:
    """Strides of k and v, whose shapes and dtypes are checked."""
    k = tensors["k"]
    if "v" not in tensors:
        raise ArgumentError("v", "an array", "NoneType", function=_NAME)
    if "k_pe" in tensors:
        raise ArgumentError("k_pe", "None but with a latent cache", "an array", function=_NAME)
    if len(k.shape) != (3 if packed else 4):
        names = "(rows, num_kv_heads, head_dim)" if packed else "(batch, tokens, num_kv_heads, head_dim)"
        raise ShapeError("k", f"{3 if packed else 4} dimensions {names}", f"shape {tuple(k.shape)}", function=_NAME)
    if tuple(k.shape[-2:]) != (cache.num_kv_heads, cache.head_dim):
        expected = f"the cache's (num_kv_heads, head_dim) = {(cache.num_kv_heads, cache.head_dim)} at the end"
        raise ShapeError("k", expected, f"shape {tuple(k.shape)}", function=_NAME)
    v = tensors["v"]
    values.check_like(v, k.shape, k.dtype, _NAME)
    return tuple(k.strides), tuple(v.strides), ()


def _latent_strides(cache: KVCache, tensors: dict[str, Tensor], packed: bool) -> _Strides:
    """The same of a latent cache's rows: in k as a whole, or what is behind V's channels in k_pe."""
    k, k_pe, width_v = tensors["k"], tensors.get("k_pe"), cache.v_format.head_dim
    if "v" in tensors:
        expected = "None with a latent cache: the value is a part of k's row (and k_pe what is behind it)"
        raise ArgumentError("v", expected, "an array", function=_NAME)
    width = cache.head_dim if k_pe is None else width_v
    where = "without k_pe" if k_pe is None else "with k_pe"
    found = [_with_head(k, width, packed, where)]
    if k_pe is not None:
        found.append(_with_head(k_pe, cache.head_dim - width_v, packed, "the channels behind k's"))
        if k_pe.dtype != k.dtype:
            raise DtypeError("k_pe", f"{k.dtype}, like k", k_pe.dtype, function=_NAME)
        tokens = 1 if packed else 2
        if tuple(k_pe.shape[:tokens]) != tuple(k.shape[:tokens]):
            expected = f"{tuple(k.shape[:tokens])} at the beginning, like k"
            raise ShapeError("k_pe", expected, f"shape {tuple(k_pe.shape)}", function=_NAME)
    return found[0], (), found[1] if len(found) > 1 else ()


def _with_head(t: Tensor, width: int, packed: bool, where: str) -> tuple[int, ...]:
    """Strides of an array of rows, with one of its head, which it need not have."""
    lead = ("rows",) if packed else ("batch", "tokens")
    shape, strides = tuple(t.shape), tuple(t.strides)
    if len(shape) == len(lead) + 1:
        shape, strides = (*shape[:-1], 1, shape[-1]), (*strides[:-1], 0, strides[-1])
    if len(shape) != len(lead) + 2 or shape[-2:] != (1, width):
        names = ", ".join(lead)
        expected = f"({names}, {width}) or ({names}, 1, {width}), {where}"
        raise ShapeError(t.argument, expected, f"shape {tuple(t.shape)}", function=_NAME)
    return strides


def _check_sequences(cache: KVCache, tensors: dict[str, Tensor]) -> tuple[int, int]:
    """Batch, and tokens that a sequence can have at most, of a call with seq_lens."""
    k, lengths, packed = tensors["k"], tensors["seq_lens"], "cu_seqlens" in tensors
    # The batch of packed rows is that of seq_lens, 0 included.
    extent = None if packed and len(lengths.shape) != 1 else lengths.shape[0] if packed else k.shape[0]
    check_int32(lengths, (extent,), "(batch,)" if packed else f"({extent},)", _NAME)
    batch = lengths.shape[0]
    if packed:
        check_int32(tensors["cu_seqlens"], (batch + 1,), f"({batch + 1},)", _NAME)
    capacity = check_table(cache, tensors.get("block_table"), batch, _NAME)
    check_slots(cache, tensors.get("recent_slots"), batch, _NAME)
    return batch, capacity


def _check_slot_mapping(cache: KVCache, tensors: dict[str, Tensor]) -> int:
    """Tokens that a call by slots writes."""
    for name in _BY_SEQUENCE:
        if name in tensors:
            raise ArgumentError(name, "None with slot_mapping", "an array", function=_NAME)
    if cache.recent_window:
        expected = "None with a cache that has a recent_window, which is by sequences"
        raise ArgumentError("slot_mapping", expected, "an array", function=_NAME)
    slots, tokens = tensors["slot_mapping"], tensors["k"].shape[0]
    _check_numbers(slots, 0, tokens, f"(slots,) with at most {tokens} slots, as many as k has tokens")
    return slots.shape[0]


def _check_positions(tensors: dict[str, Tensor], rows: int) -> None:
    positions = tensors.get("positions")
    if positions is None:
        if "slot_mapping" in tensors and "cos" in tensors:
            raise ArgumentError("positions", "an array, with slot_mapping and cos", "None", function=_NAME)
        return
    if "slot_mapping" not in tensors or "cos" not in tensors:
        raise ArgumentError("positions", "None without slot_mapping and cos", "an array", function=_NAME)
    tokens = tensors["k"].shape[0]
    _check_numbers(positions, rows, tokens, f"(positions,) with {rows} to {tokens} positions, as slot_mapping or k has")


def _check_numbers(t: Tensor, least: int, most: int, expected: str) -> None:
    """A contiguous array of so many integers."""
    if t.dtype not in ("int32", "int64"):
        raise DtypeError(t.argument, "int32 or int64", t.dtype, function=_NAME)
    if len(t.shape) != 1 or not least <= t.shape[0] <= most:
        raise ShapeError(t.argument, f"shape {expected}", f"{tuple(t.shape)}", function=_NAME)
    if t.shape[0] > 1 and t.strides[0] != 1:
        raise ArgumentError(t.argument, "a contiguous array", f"strides {tuple(t.strides)}", function=_NAME)


def check_pairs(copies: Any, count: int, what: str, function: str) -> list[tuple[int, int]]:
    """Pairs (source, destination) of numbers below ``count``."""
    pairs: list[tuple[int, int]] = []
    try:
        given = list(copies)
    except (TypeError, RuntimeError):  # the latter of a nested tensor
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
