"""Attention for Hugging Face transformers: ``register()``, then ``model.set_attn_implementation("omniattn")``.

An attention function and a mask function are registered. The mask function decides what attention has to know besides
"causal or not": None where that is all, the parts of the mask (`StructuredMask`, `PackedMask`) where it is a window,
padding, queries behind a cache, or packed sequences, a full boolean mask for the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.utils import import_utils

import omniattn

from ..errors import ArgumentError, ShapeError, UnsupportedError
from . import transformers_paged as paged
from .masks import PackedMask, PartedMask, StructuredMask, band, taken
from .own_names import by_own_names
from .transformers_checks import (
    addend,
    check_addends,
    check_broadcasts,
    check_causal,
    check_dropout,
    check_tensors,
    check_window,
    longest,
    starts_of,
)
from .transformers_keywords import IGNORED, PACKED, TESTED, check
from .transformers_packed import packed_mask, packed_positions

__all__ = ["attention_mask", "register"]

_FUNCTION = "omniattn.integrations.transformers"

#: What has to be there: functions of masking_utils and their arguments.
_SDPA_MASK = (
    "batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask", "local_size",
    "allow_is_causal_skip", "allow_is_bidirectional_skip", "device",
)  # fmt: skip

#: What transformers calls arguments of omniattn's functions.
_NAMES = {
    "q": "query", "k": "key", "v": "value", "mask": "attention_mask", "softmax_scale": "scaling", "sinks": "s_aux",
    "dropout_p": "dropout", "window": "sliding_window", "cu_seqlens_q": "cu_seq_lens_q",
    "cu_seqlens_k": "cu_seq_lens_k", "max_seqlen_q": "max_length_q", "max_seqlen_k": "max_length_k",
}  # fmt: skip

_KNOWN = frozenset((*PACKED, "deterministic"))


def register(*, ignore: Iterable[str] = ()) -> None:
    """Register ``"omniattn"``, ``"omniattn_int8"`` and ``"omniattn_auto"`` with transformers, for attention and masks.

    Afterwards ``model.set_attn_implementation("omniattn")`` or ``from_pretrained(..., attn_implementation="omniattn")``
    choose them. ``"omniattn_int8"`` is ``precision="int8"`` for more than one query; a single query, as in
    token-by-token generation, is attended to exactly: to quantize all keys for it would cost more than it saves.
    ``"omniattn_auto"`` is ``precision="auto"``, and exact in ``generate_batch``, whose pages 8 bits would copy first.
    Registering again is fine.

    Parameters
    ----------
    ignore : iterable of str
        More keywords of models' forward functions that come down to attention and do not concern it. Others that are
        not known raise, because they might.

    Raises
    ------
    ArgumentError
        ignore is no iterable of str; one str is none.
    UnsupportedError
        This version of transformers passes masks in another way than the versions that this was made for.

    Notes
    -----
    Served: grouped-query and cross attention, causal and bidirectional, padding on both sides, sliding windows, chunks,
    softcap, sinks (``s_aux``), position biases with gradients, dynamic, sliding and static caches, packed sequences by
    ``position_ids`` or ``cu_seq_lens_*`` (`omniattn.attention_varlen`), 4-dimensional masks of the caller, boolean or
    added, value heads of another size, gradients, autocast, attention dropout, ``deterministic``.
    Rows of padding are 0 where eager attention gives a mean of values.
    ``generate_batch`` (continuous batching) is served under the same names, over the pages of its cache:
    docs/integrations/transformers.md says how, and what of transformers is wrapped for it. Not served, and raising:
    4-dimensional masks of integers (``mask != 0`` makes booleans of them; eager attention adds them as they are),
    dropout with a low precision, ``output_attentions``, sparse attention by indices. Tested with transformers 5.17,
    5.20, 5.23 and 5.24.
    """
    _check_version()
    names = None if isinstance(ignore, (str, bytes)) or not isinstance(ignore, Iterable) else tuple(ignore)
    if names is None or not all(isinstance(x, str) for x in names):
        raise ArgumentError("ignore", "an iterable of str", repr(ignore), function="register")
    IGNORED.update(names)
    for name, precision in (("omniattn", "exact"), ("omniattn_int8", "int8"), ("omniattn_auto", "auto")):
        AttentionInterface.register(name, _attention_function(precision))
        AttentionMaskInterface.register(name, attention_mask)
    paged.register()


def _check_version() -> None:
    there = set(inspect.signature(masking_utils.sdpa_mask).parameters)
    missing = [name for name in _SDPA_MASK if name not in there]
    missing += [name for name in ("causal_mask_function",) if not hasattr(masking_utils, name)]
    missing += [name for name in ("is_tracing",) if not hasattr(import_utils, name)]
    if missing:
        raise UnsupportedError(
            f"transformers {transformers.__version__}: its masks lack {', '.join(missing)}",
            instead=TESTED,
        )


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of a model's layers, as transformers' mask interface asks for it.

    Parameters
    ----------
    batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size, device, config
        As transformers passes them: query i is at position i + q_offset, key j at j + kv_offset; attention_mask is
        (batch, positions), bool, False for padding; local_size is the size of a window or a chunk.
    allow_is_causal_skip, allow_is_bidirectional_skip : bool
        mask_function is nothing but causal, or bidirectional, of local_size.

    Returns
    -------
    None
        Nothing but causal (as `torch.nn.functional.scaled_dot_product_attention` has it) or bidirectional attention.
    StructuredMask
        A window, padding below a causal mask, or queries behind a cache, as its parts.
    PackedMask
        Sequences that ``position_ids`` pack into rows, with or without windows.
    tensor, bool, broadcastable to (batch, 1, q_length, kv_length)
        Everything else; what would have parts, while a graph is traced or captured, too.
    """
    options = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask, "device": device,
        **kwargs,
    }  # fmt: skip
    causal, bidirectional = allow_is_causal_skip, allow_is_bidirectional_skip
    if isinstance(q_offset, torch.Tensor):
        if q_length == 1 or import_utils.is_tracing(q_offset):
            # A step of a static cache, which is not to wait for the GPU.
            return _full(options)
        options["q_offset"] = int(q_offset)
    window = _window(options, local_size, causal, bidirectional, config)
    if window is None or (attention_mask is not None and attention_mask.dim() != 2):
        packed = packed_mask(options) if window is None else None
        return _full(options) if packed is None else packed
    # Where padding may not be looked at, which would be a graph break or a synchronization, neither may its class be.
    tracing = import_utils.is_tracing(torch.empty(0, device=device) if attention_mask is None else attention_mask)
    return _from_parts(options, *window, read_padding=not tracing)


def _full(options: dict[str, Any]) -> torch.Tensor:
    return masking_utils.sdpa_mask(**options, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)


def _window(
    options: dict[str, Any], local_size: int | None, causal: bool, bidirectional: bool, config: Any
) -> tuple[int, int] | None:
    """(left, right) of a mask that is a window of positions; None if it is not, or cannot be told to be."""
    if local_size is None:
        if causal and options["mask_function"] is masking_utils.causal_mask_function:
            return -1, 0
        if bidirectional and options["mask_function"] is masking_utils.bidirectional_mask_function:
            return -1, -1
        return None
    # Windows and chunks come with a local_size, and the function does not say which it is.
    chunk = getattr(config, "attention_chunk_size", None)
    if causal and chunk == local_size:
        return (-1, 0) if options["q_offset"] + options["q_length"] <= chunk else None
    if chunk is not None or getattr(config, "sliding_window", None) != local_size:
        return None
    if causal:
        return local_size - 1, 0
    return (local_size, local_size) if bidirectional else None


def _from_parts(options: dict[str, Any], left: int, right: int, *, read_padding: bool) -> torch.Tensor | None:
    """`attention_mask` where the mask is a window. read_padding: its values may be read."""
    batch, q_len, kv_len = options["batch_size"], options["q_length"], options["kv_length"]
    shift = options["q_offset"] - options["kv_offset"]
    # With a causal mask nobody sees the keys behind the last query.
    seen = shift + q_len if right == 0 else kv_len
    if not 0 < seen <= kv_len or (right != 0 and shift != kv_len - q_len):
        return _full(options)
    padding = masking_utils.prepare_padding_mask(options["attention_mask"], kv_len, options["kv_offset"])
    if padding is not None:
        padding = padding[:, options["kv_offset"] :][:, :kv_len]
        if read_padding and bool(padding[:, :seen].all()):
            padding = None
    if left >= shift + q_len - 1:
        left = -1
    if right > 0 and right >= kv_len - 1 - shift:
        right = -1
    if left < 0 and (right < 0 or (q_len == 1 and seen == kv_len)):
        # Nothing for queries to differ in.
        return None if padding is None else padding[:, None, None, :].expand(batch, 1, q_len, kv_len)
    if left < 0 and padding is None and q_len > 1 and shift == 0:
        return None
    if not read_padding:
        return _full(options)
    rows = torch.ones(0, dtype=torch.bool, device=options["device"]) if padding is None else padding
    return StructuredMask(rows, batch, q_len, kv_len, shift, left, right)


def _attention_function(precision: str) -> Callable[..., tuple[torch.Tensor, None]]:
    @by_own_names(_FUNCTION, _NAMES)
    def attention(
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
        """o of one layer, (batch, q_len, num_q_heads, head_dim), for q, k, v of (batch, heads, length, head_dim)."""
        check(0.0, kwargs, _KNOWN)
        check_tensors(query, key, value)
        packed = _packed(kwargs)
        sliding_window = check_window(sliding_window)
        shape = (max(query.shape[0], key.shape[0]), query.shape[1], query.shape[2], key.shape[2])
        check_addends(attention_mask, position_bias, shape, query.device)
        query, key, value = _cast(query, key, value)
        options: dict[str, Any] = {
            "softmax_scale": scaling,
            "softcap": 0.0 if softcap is None else softcap,
            "sinks": addend(s_aux, query, "s_aux"),
            "precision": "exact" if query.shape[2] == 1 else precision,
        }
        if check_dropout(dropout) > 0:
            options["dropout_p"] = dropout
        if kwargs.get("deterministic") is not None:
            options["deterministic"] = kwargs["deterministic"]
        is_causal = check_causal(is_causal)
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        if packed is not None:
            if attention_mask is not None and attention_mask.dtype != torch.bool:
                raise UnsupportedError(
                    f"an attention_mask of {attention_mask.dtype} with cu_seq_lens_q", instead="one of the two"
                )
            out = _attend_packed(module, query, key, value, packed, attention_mask, causal, sliding_window,
                                 position_bias, options)  # fmt: skip
            return out, None
        if position_bias is None:
            documents = _documents(query, key, attention_mask, causal, sliding_window, kwargs.get("position_ids"))
            if documents is not None:
                return _attend_rows(query, key, value, documents, options), None
        out = _attend(query, key, value, attention_mask, causal, sliding_window, position_bias, options)
        return out, None

    return attention


def _packed(kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k if the caller packs sequences by them."""
    given = [kwargs.get(name) for name in PACKED]
    missing = [name for name, x in zip(PACKED, given, strict=True) if x is None]
    if len(missing) == len(PACKED):
        return None
    if missing:
        raise ArgumentError(missing[0], "a value, because other lengths of packed sequences came", None)
    return tuple(given)


def _cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v in the dtype of autocast, where that is on; as torch it leaves integers and float64 as they are."""
    device = tensors[0].device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
    return tensors


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    given: torch.Tensor | None,
    causal: bool,
    sliding_window: int | None,
    position_bias: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    q_len, kv_len = query.shape[2], key.shape[2]
    left = right = -1
    mask: torch.Tensor | None = given
    if type(given) is StructuredMask:
        _check_parted(given, max(query.shape[0], key.shape[0]), q_len, kv_len)
        if given.full is None:
            left, right = given.left, given.right
            mask = given.rows[:, None, None, :] if given.rows.dim() == 2 else None
            if right == 0:
                kv_len = given.shift + q_len
        else:
            mask = given.full
    elif type(given) is PackedMask:
        mask = given.materialize()
    elif given is None:
        # No mask at all. As for SDPA, causal is counted from the first key, a single query sees every key, and a
        # window is as wide for flash attention: ``sliding_window`` keys with the query's own, on each side.
        if sliding_window is not None and sliding_window < kv_len:
            left = right = sliding_window - 1
        if causal and q_len > 1:
            right = 0
            if kv_len > q_len:
                kv_len = q_len
            elif kv_len < q_len:
                mask, left, right = band(q_len, kv_len, 0, left, 0, query.device), -1, -1
    if kv_len < key.shape[2]:
        # Keys behind the last query, which nobody sees: an empty part of a static cache.
        key, value = key[:, :, :kv_len], value[:, :, :kv_len]
        mask = None if mask is None else mask[..., :kv_len]
        position_bias = None if position_bias is None else position_bias[..., :kv_len]
    mask = taken(mask, query, "attention_mask", _FUNCTION)
    if position_bias is not None:
        mask = _with_bias(addend(position_bias, query, "position_bias"), mask)
    if query.shape[0] != key.shape[0]:
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    return omniattn.attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
        mask=mask, window=None if left < 0 and right < 0 else (left, right), **options,
    )  # fmt: skip


def _check_parted(mask: PartedMask, batch: int, q_len: int, kv_len: int) -> None:
    """Refuse the mask of another call: its parts are of no shape that attention could look at."""
    if mask.shape[0] not in (1, batch) or mask.shape[2] != q_len or mask.shape[3] != kv_len:
        expected = f"a mask of {q_len} queries and {kv_len} keys, for a batch of {batch}"
        raise ShapeError("attention_mask", expected, tuple(mask.shape), function=_FUNCTION)


def _with_bias(bias: Any, mask: torch.Tensor | None) -> torch.Tensor:
    """A mask to add: the bias, and -inf where a key is hidden."""
    if mask is not None:
        bias = torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else bias + mask
    # Models look biases up by (query, key) and then put heads first. The faster kernels want keys next to each other.
    return bias if bias.stride(-1) == 1 else bias.contiguous()


def _attend_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: tuple[Any, ...],
    given: torch.Tensor | None,
    causal: bool,
    sliding_window: int | None,
    position_bias: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Sequences one behind the other in one row of the batch, by their lengths."""
    if position_bias is not None:
        raise UnsupportedError("position_bias with cu_seq_lens_q", instead="position_ids, which give a full mask")
    if query.shape[0] != 1 or key.shape[0] != 1:
        raise ShapeError("query", "a batch of 1 with cu_seq_lens_q", tuple(query.shape), function=_FUNCTION)
    starts_q, starts_k = (starts_of(x, name) for x, name in zip(packed[:2], PACKED[:2], strict=True))
    longest_q, longest_k = (longest(x, name) for x, name in zip(packed[2:], PACKED[2:], strict=True))
    if isinstance(given, PartedMask):
        _check_parted(given, 1, query.shape[2], key.shape[2])
    left = -1 if sliding_window is None else sliding_window - 1
    right = 0 if causal else left
    has_padding = isinstance(given, StructuredMask) and given.full is None and given.rows.dim() == 2
    if isinstance(given, PartedMask) and given.full is None and not has_padding:
        # Some models tell only the mask how long a window is.
        left, right = given.left, given.right
    elif given is not None and (has_padding or _says_more(module)):
        check_broadcasts(given, "attention_mask", (1, query.shape[1], query.shape[2], key.shape[2]), query.device)
        of_q, of_k = (
            torch.searchsorted(starts, torch.arange(x.shape[2], dtype=torch.int32, device=x.device), right=True)
            for starts, x in ((starts_q, query), (starts_k, key))
        )
        return _attend(query, key, value, given & (of_q[:, None] == of_k), causal, None, None, options)
    out = omniattn.attention_varlen(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1),
        cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k,
        window=None if left < 0 and right < 0 else (left, right), **options,
    )  # fmt: skip
    return out[None]


def _says_more(module: torch.nn.Module) -> bool:
    """Whether a full mask may say more than lengths and a window do.

    Outside of graphs it does: `attention_mask` would have given a `PackedMask`. Within one, masks are full, and chunks
    are what is known to be more.
    """
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    return chunk is not None or not torch.compiler.is_compiling()


def _documents(
    query: torch.Tensor, key: torch.Tensor, given: torch.Tensor | None, causal: bool, sliding_window: int | None,
    position_ids: Any,
) -> PackedMask | None:  # fmt: skip
    """The sequences that ``position_ids`` pack, where the mask or they say so and the keys are those of the queries."""
    if type(given) is PackedMask:
        return given if given.full is None else None
    length = query.shape[2]
    if not causal or query.shape[0] != 1 or key.shape[0] != 1 or length == 1 or key.shape[2] != length:
        return None
    left = -1 if sliding_window is None else sliding_window - 1
    if type(given) is StructuredMask and given.full is None:
        if given.rows.dim() == 2 or given.right != 0 or given.shift != 0:
            return None
        left = given.left
    elif given is not None:
        return None
    return packed_positions(position_ids, length, left)


def _attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: PackedMask, options: dict[str, Any]
) -> torch.Tensor:
    """Sequences one behind the other in each row of the batch, as the mask has them from ``position_ids``."""
    batch, _, length, _ = mask.shape
    for name, x in (("query", query), ("key", key)):
        if (x.shape[0], x.shape[2]) != (batch, length):
            expected = f"({batch}, heads, {length}, head_dim), as the mask of packed sequences has it"
            raise ShapeError(name, expected, tuple(x.shape), function=_FUNCTION)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    window = None if mask.left < 0 and mask.right < 0 else (mask.left, mask.right)
    out = omniattn.attention_varlen(
        q, k, v, cu_seqlens_q=mask.starts, cu_seqlens_k=mask.starts, max_seqlen_q=mask.longest,
        max_seqlen_k=mask.longest, window=window, **options,
    )  # fmt: skip
    return out.unflatten(0, (batch, length))
