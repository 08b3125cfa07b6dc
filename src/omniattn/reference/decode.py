"""Decode and append on KV caches in NumPy: the oracle of the tests and the CPU backend."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn import arrays
from omniattn.kv.cache import KVCache
from omniattn.kv.formats import IN_ORDER, LATENT_656, KVFormat
from omniattn.reference import kv_cache
from omniattn.reference.attention import attention

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RecentArrays:
    """Rings of the newest tokens in 16 bits: position t of a sequence is in row t % ring of its slot.

    Attributes
    ----------
    window : int
        Newest tokens that are read from the ring.
    format : KVFormat
    k, v : uint8 (slots, heads, ring, row_bytes)
    state : int32 (slots, 2)
        Positions that the ring has, from the first number to before the second; what is more than ``ring`` before the
        second is overwritten.
    """

    window: int
    format: KVFormat
    k: Array
    v: Array
    state: Array

    def begin(self, slot: int, length: int) -> int:
        """First position of a sequence of ``length`` tokens that is read from its ring."""
        first, end = (int(x) for x in self.state[slot])
        if end < length:
            return length
        return min(max(first, end - self.k.shape[2], length - self.window, 0), length)

    def append(self, slot: int, k: Array, v: Array, first: int) -> None:
        """Write tokens (tokens, heads, head_dim) at positions ``first`` and on; none before position 0."""
        missing = max(-first, 0)
        k, v, first = k[missing:], v[missing:], first + missing
        ring, count = self.k.shape[2], k.shape[0]
        if count == 0:
            return
        length = first + count
        begin, end = (int(x) for x in self.state[slot])
        kept = max(begin, end - ring)
        if not kept <= first <= end:
            kept = first
        self.state[slot] = max(kept, length - ring), length
        some = min(count, ring)
        rows = np.arange(length - some, length) % ring
        for plane, values in ((self.k, k), (self.v, v)):
            data, _ = kv_cache.encode(kv_cache.pad_row(np.asarray(values[count - some :]), self.format), self.format)
            plane[slot, :, rows] = data


@dataclass(frozen=True)
class CacheArrays:
    """A cache's memory as NumPy sees it.

    Attributes
    ----------
    k_format, v_format : KVFormat
    k, v : uint8 (blocks, heads, block_size, row_bytes)
        Rows of the caller's arrays are not padded.
    k_params, v_params : uint32 (blocks, heads, block_size, words of the parameter plane)
    k_mean, k_channel_scale : float32 (heads, head_dim) or None
    hadamard : bool
    recent : RecentArrays or None
    k_scale, v_scale : float32, optional
        Of the caller's arrays in 8 bits: one a row, (blocks, heads, block_size), or (sequences or 1, heads or 1).
    """

    k_format: KVFormat
    v_format: KVFormat
    k: Array
    v: Array
    k_params: Array
    v_params: Array
    k_mean: Array | None = None
    k_channel_scale: Array | None = None
    hadamard: bool = False
    recent: RecentArrays | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self.k.shape[2])


def _places(table: Array, positions: Array, block_size: int) -> tuple[Array, Array]:
    """(block, row) of token positions by one sequence's block table."""
    return np.asarray(table)[positions // block_size], positions % block_size


def append_tokens(cache: CacheArrays, k: Array, v: Array | None, table: Array, first: int, slot: int = 0) -> None:
    """Quantize tokens (tokens, heads, head_dim) of one sequence, and write them at positions ``first`` and on.

    Tokens before position 0 are passed over. ``slot``: the sequence's in the recent window. v: None of latent caches.
    """
    missing = max(-first, 0)
    k, v, first = k[missing:], None if v is None else v[missing:], first + missing
    if k.shape[0] == 0:
        return
    if cache.recent is not None:
        assert v is not None
        cache.recent.append(slot, k, v, first)
    write_tokens(cache, k, v, *_places(table, np.arange(first, first + k.shape[0]), cache.block_size))


def write_tokens(cache: CacheArrays, k: Array, v: Array | None, blocks: Array, rows: Array) -> None:
    """Quantize tokens (tokens, heads, head_dim), and write them to rows of blocks. v: None of latent caches."""
    if cache.k_format.layout == LATENT_656:
        cache.k[blocks, :, rows] = kv_cache.encode_656(k)
        return
    stored = (
        kv_cache.transform_key(k, cache.k_format, cache.k_mean, cache.k_channel_scale, cache.hadamard)
        if cache.k_format.quantized
        else kv_cache.pad_row(np.asarray(k), cache.k_format)
    )
    k_valid = None if cache.hadamard else cache.k_format.head_dim
    planes: list[tuple[Array, Array, KVFormat, Array, int | None, Array | None]] = [
        (cache.k, cache.k_params, cache.k_format, stored, k_valid, cache.k_scale)
    ]
    if v is not None:
        values = kv_cache.pad_row(np.asarray(v), cache.v_format)
        planes.append((cache.v, cache.v_params, cache.v_format, values, cache.v_format.head_dim, cache.v_scale))
    for data, params, fmt, values, valid, scale in planes:
        if fmt.layout == IN_ORDER:
            if scale is not None and scale.ndim == 3:
                scale[blocks, :, rows] = kv_cache.row_scale(values, fmt)
            of_rows = _scales(scale, blocks, rows, data.shape[1], 0)
            data[blocks, :, rows] = kv_cache.encode_in_order(values, of_rows, fmt)[..., : data.shape[-1]]
            continue
        row_data, row_params = kv_cache.encode(values, fmt, valid)
        data[blocks, :, rows] = row_data[..., : data.shape[-1]]  # the caller's rows are not padded
        params[blocks, :, rows] = row_params


def _scales(scale: Array | None, blocks: Array, rows: Array, heads: int, sequence: int) -> Array:
    """Scales (tokens, heads) of rows of blocks, of a sequence of the call."""
    if scale is None:
        return np.ones((len(rows), heads), np.float32)
    if scale.ndim == 3:
        return np.asarray(scale[blocks, :, rows])
    return np.broadcast_to(scale[sequence if len(scale) > 1 else 0], (len(rows), heads))


def first_seen(lengths: Array, queries: Array | int, window_left: int) -> Array:
    """The first token of each sequence that any of its queries sees. Blocks left of it need not be the sequence's."""
    lengths = np.asarray(lengths, dtype=np.int64)
    return np.maximum(lengths - queries - window_left, 0) if window_left >= 0 else np.zeros_like(lengths)


def read_tokens(
    cache: CacheArrays, table: Array, count: int, slot: int = 0, sequence: int = 0, first: int = 0
) -> tuple[Array, Array]:
    """The first ``count`` tokens of one sequence as float32 (tokens, heads, head_dim): what attention sees.

    ``sequence``: its number in the call. ``first``: tokens before it are not read, but zeros.
    """
    positions = np.arange(min(first, count), count)
    blocks, rows = _places(table, positions, cache.block_size)
    if cache.k_format.layout == LATENT_656:
        k = kv_cache.decode_656(cache.k[blocks, :, rows])
        v = k[..., : cache.v_format.head_dim]
    elif cache.k_format.layout == IN_ORDER:
        k, v = (
            kv_cache.decode_in_order(data[blocks, :, rows], _scales(scale, blocks, rows, data.shape[1], sequence), fmt)
            for data, scale, fmt in (
                (cache.k, cache.k_scale, cache.k_format), (cache.v, cache.v_scale, cache.v_format),
            )
        )  # fmt: skip
    else:
        k = kv_cache.decode_rows(cache.k[blocks, :, rows], cache.k_params[blocks, :, rows], cache.k_format)
        v = kv_cache.decode_rows(cache.v[blocks, :, rows], cache.v_params[blocks, :, rows], cache.v_format)
        if cache.k_format.quantized:
            k = kv_cache.restore_key(k, cache.k_format, cache.k_mean, cache.k_channel_scale, cache.hadamard)
        k, v = k[..., : cache.k_format.head_dim], v[..., : cache.v_format.head_dim]
    if cache.recent is not None:
        recent = cache.recent
        newest = positions[positions >= recent.begin(slot, count)]
        none = np.zeros((0,), dtype=np.uint32)
        for seen, plane in ((k, recent.k), (v, recent.v)):
            kept = kv_cache.decode_rows(plane[slot, :, newest % recent.k.shape[2]], none, recent.format)
            seen[len(seen) - len(newest) :] = kept[..., : recent.format.head_dim]
    if positions.size == count:
        return k, v
    k, v = (np.concatenate([np.zeros((count - positions.size, *x.shape[1:]), x.dtype), x]) for x in (k, v))
    return k, v


def decode(
    q: Array,
    cache: CacheArrays,
    *,
    seq_lens: Array,
    block_table: Array,
    recent_slots: Array | None = None,
    window_left: int = -1,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    compute_dtype: npt.DTypeLike = np.float32,
) -> tuple[Array, Array]:
    """Attention of the newest tokens over each sequence's cache.

    Parameters
    ----------
    q : (batch, q_len, heads_q, head_dim)
        The last q_len tokens of each sequence.
    cache : CacheArrays
    seq_lens : (batch,) int
        Tokens of each sequence, the new ones included: query i sees the keys j <= seq_lens[b] - q_len + i.
    block_table : (batch, blocks) int
    recent_slots : (batch,) int, optional
        Slots of the recent window; those of a contiguous cache unless given.
    window_left : int
        Keys before its own that a query sees at most, -1 for all.
    softmax_scale, softcap, sinks, compute_dtype
        As in `reference.attention`.

    Returns
    -------
    o : (batch, q_len, heads_q, head_dim)
        Of a latent cache head_dim_v.
    lse : (batch, heads_q, q_len)
    """
    batch, q_len, heads, _ = q.shape
    o = np.zeros((*q.shape[:-1], cache.v_format.head_dim), dtype=compute_dtype)
    lse = np.empty((batch, heads, q_len), dtype=compute_dtype)
    first = first_seen(seq_lens, q_len, window_left)
    for b in range(batch):
        slot = b if recent_slots is None else int(recent_slots[b])
        k, v = read_tokens(cache, np.asarray(block_table[b]), int(seq_lens[b]), slot, b, int(first[b]))
        o[b : b + 1], lse[b : b + 1] = attention(
            q[b : b + 1],
            k[None],
            v[None],
            causal=True,
            window=(window_left, -1),
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks,
            compute_dtype=compute_dtype,
        )
    return o, lse


def sparse(
    q: Array,
    cache: CacheArrays,
    *,
    indices: Array,
    lengths: Array | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    compute_dtype: npt.DTypeLike = np.float32,
) -> tuple[Array, Array, Array]:
    """Attention of each query token over rows of a latent cache that a list names.

    Parameters
    ----------
    q : (tokens, heads, head_dim)
    cache : CacheArrays
    indices : (tokens, topk) int
        Rows, block * block_size + token; those below 0 or beyond the cache are no keys.
    lengths : (tokens,) int, optional
        Entries of each list that count, from the first on; all unless given.
    softmax_scale, softcap, sinks, compute_dtype
        As in `reference.attention`.

    Returns
    -------
    o : (tokens, heads, head_dim_v)
    lse : (tokens, heads)
        Natural logarithm, sinks counted.
    maximum : (tokens, heads)
        The largest score, after scale and softcap, -inf where there is no key; sinks do not count.
    """
    tokens, heads, dim = q.shape
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    o = np.zeros((tokens, heads, cache.v_format.head_dim), dtype=compute_dtype)
    lse, maximum = (np.full((tokens, heads), -np.inf, dtype=compute_dtype) for _ in range(2))
    rows = cache.k.shape[0] * cache.block_size
    # The blocks of a table are rows: those of a list, one after the other.
    single = dataclasses.replace(cache, **{
        name: x.swapaxes(1, 2).reshape(rows, 1, 1, x.shape[-1])
        for name, x in vars(cache).items() if name in ("k", "v", "k_params", "v_params")
    })  # fmt: skip
    for i in range(tokens):
        listed = np.asarray(indices[i] if lengths is None else indices[i, : max(int(lengths[i]), 0)], dtype=np.int64)
        listed = listed[(listed >= 0) & (listed < rows)]
        k, v = read_tokens(single, listed, len(listed))
        found = attention(
            q[i][None, None], k[None], v[None], softmax_scale=scale, softcap=softcap, sinks=sinks,
            compute_dtype=compute_dtype,
        )  # fmt: skip
        o[i], lse[i] = found[0][0, 0], found[1][0, :, 0]
        if len(listed):
            scores = scale * q[i].astype(compute_dtype) @ k[:, 0].astype(compute_dtype).T
            maximum[i] = (softcap * np.tanh(scores / softcap) if softcap else scores).max(-1)
    return o, lse, maximum


def on_host(cache: KVCache) -> CacheArrays:
    """A cache's memory as NumPy sees it; of a cache on the CPU it is the memory itself, written in place."""

    def plane(name: str, fmt: KVFormat) -> Any:
        if name not in cache.planes:  # V of a latent cache
            return plane("k", cache.k_format)[..., : fmt.head_dim * fmt.bits // 8]
        raw = arrays.raw_view(cache.planes[name])
        if fmt.layout == "fbgemm":
            return raw.swapaxes(1, 2)
        raw = raw.view(np.uint8) if not fmt.quantized or fmt.layout in (IN_ORDER, LATENT_656) else raw
        return raw.swapaxes(1, 2) if cache.array_order == "NHD" else raw

    def params(name: str, fmt: KVFormat) -> Any:
        lead = (cache.num_blocks, cache.num_kv_heads, cache.block_size)
        if not fmt.plane_words:
            return np.empty((*lead, 0), dtype=np.uint32)
        return arrays.raw_view(cache.planes[name]).view(np.uint32)

    recent = None
    if cache.recent_format is not None:
        k, v, state = (arrays.raw_view(cache.planes[name]) for name in ("recent_k", "recent_v", "recent_state"))
        recent = RecentArrays(cache.recent_window, cache.recent_format, k.view(np.uint8), v.view(np.uint8), state)

    def scale(name: str) -> Any:
        if name in cache.planes:
            rows = arrays.raw_view(cache.planes[name])
            return rows.swapaxes(1, 2) if cache.array_order == "NHD" else rows
        found = own.get(name)
        return None if found is None else np.atleast_2d(found)

    own = {name: arrays.to_numpy(t) for name, t in cache.key_arrays.items()}
    return CacheArrays(
        cache.k_format, cache.v_format, plane("k", cache.k_format), plane("v", cache.v_format),
        params("k_params", cache.k_format), params("v_params", cache.v_format), own.get("k_mean"),
        own.get("k_channel_scale"), cache.hadamard, recent, scale("k_scale"),
        scale("k_scale" if cache.facts.is_latent else "v_scale"),
    )  # fmt: skip
