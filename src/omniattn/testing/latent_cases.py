"""Calls of ``decode`` over small latent caches, for the rows that serve them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import omniattn
from omniattn.kv.formats import LATENT_656_CODES, LATENT_656_GROUP
from omniattn.reference import attention
from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.reference.kv_cache import bfloat16_bits, decode_656
from omniattn.registry import KernelSpec
from omniattn.registry.decode import LATENT_DIMS
from omniattn.testing.cache_cases import decode_errors
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework
from omniattn.testing.inputs import make_qkv

#: The one scale of e4m3 rows.
_SCALE = 0.375
#: Operations of the registry that have these cases.
LATENT_OPS: tuple[str, ...] = ("latent_decode", "latent_combine", "latent_append")


@dataclass(frozen=True)
class Prepared:
    """Queries (batch, q_len, heads, channels), blocks, their table, and what decoding gives."""

    q: Values
    pool: Values
    table: Values
    o: Values
    lse: Values


@dataclass(frozen=True)
class LatentCase:
    """A latent cache for one row of the registry: `RowCase`.

    Attributes
    ----------
    dtype : str
    lengths : tuple of int
        Tokens of each sequence.
    heads, q_len : int
    block_size : int
        0: contiguous.
    fmt : str
        A key of `registry.decode.LATENT_FORMATS`.
    """

    dtype: str
    lengths: tuple[int, ...]
    heads: int
    q_len: int
    block_size: int
    fmt: str = "latent"

    @property
    def name(self) -> str:
        """What messages call it."""
        cache = f"blocks of {self.block_size}" if self.block_size else "contiguous"
        return f"lengths {self.lengths}, {self.heads} heads, {cache}, {self.fmt}"

    def prepare(self) -> Prepared:
        """Inputs, and what must come out."""
        width, width_v = LATENT_DIMS
        batch, size = len(self.lengths), self.block_size or max(self.lengths)
        q, rows, _ = make_qkv(
            "normal", batch=None, seqlen_q=batch * self.q_len, seqlen_k=sum(self.lengths), heads_q=self.heads,
            heads_kv=1, head_dim=width, seed=self.q_len, dtype=self.dtype,
        )  # fmt: skip
        q = q.reshape(batch, self.q_len, self.heads, width)
        stored, rows = _stored(rows, self.fmt)
        counts = [-(-n // size) for n in self.lengths]
        order = iter(np.random.default_rng(self.q_len).permutation(sum(counts)))
        # What no token has is NaN.
        nan = 0x7F if stored.dtype == np.uint8 else np.nan
        pool = np.full((sum(counts), size, 1, stored.shape[-1]), nan, stored.dtype)
        table = np.zeros((batch, max(counts)), np.int32)
        o, lse = np.zeros((*q.shape[:3], width_v), np.float32), np.zeros((batch, self.heads, self.q_len), np.float32)
        begin = 0
        for b, n in enumerate(self.lengths):
            own, own_stored = rows[begin : begin + n], stored[begin : begin + n]
            begin += n
            for i in range(counts[b]):
                table[b, i] = b if not self.block_size else next(order)
                part = own_stored[i * size : (i + 1) * size]
                pool[table[b, i], : len(part)] = part
            o[b : b + 1], lse[b : b + 1] = attention(q[b : b + 1], own[None], own[None, ..., :width_v], causal=True)
        return Prepared(q, pool, table, o, lse)

    def check(self, framework: Framework, prepared: Prepared) -> tuple[float, str]:
        """Decode, and compare O and the LSE."""
        kind = omniattn.PagedKVCache if self.block_size else omniattn.KVCache
        scales: dict[str, Any] = {}
        if self.fmt == "latent":
            pool = framework.array(prepared.pool, self.dtype)
        else:
            pool = framework.array(prepared.pool, "uint8")
        if self.fmt == "latent_e4m3":
            pool = framework.as_dtype(pool, "float8_e4m3fn")
            scales["k_scale"] = framework.array(np.array([_SCALE]), "float32")
        cache: Any = kind.from_arrays(pool, head_dim_v=LATENT_DIMS[1], **scales)
        call: dict[str, Any] = {"seq_lens": framework.array(np.array(self.lengths), "int32")}
        if self.block_size:
            call["block_table"] = framework.array(prepared.table, "int32")
        got = omniattn.decode(framework.array(prepared.q, self.dtype), cache, return_lse=True, **call)
        framework.synchronize()
        o, lse = (framework.to_numpy(x) for x in got)
        errors = decode_errors(o, lse, prepared.o, prepared.lse, self.dtype, "io")
        worst = max(errors)
        return worst, "" if worst <= 1.0 else "O {:.2f}, LSE {:.2f} of their tolerances".format(*errors)


def _stored(rows: Values, fmt: str) -> tuple[Values, Values]:
    """Rows (n, 1, channels) as they lie in a cache, and what they mean there.

    Products with scales are exact in 16 bits, to which kernels may round them.
    """
    if fmt == "latent":
        return rows, rows
    if fmt == "latent_e4m3":
        codes = encode_e4m3(rows / _SCALE)
        return codes, decode_e4m3(codes) * np.float32(_SCALE)
    groups = rows[..., :LATENT_656_CODES].reshape(*rows.shape[:-1], -1, LATENT_656_GROUP)
    scales = np.exp2(np.ceil(np.log2(np.abs(groups).max(-1) / 448))).astype("<f4")
    codes = encode_e4m3(groups / scales[..., None]).reshape(*rows.shape[:-1], LATENT_656_CODES)
    rope = bfloat16_bits(rows[..., LATENT_656_CODES:]).astype("<u2")
    stored = np.concatenate([codes, scales.view(np.uint8), rope.view(np.uint8)], -1)
    return stored, decode_656(stored)


def latent_cases(spec: KernelSpec) -> tuple[LatentCase, ...]:
    """The cases of a row of `LATENT_OPS`: rows of one block and of several, by copies of each kind."""
    fmt = spec.cache[0] if spec.cache else "latent"
    return (
        LatentCase(spec.dtype, (700, 65), 128, 1, 64, fmt),
        LatentCase(spec.dtype, (250, 3, 300), 16, 2, 3, fmt),
        LatentCase(spec.dtype, (500, 64), 40, 4, 0, fmt),
    )
