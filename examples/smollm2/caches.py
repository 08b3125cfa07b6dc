"""Perplexity for each format of a KV cache, and how often the likeliest next token stays the same.

Runs as `python examples/smollm2/perplexity.py --caches`. K and V of every layer go through a cache (`omniattn.append`),
and every query reads them from there (`omniattn.decode`, 16 queries a call), so each token is predicted from quantized
keys and values, its own included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from array_backend import Array, Backend
from model import AttentionFn, Model
from precisions import Row, write_rows

#: Queries of one call: what `decode` takes.
CHUNK = 16
#: Tokens of a sequence that means and scales of K's channels are taken from, as from a prompt.
CALIBRATION = 64


@dataclass(frozen=True)
class CacheVariant:
    """One row: options of `omniattn.KVCache`, and what is done to K's channels before."""

    label: str
    options: dict[str, Any] = field(default_factory=dict)
    mean: bool = False
    channel_scale: bool = False


def variants() -> list[CacheVariant]:
    """The rows of the table; the first is what the others are compared with."""
    int4, int4g = {"k_dtype": "int4"}, {"k_dtype": "int4", "group_size": 32}
    return [
        CacheVariant("16 bit"),
        CacheVariant("fp8", {"k_dtype": "fp8"}),
        CacheVariant("int8", {"k_dtype": "int8"}),
        CacheVariant("int4", int4),
        CacheVariant("int4, K Hadamard", int4 | {"hadamard": True}),
        CacheVariant("int4, K mean", int4, mean=True),
        CacheVariant("int4, K mean, Hadamard", int4 | {"hadamard": True}, mean=True),
        CacheVariant("int4, groups of 32", int4g),
        CacheVariant("int4, groups of 32, K mean and channel scales", int4g, mean=True, channel_scale=True),
        CacheVariant("K int8, V int4, groups of 32", int4g | {"k_dtype": "int8", "v_dtype": "int4"}),
    ]


def cache_attention(backend: Backend, variant: CacheVariant) -> AttentionFn:
    """Causal self-attention whose K and V have been through a cache; for q, k and v of the same tokens."""
    import omniattn as oa

    def attend(q: Array, k: Array, v: Array) -> Array:
        batch, seqlen, heads, dim = k.shape
        options = dict(variant.options)
        # On a GPU a 16-bit cache has the queries' type; NumPy has no bfloat16.
        options.setdefault("k_dtype", "bf16" if "bfloat16" in str(k.dtype) else "fp16")
        first = backend.to_numpy(k[:, :CALIBRATION]).reshape(-1, heads, dim)
        if variant.mean:
            options["k_mean"] = backend.table(first.mean(axis=0))
            first = first - first.mean(axis=0)
        if variant.channel_scale:
            # The root: a channel's range is taken from K in equal parts by its scale and by its token's.
            options["k_channel_scale"] = backend.table(np.maximum(np.abs(first).max(axis=0), 1e-3) ** 0.5)
        cache = oa.KVCache(batch, seqlen, heads, dim, like=k, **options)
        oa.append(cache, k, v, seq_lens=lengths(backend, batch, seqlen))
        parts = []
        for begin in range(0, seqlen, CHUNK):
            end = min(begin + CHUNK, seqlen)
            # Keys behind `end` are in the cache too; a sequence of `end` tokens does not see them.
            parts.append(oa.decode(q[:, begin:end], cache, seq_lens=lengths(backend, batch, end)))
        return backend.xp.concatenate(parts, axis=1)

    return attend


def lengths(backend: Backend, batch: int, length: int) -> Array:
    """int32 lengths where the model's arrays are."""
    zeros = backend.xp.zeros(0, dtype=backend.xp.int32)
    return backend.cast_like(backend.indices(np.full(batch, length)), zeros)


def token_bytes(model: Model, variant: CacheVariant) -> int:
    """Bytes of one token in all layers."""
    import omniattn as oa

    config = model.config
    options = {"k_dtype": "fp16"} | variant.options
    cache = oa.KVCache(1, 1, config.num_kv_heads, config.head_dim, like=np.zeros(1, np.float32), **options)
    return config.num_layers * cache.token_bytes


def write_table(model: Model, windows: list[np.ndarray], write: Callable[[str], None]) -> list[dict[str, Any]]:
    """Write the table of all caches, and return its rows."""
    rows = [
        Row((x.label, str(token_bytes(model, x))), partial(cache_attention, model.backend, x), x.label)
        for x in variants()
    ]
    return write_rows(("Cache", "Bytes a token"), rows, model, windows, write)
