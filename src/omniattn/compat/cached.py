"""Attention over a KV cache in the caller's own tensors: what ``flash_attn_with_kvcache`` of both versions does."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import arguments, arrays
from ..checks.decode import MAX_Q_LEN
from ..errors import AlignmentError, ArgumentError, ShapeError, StrideError, UnsupportedError
from ..frameworks import FUNCTIONS
from ..kv.cache import KVCache, PagedKVCache
from ..ops import append, attention_varlen, attention_with_kvcache, decode
from . import common
from .cached_checks import E4M3, Rows, check_arrays, check_descales, check_lengths, check_numbers, check_rows
from .rotary import check_angles, rotation

#: Element types that caches have.
_CACHE_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Cache:
    """Where the tokens of each sequence are.

    Attributes
    ----------
    k, v : tensor, (batch, seqlen, ...) or (blocks, page, num_kv_heads, head_dim)
        The caller's.
    table : tensor, (batch, places), or None
        Block of each part of a sequence, ``page`` tokens long; of a cache without blocks its row of the cache. None:
        row b is sequence b.
    page, capacity : int
        Tokens of a block, and of a sequence at most.
    first : tensor, (batch,), or None
        Position of a sequence's first key.
    name : str
        What the caller knows the table as; "" for none.
    scales : (tensor, tensor) or (None, None)
        Of K and V in 8 bits, (batch, num_kv_heads).
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None
    page: int
    capacity: int
    first: torch.Tensor | None
    name: str = ""
    scales: tuple[Any, Any] = (None, None)

    @property
    def places(self) -> str:
        """What a sequence's blocks are, for errors."""
        count = self.capacity // self.page
        return f" ({self.name} has {count} blocks of {self.page} tokens for a sequence)" if self.name else ""

    def blocks(self, batch: int) -> torch.Tensor:
        """The table of ``batch`` sequences."""
        if self.table is not None:
            return self.table
        return torch.arange(batch, dtype=torch.int32, device=self.k.device)[:, None]

    def rows(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Numbers of the rows of tokens, counted through the whole cache."""
        at = positions.long()
        if self.table is None:
            return sequences * self.page + at
        return self.table[sequences, at // self.page].long() * self.page + at % self.page

    @property
    def has_codes(self) -> bool:
        """Whether it is in 8 bits, which nothing but the package's cache reads."""
        return self.k.dtype == E4M3

    @property
    def _kind(self) -> type[KVCache]:
        return KVCache if self.table is None else PagedKVCache

    @functools.cached_property
    def own(self) -> KVCache | None:
        """The package's cache on the caller's tensors; None where it has none on such."""
        if self.has_codes:
            made: KVCache = self._kind.from_arrays(self.k, self.v, k_scale=self.scales[0], v_scale=self.scales[1])
            return made
        if self.k.dtype not in _CACHE_DTYPES or self.k.shape[3] % 8 or 0 in self.k.shape:
            return None
        try:
            return self._kind.from_arrays(self.k, self.v)
        except (AlignmentError, ShapeError, StrideError, UnsupportedError):  # strides, or more rows than there may be
            return None


def attend_cached(function: str, *arrays: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE, -inf where a row attends to nothing; the arguments as `compat.flash_attn` describes them.

    Under torch.compile an operator, whose function this is again.
    """
    if torch.compiler.is_compiling():
        return _traced(function, *arrays, **options)
    names = {"seq_lens": "cache_seqlens", "block_table": options["table_name"], "window": "window_size"}
    made: tuple[torch.Tensor, torch.Tensor] = common.call(function, _attend, function, *arrays, names=names, **options)
    return made


def _traced(function: str, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, **x: Any) -> Any:
    """A call that torch.compile reads. Tensors are checked where the operator runs."""
    from ..frameworks.torch import foreign_caches
    from ..frameworks.torch.library import fail

    common.check_tensors(function, q=q, k_cache=k_cache, v_cache=v_cache)
    dims = "(batch, seqlen, heads, head_dim)" if x.get("cu_seqlens_q") is None else "(total_q, heads, head_dim)"
    common.check_rank(q, "q", dims, function)
    if (k is None) != (v is None):
        fail("argument", "k" if k is None else "v", "k and v, or neither", "one of them", function=function)
    scale, length, longest = x["softmax_scale"], x["cache_seqlens"], x.get("max_seqlen_q")
    is_tensor = length is None or isinstance(length, torch.Tensor)
    x = x | {"cache_seqlens": length if is_tensor else None}
    out, lse = foreign_caches.run(
        q, k_cache, v_cache, k, v, *(x.get(name) for name in foreign_caches.TENSORS),
        None if is_tensor else arguments.check_int(length, "cache_seqlens", function), function, x["table_name"],
        None if scale is None else arguments.check_number(scale, "softmax_scale", function),
        common.flag(x["causal"], "causal", function),
        list(common.check_window(x["window_size"], function) or (-1, -1)), common.softcap_of(x["softcap"], function),
        arguments.check_bool(x["rotary_interleaved"], "rotary_interleaved", function),
        arguments.check_int(x["num_splits"], "num_splits", function),
        None if longest is None else arguments.check_int(longest, "max_seqlen_q", function),
    )  # fmt: skip
    return out, lse


@torch.no_grad()
def _attend(
    function: str,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    *,
    rotary_cos: Any,
    rotary_sin: Any,
    cache_seqlens: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    block_table: Any,
    table_name: str,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    rotary_interleaved: Any,
    alibi_slopes: Any,
    num_splits: Any,
    rotary_seqlens: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: Any = None,
    **descales: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if (k is None) != (v is None):
        raise ArgumentError("k" if k is None else "v", "k and v, or neither", "one of them", function=function)
    rows, new = check_rows(function, q, k, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q)
    # FlashAttention-2 has no caches in 8 bits.
    check_arrays(function, q, k_cache, v_cache, k, v, new, may_be_e4m3=table_name != "block_table")
    scales = check_descales(function, q, k_cache, rows.batch, descales)
    num_splits = arguments.check_int(num_splits, "num_splits", function)
    options = common.options_of(function, q, softmax_scale, causal, window_size, softcap, num_splits == 1)
    cache = _cache_of(
        function, q, k_cache, v_cache, rows.batch, cache_batch_idx, cache_leftpad, block_table, table_name
    )
    if cache.has_codes:
        cache = replace(cache, scales=scales)
        q = q.to(torch.bfloat16) if q.dtype == E4M3 else q
    lengths = check_lengths(function, cache, cache_seqlens, new, rows.batch)
    mod = None
    if alibi_slopes is not None:
        first = 0 if cache.first is None else cache.first
        total = lengths + (0 if new is None else new.counts)
        mod = common.alibi(alibi_slopes, (total - first - rows.counts).int(), rows.batch, q.shape[-2], function)
    rotate = rotation(function, cache.capacity, rotary_cos, rotary_sin, rotary_interleaved, q, k)
    if rotary_seqlens is not None:
        rotary_seqlens = check_numbers(rotary_seqlens, "rotary_seqlens", (rows.batch,), q, function)
    if rotate is not None and new is not None:
        local = options["causal"] or options["window"] is not None
        start = lengths if rotary_seqlens is None else rotary_seqlens
        check_angles(function, start, rotary_cos, new.counts)
        check_angles(function, start, rotary_cos, rows.counts if local else 1)
        of_q, of_k = rows.places(q), new.places(k)
        q = rotate(q, start[of_q[0]] + (of_q[1] if local else 0))
        k = (_rotated_codes if cache.has_codes else _rotated)(rotate, k, start[of_k[0]] + of_k[1])
    if new is not None:
        lengths = _append(cache, k, v, lengths, new)
    if mod is None and rows.starts is None and 0 not in q.shape and _is_for_decode(cache, q, options):
        return _decode(cache, q, lengths, options)
    if cache.has_codes or (cache.first is not None and cache.own is not None):
        return _over_cache(cache, q, rows, lengths, mod, options)
    run = _over_pages if _lies_in_pages(cache, q, rows) else _gathered
    out, lse = run(cache, q.flatten(0, -3), rows, lengths, mod, options)
    if rows.starts is not None:
        return out, lse
    return out.reshape(q.shape), lse.reshape(q.shape[-2], *q.shape[:2]).transpose(0, 1).contiguous()


FUNCTIONS["attend_cached"] = _attend


def _cache_of(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: int,
    batch_idx: Any,
    leftpad: Any,
    table: Any,
    name: str,
) -> _Cache:
    blocks, page = k.shape[:2]
    if table is not None and name == "block_table":  # FlashAttention-2 has neither
        for other, x in (("cache_batch_idx", batch_idx), ("cache_leftpad", leftpad)):
            if x is not None:
                raise ArgumentError(other, f"None with {name}", arguments.kind_of(x), function=function)
    if leftpad is not None:
        leftpad = check_numbers(leftpad, "cache_leftpad", (batch,), q, function)
    sequences = blocks
    if table is not None:
        table = check_numbers(table, name, (batch if batch_idx is None else None, None), q, function)
        if page == 0:
            raise ShapeError("k_cache", "blocks of at least one token", "0", function=function)
        sequences = table.shape[0]
    if batch_idx is not None:
        batch_idx = check_numbers(batch_idx, "cache_batch_idx", (batch,), q, function)
        if batch_idx.device.type == "cpu" and batch and (int(batch_idx.min()) < 0 or int(batch_idx.max()) >= sequences):
            expected = f"0 to {sequences - 1}"
            raise ArgumentError("cache_batch_idx", expected, f"{batch_idx.tolist()}", function=function)
    if table is not None:
        if batch_idx is not None:
            table = table[batch_idx.clamp(0, sequences - 1)]
        return _Cache(k, v, table, page, table.shape[1] * page, leftpad, name)
    if batch_idx is not None:
        return _Cache(k, v, batch_idx[:, None], max(page, 1), page, leftpad)
    if batch > blocks:
        raise ShapeError("k_cache", f"at least {batch} sequences, as q has", f"{blocks}", function=function)
    return _Cache(k, v, None, max(page, 1), page, leftpad)


# Caches in 8 bits


def _rotated(rotate: Any, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = rotate(k, positions)
    return made


def _rotated_codes(rotate: Any, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotated in fp32 and rounded once; what is too large is the largest number."""
    made: torch.Tensor = rotate(k.float(), positions).clamp(-448.0, 448.0).to(E4M3)
    return made


def _over_cache(
    cache: _Cache, q: torch.Tensor, rows: Rows, lengths: torch.Tensor, mod: Any, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Any number of queries, packed or not, none at all; in 8 bits, and with padding before the keys."""
    if 0 in (rows.batch, rows.longest, q.numel()):
        shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        return torch.zeros_like(q), torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    assert cache.own is not None
    packed = {} if rows.starts is None else {"cu_seqlens_q": rows.starts, "max_seqlen_q": rows.longest}
    out, lse = attention_with_kvcache(
        _plain_rows(q) if packed else q.contiguous(), cache.own, seq_lens=lengths.contiguous(),
        block_table=None if cache.table is None else cache.table.contiguous(), score_mod=mod, return_lse=True,
        leftpad_k=None if cache.first is None else cache.first.int().contiguous(), **packed, **options,
    )  # fmt: skip
    return out, lse


# New tokens, and split-KV decoding, on the caller's memory


def _append(cache: _Cache, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, new: Rows) -> torch.Tensor:
    """Write new tokens behind those that are there; the lengths with them."""
    total = lengths + new.counts
    if cache.own is not None:
        own = cache.own
        if cache.has_codes:  # numbers that all have a code: what is written are the bytes that were given
            own = cache._kind.from_arrays(cache.k, cache.v)
            k, v = (x.to(torch.bfloat16) for x in (k, v))
        append(
            own, *(_plain_rows(x) for x in (k, v)), seq_lens=total, cu_seqlens=new.starts,
            block_table=None if cache.table is None else cache.table.contiguous(),
        )  # fmt: skip
        return total
    sequences, numbers = new.places(k)
    is_owned = None
    if new.starts is not None and k.shape[0]:
        # Rows behind the last sequence are nobody's: the first one is written again in their place.
        row = torch.arange(k.shape[0], device=k.device)
        is_owned = row < new.starts[-1]
        row = torch.where(is_owned, row, 0)
        sequences, numbers, k, v = (x[row] for x in (sequences, numbers, k, v))
    rows = cache.rows(sequences, lengths[sequences] + numbers)
    at = rows // cache.page, rows % cache.page
    for into, values in ((cache.k, k), (cache.v, v)):
        into[at] = values if is_owned is None else torch.where(is_owned[0], values, into[at])
    return total


def _plain_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor with rows as kernels read them; a copy where they are not."""
    made: torch.Tensor = arrays.with_plain_rows(common.contiguous_rows(x))
    return made


def _is_for_decode(cache: _Cache, q: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether `decode` serves a call: few queries, and a cache that it reads where it lies."""
    queries = q.shape[1]
    if cache.first is not None or not 1 <= queries <= MAX_Q_LEN or q.shape[0] == 0 or cache.own is None:
        return False
    left, right = options["window"] or (-1, -1)
    # One query has no keys behind it, and without any limit the order of queries does not matter.
    return queries == 1 or options["causal"] or right == 0 or (left == -1 and right == -1)


def _decode(
    cache: _Cache, q: torch.Tensor, lengths: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    assert cache.own is not None
    batch, queries, heads, dim = q.shape
    groups = cache.k.shape[2]
    left, right = options["window"] or (-1, -1)
    together = queries > 1 and not options["causal"] and right != 0
    if together:  # queries that all see the same keys are as many more heads of one
        q = q.unflatten(2, (groups, heads // groups)).permute(0, 2, 3, 1, 4).reshape(batch, 1, heads * queries, dim)
    out, lse = decode(
        _plain_rows(q), cache.own, seq_lens=lengths.contiguous(),
        block_table=None if cache.table is None else cache.table.contiguous(),
        window=None if left == -1 else (left, 0), softmax_scale=options["softmax_scale"], softcap=options["softcap"],
        deterministic=options["deterministic"], return_lse=True,
    )  # fmt: skip
    if together:
        out = out.reshape(batch, heads, queries, dim).transpose(1, 2)
        lse = lse.reshape(batch, heads, queries)
    return out, lse


# Any number of queries, packed, on the caller's memory


def _lies_in_pages(cache: _Cache, q: torch.Tensor, rows: Rows) -> bool:
    """Whether `attention_varlen` can read the cache where it lies: no padding before it, rows of 16-byte chunks."""
    if cache.first is not None or q.shape[-1] % 8 or 0 in (rows.batch, q.numel(), cache.capacity):
        return False
    return q.device.type == "cpu" or all(
        x.data_ptr() % 16 == 0
        and all(n == 1 or step % 8 == 0 for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True))
        for x in (cache.k, cache.v)
    )


def _starts_of(rows: Rows, q: torch.Tensor) -> torch.Tensor:
    """cu_seqlens_q, of a batch too."""
    if rows.starts is not None:
        return rows.starts
    return torch.arange(rows.batch + 1, dtype=torch.int32, device=q.device) * rows.longest


def _over_pages(
    cache: _Cache, q: torch.Tensor, rows: Rows, lengths: torch.Tensor, mod: Any, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attention_varlen(
        common.contiguous_rows(q), cache.k, cache.v, cu_seqlens_q=_starts_of(rows, q), seqused_k=lengths.contiguous(),
        block_table=cache.blocks(rows.batch).contiguous(), max_seqlen_q=rows.longest, max_seqlen_k=cache.capacity,
        score_mod=mod, return_lse=True, **options,
    )  # fmt: skip
    return out, lse


# Everything else: the keys of the cache as packed sequences


def _gathered(
    cache: _Cache, q: torch.Tensor, rows: Rows, lengths: torch.Tensor, mod: Any, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, first = rows.batch, 0 if cache.first is None else cache.first
    starts = torch.nn.functional.pad((lengths - first).clamp(0, cache.capacity).cumsum(0), (1, 0))
    # On a GPU the lengths are not known here: as many rows as there can be.
    total = int(starts[-1]) if q.device.type == "cpu" else batch * cache.capacity
    row = torch.arange(total, device=q.device)
    sequence = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, max(batch - 1, 0))
    at = row - starts[sequence] + (0 if cache.first is None else cache.first[sequence])
    keys = cache.rows(sequence, at.clamp(0, max(cache.capacity - 1, 0))).clamp(
        0, max(cache.k[..., 0, 0].numel() - 1, 0)
    )
    k, v = (x[keys // cache.page, keys % cache.page] for x in (cache.k, cache.v))
    out, lse = attention_varlen(
        *common.padded(q, k, v), cu_seqlens_q=_starts_of(rows, q), cu_seqlens_k=starts.int(),
        max_seqlen_q=rows.longest, max_seqlen_k=cache.capacity, score_mod=mod, return_lse=True, **options,
    )  # fmt: skip
    return out[..., : q.shape[-1]], lse
