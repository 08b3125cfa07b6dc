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
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

import omniattn

from ..errors import ShapeError, UnsupportedError
from .transformers_checks import addend, check_causal, check_tensors, check_window
from .transformers_keywords import PACKED, as_int32, check, refused
from .transformers_pages import Layer, Pages, Step, layer_of, pages_on, step_of

__all__ = ["BATCHING", "register"]

#: What a model's attention is called while it generates in batches.
BATCHING = {
    "omniattn": "omniattn_flash3", "omniattn_int8": "omniattn_int8_flash3", "omniattn_auto": "omniattn_auto_flash3",
}  # fmt: skip

_PREFIX = "paged|"
_FUNCTION = "generate_batch"
#: Keywords of a step of continuous batching.
_OF_BATCHES = frozenset((
    *PACKED, "max_seqlen_q", "max_seqlen_k", "block_table", "k_cache", "v_cache", "cache", "read_index", "write_index",
    "logits_indices", "logits_processor_args",
))  # fmt: skip


def register() -> None:
    """Register `BATCHING`'s names, and let managers of batches find them.

    Functions of transformers are wrapped: the one that imports flash attention by its name, which otherwise asks a hub
    for a kernel of that name, and the one by which a manager of batches judges a model's attention. Both do what they
    did for other names. Where this version of transformers has none of the interfaces that are known, they raise for
    these names. Those that fill the inputs of a step return when they are filled, in every manager of
    batches, whatever its attention: see `_filling`.
    """
    what = _what_is_missing()
    for name, batching in BATCHING.items():
        function = _attention_function("int8" if "int8" in name else "exact") if what is None else _refusal(what)
        AttentionInterface.register(batching, function)
        if what is None and "read_index" in _names(_cache(), "update"):
            # 5.17 puts the prefix before the name that a model has.
            AttentionInterface.register(_PREFIX + batching, function)
            AttentionInterface.register(_PREFIX + name, function)
    if what is None:
        _wrap(_flash(), "_lazy_imports", _importing)
    if hasattr(_manager(), "switch_to_cb_friendly_attn"):
        _wrap(_manager(), "switch_to_cb_friendly_attn", _switching)
    for name in ("_reset_static_tensors", "prepare_batch_tensors"):
        if hasattr(_inputs(), name):
            _wrap(_inputs(), name, _filling)


def _part(module: str, name: str | None = None) -> Any:
    """A module of transformers, or what it has by a name; None where there is none."""
    try:
        found = importlib.import_module(f"transformers.{module}")
    except ImportError:
        return None
    return found if name is None else getattr(found, name, None)


_flash = functools.partial(_part, "modeling_flash_attention_utils")
_manager = functools.partial(_part, "generation.continuous_batching", "ContinuousBatchingManager")
_cache = functools.partial(_part, "generation.continuous_batching", "PagedAttentionCache")
_inputs = functools.partial(_part, "generation.continuous_batching.input_outputs", "ContinuousBatchingIOs")


def _what_is_missing() -> str | None:
    """What of the interfaces that are known this version lacks."""
    update = _names(_cache(), "update")
    if update != [*_UPDATE, "kwargs"] and update != [*_UPDATE, "read_index", "write_index"]:
        return f"PagedAttentionCache.update takes {', '.join(update) or 'nothing that is known'}"
    if _names(_manager(), "switch_to_cb_friendly_attn")[:2] != ["self", "model"]:
        return "ContinuousBatchingManager has no switch_to_cb_friendly_attn(model)"
    if _names(_flash(), "_lazy_imports")[:1] != ["implementation"]:
        return "modeling_flash_attention_utils has no _lazy_imports(implementation)"
    return None


_UPDATE = ("self", "key_states", "value_states", "layer_idx")


def _names(owner: Any, function: str) -> list[str]:
    """Arguments of a function; none where it is not there."""
    found = getattr(owner, function, None)
    return [] if found is None else list(inspect.signature(found).parameters)


def _refusal(what: str) -> Callable[..., Any]:
    def attention(*_arguments: Any, **_keywords: Any) -> Any:
        raise refused(what)

    return attention


def _wrap(owner: Any, name: str, wrapper: Callable[..., Callable[..., Any]]) -> None:
    """Put a wrapper around a function, once."""
    original = getattr(owner, name)
    if not hasattr(original, "of_omniattn"):
        wrapped = functools.wraps(original)(wrapper(original))
        wrapped.of_omniattn = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)


def _outside(*_arguments: Any, **_keywords: Any) -> Any:
    """What is imported for `BATCHING`'s names. It only has to be there: attention has a function of its own."""
    raise UnsupportedError(
        f"attention named {BATCHING['omniattn']!r} outside of generate_batch", instead='attn_implementation="omniattn"'
    )


def _importing(original: Callable[..., Any]) -> Callable[..., Any]:
    def lazy_imports(implementation: str | None, *arguments: Any, **keywords: Any) -> Any:
        if implementation is None or implementation.removeprefix(_PREFIX) not in BATCHING.values():
            return original(implementation, *arguments, **keywords)
        theirs = _flash()
        return _outside, _outside, _outside, theirs._pad_input, theirs._unpad_input

    return lazy_imports


def _switching(original: Callable[..., Any]) -> Callable[..., Any]:
    def switch_to_cb_friendly_attn(self: Any, model: Any, *arguments: Any, **keywords: Any) -> None:
        own = model.config._attn_implementation
        name = BATCHING.get((own or "").removeprefix(_PREFIX))
        if name is None:
            original(self, model, *arguments, **keywords)
            return
        what = _what_is_missing()
        if what is None and not hasattr(self, "_original_attn_impl"):
            what = "ContinuousBatchingManager has no _original_attn_impl to come back to"
        if what is not None:
            raise refused(what)
        for part in model.modules():
            # Models with sinks name the flash attentions that have them, and would take another one for this.
            compatible = getattr(part, "_compatible_flash_implementations", None)
            if compatible is not None and name not in compatible:
                part._compatible_flash_implementations = [*compatible, *BATCHING.values()]
        model.set_attn_implementation(name)
        original(self, model, *arguments, **keywords)
        self._original_attn_impl = own

    return switch_to_cb_friendly_attn


def _filling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wait for what fills tensors of the GPU.

    It runs on the current stream; copies of the next inputs, and steps, are on streams of their own, which do not wait
    for it (5.17 to 5.24). When a manager begins, inputs that it clears could be those of its first batch, whose
    requests then had wrong tokens, with any attention: seen where many processes share a GPU.
    """

    def fill(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = original(self, *arguments, **keywords)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return result

    return fill


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
            _outside()
        if attention_mask is not None or position_bias is not None or check_causal(is_causal) is False:
            what = "a mask" if attention_mask is not None else "a bias or attention that is not causal"
            raise UnsupportedError(f"{what} in generate_batch", instead='attn_implementation="sdpa"')
        check_tensors(query, key, value)
        if query.shape[0] != 1:
            raise ShapeError("query", "packed sequences, (1, ...)", tuple(query.shape), function=_FUNCTION)
        sliding_window = check_window(_window_of(module) if sliding_window is None else sliding_window)
        options: dict[str, Any] = {
            "window": None if sliding_window is None else (sliding_window - 1, 0),
            "softmax_scale": scaling,
            "softcap": 0.0 if softcap is None else softcap,
            "sinks": addend(s_aux, query, "s_aux"),
        }
        cache, index = kwargs.get("cache"), module.layer_idx
        if cache is None:
            return _attend_updated(index, query, key, value, kwargs, options, precision), None
        layer = layer_of(cache, index)
        return _attend_cache(layer, cache, query, key, value, kwargs, options, precision), None

    # Nothing of it is for torch.compile: it keeps what it knows of a step, and of pages, by the identity of tensors.
    apart = torch.compiler.disable(attend)

    @functools.wraps(attend)
    def attention(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, None]:
        if torch.compiler.is_dynamo_compiling():
            return apart(*arguments, **keywords)
        return attend(*arguments, **keywords)

    return attention


def _window_of(module: Any) -> int | None:
    """Keys that a layer sees, its own included, by the rule that caches of batches go by; some layers do not say it."""
    window, types = getattr(module.config, "sliding_window", None), getattr(module.config, "layer_types", None)
    if types is not None and types[module.layer_idx] != "sliding_attention":
        window = None
    return window


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(1, heads, rows, head_dim) as (rows, heads, head_dim)."""
    return x.squeeze(0).transpose(0, 1)


def _of(kwargs: dict[str, Any], name: str) -> Any:
    """What a step has to bring."""
    if kwargs.get(name) is None:
        raise refused(f"a step without {name}")
    return kwargs[name]


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
    starts_q, starts_k, table = _of(kwargs, "cu_seq_lens_q"), _of(kwargs, "cu_seq_lens_k"), kwargs.get("block_table")
    if isinstance(starts_k, dict):
        raise refused("lengths of all kinds of layers, and no cache that says which are a layer's")
    if table is not None:
        pages = pages_on(_of(kwargs, "k_cache"), _of(kwargs, "v_cache"))
        # One kind of layers has tables; there is one table for it.
        return _decode(step_of(starts_k, index), 0, pages, query, key, value, table, starts_q, options)
    longest = _of(kwargs, "max_length_q"), _of(kwargs, "max_length_k")
    return _attend_packed(query, key, value, starts_q, starts_k, *longest, options, precision)


def _attend_cache(
    layer: Layer,
    cache: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
    options: dict[str, Any],
    precision: str,
) -> torch.Tensor:
    """5.17 to 5.23: the cache is updated here, or its pages are written and read without it."""
    starts_q, starts_k, table = _of(kwargs, "cu_seq_lens_q"), _of(kwargs, "cu_seq_lens_k"), kwargs.get("block_table")
    longest = "max_length" if layer.by_kwargs else "max_seqlen"
    longest_q, longest_k = _of(kwargs, f"{longest}_q"), _of(kwargs, f"{longest}_k")
    if isinstance(starts_k, dict):
        starts_k, longest_k = starts_k[layer.kind], longest_k[layer.kind]
    pages = layer.pages
    if table is not None:
        if pages is None:
            raise refused(f"a block table of layers of {layer.kind}, in {key.dtype}")
        step = step_of(starts_k, layer.index)
        return _decode(step, layer.group, pages, query, key, value, table[layer.group], starts_q, options)
    if pages is None or (precision != "exact" and longest_q > 1):
        key, value = _gathered(layer, cache, key, value, kwargs)
        return _attend_packed(query, key, value, starts_q, starts_k, longest_q, longest_k, options, precision)
    step = step_of(starts_k, layer.index)
    slots = step.slots.get(layer.group)
    if slots is None:
        slots = step.slots[layer.group] = pages.slots(_of(kwargs, "write_index")[layer.group])
    omniattn.append(pages.cache, _rows(key), _rows(value), slot_mapping=slots)
    rows = _of(kwargs, "read_index")[layer.group]
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
    layer: Layer, cache: Any, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all requests, (1, heads, rows, head_dim); the new ones are in the cache then."""
    if layer.by_kwargs:
        return cache.update(key, value, layer.index, kwargs=dict(kwargs))
    indices = {name: _of(kwargs, name) for name in ("read_index", "write_index")}
    k, v = cache.update(key, value, layer.index, **indices)
    return k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def _decode(
    step: Step,
    group: int,
    pages: Pages,
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
