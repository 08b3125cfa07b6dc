"""Continuous batching of transformers (``model.generate_batch``) with omniattn.

``generate_batch`` accepts names that it knows, and names with "flash" in them; those with a 2 or 3 behind that get its
decode path over pages and CUDA graphs. So a model whose attention is ``"omniattn"`` has `BATCHING`'s name for it while
a manager of batches runs, and its own again when that stops.

How the cache comes here differs:

==============  ==================================================================================================
5.17            attention gets the cache, which updates by ``read_index`` and ``write_index``; names begin "paged|"
5.20, 5.23      attention gets the cache, which updates by ``kwargs``
5.24            the model updates the cache; attention gets gathered keys, or on the decode path pages and a table
==============  ==================================================================================================

Where attention gets the cache, keys of layers that see all of a sequence are read in their pages, for prompts too.
Layers with a window have rings without a table, which the cache gathers.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, modeling_flash_attention_utils
from transformers.generation import continuous_batching

import omniattn
from omniattn import PagedKVCache

from ..errors import ShapeError, UnsupportedError
from .transformers_keywords import PACKED, TESTED, as_int32, check, of_dtype

__all__ = ["BATCHING", "register"]

#: What a model's attention is called while it generates in batches.
BATCHING = {"omniattn": "omniattn_flash3", "omniattn_int8": "omniattn_int8_flash3"}

_PREFIX = "paged|"
_FUNCTION = "generate_batch"
_FULL = "full_attention"
_CACHE_DTYPES = (torch.float16, torch.bfloat16)
#: Keywords of a step of continuous batching.
_OF_BATCHES = frozenset((
    *PACKED, "max_seqlen_q", "max_seqlen_k", "block_table", "k_cache", "v_cache", "cache", "read_index", "write_index",
    "logits_indices", "logits_processor_args",
))  # fmt: skip


def register() -> None:
    """Register `BATCHING`'s names, and let managers of batches find them.

    Two functions of transformers are wrapped: the one that imports flash attention by its name, which otherwise asks a
    hub for a kernel of that name, and the one by which a manager of batches judges a model's attention. Both do what
    they did for other names. Where this version of transformers has none of the interfaces that are known, they raise
    for these names.
    """
    what = _what_is_missing()
    for name, batching in BATCHING.items():
        function = _attention_function("int8" if "int8" in name else "exact") if what is None else _refusal(what)
        for key in (batching, _PREFIX + batching, _PREFIX + name):
            AttentionInterface.register(key, function)
    flash: Any = modeling_flash_attention_utils
    if what is None:
        _wrap(flash, "_lazy_imports", _importing)
    manager = getattr(continuous_batching, "ContinuousBatchingManager", None)
    if hasattr(manager, "switch_to_cb_friendly_attn"):
        _wrap(manager, "switch_to_cb_friendly_attn", _switching)


def _what_is_missing() -> str | None:
    """What of the interfaces that are known this version lacks."""
    cache = getattr(continuous_batching, "PagedAttentionCache", None)
    manager = getattr(continuous_batching, "ContinuousBatchingManager", None)
    update = _names(getattr(cache, "update", None))
    if update != [*_UPDATE, "kwargs"] and update != [*_UPDATE, "read_index", "write_index"]:
        return f"PagedAttentionCache.update takes {', '.join(update) or 'nothing that is known'}"
    if _names(getattr(manager, "switch_to_cb_friendly_attn", None))[:2] != ["self", "model"]:
        return "ContinuousBatchingManager has no switch_to_cb_friendly_attn(model)"
    if _names(getattr(modeling_flash_attention_utils, "_lazy_imports", None))[:1] != ["implementation"]:
        return "modeling_flash_attention_utils has no _lazy_imports(implementation)"
    return None


_UPDATE = ("self", "key_states", "value_states", "layer_idx")


def _names(function: Any) -> list[str]:
    return [] if function is None else list(inspect.signature(function).parameters)


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"continuous batching of transformers {transformers.__version__}: {what}",
        instead=f'{TESTED}, or attn_implementation="sdpa"',
    )


def _refusal(what: str) -> Callable[..., Any]:
    def attention(*_arguments: Any, **_keywords: Any) -> Any:
        raise _refused(what)

    return attention


def _wrap(owner: Any, name: str, wrapper: Callable[..., Callable[..., Any]]) -> None:
    """Put a wrapper around a function, once."""
    original = getattr(owner, name)
    if not hasattr(original, "of_omniattn"):
        wrapped = functools.wraps(original)(wrapper(original))
        wrapped.of_omniattn = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)


def _importing(original: Callable[..., Any]) -> Callable[..., Any]:
    def lazy_imports(implementation: str | None, *arguments: Any, **keywords: Any) -> Any:
        if implementation is None or implementation.removeprefix(_PREFIX) not in BATCHING.values():
            return original(implementation, *arguments, **keywords)
        from ..compat import flash_attn_interface as ours

        theirs: Any = modeling_flash_attention_utils
        functions = (ours.flash_attn_func, ours.flash_attn_varlen_func, ours.flash_attn_with_kvcache)
        return *functions, theirs._pad_input, theirs._unpad_input

    return lazy_imports


def _switching(original: Callable[..., Any]) -> Callable[..., Any]:
    def switch_to_cb_friendly_attn(self: Any, model: Any, *arguments: Any, **keywords: Any) -> None:
        own = model.config._attn_implementation
        name = BATCHING.get((own or "").removeprefix(_PREFIX))
        if name is None:
            original(self, model, *arguments, **keywords)
            return
        what = _what_is_missing()
        if what is not None:
            raise _refused(what)
        for part in model.modules():
            # Models with sinks name the flash attentions that have them, and would take another one for this.
            compatible = getattr(part, "_compatible_flash_implementations", None)
            if compatible is not None and name not in compatible:
                part._compatible_flash_implementations = [*compatible, *BATCHING.values()]
        model.set_attn_implementation(name)
        original(self, model, *arguments, **keywords)
        self._original_attn_impl = own

    return switch_to_cb_friendly_attn


def _attention_function(precision: str) -> Callable[..., tuple[torch.Tensor, None]]:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """o of one layer, (1, rows, num_q_heads, head_dim), for q, k, v of (1, heads, rows, head_dim)."""
        check(dropout, kwargs, _OF_BATCHES)
        if kwargs.get("write_index") is None:
            raise UnsupportedError(
                f"attention named {BATCHING['omniattn']!r} outside of generate_batch", instead="omniattn"
            )
        if attention_mask is not None or position_bias is not None or is_causal is False:
            what = "a mask" if attention_mask is not None else "a bias or attention that is not causal"
            raise UnsupportedError(f"{what} in generate_batch", instead='attn_implementation="sdpa"')
        if query.shape[0] != 1:
            raise ShapeError("query", "packed sequences, (1, ...)", tuple(query.shape), function=_FUNCTION)
        if sliding_window is None:
            sliding_window = _window_of(module)
        options: dict[str, Any] = {
            "window": None if sliding_window is None else (sliding_window - 1, 0),
            "softmax_scale": scaling,
            "softcap": 0.0 if softcap is None else softcap,
            "sinks": of_dtype(s_aux, query),
        }
        cache, index = kwargs.get("cache"), module.layer_idx
        if cache is None:
            return _attend_updated(index, query, key, value, kwargs, options, precision), None
        layer = _layer_of(cache, index)
        return _attend_cache(layer, cache, query, key, value, kwargs, options, precision), None

    # Nothing of it is for torch.compile: it keeps what it knows of a step, and of pages, by the identity of tensors.
    apart = torch.compiler.disable(attend)

    @functools.wraps(attend)
    def attention(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, None]:
        if torch.compiler.is_dynamo_compiling():
            return apart(*arguments, **keywords)
        return attend(*arguments, **keywords)

    return attention


_windows: weakref.WeakKeyDictionary[torch.nn.Module, int | None] = weakref.WeakKeyDictionary()


def _window_of(module: Any) -> int | None:
    """Keys that a layer sees, its own included, by the rule that caches of batches go by; some layers do not say it."""
    try:
        return _windows[module]
    except KeyError:
        pass
    window, types = getattr(module.config, "sliding_window", None), getattr(module.config, "layer_types", None)
    if types is not None and types[module.layer_idx] != "sliding_attention":
        window = None
    _windows[module] = window
    return window


@dataclass(frozen=True, slots=True)
class _Layer:
    """What the cache of batches has of one layer, where attention gets that cache.

    Attributes
    ----------
    index, group : int
        Of the model; and of what has a block table and indices of its own.
    kind : str
        "full_attention", or "sliding_attention": a ring without a table.
    pages : _Pages or None
        K and V of all requests; None of a ring, and on the CPU of float32.
    by_kwargs : bool
        ``update`` takes the keywords of the step.
    """

    index: int
    group: int
    kind: str
    pages: _Pages | None
    by_kwargs: bool


_layers: weakref.WeakKeyDictionary[Any, dict[int, _Layer]] = weakref.WeakKeyDictionary()


def _layer_of(cache: Any, index: int) -> _Layer:
    known = _layers.get(cache)
    if known is None:
        known = _layers[cache] = {}
    layer = known.get(index)
    if layer is None:
        layer = known[index] = _describe(cache, index)
    return layer


def _describe(cache: Any, index: int) -> _Layer:
    if hasattr(cache, "layer_to_allocator"):
        # 5.20, 5.23: an allocator for all layers of a kind.
        allocator = cache.layer_to_allocator[index]
        kind = allocator.layer_type
        arrays = allocator.get_cache_for_block_table(index) if kind == _FULL else None
        group = allocator.index
    else:
        # 5.17: groups of as many layers each, which share arrays.
        group, place = cache.layer_index_to_group_indices[index]
        kind = _FULL if cache.sliding_windows[index] == 1 else "sliding_attention"
        shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        arrays = (cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)) if kind == _FULL else None
    if kind not in (_FULL, "sliding_attention"):
        raise _refused(f"layers of {kind}")
    pages = None
    if arrays is not None and arrays[0].dtype in _CACHE_DTYPES:
        pages = _Pages.on(*arrays)
    return _Layer(index, group, kind, pages, hasattr(cache, "layer_to_allocator"))


@dataclass(frozen=True, slots=True)
class _Pages:
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
    def on(cls, k: torch.Tensor, v: torch.Tensor) -> _Pages:
        """Of arrays (pages, tokens, heads, head_dim), which somebody else keeps."""
        if k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
            return cls(PagedKVCache.from_arrays(k.detach(), v.detach()), 1)
        if not k.is_contiguous() or v.storage_offset() - k.storage_offset() != k.stride(0):
            raise _refused("pages of V do not lie behind those of K")
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


_pages: dict[int, tuple[weakref.ref[torch.Tensor], _Pages]] = {}


def _pages_on(k: torch.Tensor, v: torch.Tensor) -> _Pages:
    """Of arrays that are the same ones in every step; what is kept of them must not keep them from being freed."""
    key = id(k)
    found = _pages.get(key)
    if found is not None and found[0]() is k:
        return found[1]

    def forget(reference: weakref.ref[torch.Tensor]) -> None:
        if key in _pages and _pages[key][0] is reference:
            del _pages[key]

    made = _Pages.on(k, v)
    _pages[key] = weakref.ref(k, forget), made
    return made


class _Step:
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
        self.known: dict[int, _Step] = {}


_steps = _Steps()


def _step_of(starts: torch.Tensor, layer: int) -> _Step:
    known = _steps.known
    step = known.get(id(starts))
    if step is None or step.starts() is not starts or layer <= step.layer:
        if len(known) >= 8:
            known.clear()
        step = known[id(starts)] = _Step(starts, layer)
    step.layer = layer
    return step


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(1, heads, rows, head_dim) as (rows, heads, head_dim)."""
    return x.squeeze(0).transpose(0, 1)


def _attend_updated(
    index: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
    options: dict[str, Any],
    precision: str,
) -> torch.Tensor:
    """5.24: the model has called ``cache.update``, and this is what that gave."""
    starts_k, table = kwargs["cu_seq_lens_k"], kwargs.get("block_table")
    if table is not None:
        pages = _pages_on(kwargs["k_cache"], kwargs["v_cache"])
        step = _step_of(starts_k, index)
        # One kind of layers has tables; there is one table for it.
        return _decode(step, 0, pages, query, key, value, table, kwargs["cu_seq_lens_q"], options)
    return _attend_packed(
        query, key, value, kwargs["cu_seq_lens_q"], starts_k, kwargs["max_length_q"], kwargs["max_length_k"], options,
        precision,
    )  # fmt: skip


def _attend_cache(
    layer: _Layer,
    cache: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
    options: dict[str, Any],
    precision: str,
) -> torch.Tensor:
    """5.17 to 5.23: the cache is updated here, or its pages are written and read without it."""
    starts_q, starts_k, table = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"], kwargs.get("block_table")
    longest_q, longest_k = (
        (kwargs["max_length_q"], kwargs["max_length_k"])
        if layer.by_kwargs
        else (kwargs["max_seqlen_q"], kwargs["max_seqlen_k"])
    )
    if isinstance(starts_k, dict):
        starts_k, longest_k = starts_k[layer.kind], longest_k[layer.kind]
    pages = layer.pages
    if table is not None:
        if pages is None:
            raise _refused(f"a block table of layers of {layer.kind}, in {key.dtype}")
        step = _step_of(starts_k, layer.index)
        return _decode(step, layer.group, pages, query, key, value, table[layer.group], starts_q, options)
    if pages is None or (precision != "exact" and longest_q > 1):
        key, value = _gathered(layer, cache, key, value, kwargs)
        return _attend_packed(query, key, value, starts_q, starts_k, longest_q, longest_k, options, precision)
    step = _step_of(starts_k, layer.index)
    slots = step.slots.get(layer.group)
    if slots is None:
        slots = step.slots[layer.group] = pages.slots(kwargs["write_index"][layer.group])
    omniattn.append(pages.cache, _rows(key), _rows(value), slot_mapping=slots)
    rows = kwargs["read_index"][layer.group]
    if not rows.shape[0]:
        # Prompts from their beginning: nothing else is in the cache.
        return _attend_packed(query, key, value, starts_q, starts_k, longest_q, longest_k, options, precision)
    table = step.tables.get(layer.group)
    if table is None:
        table = step.tables[layer.group] = pages.table_of_rows(rows, starts_k, longest_k)
    out = omniattn.attention_with_kvcache(
        _rows(query), pages.cache, seq_lens=step.seq_lens, block_table=table,
        cu_seqlens_q=as_int32(starts_q), max_seqlen_q=longest_q, **options,
    )  # fmt: skip
    return out[None]


def _gathered(
    layer: _Layer, cache: Any, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all requests, (1, heads, rows, head_dim); the new ones are in the cache then."""
    if layer.by_kwargs:
        return cache.update(key, value, layer.index, kwargs=dict(kwargs))
    indices = {name: kwargs[name] for name in ("read_index", "write_index")}
    k, v = cache.update(key, value, layer.index, **indices)
    return k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def _decode(
    step: _Step,
    group: int,
    pages: _Pages,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    entries: torch.Tensor,
    starts_q: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """One new token of each request: into its page, then attention over its pages."""
    table = step.tables.get(group)
    if table is None:
        table = step.tables[group] = pages.table(entries)
    omniattn.append(
        pages.cache, _rows(key), _rows(value), cu_seqlens=as_int32(starts_q),
        seq_lens=step.seq_lens, block_table=table,
    )  # fmt: skip
    out = omniattn.decode(
        query.permute(2, 0, 1, 3), pages.cache, seq_lens=step.seq_lens, block_table=table, **options
    )  # fmt: skip
    return out.transpose(0, 1)


def _attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    options: dict[str, Any],
    precision: str,
) -> torch.Tensor:
    """Attention over gathered keys."""
    out = omniattn.attention_varlen(
        _rows(query), _rows(key), _rows(value),
        cu_seqlens_q=as_int32(starts_q), cu_seqlens_k=as_int32(starts_k), max_seqlen_q=longest_q,
        max_seqlen_k=longest_k, causal=True, precision="exact" if longest_q == 1 else precision, **options,
    )  # fmt: skip
    return out[None]
