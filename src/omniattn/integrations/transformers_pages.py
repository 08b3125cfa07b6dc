"""What attention knows of the cache of continuous batching from one call to the next: pages, layers, steps."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from omniattn import PagedKVCache

from .transformers_keywords import as_int32, refused

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_CACHE_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Layer:
    """What the cache of batches has of one layer, where attention gets that cache.

    Attributes
    ----------
    index, group : int
        Of the model; and of what has a block table and indices of its own.
    kind : str
        "full_attention", or "sliding_attention": a ring without a table.
    pages : Pages or None
        K and V of all requests; None of a ring, and on the CPU of float32.
    by_kwargs : bool
        ``update`` takes the keywords of the step.
    """

    index: int
    group: int
    kind: str
    pages: Pages | None
    by_kwargs: bool


_layers: weakref.WeakKeyDictionary[Any, dict[int, Layer]] = weakref.WeakKeyDictionary()


def layer_of(cache: Any, index: int) -> Layer:
    known = _layers.get(cache)
    if known is None:
        known = _layers[cache] = {}
    layer = known.get(index)
    if layer is None:
        layer = known[index] = _describe(cache, index)
    return layer


def _describe(cache: Any, index: int) -> Layer:
    if hasattr(cache, "layer_to_allocator"):
        # 5.20, 5.23: an allocator for all layers of a kind.
        allocator = cache.layer_to_allocator[index]
        kind = allocator.layer_type
        arrays = allocator.get_cache_for_block_table(index) if kind == _FULL else None
        group = allocator.index
    else:
        # 5.17: groups of as many layers each, which share arrays.
        group, place = cache.layer_index_to_group_indices[index]
        kind = _FULL if cache.sliding_windows[index] == 1 else _SLIDING
        shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        arrays = (cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)) if kind == _FULL else None
    if kind not in (_FULL, _SLIDING):
        raise refused(f"layers of {kind}")
    pages = None
    if arrays is not None and arrays[0].dtype in _CACHE_DTYPES:
        pages = Pages.on(*arrays)
    return Layer(index, group, kind, pages, hasattr(cache, "layer_to_allocator"))


@dataclass(frozen=True, slots=True)
class Pages:
    """K and V of one layer, of all requests.

    Attributes
    ----------
    cache : PagedKVCache
    apart : int
        Pages of the memory from one page of K to the next. From 5.20 on a page of K and its page of V lie side by side,
        and the arrays that come for the two contain each other's pages: tables and slots there count both.
    """

    cache: PagedKVCache
    apart: int

    @classmethod
    def on(cls, k: torch.Tensor, v: torch.Tensor) -> Pages:
        """Of arrays (pages, tokens, heads, head_dim), which somebody else keeps."""
        if k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
            return cls(PagedKVCache.from_arrays(k.detach(), v.detach()), 1)
        if not k.is_contiguous() or v.storage_offset() - k.storage_offset() != k.stride(0):
            raise refused("pages of V do not lie behind those of K")
        return cls(PagedKVCache.from_arrays(k.detach()[::2], v.detach()[::2]), 2)

    def table(self, entries: torch.Tensor) -> torch.Tensor:
        """A block table, of transformers' one."""
        return entries if self.apart == 1 else entries.div(self.apart, rounding_mode="floor")

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """A slot mapping, of rows of K's array."""
        if self.apart == 1:
            return rows
        tokens = self.cache.block_size
        return rows.div(tokens * self.apart, rounding_mode="floor").mul_(-tokens * (self.apart - 1)).add_(rows)

    def table_of_rows(self, rows: torch.Tensor, starts: torch.Tensor, longest: int) -> torch.Tensor:
        """A block table, of the rows of K's array that hold the tokens of each request, one behind the other."""
        tokens = self.cache.block_size
        firsts = torch.arange(0, longest, tokens, dtype=torch.int32, device=starts.device)
        # Behind a request's last page are those of the next: nobody looks at them.
        places = (starts[:-1, None] + firsts).clamp_(max=rows.shape[0] - 1)
        return rows[places].div_(tokens * self.apart, rounding_mode="floor").to(torch.int32)


_pages: dict[int, tuple[weakref.ref[torch.Tensor], Pages]] = {}


def pages_on(k: torch.Tensor, v: torch.Tensor) -> Pages:
    """Of arrays that are the same ones in every step; what is kept of them must not keep them from being freed."""
    key = id(k)
    found = _pages.get(key)
    if found is not None and found[0]() is k:
        return found[1]

    def forget(reference: weakref.ref[torch.Tensor]) -> None:
        if key in _pages and _pages[key][0] is reference:
            del _pages[key]

    made = Pages.on(k, v)
    _pages[key] = weakref.ref(k, forget), made
    return made


class Step:
    """What all layers of a step share: made by the first of them.

    Attributes
    ----------
    starts : weak reference
        To the tensor that says where each request's keys begin; one tensor a step.
    layer : int
        That used this last. Layers of a step come in order: the same one again, or one before it, is another step,
        whose tensor may be the same (a graph is captured behind a trial).
    seq_lens : tensor, (requests,), int32
    slots, tables : dict
        Slot mappings and block tables by group.
    """

    __slots__ = ("layer", "seq_lens", "slots", "starts", "tables")

    def __init__(self, starts: torch.Tensor, layer: int) -> None:
        self.starts = weakref.ref(starts)
        self.layer = layer
        self.seq_lens = as_int32(starts[1:] - starts[:-1])
        self.slots: dict[int, torch.Tensor] = {}
        self.tables: dict[int, torch.Tensor] = {}


class _Steps(threading.local):
    """Managers of batches run in threads of their own."""

    def __init__(self) -> None:
        self.known: dict[int, Step] = {}


_steps = _Steps()


def step_of(starts: torch.Tensor, layer: int) -> Step:
    known = _steps.known
    step = known.get(id(starts))
    if step is None or step.starts() is not starts or layer <= step.layer:
        if len(known) >= 8:
            known.clear()
        step = known[id(starts)] = Step(starts, layer)
    step.layer = layer
    return step
