"""Problems of ``omniattn verify`` for the kernels of KV caches: a small cache in the row's own format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import omniattn
from omniattn import testing
from omniattn.cli.frameworks import Framework
from omniattn.kv.formats import KVFormat, row_dim
from omniattn.reference import decode as reference
from omniattn.registry import KernelSpec, append_spec, by_name, decode_combine_spec, decode_spec
from omniattn.registry.decode import KV_KINDS

#: Operations of the registry that this module verifies.
DECODE_OPS: tuple[str, ...] = ("decode", "decode_combine", "append", "copy_blocks")
#: Largest error of O as a part of its largest value, and of the LSE: P, and Q of quantized K, are rounded to 16 bits.
_O_SHARE = {"bfloat16": 8e-3, "float16": 1.5e-3}
_LSE_ATOL = 6e-3

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Problem:
    """One cache and its tokens.

    Attributes
    ----------
    lengths : tuple of int
    heads_q, heads_kv, q_len, head_dim : int
    block_size : int
        0: contiguous.
    """

    lengths: tuple[int, ...]
    heads_q: int
    heads_kv: int
    q_len: int
    head_dim: int
    block_size: int


def formats_of(spec: KernelSpec) -> tuple[str, str, int | None]:
    """(k_dtype, v_dtype, group_size) of a row's cache; for rows of every format, a 4-bit one."""
    defines = dict(spec.defines)
    wide = "fp16" if spec.dtype == "float16" else "bf16"
    if "K_KIND" not in defines:
        return "int4", "int4", None
    names = {kind: name for name, kind in KV_KINDS.items() if kind} | {0: wide}
    groups = max(int(defines["K_GROUPS"]), int(defines["V_GROUPS"]))
    return (
        names[int(defines["K_KIND"])],
        names[int(defines["V_KIND"])],
        None if groups == 1 else spec.head_dim // groups,
    )


def row_of(spec: KernelSpec, k: KVFormat, v: KVFormat, dtype: str) -> KernelSpec:
    """The row that a call with these formats uses in place of ``spec``: the same one, if all is right."""
    n_tiles = spec.block_m // 8
    if spec.op == "decode":
        return decode_spec(dtype, k, v, n_tiles)
    if spec.op == "decode_combine":
        return decode_combine_spec(dtype, k.row_dim, n_tiles)
    return append_spec(dtype, k, v) if spec.op == "append" else by_name("kv_copy_sm80")


def problems_of(spec: KernelSpec) -> tuple[Problem, ...]:
    """What a row is tested with."""
    q_len = 2 if spec.op in ("decode", "decode_combine") and spec.block_m > 8 else 1
    group, dim = (8 if q_len > 1 else 4), spec.head_dim
    return (
        Problem((700, 0, 33), group, 1, q_len, dim, 0),
        Problem((250, 300), 2 * group, 2, q_len, dim - 8, 16),
        Problem((90,), group, 1, q_len, dim, 3),
    )


def verify_row(framework: Framework, spec: KernelSpec) -> tuple[int, float, list[str]]:
    """Run a row's problems; returns their number, the largest error as a part of what is allowed, what was wrong."""
    dtype = "bfloat16" if spec.dtype == "uint8" else spec.dtype
    k_dtype, v_dtype, group_size = formats_of(spec)
    worst, notes = 0.0, []
    problems = [p for p in problems_of(spec) if spec.op != "copy_blocks" or p.block_size]
    for seed, problem in enumerate(problems):
        share, note = _check(framework, spec, problem, dtype, (k_dtype, v_dtype, group_size), seed)
        worst = max(worst, share)
        if note or share > 1.0:
            notes.append(f"{problem}: {note or f'error of {share:.2f} tolerances'}")
    return len(problems), worst, notes


def _check(
    framework: Framework,
    spec: KernelSpec,
    p: Problem,
    dtype: str,
    formats: tuple[str, str, int | None],
    seed: int,
) -> tuple[float, str]:
    q, k, v = testing.make_qkv(
        "normal", batch=None, seqlen_q=len(p.lengths) * p.q_len, seqlen_k=sum(p.lengths), heads_q=p.heads_q,
        heads_kv=p.heads_kv, head_dim=p.head_dim, seed=seed, dtype=dtype,
    )  # fmt: skip
    q = q.reshape(len(p.lengths), p.q_len, p.heads_q, p.head_dim)
    lens = np.array(p.lengths, dtype=np.int32)
    starts = np.cumsum([0, *p.lengths]).astype(np.int32)
    like = framework.array(np.zeros(1, np.float32), dtype)
    k_dtype, v_dtype, group_size = formats
    options: dict[str, Any] = {"like": like, "k_dtype": k_dtype, "v_dtype": v_dtype, "group_size": group_size}
    call: dict[str, Any] = {"seq_lens": framework.array(lens, "int32")}
    cache: omniattn.KVCache
    if p.block_size:
        blocks = 2 * sum(-(-n // p.block_size) for n in p.lengths)
        order = np.random.default_rng(seed).permutation(blocks).astype(np.int32)
        columns = -(-max(p.lengths) // p.block_size)
        table = np.zeros((len(p.lengths), columns), dtype=np.int32)
        at = 0
        for b, n in enumerate(p.lengths):
            count = -(-n // p.block_size)
            table[b, :count] = order[at : at + count]
            at += count
        cache = omniattn.PagedKVCache(blocks, p.block_size, p.heads_kv, p.head_dim, **options)
        call["block_table"] = framework.array(table, "int32")
    else:
        table, order, at = np.arange(len(p.lengths), dtype=np.int32)[:, None], np.zeros(0, np.int32), 0
        cache = omniattn.KVCache(len(p.lengths), max(p.lengths), p.heads_kv, p.head_dim, **options)
    if row_of(spec, cache.k_format, cache.v_format, dtype) != spec and row_dim(p.head_dim) == spec.head_dim:
        return float("inf"), f"{spec.op} never chooses this row"
    host = _host_cache(cache)
    for b in range(len(p.lengths)):
        rows = slice(starts[b], starts[b + 1])
        reference.append_tokens(host, k[rows], v[rows], table[b], 0)
    packed = framework.array(starts, "int32")
    omniattn.append(cache, framework.array(k, dtype), framework.array(v, dtype), cu_seqlens=packed, **call)
    if spec.op in ("append", "copy_blocks"):
        if spec.op == "copy_blocks":
            copies = [(int(order[i]), int(order[at + i])) for i in range(at)]
            omniattn.copy_blocks(cache, copies)  # type: ignore[arg-type]
            moved = dict(copies)
            table = np.vectorize(lambda block: moved.get(int(block), int(block)))(table)
            for plane in (host.k, host.v, host.k_params, host.v_params):
                for source, destination in copies:
                    plane[destination] = plane[source]
        framework.synchronize()
        return 0.0, _different_rows(framework, cache, host, table, p.lengths)
    got_o, got_lse = omniattn.decode(framework.array(q, dtype), cache, return_lse=True, **call)
    framework.synchronize()
    o, lse = framework.to_numpy(got_o), framework.to_numpy(got_lse)
    ref_o, ref_lse = reference.decode(q, host, seq_lens=lens, block_table=table)
    finite = np.isfinite(ref_lse)
    if not (np.isfinite(o).all() and np.array_equal(finite, np.isfinite(lse))):
        return float("inf"), "NaN or infinities at other places"
    of_o = float(np.abs(o - ref_o).max() / (np.abs(ref_o).max() * _O_SHARE[dtype]))
    return max(of_o, float(np.abs(lse[finite] - ref_lse[finite]).max(initial=0.0)) / _LSE_ATOL), ""


def _host_cache(cache: omniattn.KVCache) -> reference.CacheArrays:
    """Memory of the same extents for the reference."""
    lead = (cache.num_blocks, cache.num_kv_heads, cache.block_size)
    k, v = cache.k_format, cache.v_format
    return reference.CacheArrays(
        k, v, np.zeros((*lead, k.row_bytes), np.uint8), np.zeros((*lead, v.row_bytes), np.uint8),
        np.zeros((*lead, k.groups), np.uint32), np.zeros((*lead, v.groups), np.uint32),
    )  # fmt: skip


def _different_rows(
    framework: Framework, cache: omniattn.KVCache, host: reference.CacheArrays, table: Values, lengths: tuple[int, ...]
) -> str:
    """Which plane differs from the reference in the rows that hold tokens; empty if none does."""
    for name, fmt in (("k", cache.k_format), ("v", cache.v_format)):
        planes = [(name, getattr(host, name))]
        if fmt.quantized:
            planes.append((f"{name}_params", getattr(host, f"{name}_params")))
        for plane, wanted in planes:
            got = framework.to_numpy(getattr(cache, plane))
            if not fmt.quantized:
                wanted = _as_float32(wanted, fmt.dtype)
            for b, n in enumerate(lengths):
                at = np.arange(n)
                where = (table[b][at // cache.block_size], slice(None), at % cache.block_size)
                if not np.array_equal(got[where], wanted[where].astype(got.dtype)):
                    return f"{plane} differs from the reference"
    return ""


def _as_float32(data: Values, dtype: str) -> Values:
    bits = data.view(np.uint16)
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
