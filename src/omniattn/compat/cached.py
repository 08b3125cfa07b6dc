"""Attention over a KV cache in the caller's own tensors: what ``flash_attn_with_kvcache`` of both versions does."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from .. import arguments, arrays
from ..checks.decode import MAX_Q_LEN
from ..checks.memory import check_written
from ..checks.values import check_no_overlap
from ..errors import AlignmentError, ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError
from ..frameworks import FUNCTIONS
from ..kv.cache import KVCache, PagedKVCache
from ..ops import append, attention_varlen, decode
from . import common

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
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None
    page: int
    capacity: int
    first: torch.Tensor | None
    name: str = ""

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

    @functools.cached_property
    def own(self) -> KVCache | None:
        """The package's cache on the caller's tensors; None where it has none on such."""
        if self.k.dtype not in _CACHE_DTYPES or self.k.shape[3] % 8 or 0 in self.k.shape:
            return None
        try:
            return (KVCache if self.table is None else PagedKVCache).from_arrays(self.k, self.v)
        except (AlignmentError, ShapeError, StrideError, UnsupportedError):  # strides, or more rows than there may be
            return None


def attend_cached(function: str, *arrays: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE, -inf where a row attends to nothing; the arguments as `compat.flash_attn` describes them.

    Under torch.compile an operator, whose function this is again.
    """
    return (_traced if torch.compiler.is_compiling() else _attend)(function, *arrays, **options)


def _traced(function: str, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, **x: Any) -> Any:
    """A call that torch.compile reads. Tensors are checked where the operator runs."""
    from ..frameworks.torch import foreign_caches
    from ..frameworks.torch.library import fail

    common.check_tensors(function, q=q, k_cache=k_cache, v_cache=v_cache)
    common.check_rank(q, "q", "(batch, seqlen, heads, head_dim)", function)
    if (k is None) != (v is None):
        fail("argument", "k" if k is None else "v", "k and v, or neither", "one of them", function=function)
    scale, length = x["softmax_scale"], x["cache_seqlens"]
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
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_arrays(function, q, k_cache, v_cache, k, v)
    num_splits = arguments.check_int(num_splits, "num_splits", function)
    options = common.options_of(function, q, softmax_scale, causal, window_size, softcap, num_splits == 1)
    cache = _cache_of(function, q, k_cache, v_cache, cache_batch_idx, cache_leftpad, block_table, table_name)
    lengths = _lengths(function, cache, cache_seqlens, q.shape[0], k)
    mod = None
    if alibi_slopes is not None:
        first = 0 if cache.first is None else cache.first
        total = lengths + (0 if k is None else k.shape[1])
        mod = common.alibi(alibi_slopes, (total - first - q.shape[1]).int(), q.shape[0], q.shape[2], function)
    rotate = _rotation(function, cache, rotary_cos, rotary_sin, rotary_interleaved, q, k)
    if rotary_seqlens is not None:
        rotary_seqlens = _check_numbers(rotary_seqlens, "rotary_seqlens", (q.shape[0],), q, function)
    if rotate is not None:
        local = options["causal"] or options["window"] is not None
        start = lengths if rotary_seqlens is None else rotary_seqlens
        _check_angles(function, start, rotary_cos, max(k.shape[1], q.shape[1] if local else 1))
        q = rotate(q, start[:, None] + (torch.arange(q.shape[1], device=q.device) if local else 0))
        k = rotate(k, start[:, None] + torch.arange(k.shape[1], device=q.device))
    if k is not None:
        lengths = _append(cache, k, v, lengths)
    if mod is None and _is_for_decode(cache, q, options):
        return _decode(cache, q, lengths, options)
    if _lies_in_pages(cache, q):
        return _over_pages(cache, q, lengths, mod, options)
    return _gathered(cache, q, lengths, mod, options)


FUNCTIONS["attend_cached"] = _attend


# Checks: all of them before the cache is written


def _check_arrays(function: str, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any) -> None:
    common.check_tensors(function, q=q, k_cache=k_cache, v_cache=v_cache)
    common.check_rank(q, "q", "(batch, seqlen, heads, head_dim)", function)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        common.check_rank(x, name, "(batch or blocks, tokens, heads, head_dim)", function)
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ArgumentError(name, "a contiguous last dimension", f"strides {x.stride()}", function=function)
    if (k is None) != (v is None):
        raise ArgumentError("k" if k is None else "v", "k and v, or neither", "one of them", function=function)
    new = {} if k is None else {"k": k, "v": v}
    common.check_tensors(function, **new)
    heads, dim = k_cache.shape[2:]
    if not 1 <= dim <= arguments.MAX_HEAD_DIM:
        expected = f"head_dim from 1 to {arguments.MAX_HEAD_DIM}"
        raise ShapeError("k_cache", expected, f"{dim}", function=function)
    if q.shape[-1] != dim or heads < 1 or q.shape[2] % heads:
        expected = f"head_dim {dim} and a multiple of {heads} heads, like k_cache"
        raise ShapeError("q", expected, f"shape {tuple(q.shape)}", function=function)
    for name, x in {"v_cache": v_cache, **new}.items():
        tokens = k.shape[1] if name != "v_cache" and k.ndim > 1 else 0
        shape = tuple(k_cache.shape) if name == "v_cache" else (q.shape[0], tokens, heads, dim)
        if tuple(x.shape) != shape:
            raise ShapeError(name, f"shape {shape}", f"{tuple(x.shape)}", function=function)
    for name, x in {"k_cache": k_cache, "v_cache": v_cache, **new}.items():
        if x.dtype != q.dtype:
            raise DtypeError(name, f"{q.dtype}, like q", x.dtype, function=function)
        if x.device != q.device:
            raise ArgumentError(name, f"a tensor on {q.device}, like q", f"{x.device}", function=function)
    allowed = (torch.float16, torch.bfloat16) + ((torch.float32, torch.float64) if q.device.type == "cpu" else ())
    if q.dtype not in allowed:
        raise DtypeError("q", " or ".join(map(str, allowed)), q.dtype, function=function)
    if new:
        _check_apart(function, {"q": q, "k_cache": k_cache, "v_cache": v_cache, **new})


#: Places of tensors to each other that `_check_apart` has found apart.
_apart: set[tuple[Any, ...]] = set()


def _check_apart(function: str, named: dict[str, torch.Tensor]) -> None:
    """Both caches are written, one behind the other: they share no memory, with each other and with the others."""
    base = named["k_cache"].data_ptr()
    places = (
        torch.is_inference_mode_enabled(),
        *((x.data_ptr() - base, x.dtype, x.shape, x.stride(), x.is_inference()) for x in named.values()),
    )
    if places not in _apart:
        tensors = {name: arrays.describe(x, name) for name, x in named.items()}
        written = [tensors.pop("k_cache"), tensors.pop("v_cache")]
        for t in written:
            check_no_overlap(t, function)
        check_written(written, tensors.values(), function)
        if len(_apart) >= 4096:
            _apart.clear()
        _apart.add(places)


def _check_numbers(x: Any, name: str, shape: tuple[int | None, ...], q: torch.Tensor, function: str) -> torch.Tensor:
    """An int32 tensor on q's device; None in ``shape`` is any extent from 1 on."""
    common.check_tensors(function, **{name: x})
    fits = x.ndim == len(shape) and all(n == m or (m is None and n > 0) for n, m in zip(x.shape, shape, strict=False))
    if not fits:
        expected = f"shape ({', '.join('max_blocks' if n is None else str(n) for n in shape)})"
        raise ShapeError(name, expected, f"{tuple(x.shape)}", function=function)
    if x.dtype != torch.int32:
        raise DtypeError(name, "torch.int32", x.dtype, function=function)
    if x.device != q.device:
        raise ArgumentError(name, f"a tensor on {q.device}, like q", f"{x.device}", function=function)
    return x


def _cache_of(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch_idx: Any,
    leftpad: Any,
    table: Any,
    name: str,
) -> _Cache:
    batch, (blocks, page) = q.shape[0], k.shape[:2]
    if table is not None:
        for other, x in (("cache_batch_idx", batch_idx), ("cache_leftpad", leftpad)):
            if x is not None:
                raise ArgumentError(other, f"None with {name}", "a tensor", function=function)
        table = _check_numbers(table, name, (batch, None), q, function)
        if page == 0:
            raise ShapeError("k_cache", "blocks of at least one token", "0", function=function)
        return _Cache(k, v, table, page, table.shape[1] * page, None, name)
    if leftpad is not None:
        leftpad = _check_numbers(leftpad, "cache_leftpad", (batch,), q, function)
    if batch_idx is not None:
        places = _check_numbers(batch_idx, "cache_batch_idx", (batch,), q, function)
        if places.device.type == "cpu" and batch and (int(places.min()) < 0 or int(places.max()) >= blocks):
            raise ArgumentError("cache_batch_idx", f"0 to {blocks - 1}", f"{places.tolist()}", function=function)
    elif batch > blocks:
        raise ShapeError("k_cache", f"at least {batch} sequences, as q has", f"{blocks}", function=function)
    else:
        return _Cache(k, v, None, max(page, 1), page, leftpad)
    return _Cache(k, v, places[:, None], max(page, 1), page, leftpad)


def _lengths(function: str, cache: _Cache, given: Any, batch: int, k: Any) -> torch.Tensor:
    """Tokens before the new ones, (batch,), int32."""
    new = 0 if k is None else k.shape[1]
    most = cache.capacity - new
    name = "cache_seqlens"
    if given is None:
        if k is not None:
            raise ArgumentError(name, "the lengths of the sequences, with k and v", "None", function=function)
        given = cache.capacity
    if most < 0:
        raise ArgumentError("k", f"at most {cache.capacity} tokens, as the cache has", f"{new}", function=function)
    if not isinstance(given, torch.Tensor):
        number = arguments.check_int(given, name, function, most=most)
        return torch.full((batch,), number, dtype=torch.int32, device=cache.k.device)
    lengths = _check_numbers(given, name, (batch,), cache.k, function)
    if not batch:
        return lengths
    if lengths.device.type == "cpu":
        least = torch.zeros_like(lengths) if cache.first is None else cache.first
        if int(least.min()) < 0 or bool((lengths < least).any()) or int(lengths.max()) > most:
            expected = f"from 0 (cache_leftpad) to {most}, with room for {new} new tokens"
            raise CacheLengthError(name, expected + cache.places, f"{lengths.tolist()}", function=function)
        used = -(-(lengths + new) // cache.page)
        for b, count in enumerate([] if cache.table is None else used.tolist()):
            blocks = cache.table[b, :count]  # type: ignore[index]
            if count and (int(blocks.min()) < 0 or int(blocks.max()) >= cache.k.shape[0]):
                expected = f"blocks 0 to {cache.k.shape[0] - 1}"
                raise ArgumentError(cache.name, expected, f"{blocks.tolist()} at {b}", function=function)
    elif cache.name == "block_table" and not torch.cuda.is_current_stream_capturing():
        longest = _longest(lengths)
        if longest > most:
            raise CacheLengthError(name, f"at most {most}{cache.places}", f"{longest}", function=function)
    return lengths


class CacheLengthError(ArgumentError, RuntimeError):
    """Tokens that the cache has no room for: an error of torch's own kind in FlashAttention-2."""


#: The lengths that `_longest` has read last: the tensor, its version, the longest.
_read: tuple[weakref.ref[torch.Tensor], int, int] | None = None


def _longest(lengths: torch.Tensor) -> int:
    """The largest of a GPU's tensor. It waits for the GPU, once for all layers: not again until the tensor changes."""
    global _read
    version = -1 if lengths.is_inference() else lengths._version
    if _read is not None and _read[0]() is lengths and _read[1] == version >= 0:
        return _read[2]
    longest = int(lengths.max())
    _read = (weakref.ref(lengths), version, longest)
    return longest


def _rotation(
    function: str, cache: _Cache, cos: Any, sin: Any, interleaved: Any, q: torch.Tensor, k: Any
) -> functools.partial[torch.Tensor] | None:
    """(tensor, positions) -> tensor, rotated."""
    interleaved = arguments.check_bool(interleaved, "rotary_interleaved", function)
    if cos is None and sin is None:
        return None
    if cos is None or sin is None or k is None:
        expected = "rotary_cos, rotary_sin, k and v together"
        raise ArgumentError("rotary_cos", expected, "some of them without the others", function=function)
    common.check_tensors(function, rotary_cos=cos, rotary_sin=sin)
    if (
        cos.ndim != 2
        or cos.shape != sin.shape
        or cos.shape[0] < cache.capacity
        or not 0 < 2 * cos.shape[1] <= q.shape[-1]
    ):
        expected = f"two of one shape, at least {cache.capacity} positions and at most {q.shape[-1] // 2} pairs"
        received = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        raise ShapeError("rotary_cos", expected, received, function=function)
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.device != q.device:
            raise ArgumentError(name, f"a tensor on {q.device}, like q", f"{x.device}", function=function)
    return functools.partial(_rotate, cos=cos, sin=sin, interleaved=interleaved)


def _check_angles(function: str, start: torch.Tensor, cos: torch.Tensor, count: int) -> None:
    """Angles for ``count`` positions from ``start`` on. On a GPU that would need a synchronization."""
    if start.device.type == "cpu" and len(start) and not 0 <= int(start.min()) <= int(start.max()) <= len(cos) - count:
        expected = f"angles of {count} positions from each of {start.tolist()} on"
        raise ShapeError("rotary_cos", expected, f"those of 0 to {len(cos) - 1}", function=function)


def _rotate(
    x: torch.Tensor, positions: torch.Tensor, *, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Channels in pairs, turned by the angle of their positions, (batch, tokens) or (batch, 1); computed in fp32."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    at = positions.long().clamp(0, cos.shape[0] - 1)
    cos, sin = (t[at][:, :, None].to(wide) for t in (cos, sin))
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs].to(wide), x[..., 2 * pairs :]
    shape = (*x.shape[:-1], pairs, 2) if interleaved else (*x.shape[:-1], 2, pairs)
    one, two = turned.reshape(shape).unbind(-1 if interleaved else -2)
    made = torch.stack((one * cos - two * sin, one * sin + two * cos), dim=-1 if interleaved else -2)
    return torch.cat((made.flatten(-2).to(x.dtype), rest), dim=-1)


# New tokens, and split-KV decoding, on the caller's memory


def _append(cache: _Cache, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Write new tokens behind those that are there; the lengths with them."""
    batch, new = k.shape[:2]
    total = lengths + new
    if cache.own is not None:
        append(
            cache.own, *(_rows(x) for x in (k, v)), seq_lens=total,
            block_table=None if cache.table is None else cache.table.contiguous(),
        )  # fmt: skip
        return total
    positions = lengths[:, None] + torch.arange(new, device=k.device)
    rows = cache.rows(torch.arange(batch, device=k.device)[:, None], positions)
    for into, values in ((cache.k, k), (cache.v, v)):
        into[rows // cache.page, rows % cache.page] = values
    return total


def _rows(x: torch.Tensor) -> torch.Tensor:
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
        _rows(q), cache.own, seq_lens=lengths.contiguous(),
        block_table=None if cache.table is None else cache.table.contiguous(),
        window=None if left == -1 else (left, 0), softmax_scale=options["softmax_scale"], softcap=options["softcap"],
        deterministic=options["deterministic"], return_lse=True,
    )  # fmt: skip
    if together:
        out = out.reshape(batch, heads, queries, dim).transpose(1, 2)
        lse = lse.reshape(batch, heads, queries)
    return out, lse


# Any number of queries, on the caller's memory


def _lies_in_pages(cache: _Cache, q: torch.Tensor) -> bool:
    """Whether `attention_varlen` can read the cache where it lies: no padding before it, rows of 16-byte chunks."""
    if cache.first is not None or q.shape[-1] % 8 or 0 in (q.shape[0], q.shape[1], cache.capacity):
        return False
    return q.device.type == "cpu" or all(
        x.data_ptr() % 16 == 0
        and all(n == 1 or step % 8 == 0 for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True))
        for x in (cache.k, cache.v)
    )


def _over_pages(
    cache: _Cache, q: torch.Tensor, lengths: torch.Tensor, mod: Any, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, queries, heads, dim = q.shape
    out, lse = attention_varlen(
        common.contiguous_rows(q.reshape(batch * queries, heads, dim)), cache.k, cache.v,
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries,
        seqused_k=lengths.contiguous(), block_table=cache.blocks(batch).contiguous(), max_seqlen_q=queries,
        max_seqlen_k=cache.capacity, score_mod=mod, return_lse=True, **options,
    )  # fmt: skip
    lse = lse.reshape(heads, batch, queries).transpose(0, 1).contiguous()
    return out.reshape(batch, queries, heads, dim), lse


# Everything else: the keys of the cache as packed sequences


def _gathered(
    cache: _Cache, q: torch.Tensor, lengths: torch.Tensor, mod: Any, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, queries, heads, dim = q.shape
    first = 0 if cache.first is None else cache.first
    starts = torch.nn.functional.pad((lengths - first).clamp(0, cache.capacity).cumsum(0), (1, 0))
    # On a GPU the lengths are not known here: as many rows as there can be.
    total = int(starts[-1]) if q.device.type == "cpu" else batch * cache.capacity
    row = torch.arange(total, device=q.device)
    sequence = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, max(batch - 1, 0))
    at = row - starts[sequence] + (0 if cache.first is None else cache.first[sequence])
    rows = cache.rows(sequence, at.clamp(0, max(cache.capacity - 1, 0))).clamp(
        0, max(cache.k[..., 0, 0].numel() - 1, 0)
    )
    k, v = (x[rows // cache.page, rows % cache.page] for x in (cache.k, cache.v))
    out, lse = attention_varlen(
        *common.padded(q.reshape(batch * queries, heads, dim), k, v),
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries,
        cu_seqlens_k=starts.int(), max_seqlen_q=queries, max_seqlen_k=cache.capacity, score_mod=mod, return_lse=True,
        **options,
    )  # fmt: skip
    lse = lse.reshape(heads, batch, queries).transpose(0, 1).contiguous()
    return out[..., :dim].reshape(batch, queries, heads, dim), lse
