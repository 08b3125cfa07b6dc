"""Calls of ``append``, ``copy_blocks`` and ``decode`` on small caches in the formats that kernels have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import omniattn
from omniattn.kv.formats import IN_ORDER, MAX_QUANTIZED_DIM, KVFormat, check_format, row_dim
from omniattn.reference import decode as reference
from omniattn.registry import KernelSpec
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework
from omniattn.testing.inputs import make_qkv

#: Operations of the registry that have these cases.
CACHE_OPS: tuple[str, ...] = ("decode", "decode_combine", "append", "dequantize", "dequantize_rounds", "copy_blocks")
#: Those of keys and values that prompts read in 16 bits.
_WIDENS = ("dequantize", "dequantize_rounds")
#: New tokens of a sequence, where attention over pages is called.
_PROMPT = 40
#: Largest error of O as a part of its largest value: rounding of O, of P, and of Q where codes are multiplied.
O_TOLERANCE = {"bfloat16": 8e-3, "float16": 1.5e-3}
#: Absolute error of the LSE: with a 16-bit cache as `attention`, with codes that of Q in fp16 besides.
LSE_TOLERANCE = {"io": 1e-4, "codes": 6e-3}
#: What errors may be larger where elements of a quantized cache are rounded to 16 bits.
_ROUNDED = 2.5
#: The format of rows that serve every one.
_ANY_FORMAT = "int4"


@dataclass(frozen=True)
class Shape:
    """A cache and its queries.

    Attributes
    ----------
    lengths : tuple of int
        Tokens of each sequence.
    heads_q, heads_kv : int
    below : int
        How far head_dim lies below the kernel's own.
    block_size : int
        0: contiguous.
    """

    lengths: tuple[int, ...]
    heads_q: int
    heads_kv: int
    below: int
    block_size: int


def _shapes(group: int) -> tuple[Shape, ...]:
    return (
        Shape((700, 0, 33), group, 1, 0, 0),
        Shape((250, 300), 2 * group, 2, 8, 16),
        Shape((90,), group, 1, 0, 3),
    )


class Formats(NamedTuple):
    """Arguments of a cache; with the layout `IN_ORDER` it is on arrays of the caller."""

    k_dtype: str
    v_dtype: str
    group_size: int | None
    layout: str


def formats_of(spec: KernelSpec) -> Formats:
    """The formats of a row's cache."""
    # Warps share keys of 16 bits alone, and leave more than 16 rows to combine.
    words = tuple({"e4m3": "fp8", "s8": "int8"}.get(word, word) for word in spec.cache)
    in_order = words != spec.cache
    exact = spec.head_dim > MAX_QUANTIZED_DIM or (spec.op == "decode_combine" and spec.block_m > 16)
    words = words or (("16" if exact else _ANY_FORMAT),) * 2
    own = "fp16" if spec.dtype == "float16" else "bf16"
    layout = "fbgemm" if words[0].startswith("fbgemm") else IN_ORDER if in_order else "fragment"
    named = [word.replace("fbgemm", "int4").partition("g") for word in words]
    dtypes = [own if name == "16" else name for name, _, _ in named]
    groups = [int(group) for _, _, group in named if group]
    return Formats(dtypes[0], dtypes[1], groups[0] if groups else None, layout)


@dataclass(frozen=True)
class Prepared:
    """Inputs, blocks, the reference's memory after appending (and copying), and what decoding gives.

    Attributes
    ----------
    q, k, v : ndarray of float32
        (batch, q_len, heads_q, head_dim), and packed (tokens, heads_kv, head_dim).
    table : ndarray
        The block table before blocks are copied.
    copies : tuple of (source, destination)
    host : CacheArrays
    host_table : ndarray
        The block table afterwards.
    o, lse : ndarray
    """

    q: Values
    k: Values
    v: Values
    table: Values
    copies: tuple[tuple[int, int], ...]
    host: reference.CacheArrays
    host_table: Values
    o: Values
    lse: Values


@dataclass(frozen=True)
class CacheCase:
    """A cache for one row of the registry: `RowCase`.

    Attributes
    ----------
    dtype : str
        Element type of q, k and v.
    head_dim : int
        The kernel's own.
    formats : Formats
    q_len : int
        New tokens of a sequence.
    index : int
        Of the shape.
    copies : bool
        Whether blocks are copied.
    decodes : bool
        Whether what decoding gives is compared, and not the bytes of the cache. The numbers are the same.
    """

    dtype: str
    head_dim: int
    formats: Formats
    q_len: int
    index: int
    copies: bool
    decodes: bool = field(compare=False)

    @property
    def shape(self) -> Shape:
        """The facts."""
        return _shapes(8 if self.q_len > 1 else 4)[self.index]

    @property
    def name(self) -> str:
        """What messages call it."""
        cache = f"blocks of {self.shape.block_size}" if self.shape.block_size else "contiguous"
        return f"lengths {self.shape.lengths}, {cache}"

    @property
    def _dim(self) -> int:
        # Rows in FBGEMM's layout are not padded, and those of a caller in 8 bits are of whole 16 bytes.
        if self.formats.layout == "fbgemm":
            return self.head_dim
        return self.head_dim - self.shape.below * (2 if self.formats.layout == IN_ORDER else 1)

    def _format(self, *, is_key: bool) -> KVFormat:
        f = self.formats
        dtype = f.k_dtype if is_key else f.v_dtype
        if f.layout == IN_ORDER:
            return KVFormat(dtype, self._dim, row_dim(self._dim), False, is_key, IN_ORDER)
        return check_format(dtype, self._dim, f.group_size, True, "CacheCase", is_key=is_key, layout=f.layout)

    def prepare(self) -> Prepared:
        """Inputs, and what must come out."""
        shape, batch = self.shape, len(self.shape.lengths)
        q, k, v = make_qkv(
            "normal", batch=None, seqlen_q=batch * self.q_len, seqlen_k=sum(shape.lengths), heads_q=shape.heads_q,
            heads_kv=shape.heads_kv, head_dim=self._dim, seed=self.index, dtype=self.dtype,
        )  # fmt: skip
        q = q.reshape(batch, self.q_len, shape.heads_q, self._dim)
        starts = np.cumsum([0, *shape.lengths])
        table, blocks, order = self._blocks()
        host = self._memory(blocks)
        for b in range(batch):
            rows = slice(starts[b], starts[b + 1])
            reference.append_tokens(host, k[rows], v[rows], table[b], 0)
        host_table = table
        copies: tuple[tuple[int, int], ...] = ()
        if self.copies:
            half = blocks // 2
            copies = tuple((int(order[i]), int(order[half + i])) for i in range(half))
            moved = dict(copies)
            host_table = np.vectorize(lambda block: moved.get(int(block), int(block)))(table)
            for plane in (host.k, host.v, host.k_params, host.v_params):
                for source, destination in copies:
                    plane[destination] = plane[source]
        lens = np.array(shape.lengths, dtype=np.int32)
        o, lse = reference.decode(q, host, seq_lens=lens, block_table=table)
        return Prepared(q, k, v, table, copies, host, host_table, o, lse)

    def _blocks(self) -> tuple[Values, int, Values]:
        """Block table, number of blocks (twice what is needed), and the order in which they are taken."""
        size, lengths = self.shape.block_size, self.shape.lengths
        if not size:
            return np.arange(len(lengths), dtype=np.int32)[:, None], len(lengths), np.zeros(0, np.int32)
        counts = [-(-n // size) for n in lengths]
        order = np.random.default_rng(self.index).permutation(2 * sum(counts)).astype(np.int32)
        table = np.zeros((len(lengths), max(counts)), dtype=np.int32)
        begin = 0
        for b, count in enumerate(counts):
            table[b, :count] = order[begin : begin + count]
            begin += count
        return table, 2 * sum(counts), order

    def _memory(self, blocks: int) -> reference.CacheArrays:
        k, v = self._format(is_key=True), self._format(is_key=False)
        lead = (blocks, self.shape.heads_kv, self.shape.block_size or max(self.shape.lengths))
        in_order = self.formats.layout == IN_ORDER
        widths = [self._dim if in_order else f.row_bytes for f in (k, v)]
        scales: list[Values | None] = [None, None]
        if in_order and self.index == 1:  # one a head; else one a row, which is written
            largest = 4.0 / (448.0 if k.dtype == "fp8" else 127.0)
            scales = [np.linspace(x, 2 * x, lead[1], dtype=np.float32)[None] for x in (largest, 1.5 * largest)]
        elif in_order:
            scales = [np.zeros(lead, np.float32) for _ in "kv"]
        return reference.CacheArrays(
            k, v, np.zeros((*lead, widths[0]), np.uint8), np.zeros((*lead, widths[1]), np.uint8),
            np.zeros((*lead, k.plane_words), np.uint32), np.zeros((*lead, v.plane_words), np.uint32),
            k_scale=scales[0], v_scale=scales[1],
        )  # fmt: skip

    def check(self, framework: Framework, prepared: Prepared) -> tuple[float, str]:
        """Append, and copy or decode; compare bytes of the cache, or O and the LSE."""
        shape = self.shape
        call: dict[str, Any] = {"seq_lens": framework.array(np.array(shape.lengths), "int32")}
        lead = prepared.host.k.shape[:3]
        kind = omniattn.PagedKVCache if shape.block_size else omniattn.KVCache
        if shape.block_size:
            call["block_table"] = framework.array(prepared.table, "int32")
        if self.formats.layout == IN_ORDER:
            cache = self._on_arrays(framework, kind, prepared.host)
        else:
            like = framework.array(np.zeros(1, np.float32), self.dtype)
            cache = kind(lead[0], lead[2], lead[1], self._dim, like=like, **self.formats._asdict())
            for plane in (cache.k, cache.v, cache.k_params, cache.v_params):
                if plane is not None:
                    framework.poison(plane)
        starts = framework.array(np.cumsum([0, *shape.lengths]), "int32")
        k, v = (framework.array(x, self.dtype) for x in (prepared.k, prepared.v))
        omniattn.append(cache, k, v, cu_seqlens=starts, **call)
        if not self.decodes:
            if prepared.copies:
                omniattn.copy_blocks(cache, list(prepared.copies))  # type: ignore[arg-type]
            framework.synchronize()
            note = self._different_rows(framework, cache, prepared)
            return (float("inf") if note else 0.0), note
        function = omniattn.attention_with_kvcache if self.q_len == _PROMPT else omniattn.decode
        if self.q_len == _PROMPT and not prepared.host.k_format.quantized:
            # Keys in 16 bits are made anew where there may be padding in front of them; here there is none.
            call["leftpad_k"] = framework.array(np.zeros(len(shape.lengths)), "int32")
        got = function(framework.array(prepared.q, self.dtype), cache, return_lse=True, **call)
        framework.synchronize()
        o, lse = (framework.to_numpy(x) for x in got)
        of = "codes" if prepared.host.k_format.quantized else "io"
        errors = decode_errors(o, lse, prepared.o, prepared.lse, self.dtype, of)
        if self.q_len == _PROMPT:  # the reference knows nothing of elements that are rounded to 16 bits
            errors = errors[0] / _ROUNDED, errors[1] / _ROUNDED
        worst = max(errors)
        return worst, "" if worst <= 1.0 else "O {:.2f}, LSE {:.2f} of their tolerances".format(*errors)

    def _on_arrays(self, framework: Framework, kind: Any, host: reference.CacheArrays) -> omniattn.KVCache:
        """A cache on arrays of bytes that nobody has written, (blocks, heads, tokens, dim)."""
        dtype = {"fp8": "float8_e4m3fn", "int8": "int8"}[host.k_format.dtype]
        data = [framework.array(np.full(x.shape, 0xFF, np.uint8), "uint8") for x in (host.k, host.v)]
        scales: dict[str, Any] = {}
        for name, scale in (("k_scale", host.k_scale), ("v_scale", host.v_scale)):
            assert scale is not None
            values = np.full(scale.shape, np.nan) if scale.ndim == 3 else scale[0]
            scales[name] = framework.array(values.astype(np.float32), "float32")
        k, v = (framework.as_dtype(x, dtype) for x in data)
        made: omniattn.KVCache = kind.from_arrays(k, v, layout="HND", **scales)
        return made

    def _different_rows(self, framework: Framework, cache: omniattn.KVCache, prepared: Prepared) -> str:
        """Which plane differs from the reference in the rows that hold tokens; empty if none does."""
        for name in ("k", "v"):
            fmt: KVFormat = getattr(prepared.host, f"{name}_format")
            in_order, others = fmt.layout == IN_ORDER, [f"{name}_params"] * (fmt.plane_words > 0)
            if in_order and prepared.host.k_scale is not None and prepared.host.k_scale.ndim == 3:
                others = [f"{name}_scale"]
            for plane in (name, *others):
                wanted = getattr(prepared.host, plane)
                array = getattr(cache, plane)
                got = framework.to_numpy(framework.as_dtype(array, "uint8") if in_order and plane == name else array)
                if fmt.layout == "fbgemm":
                    got = got.swapaxes(1, 2)  # tokens before heads
                if not fmt.quantized:
                    wanted = _as_float32(wanted, fmt.dtype)
                for b, n in enumerate(self.shape.lengths):
                    at = np.arange(n)
                    size = wanted.shape[2]
                    where = (prepared.host_table[b][at // size], slice(None), at % size)
                    if not np.array_equal(got[where], wanted[where].astype(got.dtype)):
                        return f"{plane} differs from the reference"
        return ""


def decode_errors(o: Values, lse: Values, ref_o: Values, ref_lse: Values, dtype: str, kind: str) -> tuple[float, float]:
    """Errors of O and of the LSE as parts of their tolerances; infinite where NaN or infinities are elsewhere.

    Parameters
    ----------
    o, ref_o : (batch, q_len, heads_q, head_dim)
        A sequence's error counts relative to its own largest value: sequences may differ by orders of magnitude.
    lse, ref_lse : (batch, heads_q, q_len)
    dtype : str
        Of q.
    kind : {"io", "codes"}
        Whether K of the cache is 16-bit numbers or codes.
    """
    hidden = np.isneginf(ref_lse)
    if not np.isfinite(o).all() or not np.array_equal(np.isneginf(lse), hidden) or np.isnan(lse).any():
        return float("inf"), float("inf")
    largest = np.abs(ref_o).max(axis=(1, 2, 3), keepdims=True)
    if o[np.broadcast_to(largest == 0, o.shape)].any():
        return float("inf"), 0.0
    of_o = float((np.abs(o - ref_o) / np.maximum(largest, 1e-30)).max(initial=0.0)) / O_TOLERANCE[dtype]
    error = np.abs(lse[~hidden] - ref_lse[~hidden]) / np.maximum(np.abs(ref_lse[~hidden]), 1.0)
    return of_o, float(error.max(initial=0.0)) / LSE_TOLERANCE[kind]


def _as_float32(data: Values, dtype: str) -> Values:
    bits = data.view(np.uint16)
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _io_dtype(spec: KernelSpec) -> str:
    """Element type of the tokens of a row's cases."""
    return spec.dtype if spec.dtype in O_TOLERANCE else "bfloat16"


def cache_cases(spec: KernelSpec) -> tuple[CacheCase, ...]:
    """The cases of a row of `CACHE_OPS`; a contiguous cache has no blocks to copy."""
    if spec.op in _WIDENS and spec.head_dim > MAX_QUANTIZED_DIM:
        own = Formats(*(("fp16" if spec.dtype == "float16" else "bf16",) * 2), None, "fragment")
        return tuple(CacheCase(_io_dtype(spec), spec.head_dim, own, _PROMPT, i, False, True) for i in range(3))
    if spec.op in _WIDENS:
        kept = [
            Formats(*of)
            for of in (
                ("int8", "int4", None, "fragment"),
                ("fp8", "fp8", None, IN_ORDER),
                ("int4", "int4", None, "fbgemm"),
            )
        ]
        return tuple(CacheCase(_io_dtype(spec), spec.head_dim, x, _PROMPT, i, False, True) for i, x in enumerate(kept))
    decodes, copies = spec.op in ("decode", "decode_combine"), spec.op == "copy_blocks"
    q_len = spec.block_m // 8 if decodes else 1
    formats = formats_of(spec)
    found = (CacheCase(_io_dtype(spec), spec.head_dim, formats, q_len, index, copies, decodes) for index in range(3))
    return tuple(case for case in found if case.shape.block_size or not copies)
