"""Checks of ``flash_attn_with_kvcache``, all of them before the cache is written; how queries and new keys lie."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from .. import arguments, arrays
from ..checks.memory import check_written
from ..checks.values import check_no_overlap
from ..errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from . import common

#: Element type of caches in 8 bits, which FlashAttention-3 has.
E4M3 = torch.float8_e4m3fn


class CacheLengthError(ArgumentError, RuntimeError):
    """Tokens that the cache has no room for: an error of torch's own kind in FlashAttention-2."""


class Rows(NamedTuple):
    """Rows of queries, or of new keys and values, by sequences.

    Attributes
    ----------
    batch : int
        Sequences.
    longest : int
        At least the rows of each; of a batch (batch, longest, ...) all have so many.
    starts : tensor, (batch + 1,), int32, or None
        Packed rows (total, ...): the one that each sequence begins with, and the end of the last one's.
    """

    batch: int
    longest: int
    starts: torch.Tensor | None

    @property
    def counts(self) -> torch.Tensor | int:
        """Rows of each sequence."""
        return self.longest if self.starts is None else self.starts.diff()

    def places(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence of each row of x, and its number there: (batch, 1) and (longest,), or of packed rows (total,)."""
        if self.starts is None:
            return (torch.arange(self.batch, device=x.device)[:, None], torch.arange(self.longest, device=x.device))
        row = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        sequence = torch.bucketize(row, self.starts[1:], right=True).clamp(max=max(self.batch - 1, 0))
        return sequence, row - self.starts[sequence]


def check_rows(
    function: str, q: Any, k: Any, starts: Any, new_starts: Any, longest: Any
) -> tuple[Rows, Rows | None]:  # fmt: skip
    """How q lies, and k if there is one."""
    common.check_tensors(function, q=q)
    if starts is None:
        common.check_rank(q, "q", "(batch, seqlen, heads, head_dim)", function)
        if longest is not None:
            expected = "None without cu_seqlens_q"
            raise ArgumentError("max_seqlen_q", expected, repr(longest), function=function)
        of_q = Rows(q.shape[0], q.shape[1], None)
    else:
        common.check_rank(q, "q", "(total_q, heads, head_dim)", function)
        starts = check_numbers(starts, "cu_seqlens_q", (None,), q, function)
        if longest is None:
            raise ArgumentError("max_seqlen_q", "an integer, with cu_seqlens_q", "None", function=function)
        of_q = Rows(starts.shape[0] - 1, arguments.check_int(longest, "max_seqlen_q", function), starts)
        _check_starts(starts, "cu_seqlens_q", q.shape[0], function, of_q.longest)
    if k is None:
        if new_starts is not None:
            received = arguments.kind_of(new_starts)
            raise ArgumentError("cu_seqlens_k_new", "None without k and v", received, function=function)
        return of_q, None
    common.check_tensors(function, k=k)
    if new_starts is None:
        common.check_rank(k, "k", "(batch, seqlen_new, heads, head_dim)", function)
        return of_q, Rows(of_q.batch, k.shape[1], None)
    common.check_rank(k, "k", "(total_new, heads, head_dim)", function)
    new_starts = check_numbers(new_starts, "cu_seqlens_k_new", (of_q.batch + 1,), q, function)
    _check_starts(new_starts, "cu_seqlens_k_new", k.shape[0], function, None)
    return of_q, Rows(of_q.batch, k.shape[0], new_starts)


def _check_starts(starts: torch.Tensor, name: str, rows: int, function: str, longest: int | None) -> None:
    """Values, on the CPU; on a GPU that would need a synchronization."""
    if starts.shape[0] > 1 and not starts.is_contiguous():
        raise ArgumentError(name, "a contiguous tensor", f"strides {starts.stride()}", function=function)
    if starts.device.type != "cpu":
        return
    counts = starts.diff()
    if int(starts[0]) or bool((counts < 0).any()) or int(starts[-1]) > rows:
        expected = f"0, never less than before, and at most {rows} rows"
        raise ArgumentError(name, expected, f"{starts.tolist()}", function=function)
    if longest is not None and len(counts) and int(counts.max()) > longest:
        raise ArgumentError("max_seqlen_q", f"at least {int(counts.max())}", f"{longest}", function=function)


def check_arrays(
    function: str, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, new: Rows | None, *, may_be_e4m3: bool = False
) -> None:
    """Extents, element types and devices; ``new``: how k and v lie."""
    common.check_tensors(function, k_cache=k_cache, v_cache=v_cache)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        common.check_rank(x, name, "(batch or blocks, tokens, heads, head_dim)", function)
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ArgumentError(name, "a contiguous last dimension", f"strides {x.stride()}", function=function)
    given = {} if k is None else {"k": k, "v": v}
    common.check_tensors(function, **given)
    heads, dim = k_cache.shape[2:]
    if not 1 <= dim <= arguments.MAX_HEAD_DIM:
        expected = f"head_dim from 1 to {arguments.MAX_HEAD_DIM}"
        raise ShapeError("k_cache", expected, f"{dim}", function=function)
    if q.shape[-1] != dim or heads < 1 or q.shape[-2] % heads:
        expected = f"head_dim {dim} and a multiple of {heads} heads, like k_cache"
        raise ShapeError("q", expected, f"shape {tuple(q.shape)}", function=function)
    for name, x in {"v_cache": v_cache, **given}.items():
        shape = tuple(k_cache.shape)
        if new is not None and name != "v_cache":
            lead = (new.batch, new.longest) if new.starts is None else (new.longest,)
            shape = (*lead, heads, dim)
        if tuple(x.shape) != shape:
            raise ShapeError(name, f"shape {shape}", f"{tuple(x.shape)}", function=function)
    eight = may_be_e4m3 and k_cache.dtype == E4M3
    wanted, whose = (E4M3, "k_cache") if eight else (q.dtype, "q")
    for name, x in {"k_cache": k_cache, "v_cache": v_cache, **given}.items():
        if x.dtype != wanted:
            raise DtypeError(name, f"{wanted}, like {whose}", x.dtype, function=function)
        if x.device != q.device:
            raise ArgumentError(name, f"a tensor on {q.device}, like q", f"{x.device}", function=function)
    allowed = (torch.float16, torch.bfloat16) + ((torch.float32, torch.float64) if q.device.type == "cpu" else ())
    if q.dtype not in allowed + ((E4M3,) if eight else ()):
        raise DtypeError("q", " or ".join(map(str, allowed)), q.dtype, function=function)
    if eight and dim % 16:
        raise ShapeError("k_cache", "head_dim a multiple of 16 in 8 bits", f"{dim}", function=function)
    if given:
        _check_apart(function, {"q": q, "k_cache": k_cache, "v_cache": v_cache, **given})


def check_descales(
    function: str, q: torch.Tensor, cache: torch.Tensor, batch: int, given: dict[str, Any]
) -> tuple[Any, Any]:
    """Scales of K and V as `from_arrays` takes them, or None and None; that of q is in K's, which is exact.

    q is as it came: in e4m3, or its descale is refused.
    """
    there = {name: x for name, x in given.items() if x is not None}
    if cache.dtype != E4M3 or q.dtype != E4M3:
        for name in there if cache.dtype != E4M3 else there.keys() & {"q_descale"}:
            raise UnsupportedError(
                f"{function}(): {name} with {'caches' if cache.dtype != E4M3 else 'q'} in 16 bits or more, which "
                "are what they are",
                instead=f"{name}=None, or tensors in float8_e4m3fn",
            )
    shape = (batch, cache.shape[2])
    common.check_tensors(function, **there)
    for name, x in there.items():
        if tuple(x.shape) != shape:
            raise ShapeError(name, f"shape {shape}, (batch, nheads_k)", f"{tuple(x.shape)}", function=function)
        if x.dtype != torch.float32:
            raise DtypeError(name, "torch.float32", x.dtype, function=function)
        if x.device != cache.device:
            raise ArgumentError(name, f"a tensor on {cache.device}, like k_cache", f"{x.device}", function=function)
    if not there:
        return None, None
    of_q, of_k, of_v = (there.get(name) for name in ("q_descale", "k_descale", "v_descale"))
    of_k = of_k if of_q is None else of_q if of_k is None else of_k * of_q
    if of_k is not None and of_v is not None and of_k.stride() == of_v.stride():
        return of_k, of_v
    ones = torch.ones(shape, device=cache.device) if of_k is None or of_v is None else None
    return (ones if of_k is None else of_k.contiguous()), (ones if of_v is None else of_v.contiguous())


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


def check_numbers(x: Any, name: str, shape: tuple[int | None, ...], q: torch.Tensor, function: str) -> torch.Tensor:
    """An int32 tensor on q's device; None in ``shape`` is any extent from 1 on."""
    common.check_tensors(function, **{name: x})
    fits = x.ndim == len(shape) and all(n == m or (m is None and n > 0) for n, m in zip(x.shape, shape, strict=False))
    if not fits:
        names = {1: ("batch + 1",), 2: ("rows", "max_blocks")}[len(shape)]
        expected = ", ".join(name if n is None else str(n) for n, name in zip(shape, names, strict=True))
        raise ShapeError(name, f"shape ({expected}{',' * (len(shape) == 1)})", f"{tuple(x.shape)}", function=function)
    if x.dtype != torch.int32:
        raise DtypeError(name, "torch.int32", x.dtype, function=function)
    if x.device != q.device:
        raise ArgumentError(name, f"a tensor on {q.device}, like q", f"{x.device}", function=function)
    return x


def check_lengths(function: str, cache: Any, given: Any, new: Rows | None, batch: int) -> torch.Tensor:
    """Tokens before the new ones, (batch,), int32; ``cache`` as `cached` has it."""
    counts: torch.Tensor | int = 0 if new is None else new.counts
    least_new = counts if isinstance(counts, int) else 0
    most = cache.capacity - least_new
    name = "cache_seqlens"
    if given is None:
        if new is not None:
            raise ArgumentError(name, "the lengths of the sequences, with k and v", "None", function=function)
        given = cache.capacity
    if most < 0:
        received = f"{least_new}"
        raise ArgumentError("k", f"at most {cache.capacity} tokens, as the cache has", received, function=function)
    if isinstance(given, torch.Tensor):
        lengths = check_numbers(given, name, (batch,), cache.k, function)
    else:
        number = arguments.check_int(given, name, function, most=most)
        lengths = torch.full((batch,), number, dtype=torch.int32, device=cache.k.device)
        if isinstance(counts, int):
            return lengths
    if not batch:
        return lengths
    if lengths.device.type == "cpu":
        _check_on_host(function, cache, lengths, counts)
    elif cache.name == "block_table" and not torch.cuda.is_current_stream_capturing():
        longest = _longest(lengths)
        if longest > most:
            raise CacheLengthError(name, f"at most {most}{cache.places}", f"{longest}", function=function)
    return lengths


def _check_on_host(function: str, cache: Any, lengths: torch.Tensor, counts: torch.Tensor | int) -> None:
    least = torch.zeros_like(lengths) if cache.first is None else cache.first
    total = lengths + counts
    if int(least.min()) < 0 or bool((lengths < least).any()) or int(total.max()) > cache.capacity:
        room = counts if isinstance(counts, int) else counts.tolist()
        most = cache.capacity - room if isinstance(room, int) else cache.capacity
        expected = f"from 0 (cache_leftpad) to {most}, with room for {room} new tokens"
        raise CacheLengthError("cache_seqlens", expected + cache.places, f"{lengths.tolist()}", function=function)
    used = -(-total // cache.page)
    for b, count in enumerate([] if cache.table is None else used.tolist()):
        blocks = cache.table[b, :count]
        if count and (int(blocks.min()) < 0 or int(blocks.max()) >= cache.k.shape[0]):
            expected = f"blocks 0 to {cache.k.shape[0] - 1}"
            raise ArgumentError(cache.name, expected, f"{blocks.tolist()} at {b}", function=function)


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
