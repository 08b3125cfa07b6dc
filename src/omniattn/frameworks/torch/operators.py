"""Attention and its gradients as operators: their kernels call the public functions, for every check and plan."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...arrays.identity import of_key
from ...checks.values import check_layout
from ...errors import ArgumentError
from .. import FUNCTIONS
from .library import LIBRARY, TAGS, precision_of

_ARRAYS = "Tensor? mask, Tensor? sinks, Tensor[] arrays"
_OPTIONS = (
    "str layout, bool causal, SymInt[]? window, float? softmax_scale, float softcap, str? score_mod, bool deterministic"
)
_QKV = "Tensor q, Tensor k, Tensor v"
_PACKED = (
    "Tensor cu_seqlens_q, Tensor{} cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, {}SymInt max_seqlen_q, "
    "SymInt max_seqlen_k"
)
_OF_FORWARD, _OF_BACKWARD = _PACKED.format("?", "Tensor? block_table, "), _PACKED.format("", "")
_FORWARD = "str precision, bool return_lse"
_GRADIENTS = "Tensor do, {}, Tensor o, Tensor lse, Tensor? dlse"

_SCHEMAS = {
    "attention": f"({_QKV}, Tensor? block_mask, {_ARRAYS}, {_OPTIONS}, {_FORWARD}, SymInt[]? block_size) "
    "-> (Tensor, Tensor)",
    "attention_varlen": f"({_QKV}, {_OF_FORWARD}, {_ARRAYS}, {_OPTIONS}, {_FORWARD}) -> (Tensor, Tensor)",
    "attention_backward": f"({_GRADIENTS.format(_QKV)}, Tensor? block_mask, {_ARRAYS}, {_OPTIONS}, str[] wanted, "
    "SymInt[]? block_size) -> Tensor[]",
    "attention_varlen_backward": f"({_GRADIENTS.format(_QKV)}, {_OF_BACKWARD}, {_ARRAYS}, {_OPTIONS}, str[] wanted) "
    "-> Tensor[]",
    "merge_states": "(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b) -> (Tensor, Tensor)",
}  # fmt: skip

for _name, _schema in _SCHEMAS.items():
    LIBRARY.define(_name + _schema, tags=TAGS)


_OVERLOADS = {name: getattr(torch.ops.omniattn, name).default for name in _SCHEMAS}


def operator(name: str) -> Any:
    """The overload that calls go to."""
    return _OVERLOADS[name]


@functools.lru_cache(maxsize=256)
def _score_mod_parts(text: str) -> tuple[Any, ...]:
    return ast.literal_eval(text)


def score_mod_text(key: int, expression: str, mask: Any, grad: Any, names: tuple[str, ...]) -> str:
    """A ScoreMod without its arrays, as an operator takes it; `score_mod_of` reads it."""
    return f"({expression!r}, {mask!r}, {grad!r}, {names!r}, {key})"


_DROPOUT = "dropout "


def dropout_text(p: float) -> str:
    """Dropout by p as an operator takes it, in the place of a score modification; seed and offset are its array."""
    return f"{_DROPOUT}{p!r}"


def score_mod_of(text: str | None, arrays: Sequence[Any]) -> Any:
    """The ScoreMod of a text and arrays; its NumPy functions are those of the object it was made of, while it lives."""
    if text is None:
        return None
    expression, mask, grad, names, key = _score_mod_parts(text)
    alive = of_key(key)
    return FUNCTIONS["ScoreMod"](
        expression, mask, getattr(alive, "reference", None), grad, getattr(alive, "reference_grad", None),
        **dict(zip(names, arrays, strict=True)),
    )  # fmt: skip


def alive_score_mod(text: str | None) -> Any:
    """The object that a text was made of, while it lives: it has the functions that the text has not; or None."""
    return None if text is None or text.startswith(_DROPOUT) else of_key(_score_mod_parts(text)[-1])


# --- Kernels ---------------------------------------------------------------------------------------------------------


def _options(score: Sequence[Any], arrays: Sequence[Any]) -> dict[str, Any]:
    layout, causal, window, softmax_scale, softcap, score_mod, deterministic = score
    scores: dict[str, Any]
    if score_mod is not None and score_mod.startswith(_DROPOUT):
        scores = {"dropout_p": float(score_mod.removeprefix(_DROPOUT)), "dropout_rng": arrays[0]}
    else:
        scores = {"score_mod": score_mod_of(score_mod, arrays)}
    return {
        "layout": layout, "causal": causal, "window": None if window is None else tuple(window),
        "softmax_scale": softmax_scale, "softcap": softcap, "deterministic": deterministic, **scores,
    }  # fmt: skip


def _both(results: Any, return_lse: bool, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return results if return_lse else (results, q.new_empty((0,), dtype=torch.float32))


def _attention(
    q: Any, k: Any, v: Any, block_mask: Any, mask: Any, sinks: Any, arrays: Any, *more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *score, precision, return_lse, block_size = more
    results = FUNCTIONS["attention"](
        q, k, v, block_mask=block_mask, mask=mask, sinks=sinks, precision=precision_of(precision),
        return_lse=return_lse, block_size=None if block_size is None else tuple(block_size),
        **_options(score, arrays),
    )  # fmt: skip
    return _both(results, return_lse, q)


def _attention_varlen(
    q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, used_q: Any, used_k: Any, table: Any, max_q: int, max_k: int,
    mask: Any, sinks: Any, arrays: Any, *more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    *score, precision, return_lse = more
    results = FUNCTIONS["attention_varlen"](
        q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, seqused_q=used_q, seqused_k=used_k, block_table=table,
        max_seqlen_q=max_q, max_seqlen_k=max_k, mask=mask, sinks=sinks, precision=precision_of(precision),
        return_lse=return_lse, **_options(score, arrays),
    )  # fmt: skip
    return _both(results, return_lse, q)


def _attention_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, block_mask: Any, mask: Any, sinks: Any, arrays: Any,
    *more: Any,
) -> list[torch.Tensor]:  # fmt: skip
    *score, wanted, block_size = more
    return list(
        FUNCTIONS["attention_backward"](
            do, q, k, v, o, lse, dlse=dlse, block_mask=block_mask, mask=mask, sinks=sinks, wanted=tuple(wanted),
            block_size=None if block_size is None else tuple(block_size), **_options(score, arrays),
        )
    )  # fmt: skip


def _attention_varlen_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, starts_q: Any, starts_k: Any, used_q: Any,
    used_k: Any, max_q: int, max_k: int, mask: Any, sinks: Any, arrays: Any, *more: Any,
) -> list[torch.Tensor]:  # fmt: skip
    *score, wanted = more
    return list(
        FUNCTIONS["attention_varlen_backward"](
            do, q, k, v, o, lse, dlse=dlse, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, seqused_q=used_q,
            seqused_k=used_k, max_seqlen_q=max_q, max_seqlen_k=max_k, mask=mask, sinks=sinks,
            wanted=tuple(wanted), **_options(score, arrays),
        )
    )  # fmt: skip


def _merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return FUNCTIONS["merge_states"](o_a, lse_a, o_b, lse_b)


# --- Shapes, for tensors without memory ------------------------------------------------------------------------------


def _empty(like: torch.Tensor, shape: Sequence[Any] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_empty(tuple(like.shape if shape is None else shape), dtype=dtype or like.dtype)


def _lse_of(q: torch.Tensor, layout: str, packed: bool, return_lse: bool) -> torch.Tensor:
    if not return_lse:
        shape: tuple[Any, ...] = (0,)
    elif packed:
        rows, heads = (q.shape[0], q.shape[1]) if layout == "NHD" else (q.shape[1], q.shape[0])
        shape = (heads, rows)
    else:
        rows, heads = (q.shape[1], q.shape[2]) if layout == "NHD" else (q.shape[2], q.shape[1])
        shape = (q.shape[0], heads, rows)
    return _empty(q, shape, torch.float32)


def _check_ranks(function: str, layout: str, rank: int, **tensors: torch.Tensor) -> None:
    check_layout(layout, function)
    for name, x in tensors.items():
        if x.ndim != rank:
            raise ArgumentError(name, f"{rank} dimensions", f"shape {tuple(x.shape)}", function=function)


def _attention_shapes(q: Any, k: Any, v: Any, block_mask: Any, mask: Any, sinks: Any, arrays: Any, *more: Any) -> Any:
    _check_ranks("attention", more[0], 4, q=q, k=k, v=v)
    layout, return_lse = more[0], more[-2]
    return _empty(q, (*q.shape[:-1], v.shape[-1])), _lse_of(q, layout, False, return_lse)


def _varlen_shapes(
    q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, used_q: Any, used_k: Any, table: Any, max_q: Any, max_k: Any,
    mask: Any, sinks: Any, arrays: Any, *more: Any,
) -> Any:  # fmt: skip
    _check_ranks("attention_varlen", more[0], 3, q=q)
    _check_ranks("attention_varlen", more[0], 3 if table is None else 4, k=k, v=v)
    layout, return_lse = more[0], more[-1]
    return _empty(q, (*q.shape[:-1], v.shape[-1])), _lse_of(q, layout, True, return_lse)


def _gradients_shapes(q: Any, k: Any, v: Any, mask: Any, sinks: Any, wanted: Sequence[str]) -> list[torch.Tensor]:
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    made = {
        "dq": lambda: _empty(q), "dk": lambda: _empty(k), "dv": lambda: _empty(v),
        "dsinks": lambda: _empty(q, sinks.shape, sums), "dmask": lambda: _empty(q, mask.shape, sums),
    }  # fmt: skip
    return [made[name]() for name in wanted]


def _backward_shapes(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, block_mask: Any, mask: Any, sinks: Any, arrays: Any,
    *more: Any,
) -> Any:  # fmt: skip
    return _gradients_shapes(q, k, v, mask, sinks, more[-2])


def _varlen_backward_shapes(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, starts_q: Any, starts_k: Any, used_q: Any,
    used_k: Any, max_q: Any, max_k: Any, mask: Any, sinks: Any, arrays: Any, *more: Any,
) -> Any:  # fmt: skip
    return _gradients_shapes(q, k, v, mask, sinks, more[-1])


def _merge_shapes(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> Any:
    return _empty(o_a), _empty(lse_a)


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (_attention, _attention_shapes),
    "attention_varlen": (_attention_varlen, _varlen_shapes),
    "attention_backward": (_attention_backward, _backward_shapes),
    "attention_varlen_backward": (_attention_varlen_backward, _varlen_backward_shapes),
    "merge_states": (_merge_states, _merge_shapes),
}
for _name, (_kernel, _shapes) in _KERNELS.items():
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _key)
    torch.library.register_fake(f"omniattn::{_name}", _shapes, lib=LIBRARY)
