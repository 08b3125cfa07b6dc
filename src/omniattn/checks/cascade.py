"""What ``shared_prefix`` of ``attention_with_kvcache`` may be where the call runs in levels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from .. import arguments, arrays
from ..arrays import Tensor
from ..errors import ArgumentError, StrideError, UnsupportedError
from ..kv.cache import KVCache
from ..kv.runs import SharedLevel, SharedPrefixes
from ..problems.decode import MAX_Q_LEN
from ..select.model import rules
from . import values
from .caches import check_int32
from .decode import check_prefix, check_queries, check_sharing
from .with_cache import Queries, WithCacheOptions, check_extents

_NAME = "attention_with_kvcache"
#: The caller's arrays of a call in levels, those of levels aside.
ARRAYS = ("q", "seq_lens", "block_table", "cu_seqlens_q", "sinks", "out")


def is_of_decode(shape: tuple[int, ...], cache: KVCache, causal: Any, *, packed: bool) -> bool:
    """Whether the kernels of ``decode`` run a call with a number as ``shared_prefix``, or its check refuses it."""
    if packed or len(shape) != 4:
        return len(shape) != 3 or not packed
    most = MAX_Q_LEN
    if cache.k_format.quantized or cache.v_format.quantized:
        most = max(most, rules().rows_of_codes // max(shape[2] // cache.num_kv_heads, 1))
    return shape[0] > 0 and 1 <= shape[1] <= most and (causal is True or shape[1] == 1)


def check_levels(
    shared: int | SharedPrefixes, cache: KVCache, others: Mapping[str, Any], options: WithCacheOptions
) -> None:
    """What no call in levels may have, whatever its arrays are."""
    arguments.check_bool(options.return_lse, "return_lse", _NAME)
    causal = arguments.check_bool(options.causal, "causal", _NAME)
    left, _ = values.check_window(options.window, causal, _NAME)
    deterministic = arguments.check_bool(options.deterministic, "deterministic", _NAME)
    received = "SharedPrefixes" if isinstance(shared, SharedPrefixes) else f"{shared}"
    check_sharing(cache, left, deterministic, received, _NAME)
    for name, given in others.items():
        if given is not None:
            instead = f"shared_prefix=0, or a call without {name}"
            raise UnsupportedError(f"{_NAME}(): {name} with shared_prefix", instead=instead)


def check_arrays(
    q: Tensor, tensors: Mapping[str, Tensor], cache: KVCache, longest: Any, shared: int | SharedPrefixes
) -> Queries:
    """Shapes and dtypes; how the queries lie."""
    queries = check_extents(q, tensors.get("cu_seqlens_q"), longest)
    check_queries(q, cache, _NAME)
    batch, packed = queries.batch, queries.packed
    check_int32(tensors["seq_lens"], (batch,), f"({batch},)", _NAME)
    if "block_table" not in tensors:
        expected = f"an int32 array of shape ({batch}, max_blocks), with a PagedKVCache"
        raise ArgumentError("block_table", expected, "None", function=_NAME)
    check_int32(tensors["block_table"], (batch, None), f"({batch}, max_blocks), max_blocks >= 1", _NAME)
    if "out" in tensors:
        values.check_like(tensors["out"], (*q.shape[:-1], cache.v_format.head_dim), q.dtype, _NAME)
    for name in ("q", "out"):
        if not packed and name in tensors:
            _check_rows_lie_as_one(tensors[name])
    if isinstance(shared, int):
        check_prefix(shared, cache, tensors["block_table"].shape[1] * cache.block_size, -1, False, _NAME)
        if q.device == "cuda" and len(names := libraries(tensors)) > 1:
            raise UnsupportedError(
                f"{_NAME}(): a number as shared_prefix of arrays of several libraries ({', '.join(names)})",
                instead="SharedPrefixes, or seq_lens, block_table and cu_seqlens_q of one library",
            )
    if "dlpack" in (q.framework, tensors["seq_lens"].framework) and (isinstance(shared, int) or not packed):
        raise UnsupportedError(
            f"{_NAME}(): shared_prefix of arrays of a library that is known by DLPack alone",
            instead="SharedPrefixes with packed queries, or arrays of torch, CuPy, JAX or NumPy",
        )
    return queries


def libraries(tensors: Mapping[str, Tensor]) -> list[str]:
    """Whose arrays say where the sequences of a call are: the one level of a number is made of these."""
    return sorted({tensors[x].framework for x in ("seq_lens", "block_table", "cu_seqlens_q") if x in tensors})


def _check_rows_lie_as_one(t: Tensor) -> None:
    batch, q_len = t.shape[:2]
    if t.device == "cuda" and min(batch, q_len) > 1 and t.strides[0] != q_len * t.strides[1]:
        expected = f"the first two dimensions as one with shared_prefix: strides ({q_len} * s, s, ...)"
        hint = "A contiguous copy has such strides"
        raise StrideError(t.argument, expected, f"strides {tuple(t.strides)}", function=_NAME, hint=hint)


def describe_levels(shared: SharedPrefixes, stream: int | None) -> SharedPrefixes:
    """The arrays of all levels, described, with shapes and dtypes as they have to be."""
    if not isinstance(shared.levels, tuple) or not all(isinstance(level, SharedLevel) for level in shared.levels):
        raise ArgumentError("shared_prefix.levels", "a tuple of SharedLevel", repr(shared.levels), function=_NAME)
    levels = []
    for i, level in enumerate(shared.levels):
        names = (f"shared_prefix.levels[{i}].{name}" for name in SharedLevel._fields)
        starts, lens, table = (arrays.describe_of(_NAME, x, name, stream) for x, name in zip(level, names, strict=True))
        values.check_cu_seqlens(starts, starts.argument, _NAME)
        groups = starts.shape[0] - 1
        check_int32(lens, (groups,), f"({groups},)", _NAME)
        check_int32(table, (groups, None), f"({groups}, max_blocks), max_blocks >= 1", _NAME)
        levels.append(SharedLevel(starts, lens, table))
    lens, table = (
        arrays.describe_of(_NAME, x, f"shared_prefix.{name}", stream)
        for name, x in (("seq_lens", shared.seq_lens), ("block_table", shared.block_table))
    )
    return SharedPrefixes(tuple(levels), lens, table)


def check_own(shared: SharedPrefixes, batch: int) -> None:
    """What levels leave the sequences of a call; of described arrays."""
    check_int32(shared.seq_lens, (batch,), f"({batch},)", _NAME)
    check_int32(shared.block_table, (batch, None), f"({batch}, max_blocks), max_blocks >= 1", _NAME)


def check_prefix_contents(shared: int, starts: Any, lens: Any, table: Any, size: int, *, packed: bool) -> None:
    """On the CPU: a number of tokens against lengths and blocks."""
    there = [b for b in range(len(lens)) if lens[b] != 0]
    for b, new in enumerate(int(x) for x in starts[1:] - starts[:-1]):
        least = shared + new
        if (lens[b] or (packed and new)) and lens[b] < least:
            expected = f"{'' if packed and new else '0, or '}at least {least}: shared_prefix and the {new} new tokens"
            raise ArgumentError("seq_lens", expected, f"{lens[b]} at {b}", function=_NAME)
        if lens[b] and (table[b, : shared // size] != table[there[0], : shared // size]).any():
            expected = f"the same first {shared // size} blocks for all sequences, with shared_prefix"
            raise ArgumentError("block_table", expected, f"others at sequence {b}", function=_NAME)


def check_contents(shared: SharedPrefixes, starts: Any, lens: Any, table: Any, size: int, num_rows: int) -> None:
    """On the CPU: levels and what is behind them against the rows, lengths and blocks of the call; of NumPy arrays."""
    for i, level in enumerate(shared.levels):
        rows, name = level.cu_seqlens_q, f"shared_prefix.levels[{i}]"
        if len(rows) and (rows[0] != 0 or (rows[1:] < rows[:-1]).any() or rows[-1] > num_rows):
            expected = f"0 first, never decreasing, at most {num_rows}, the rows of q"
            raise ArgumentError(f"{name}.cu_seqlens_q", expected, str(rows.tolist()), function=_NAME)
        for tokens in level.seq_lens.tolist():
            if tokens % size or not 0 <= tokens <= level.block_table.shape[1] * size:
                expected = f"multiples of block_size {size} that block_table has room for"
                raise ArgumentError(f"{name}.seq_lens", expected, f"{tokens}", function=_NAME)
    room = shared.block_table.shape[1] * size
    for b, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        own, length = int(shared.seq_lens[b]), int(lens[b])
        if not 0 <= own <= room:
            expected = f"0 to {room}, which shared_prefix.block_table has room for"
            raise ArgumentError("shared_prefix.seq_lens", expected, f"{own} at {b}", function=_NAME)
        if begin == end:
            continue
        found, tokens = [], 0
        for i, level in enumerate(shared.levels):
            rows = level.cu_seqlens_q
            if ((begin < rows) & (rows < end)).any():
                where = f"shared_prefix.levels[{i}].cu_seqlens_q"
                raise ArgumentError(where, "whole sequences in each group", f"a part of sequence {b}", function=_NAME)
            for g in range(len(rows) - 1):
                if rows[g] <= begin and end <= rows[g + 1] and level.seq_lens[g]:
                    tokens += int(level.seq_lens[g])
                    found += level.block_table[g, : level.seq_lens[g] // size].tolist()
        if own + tokens != length or (length and own < end - begin):
            expected = f"{length} tokens of sequence {b} in all, its {end - begin} new ones behind the shared ones"
            received = f"{tokens} in levels and {own} behind them"
            raise ArgumentError("shared_prefix.seq_lens", expected, received, function=_NAME)
        blocks = -(-length // size)
        found += shared.block_table[b, : -(-own // size)].tolist()
        if found != table[b, :blocks].tolist():
            expected = f"the blocks that sequence {b} has in the call's block_table"
            raise ArgumentError("shared_prefix", expected, str(found), function=_NAME)
