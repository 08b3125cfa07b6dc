"""What ``decode`` may be given."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import arguments, arrays, runtime
from ..arrays import Tensor
from ..errors import ArgumentError, DtypeError, ShapeError
from ..kv.cache import KVCache
from ..kv.formats import KV_ARRAY_DTYPES
from ..plan.engine import Call
from ..problems import DecodeProblem
from ..problems.decode import MAX_Q_LEN
from . import values
from .caches import check_int32, check_scales, check_slots, check_table

_NAME = "decode"
#: The caller's arrays, in the order of a call.
ARRAYS = ("q", "seq_lens", "block_table", "sinks", "recent_slots", "out")
#: Those that kernels access 16 bytes at a time.
ALIGNED = frozenset({"q", "out"})


class DecodeOptions(NamedTuple):
    """Everything that is no array, as the caller gave it."""

    window: Any
    softmax_scale: Any
    softcap: Any
    return_lse: Any
    deterministic: Any
    shared_prefix: Any


def check_decode(call: Call, tensors: dict[str, Tensor]) -> DecodeProblem:
    """The problem of a call."""
    options, cache = call.options, call.cache
    assert cache is not None
    return_lse = arguments.check_bool(options.return_lse, "return_lse", _NAME)
    deterministic = arguments.check_bool(options.deterministic, "deterministic", _NAME)
    left, right = values.check_window(options.window, False, _NAME)
    if right > 0:
        raise ArgumentError("window", "(left, 0) or (left, -1): decode is causal", repr(options.window), function=_NAME)
    softcap = values.check_softcap(options.softcap, _NAME)
    q = tensors["q"]
    arrays.require_same_device(
        [q, tensors["seq_lens"], *cache.tensors, *(t for n, t in tensors.items() if n not in ("q", "seq_lens"))]
    )
    _check_extents(q, cache)
    check_queries(q, cache, _NAME)
    batch, q_len, heads, dim = q.shape
    check_int32(tensors["seq_lens"], (batch,), f"({batch},)", _NAME)
    table = tensors.get("block_table")
    capacity = check_table(cache, table, batch, _NAME)
    check_slots(cache, tensors.get("recent_slots"), batch, _NAME)
    check_scales(cache, batch, _NAME)
    scale, sinks, o_strides = check_scale_sinks_out(options.softmax_scale, tensors, cache, _NAME)
    shared = check_prefix(options.shared_prefix, cache, capacity, left, deterministic, _NAME)
    if shared:
        _check_joined(q)
    return DecodeProblem(
        q.dtype, cache.facts, batch, q_len, heads, cache.num_kv_heads, dim, capacity, cache.block_size,
        cache.num_blocks, 0 if table is None else table.shape[1], left, scale, softcap, sinks, deterministic, shared,
        return_lse, tuple(q.strides), o_strides, tensor_maps=has_maps(q, cache),
    )  # fmt: skip


def _check_extents(q: Tensor, cache: KVCache) -> None:
    if len(q.shape) != 4:
        expected = "4 dimensions (batch, q_len, num_q_heads, head_dim)"
        raise ShapeError("q", expected, f"shape {tuple(q.shape)}", function=_NAME)
    q_len = q.shape[1]
    if not 1 <= q_len <= MAX_Q_LEN:
        hint = None
        if q_len > MAX_Q_LEN:
            hint = "attention_with_kvcache() takes prompts too"
            if cache.facts.is_latent:
                hint = "Prompts of latent attention are attention() over keys and values made of the rows"
        raise ShapeError("q", f"q_len from 1 to {MAX_Q_LEN}", f"{q_len}", function=_NAME, hint=hint)


def check_scale_sinks_out(
    softmax_scale: Any, tensors: dict[str, Tensor], cache: KVCache, function: str
) -> tuple[float, str, tuple[int, ...]]:
    """The scale of a call's scores, what its sinks are, and the strides of o."""
    q = tensors["q"]
    heads, dim = q.shape[-2:]
    scale = dim**-0.5
    if softmax_scale is not None:
        scale = arguments.check_number(softmax_scale, "softmax_scale", function)
    sinks = values.check_sinks(tensors["sinks"], heads, q.dtype, function) if "sinks" in tensors else "none"
    values.check_strides(q, function)
    shape = (*q.shape[:-1], cache.v_format.head_dim)
    o_strides = arrays.contiguous_strides(shape)
    if "out" in tensors:
        values.check_like(tensors["out"], shape, q.dtype, function)
        values.check_strides(tensors["out"], function, written=True)
        o_strides = tuple(tensors["out"].strides)
    return scale, sinks, o_strides


def has_maps(q: Tensor, cache: KVCache) -> bool:
    """Whether kernels over a latent cache can have tensor maps; others need none."""
    return q.device != "cuda" or not cache.facts.is_latent or runtime.has_tensor_maps()


def check_queries(q: Tensor, cache: KVCache, function: str) -> None:
    """Element type, heads and head_dim of (..., num_q_heads, head_dim)."""
    allowed = values.CPU_DTYPES if q.device == "cpu" else values.GPU_DTYPES
    if q.dtype not in allowed:
        raise DtypeError("q", f"{' or '.join(allowed)} on {q.device}", q.dtype, function=function)
    heads, dim = q.shape[-2:]
    if dim != cache.head_dim:
        hint = None
        if dim == 2 * cache.head_dim and not cache.facts.is_latent:
            hint = "With head_dim_v, from_arrays() takes rows for latent ones, else for K and V side by side"
        expected = f"head_dim {cache.head_dim}, like the cache"
        raise ShapeError("q", expected, f"{dim}", function=function, hint=hint)
    if heads < 1 or heads % cache.num_kv_heads:
        expected = f"a multiple of the cache's {cache.num_kv_heads} heads"
        raise ShapeError("q", expected, f"{heads} heads", function=function)
    if q.device == "cuda":
        for fmt in (cache.k_format, cache.v_format, cache.recent_format):
            if fmt is not None and not fmt.quantized and KV_ARRAY_DTYPES[fmt.dtype] != q.dtype:
                raise DtypeError("q", f"{KV_ARRAY_DTYPES[fmt.dtype]}, like the cache", q.dtype, function=function)


def check_prefix(
    shared: Any, cache: KVCache, capacity: int, window_left: int, deterministic: bool, function: str
) -> int:
    """``shared_prefix``: whole blocks of a paged cache, and nothing beside it that needs the prefix's single keys."""
    size = cache.block_size if cache.paged else 1
    whole = f"a multiple of block_size {size}, an integer from 0 to {capacity // size * size}"
    try:
        tokens = arguments.check_int(shared, "shared_prefix", function, least=0, most=arguments.MAX_ROWS)
    except ArgumentError as error:
        if not cache.paged:
            raise
        raise ArgumentError("shared_prefix", whole, error.received, function=function) from None
    if tokens == 0:
        return 0
    received = f"{tokens}"
    if cache.paged and (tokens % size or tokens > capacity):
        raise ArgumentError("shared_prefix", whole, received, function=function)
    check_sharing(cache, window_left, deterministic, received, function)
    return tokens


def why_not_shared(cache: KVCache) -> str | None:
    """Why calls on a cache have no ``shared_prefix``: what is expected of it; None if they may have one."""
    if not cache.paged:
        return "0 with a KVCache, whose sequences have memory of their own"
    if cache.layout.is_latent:
        return "0 with a latent cache"
    if cache.recent_window:
        return "0 with a cache that has a recent_window"
    if cache.layout.scales is not None and cache.layout.scales.sequences:
        return "0 with a cache whose sequences have scales of their own"
    return None


def check_sharing(cache: KVCache, window_left: int, deterministic: bool, received: str, function: str) -> None:
    """What ``shared_prefix`` does not go with; ``received``: what was given for it."""
    expected = why_not_shared(cache)
    if expected is None and window_left >= 0:
        expected = "0 with a window"
    elif expected is None and deterministic:
        # Rows of several sequences are computed together: when one takes a new maximum, the others do.
        expected = "0 with deterministic=True"
    if expected is not None:
        raise ArgumentError("shared_prefix", expected, received, function=function)


def _check_joined(q: Tensor) -> None:
    """With ``shared_prefix`` the queries of all sequences are those of one."""
    batch, q_len = q.shape[:2]
    if q.device == "cuda" and min(batch, q_len) > 1 and q.strides[0] != q_len * q.strides[1]:
        expected = f"q's first two dimensions as one with shared_prefix, strides ({q_len} * s, s, ...)"
        raise ArgumentError("q", expected, f"strides {tuple(q.strides)}", function=_NAME)


def check_shared(table: Any, seq_lens: Any, problem: DecodeProblem, block_size: int, function: str) -> None:
    """What ``shared_prefix`` says of blocks and lengths."""
    shared, least = problem.shared_prefix, problem.shared_prefix + problem.q_len
    # A sequence without tokens pauses: it sees nothing, and its blocks are not looked at.
    there = [b for b in range(problem.batch) if seq_lens[b] != 0]
    for b in there:
        if seq_lens[b] < least:
            expected = f"0, or at least {least}: shared_prefix and the {problem.q_len} new tokens"
            raise ArgumentError("seq_lens", expected, f"{seq_lens[b]} at {b}", function=function)
        if (table[b, : shared // block_size] != table[there[0], : shared // block_size]).any():
            expected = f"the same first {shared // block_size} blocks for all sequences, with shared_prefix"
            raise ArgumentError("block_table", expected, f"others at sequence {b}", function=function)
