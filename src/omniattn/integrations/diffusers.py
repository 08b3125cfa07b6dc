"""Attention for diffusers: ``register()``, then ``model.set_attention_backend("omniattn")``.

diffusers keeps its backends in an enumeration that is not made to be extended, and in a private registry. Both are
looked at before anything is changed; a version in which they differ raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers.models import attention_dispatch

import omniattn

from ..arguments import check_bool, check_number
from ..errors import ArgumentError, ShapeError, UnsupportedError
from .masks import taken
from .own_names import by_own_names

__all__ = ["register"]

_FUNCTION = "omniattn.integrations.diffusers"
_NATIVE = 'model.set_attention_backend("native")'

#: What diffusers calls arguments of omniattn's functions.
_NAMES = {
    "q": "query", "k": "key", "v": "value", "mask": "attn_mask", "softmax_scale": "scale", "window": "window_size",
}  # fmt: skip

#: Arguments that the private functions have to have.
_EXPECTED = {
    "_AttentionBackendRegistry.register": ("backend", "constraints", "supports_context_parallel"),
    "_templated_context_parallel_attention": (
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "return_lse",
        "forward_op", "backward_op", "_parallel_config",
    ),
    "dispatch_attention_fn": ("query", "key", "value", "attn_mask", "backend", "parallel_config"),
}  # fmt: skip


def register() -> None:
    """Register the attention backends ``"omniattn"``, ``"omniattn_int8"`` and ``"omniattn_auto"`` with diffusers.

    The last two are ``precision="int8"`` and ``precision="auto"``.

    Afterwards ``model.set_attention_backend("omniattn")``, ``with attention_backend("omniattn"):`` and
    ``dispatch_attention_fn(..., backend="omniattn")`` choose them. Registering again is fine.

    Raises
    ------
    UnsupportedError
        This version of diffusers keeps its backends in another way than the version that this was made for.

    Notes
    -----
    Served: masks, boolean or added, of 2 dimensions (batch, keys) or 4; is_causal, aligned at the top left as in torch,
    with a mask too; scale; fewer heads of k and v with ``enable_gqa``; ``window_size``; ``return_lse`` with lse as
    (batch, heads, queries); gradients; context parallelism, ring, Ulysses and both, with gradients for ``"omniattn"``.
    Raising: dropout; masks of integers (``mask != 0`` makes booleans of them); masks with ring attention; under context
    parallelism is_causal and grouped heads, which diffusers does not divide, and a mask that requires a gradient, for
    which it has no place. Tested with diffusers 0.42.
    """
    _check_version()
    for name, precision in (("omniattn", "exact"), ("omniattn_int8", "int8"), ("omniattn_auto", "auto")):
        member = _member(name)
        attention_dispatch._AttentionBackendRegistry.register(member, constraints=[], supports_context_parallel=True)(
            _backend(precision)
        )


def _check_version() -> None:
    missing = [] if hasattr(attention_dispatch, "AttentionBackendName") else ["AttentionBackendName"]
    for name, arguments in _EXPECTED.items():
        found: Any = attention_dispatch
        for part in name.split("."):
            found = getattr(found, part, None)
        there = () if found is None else inspect.signature(found).parameters
        missing += [f"{name}({argument}=)" for argument in arguments if argument not in there]
    if missing:
        raise UnsupportedError(
            f"diffusers {diffusers.__version__}: its attention backends lack {', '.join(missing)}",
            instead="diffusers 0.42, with which this was tested, or omniattn in place of "
            "torch.nn.functional.scaled_dot_product_attention",
        )


def _member(name: str) -> Any:
    """A member of the enumeration of backends, which is made if it is not there."""
    names: Any = attention_dispatch.AttentionBackendName
    if name in names._value2member_map_:
        return names(name)
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    member.__objclass__, member._sort_order_ = names, len(names._member_names_)
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[name] = member
    if hasattr(names, "_hashable_values_"):  # Python 3.12 and newer
        names._hashable_values_.append(name)
    # The metaclass refuses to set attributes that are members.
    type.__setattr__(names, member._name_, member)
    return member


def _backend(precision: str) -> Callable[..., Any]:
    """The function of a backend. diffusers hands it the arguments that it names, and drops all others."""

    @by_own_names(_FUNCTION, _NAMES)
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        """o of (batch, queries, heads, head_dim), as q; with return_lse also lse of (batch, heads, queries)."""
        _check_kinds(query, key, value, attn_mask, dropout_p, window_size)
        if _parallel_config is None:
            _check_keys(attn_mask, key)
        flags = {"is_causal": is_causal, "enable_gqa": enable_gqa, "return_lse": return_lse}
        is_causal, enable_gqa, return_lse = (check_bool(flag, name, _FUNCTION) for name, flag in flags.items())
        _check(query, key, attn_mask, dropout_p, is_causal, enable_gqa, window_size, _parallel_config)
        mask = _mask(attn_mask, query, key)
        if _parallel_config is None:
            return _attend(query, key, value, mask, is_causal, scale, window_size, return_lse, precision)
        # Heads are as many, and so there is nothing of enable_gqa, which diffusers refuses here.
        result = attention_dispatch._templated_context_parallel_attention(
            query, key, value, mask, dropout_p, is_causal, scale, False, return_lse,
            forward_op=_forward_of(precision), backward_op=_backward_of(precision), _parallel_config=_parallel_config,
        )  # fmt: skip
        if return_lse:
            # Its own order is (batch, queries, heads).
            return result[0], result[1].transpose(1, 2)
        return result

    return attention


def _check_kinds(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, window_size: Any) -> None:
    """Refuse arguments of other kinds, and keys without values, before anything is looked at or cut."""
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if isinstance(x, torch.Tensor):
            if x is not attn_mask and x.dim() != 4:
                raise ShapeError(name, "(batch, length, heads, head_dim)", tuple(x.shape), function=_FUNCTION)
        elif x is not None or name != "attn_mask":
            raise ArgumentError(name, "a tensor", repr(x), function=_FUNCTION)
    if value.shape[:3] != key.shape[:3]:
        expected = f"{tuple(key.shape[:3])} before head_dim, as key has it"
        raise ShapeError("value", expected, tuple(value.shape), function=_FUNCTION)
    check_number(dropout_p, "dropout_p", _FUNCTION, least=0.0)
    sides = window_size if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or any(isinstance(x, bool) or not isinstance(x, int) or x < -1 for x in sides):
        expected = "(left, right), two integers >= -1 (-1: unlimited)"
        raise ArgumentError("window_size", expected, repr(window_size), function=_FUNCTION)


def _check_keys(attn_mask: torch.Tensor | None, key: torch.Tensor) -> None:
    """Refuse a mask of other keys. Under context parallelism key has those of one device only."""
    keys = key.shape[1]
    if attn_mask is not None and attn_mask.dim() and attn_mask.shape[-1] not in (1, keys):
        raise ShapeError("attn_mask", f"{keys} keys, as key has", tuple(attn_mask.shape), function=_FUNCTION)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    window_size: tuple[int, int],
    parallel: Any,
) -> None:
    if dropout_p > 0:
        raise UnsupportedError(
            f"dropout_p={dropout_p}, which this backend does not have",
            instead=f"model.eval(), or {_NATIVE}",
        )
    if tuple(window_size) != (-1, -1) and query.shape[1] != key.shape[1]:
        raise UnsupportedError(
            f"window_size with {query.shape[1]} queries and {key.shape[1]} keys, whose alignment differs between "
            "backends", instead="a mask"
        )  # fmt: skip
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise ShapeError(
            "key", f"{query.shape[2]} heads, as query has", tuple(key.shape), function=_FUNCTION,
            hint="enable_gqa=True lets several heads of queries share one of keys",
        )  # fmt: skip
    if parallel is None:
        return
    if getattr(parallel, "context_parallel_config", None) is None:
        raise ArgumentError("parallel_config", "one with a context_parallel_config", repr(parallel), function=_FUNCTION)
    for name, there in (
        ("is_causal", is_causal), ("enable_gqa", query.shape[2] != key.shape[2]),
        ("window_size", tuple(window_size) != (-1, -1)),
    ):  # fmt: skip
        if there:
            raise UnsupportedError(f"{name} with context parallelism", instead="a mask, or one device")
    if attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "a mask that requires a gradient with context parallelism, whose autograd function returns none for it",
            instead="mask.detach(), or one device",
        )
    if attn_mask is not None and parallel.context_parallel_config.ring_degree > 1:
        raise UnsupportedError(
            "a mask with ring attention, where each step has other keys", instead="ulysses_degree in place of it"
        )


def _mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """A mask as attention takes it; as for diffusers' own backends (batch, keys) are those of padding."""
    if mask is not None and mask.shape == (query.shape[0], key.shape[1]):
        mask = mask[:, None, None, :]
    return taken(mask, query, "attn_mask", _FUNCTION)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    window_size: tuple[int, int],
    return_lse: bool,
    precision: str,
) -> Any:
    queries, keys = query.shape[1], key.shape[1]
    left, right = window_size
    if is_causal and keys > queries:
        # Counted from the first key, as torch does: nobody sees those behind the last query.
        key, value = key[:, :queries], value[:, :queries]
        if mask is not None and mask.ndim and mask.shape[-1] == keys:
            mask = mask[..., :queries]
    elif is_causal and keys < queries:
        is_causal, left, right = False, -1, queries - keys
    return omniattn.attention(
        query, key, value, mask=mask, causal=is_causal, softmax_scale=scale,
        window=None if left < 0 and right < 0 else (left, right),
        return_lse=return_lse, precision=precision,
    )  # fmt: skip


def _arrived(*tensors: Any) -> tuple[Any, ...]:
    """Tensors without the wrapper that a collective operation in flight has: it waits when it is first used."""
    return tuple(x.wait() if hasattr(x, "wait") else x for x in tensors)


def _forward_of(precision: str) -> Callable[..., Any]:
    """What diffusers' context parallelism calls for the keys of one device; without autograd."""

    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _save_ctx: bool = True,
        _parallel_config: Any = None,
    ) -> Any:
        query, key, value = _arrived(query, key, value)
        if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[1] != 1:
            raise UnsupportedError("a mask that differs between heads with context parallelism", instead=_NATIVE)
        out, lse = omniattn.attention(
            query, key, value, mask=attn_mask, softmax_scale=scale, return_lse=True, precision=precision
        )
        if _save_ctx:
            mask = () if attn_mask is None else (attn_mask,)
            ctx.save_for_backward(query, key, value, out, lse, *mask)
            ctx.scale = scale
        # Context parallelism has lse as (batch, queries, heads).
        return (out, lse.transpose(1, 2).contiguous()) if return_lse else out

    return forward


def _backward_of(precision: str) -> Callable[..., Any]:
    """Gradients of `_forward_of`, or of what a ring has merged, by the keys of one device."""

    def backward(
        ctx: Any,
        grad_out: torch.Tensor,
        *_: Any,
        query: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        if precision != "exact":
            raise UnsupportedError(
                f"gradients of precision={precision!r} with context parallelism",
                instead='model.set_attention_backend("omniattn")',
            )
        *saved, own_lse = ctx.saved_tensors[:5]
        mask = ctx.saved_tensors[5] if len(ctx.saved_tensors) > 5 else None
        given = zip((query, key, value, out), saved, strict=True)
        q, k, v, o, do = _arrived(*(own if x is None else x for x, own in given), grad_out)
        merged = own_lse if lse is None else _arrived(lse)[0].transpose(1, 2).to(torch.float32).contiguous()
        return omniattn.attention_backward(do, q, k, v, o, merged, softmax_scale=ctx.scale, mask=mask)

    return backward
