"""What ``attention_with_kvcache`` may be given, and which kernels a call is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .. import arguments, arrays, runtime
from ..arrays import Tensor
from ..errors import ArgumentError, ShapeError, StrideError, UnsupportedError
from ..kv.cache import KVCache
from ..kv.places import by_position
from ..plan.engine import Call
from ..problems import (
    AttentionProblem,
    AttentionStrides,
    DecodeProblem,
    DequantizeProblem,
    Pages,
    WithCacheProblem,
)
from ..problems.decode import MAX_Q_LEN
from ..problems.quantize import Strides3
from ..problems.with_cache import few_queries, fixed_rows
from ..select.model import rules
from . import values
from .attention import describable
from .caches import check_int32, check_scales, check_slots, check_table, host_table
from .decode import check_prefix, check_queries, check_scale_sinks_out, has_maps
from .extras import check_score_mod

_NAME = "attention_with_kvcache"
#: The caller's arrays, in the order of a call.
ARRAYS = ("q", "seq_lens", "block_table", "cu_seqlens_q", "sinks", "recent_slots", "batch_index", "leftpad_k", "out")
#: Those that kernels access 16 bytes at a time.
ALIGNED = frozenset({"q", "out"})


class WithCacheOptions(NamedTuple):
    """Everything that is no array, as the caller gave it."""

    max_seqlen_q: Any
    causal: Any
    window: Any
    softmax_scale: Any
    softcap: Any
    return_lse: Any
    deterministic: Any
    shared_prefix: Any
    num_splits: Any


class Queries(NamedTuple):
    """How the queries of a call lie.

    Attributes
    ----------
    batch : int
        Sequences.
    rows : int
        Queries of all of them.
    q_len : int
        Queries of each; 0 of packed ones, which say it on the device.
    longest : int
        Those of the longest sequence.
    packed : bool
    """

    batch: int
    rows: int
    q_len: int
    longest: int
    packed: bool


class _Facts(NamedTuple):
    """What both kinds of kernels are told."""

    left: int
    right: int
    scale: float
    softcap: float
    sinks: str
    return_lse: bool
    deterministic: bool
    capacity: int
    has_index: bool
    shared: int
    num_splits: int


def check_with_cache(call: Call, tensors: dict[str, Tensor]) -> WithCacheProblem:
    """The problem of a call."""
    options, cache, q = call.options, call.cache, tensors["q"]
    assert cache is not None
    causal = arguments.check_bool(options.causal, "causal", _NAME)
    return_lse = arguments.check_bool(options.return_lse, "return_lse", _NAME)
    deterministic = arguments.check_bool(options.deterministic, "deterministic", _NAME)
    num_splits = 0
    if options.num_splits is not None:
        num_splits = arguments.check_int(options.num_splits, "num_splits", _NAME, least=1, most=arguments.MAX_ROWS)
        if deterministic:
            expected = "None with deterministic=True, whose parts of a sequence's keys are fixed"
            raise ArgumentError("num_splits", expected, repr(num_splits), function=_NAME)
    left, right = values.check_window(options.window, causal, _NAME)
    softcap = values.check_softcap(options.softcap, _NAME)
    arrays.require_same_device([q, *(t for name, t in tensors.items() if name != "q"), *cache.tensors])
    queries = check_extents(q, tensors.get("cu_seqlens_q"), options.max_seqlen_q)
    check_queries(q, cache, _NAME)
    batch = queries.batch
    check_int32(tensors["seq_lens"], (batch,), f"({batch},)", _NAME)
    capacity = _check_places(cache, tensors, batch)
    if has_leftpad := "leftpad_k" in tensors:
        check_int32(tensors["leftpad_k"], (batch,), f"({batch},)", _NAME)
    check_scales(cache, batch, _NAME)
    scale, sinks, o_strides = check_scale_sinks_out(options.softmax_scale, tensors, cache, _NAME)
    shared = check_prefix(options.shared_prefix, cache, capacity, left, deterministic, _NAME)
    facts = _Facts(
        left, right, scale, softcap, sinks, return_lse, deterministic, capacity, "batch_index" in tensors, shared,
        num_splits,
    )  # fmt: skip
    texts = call.facts
    few = few_queries(q.shape[-2] // cache.num_kv_heads, rows=fixed_rows(_is_quantized(cache)) if deterministic else 8)
    most = MAX_Q_LEN
    if _is_quantized(cache) and not cache.facts.is_latent:
        most = max(most, rules().rows_of_codes // (q.shape[-2] // cache.num_kv_heads))
    if deterministic and queries.packed:
        most = few
    if cache.facts.is_latent and queries.packed and not (queries.batch and queries.longest):
        queries = queries._replace(longest=min(queries.rows, 1))  # rows of nobody are cleared
    against = _reason_against_decode(queries, right, texts is not None, most)
    if cache.facts.is_latent and (queries.rows == 0 or queries.batch == 0) and texts is None:
        against = None  # nothing is attended to
    if has_leftpad:
        against = "leftpad_k"
    if deterministic and queries.packed and right != 0 and against is None:
        against = "queries that may see keys behind their own"  # of one query too: whatever max_seqlen_q says
    if against is not None and cache.facts.is_latent:
        fixed = ", packed and deterministic" if deterministic and queries.packed else ""
        raise UnsupportedError(
            f"{_NAME}(): a latent cache with {against}{fixed}",
            instead=f"up to {most} causal queries a sequence{fixed}, or attention over keys and values that are made "
            "of it",
        )
    kernels: AttentionProblem | DecodeProblem
    beside: DecodeProblem | None = None
    keys: DequantizeProblem | None = None
    if against is None:
        kernels = _decode(q, cache, queries, facts, tensors, o_strides)
        why = f"up to {most} new tokens of each sequence"
        if shared:
            _merged_rows(q, q.strides, queries)
    else:
        if shared:
            instead = f"shared_prefix=0, or a call without {against}"
            raise UnsupportedError(f"{_NAME}(): {against} with shared_prefix", instead=instead)
        kernels, why = _over_pages(q, cache, queries, facts, tensors, o_strides), f"attention over pages: {against}"
        keys = _keys(q, cache, queries, facts, tensors, texts is not None)
        if deterministic and queries.packed and cache.recent_window and not has_leftpad:
            raise UnsupportedError(
                f"{_NAME}(): deterministic with {against}, packed, over a cache with a recent_window",
                instead=f"a batch, a cache without recent_window, or max_seqlen_q up to {few}",
            )
        if has_leftpad or _is_quantized(cache):
            kernels = keys.attention(kernels)
        if texts is not None:
            kernels = replace(kernels, score_mod=check_score_mod(kernels, call, tensors, texts))
        elif queries.packed and queries.batch and right == 0 and not (cache.recent_window or has_leftpad):
            beside = _decode(q, cache, queries, facts, tensors, o_strides)
            beside = replace(beside, q_len=few, has_company=True)
    problem = WithCacheProblem(kernels, tuple(q.shape), capacity, (left, right), why, facts.has_index, beside, keys)
    if return_lse and not problem.lse_is_own and q.framework == "dlpack":
        raise UnsupportedError(
            f"{_NAME}(): return_lse with a batch over pages, of a library that is known by DLPack alone and has no "
            "views",
            instead="packed queries, or arrays of torch, CuPy, JAX or NumPy",
        )
    return problem


def check_extents(q: Tensor, starts: Tensor | None, longest: Any) -> Queries:
    """How q lies."""
    rank = len(q.shape)
    if starts is None:
        if rank != 4:
            expected = "4 dimensions (batch, q_len, num_q_heads, head_dim), without cu_seqlens_q"
            raise ShapeError("q", expected, f"shape {tuple(q.shape)}", function=_NAME)
        if longest is not None:
            expected = "None without cu_seqlens_q: q's shape says how many queries a sequence has"
            raise ArgumentError("max_seqlen_q", expected, repr(longest), function=_NAME)
        batch, q_len = q.shape[:2]
        found = Queries(batch, batch * q_len, q_len, q_len, False)
    else:
        if rank != 3:
            expected = "3 dimensions (rows, num_q_heads, head_dim), with cu_seqlens_q"
            raise ShapeError("q", expected, f"shape {tuple(q.shape)}", function=_NAME)
        values.check_cu_seqlens(starts, "cu_seqlens_q", _NAME)
        batch, rows = starts.shape[0] - 1, q.shape[0]
        if longest is None:
            expected = "an integer, with cu_seqlens_q: the queries of the longest sequence"
            raise ArgumentError("max_seqlen_q", expected, "None", function=_NAME)
        most = arguments.check_int(longest, "max_seqlen_q", _NAME, most=arguments.MAX_ROWS)
        found = Queries(batch, rows, 0, most, True)
    if found.batch > values.MAX_PACKED_SEQUENCES:
        name = "q" if starts is None else "cu_seqlens_q"
        expected = f"at most {values.MAX_PACKED_SEQUENCES} sequences"
        raise ShapeError(name, expected, str(found.batch), function=_NAME)
    for name, most, extent in (("rows", arguments.MAX_ROWS, found.rows), ("heads", arguments.MAX_EXTENT, q.shape[-2])):
        if extent > most:
            raise ShapeError("q", f"at most {most} {name}", str(extent), function=_NAME)
    return found


def _check_places(cache: KVCache, tensors: dict[str, Tensor], batch: int) -> int:
    """Tokens that a sequence can have at most: table, slots and index."""
    table, slots, index = (tensors.get(name) for name in ("block_table", "recent_slots", "batch_index"))
    check_slots(cache, slots, batch, _NAME)
    if index is None:
        return check_table(cache, table, batch, _NAME)
    if cache.paged:
        expected = "None with a PagedKVCache, whose block_table says where a sequence's tokens are"
        raise ArgumentError("batch_index", expected, "an array", function=_NAME)
    if cache.recent_window:
        raise UnsupportedError(f"{_NAME}(): batch_index with a recent_window", instead="a cache without recent_window")
    if table is not None:
        raise ArgumentError("block_table", "None with a KVCache", "an array", function=_NAME)
    check_int32(index, (batch,), f"({batch},)", _NAME)
    return cache.block_size


def _reason_against_decode(queries: Queries, right: int, has_mod: bool, most: int) -> str | None:
    """Why a call is not for the kernels of ``decode``; None if it is. By its shape and kind alone.

    These take up to ``most`` queries of each sequence that see no later key; how many packed queries a sequence has
    they read on the device.
    """
    if has_mod:
        return "score_mod"
    if queries.batch == 0:
        return "rows and no sequence"
    if not 1 <= queries.longest <= most:
        return f"{'up to ' if queries.packed else ''}{queries.longest} queries a sequence"
    if queries.longest > 1 and right != 0:
        return "queries that see keys behind their own"
    return None


def _is_quantized(cache: KVCache) -> bool:
    """Whether attention over pages reads keys and values made in 16 bits."""
    return cache.k_format.quantized or cache.v_format.quantized


def _keys(
    q: Tensor, cache: KVCache, queries: Queries, f: _Facts, tensors: dict[str, Tensor], has_mod: bool
) -> DequantizeProblem:
    """Keys and values made one behind the other. A score modification knows the places of keys: all are there."""
    table = tensors.get("block_table")
    columns = int(f.has_index) if table is None else table.shape[1]
    return DequantizeProblem(
        q.dtype, cache.facts, queries.batch, queries.rows, queries.q_len, f.capacity, columns, cache.block_size,
        cache.num_blocks, -1 if has_mod else f.left, leftpad="leftpad_k" in tensors,
    )  # fmt: skip


def _decode(
    q: Tensor, cache: KVCache, queries: Queries, f: _Facts, tensors: dict[str, Tensor], o_strides: tuple[int, ...]
) -> DecodeProblem:
    """The call as ``decode`` has it. A contiguous cache with an index is one of blocks, one a sequence."""
    layout, table = cache.facts, tensors.get("block_table")
    columns = 0 if table is None else table.shape[1]
    if f.has_index:
        layout, columns = replace(layout, paged=True), 1
    return DecodeProblem(
        q.dtype, layout, queries.batch, queries.longest, q.shape[-2], cache.num_kv_heads, cache.head_dim, f.capacity,
        cache.block_size, cache.num_blocks, columns, f.left, f.scale, f.softcap, f.sinks, f.deterministic, f.shared,
        f.return_lse, _with_batch(q.strides), _with_batch(o_strides), queries.rows if queries.packed else -1,
        num_splits=f.num_splits, tensor_maps=has_maps(q, cache),
    )  # fmt: skip


def _with_batch(strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of (batch, queries, heads, channels); packed queries are those of one."""
    return (0, *strides) if len(strides) == 3 else tuple(strides)


def _over_pages(
    q: Tensor, cache: KVCache, queries: Queries, f: _Facts, tensors: dict[str, Tensor], o_strides: tuple[int, ...]
) -> AttentionProblem:
    """The call as attention over pages has it: the queries of a batch are packed ones, so many a sequence.

    A contiguous cache is a pool with a page for each sequence. How many keys these have is known on the device alone:
    selection counts those that they have room for.
    """
    table, on_gpu = tensors.get("block_table"), q.device == "cuda"
    k, v = cache.planes["k"], cache.planes["v"]
    columns = 1 if table is None else table.shape[1]
    pages = Pages(
        cache.block_size, cache.num_blocks, columns, columns if table is not None and queries.batch > 1 else 0,
        has_table=table is not None, has_index=f.has_index and queries.batch > 0,
    )  # fmt: skip
    rows, keys = queries.rows, queries.batch * f.capacity
    read = (q,) if _is_quantized(cache) else (q, k, v)  # others are made in 16 bits, in a workspace
    maps = on_gpu and all(map(describable, read)) and runtime.has_tensor_maps()
    of_q, of_o = _merged_rows(q, q.strides, queries), _merged_rows(tensors.get("out", q), o_strides, queries)
    window = values.hiding_window((f.left, f.right), rows if queries.packed else queries.q_len, f.capacity)
    strides = AttentionStrides(of_q, _of_plane(k, cache), _of_plane(v, cache), of_o, (0, rows), (0, 0, 0, 0))
    return AttentionProblem(
        q.dtype, queries.batch, rows, keys, q.shape[-2], cache.num_kv_heads, cache.head_dim, *window, f.scale,
        f.softcap, "none", f.sinks, True, deterministic=f.deterministic, tensor_maps=maps, lse=f.return_lse,
        max_seqlen_q=queries.longest, strides=strides, used=(False, True), pages=pages,
        queries_per_sequence=0 if queries.packed else queries.q_len, num_splits=f.num_splits,
    )  # fmt: skip


def _of_plane(t: Tensor, cache: KVCache) -> Strides3:
    """(page, key, head) strides of a plane, of the caller's or of a 16-bit cache.

    Those of own caches are (blocks, heads, tokens, channels).
    """
    _, (page, head, key) = by_position(t.shape, t.strides, cache.array_order or "HND")
    return page, key, head


def _merged_rows(t: Tensor, strides: tuple[int, ...], queries: Queries) -> Strides3:
    """(batch, row, head) strides of queries or of o, whose first two dimensions are one.

    Raises
    ------
    StrideError
        On a GPU, where they are not.
    """
    if queries.packed:
        row = strides[0]
    else:
        batch, q_len = queries.batch, queries.q_len
        row = strides[0] if q_len == 1 else strides[1]
        if t.device == "cuda" and min(batch, q_len) > 1 and strides[0] != q_len * row:
            raise StrideError(
                t.argument, f"the first two dimensions as one: strides ({q_len} * s, s, ...)",
                f"strides {tuple(strides)}", function=_NAME, hint="A contiguous copy has such strides",
            )  # fmt: skip
    return 0, 0 if queries.rows == 1 else row, 0 if t.shape[-2] == 1 else strides[-2]


def host_places(cache: KVCache, tensors: dict[str, Tensor], batch: int) -> Any:
    """Block table on the CPU; of a contiguous cache one block a sequence, which ``batch_index`` may name."""
    index = tensors.get("batch_index")
    if index is None:
        return host_table(cache, tensors.get("block_table"), batch)
    numbers = arrays.to_numpy(index)
    bad = [int(x) for x in numbers if not 0 <= x < cache.num_blocks]
    if bad:
        expected = f"the cache's sequences, 0 to {cache.num_blocks - 1}"
        raise ArgumentError("batch_index", expected, f"{bad[0]}", function=_NAME)
    return numbers[:, None]
