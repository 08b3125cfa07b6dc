"""Checks that `append`, `decode` and the caches share. Every error names argument, expected and received."""

from __future__ import annotations

from typing import Any

from .. import arguments, arrays
from ..arrays import Tensor
from ..errors import ArgumentError, DtypeError, ShapeError
from ..kv.cache import KVCache


def check_cache(cache: Any, function: str) -> KVCache:
    if not isinstance(cache, KVCache):
        raise ArgumentError("cache", "a KVCache or PagedKVCache", type(cache).__name__, function=function)
    return cache


def check_int32(t: Tensor, shape: tuple[int | None, ...], names: str, function: str) -> None:
    """A contiguous int32 array; None in ``shape`` is any extent from 1 on."""
    if t.dtype != "int32":
        raise DtypeError(t.argument, "int32", t.dtype, function=function)
    fits = len(t.shape) == len(shape) and all(
        have >= 1 if want is None else have == want for have, want in zip(t.shape, shape, strict=True)
    )
    if not fits:
        raise ShapeError(t.argument, f"shape {names}", f"{tuple(t.shape)}", function=function)
    if 0 not in t.shape and tuple(t.strides) != arrays.contiguous_strides(tuple(t.shape)):
        one = all(n == 1 or s == c for n, s, c in zip(t.shape, t.strides, arrays.contiguous_strides(tuple(t.shape))))
        if not one:
            raise ArgumentError(t.argument, "a contiguous array", f"strides {tuple(t.strides)}", function=function)


def check_table(cache: KVCache, table: Tensor | None, batch: int, function: str) -> int:
    """Tokens that a sequence can have at most."""
    if not cache.paged:
        if table is not None:
            raise ArgumentError("block_table", "None with a KVCache", "an array", function=function)
        if batch > cache.num_blocks:
            raise ShapeError(
                "seq_lens", f"at most the cache's {cache.num_blocks} sequences", f"{batch}", function=function
            )
        return cache.block_size
    if table is None:
        expected = f"an int32 array of shape ({batch}, max_blocks), with a PagedKVCache"
        raise ArgumentError("block_table", expected, "None", function=function)
    check_int32(table, (batch, None), f"({batch}, max_blocks), max_blocks >= 1", function)
    return min(table.shape[1] * cache.block_size, arguments.MAX_ROWS)


def check_slots(cache: KVCache, slots: Tensor | None, batch: int, function: str) -> None:
    """Shape and presence of ``recent_slots``."""
    if slots is None:
        if cache.paged and cache.recent_window:
            expected = f"an int32 array of shape ({batch},), with a PagedKVCache that has a recent_window"
            raise ArgumentError("recent_slots", expected, "None", function=function)
    elif not cache.recent_window:
        raise ArgumentError("recent_slots", "None with a cache without recent_window", "an array", function=function)
    elif not cache.paged:
        raise ArgumentError("recent_slots", "None with a KVCache", "an array", function=function)
    else:
        check_int32(slots, (batch,), f"({batch},)", function)


def check_scales(cache: KVCache, batch: int, function: str) -> None:
    """Scales of the caller's arrays that are those of a call's sequences."""
    scales = cache.facts.scales
    if scales is not None and scales.sequences not in (0, batch):
        received = f"those of {scales.sequences} sequences, k_scale and v_scale of from_arrays()"
        raise ShapeError("cache", f"scales for {batch} sequences, or the same for all", received, function=function)


def host_slots(cache: KVCache, slots: Tensor | None, lengths: Any, function: str) -> Any:
    """Slots of the recent window on the CPU, their numbers checked; those of a contiguous cache are its sequences.

    Rows of length 0 are padding: their slots are not looked at, and come back as 0.
    """
    import numpy as np

    if slots is None:
        return np.arange(len(lengths), dtype=np.int32)
    numbers = np.where(np.asarray(lengths) == 0, 0, arrays.to_numpy(slots))
    used = [int(x) for x, length in zip(numbers, lengths, strict=True) if length != 0]
    expected = f"numbers from 0 to {cache.recent_slots - 1}, each once"
    bad = [x for x in used if not 0 <= x < cache.recent_slots]
    if bad or len(set(used)) < len(used):
        received = f"{bad[0]}" if bad else str(used)
        raise ArgumentError("recent_slots", expected, received, function=function)
    return numbers


def check_values(
    cache: KVCache, lengths: Any, table: Any, capacity: int, function: str, *, new: Any = None, first: Any = None
) -> None:
    """Lengths and block numbers on the CPU; on a GPU that would need a synchronization.

    ``new``: tokens that are appended to each sequence, which its length includes; of length 0 it is padding. ``first``:
    the first token of each sequence that matters; 0 unless given.
    """
    for b, length in enumerate(lengths):
        if length == 0:
            continue
        least = 0 if new is None else int(new[b])
        if not least <= length <= capacity:
            of = "" if new is None else f", of which {least} are new"
            hint = None
            if cache.paged and length > capacity:
                hint = f"block_table has {table.shape[1]} blocks of {cache.block_size} tokens for a sequence"
            raise ArgumentError(
                "seq_lens", f"{least} to {capacity}{of}", f"{length} at {b}", function=function, hint=hint
            )
        if cache.paged:
            begin = 0 if first is None else int(first[b]) // cache.block_size
            used = table[b, begin : -(-int(length) // cache.block_size)]
            bad = [int(x) for x in used if not 0 <= x < cache.num_blocks]
            if bad:
                expected = f"blocks 0 to {cache.num_blocks - 1}"
                raise ArgumentError("block_table", expected, f"{bad[0]} at sequence {b}", function=function)


def host_table(cache: KVCache, table: Tensor | None, batch: int) -> Any:
    """Block table on the CPU; of a contiguous cache, one block a sequence."""
    import numpy as np

    return np.arange(batch, dtype=np.int32)[:, None] if table is None else arrays.to_numpy(table)
