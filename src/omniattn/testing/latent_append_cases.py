"""Calls of ``append`` on small latent caches, for the rows that serve them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import omniattn
from omniattn.kv.formats import IN_ORDER, KVFormat
from omniattn.reference import kv_cache
from omniattn.registry import KernelSpec
from omniattn.registry.decode import LATENT_DIMS
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework
from omniattn.testing.inputs import make_qkv

#: The scale of e4m3 rows: nearly 1 in 100 values is beyond the largest code.
_SCALE = 0.0057
#: Names of formats, as constructors take them.
_NAMES = {"latent": None, "latent_e4m3": "fp8", "latent_656": "fp8_ds_mla"}


class Prepared(NamedTuple):
    """Rows (tokens, channels), tables of angles, places of tokens (blocks, tokens of them), and the bytes there."""

    rows: Values
    cos: Values
    sin: Values
    table: Values
    stored: Values


@dataclass(frozen=True)
class LatentAppendCase:
    """A latent cache that tokens are appended to, for one row of the registry: `RowCase`.

    Attributes
    ----------
    dtype : str
        Of the tokens.
    fmt : str
        A key of `LATENT_FORMATS`.
    lengths : tuple of int
        New tokens of each sequence.
    block_size : int
    rope : str
        Of `ROPE_STYLES`, or "none".
    by_slots : bool
        Places by slot_mapping, channels apart; else by lengths, side by side.
    """

    dtype: str
    fmt: str
    lengths: tuple[int, ...]
    block_size: int
    rope: str
    by_slots: bool

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"lengths {self.lengths}, blocks of {self.block_size}, rope {self.rope}"

    @property
    def _dtype(self) -> str:
        return _NAMES[self.fmt] or {"float16": "fp16", "bfloat16": "bf16"}[self.dtype]

    def _counts(self) -> list[int]:
        return [-(-n // self.block_size) for n in self.lengths]

    def prepare(self) -> Prepared:
        """Inputs, and what must come out."""
        width, width_v = LATENT_DIMS
        _, k, _ = make_qkv(
            "normal", batch=None, seqlen_q=1, seqlen_k=sum(self.lengths), heads_q=1, heads_kv=1, head_dim=width,
            seed=len(self.lengths), dtype=self.dtype,
        )  # fmt: skip
        rng = np.random.default_rng(self.block_size)
        rows = k[:, 0]
        angles = rng.uniform(0, 6, (max(self.lengths), (width - width_v) // 2))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        counts = self._counts()
        order = iter(rng.permutation(sum(counts)))
        table = np.zeros((len(counts), max(counts)), np.int32)
        for row, count in zip(table, counts, strict=True):
            row[:count] = [next(order) for _ in range(count)]
        turned, positions = rows, self._positions()
        if self.rope != "none":
            tail = kv_cache.rotate(rows[:, width_v:], cos[positions], sin[positions], self.rope == "interleaved")
            turned = np.concatenate([rows[:, :width_v], tail], axis=-1)
        return Prepared(rows, cos, sin, table, self._stored(turned))

    def _positions(self) -> Values:
        return np.concatenate([np.arange(n) for n in self.lengths])

    def _stored(self, rows: Values) -> Values:
        """Bytes of rows, by the reference."""
        if self._dtype == "fp8_ds_mla":
            return kv_cache.encode_656(rows)
        fmt = KVFormat(self._dtype, rows.shape[-1], rows.shape[-1], False, True, IN_ORDER)
        if self._dtype == "fp8":
            return kv_cache.encode_in_order(rows, np.full(len(rows), _SCALE, np.float32), fmt)
        return kv_cache.encode(rows, fmt)[0]

    def check(self, framework: Framework, prepared: Prepared) -> tuple[float, str]:
        """Append, and compare the bytes."""
        width, width_v = LATENT_DIMS
        scale = framework.array(np.array([_SCALE]), "float32") if self._dtype == "fp8" else None
        cache = omniattn.PagedKVCache(
            sum(self._counts()) + 2, self.block_size, 1, width, like=framework.array(np.zeros(1), self.dtype),
            head_dim_v=width_v, k_dtype=self._dtype, k_scale=scale,
        )  # fmt: skip
        framework.poison(cache.k)
        rows, table, at = prepared.rows, prepared.table, self._positions()
        of = np.repeat(np.arange(len(self.lengths)), self.lengths)
        blocks, within = table[of, at // self.block_size], at % self.block_size
        call: dict[str, Any] = {}
        if self.rope != "none":
            call = {"cos": framework.array(prepared.cos, "float32"), "sin": framework.array(prepared.sin, "float32")}
            call["rope"] = self.rope
        k = framework.array(rows, self.dtype)
        if self.by_slots:
            k, call["k_pe"] = (framework.array(x, self.dtype) for x in (rows[:, :width_v], rows[:, width_v:]))
            call["slot_mapping"] = framework.array(blocks * self.block_size + within, "int32")
            if self.rope != "none":
                call["positions"] = framework.array(at, "int32")
        else:
            call["seq_lens"] = framework.array(np.array(self.lengths), "int32")
            call["cu_seqlens"] = framework.array(np.cumsum([0, *self.lengths]), "int32")
            call["block_table"] = framework.array(table, "int32")
        omniattn.append(cache, k, **call)
        framework.synchronize()
        got = framework.to_numpy(cache.k)[:, :, 0]
        wanted = prepared.stored
        if got.dtype != np.uint8:
            wanted = _floats(wanted, self._dtype)
        unlike = int((got[blocks, within] != wanted).any(axis=-1).sum())
        return (float("inf"), f"{unlike} rows differ from the reference") if unlike else (0.0, "")


def _floats(data: Values, dtype: str) -> Values:
    """Numbers of rows in 16 bits."""
    width = data.shape[-1] // 2
    fmt = KVFormat(dtype, width, width, False, True)
    return kv_cache.decode_rows(data, np.zeros((len(data), 0), np.uint32), fmt)


def latent_append_cases(spec: KernelSpec) -> tuple[LatentAppendCase, ...]:
    """The cases of a row: each way to say where tokens go, each rotation."""
    fmt = spec.cache[0]
    return (
        LatentAppendCase(spec.dtype, fmt, (70, 1, 33), 16, "half", False),
        LatentAppendCase(spec.dtype, fmt, (50, 19), 3, "interleaved", True),
        LatentAppendCase(spec.dtype, fmt, (9,), 64, "none", True),
    )
