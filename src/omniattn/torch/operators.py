"""aten's operators of flash attention on this package's kernels: what torch's registry of implementations activates.

Each function here has the arguments and results of one operator of aten, as torch's own kernels have them; `Handlers`
puts them into the dispatcher, with the kernels that were there before behind them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from ..arguments import MAX_HEAD_DIM
from ..errors import UnsupportedError
from ..ops import attention, attention_backward, attention_varlen, attention_varlen_backward
from . import shapes

#: Whether torch has a registry of flash-attention implementations: 2.11 and newer.
HAS_IMPLEMENTATIONS = hasattr(torch.nn.attention, "register_flash_attention_impl")

_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALF, torch.float32, torch.float64)


# --- (batch, heads, seq, head_dim): what SDPA and context_parallel call -----------------------------------------------


def sdpa_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> tuple[Any, ...]:
    """Results of ``_scaled_dot_product_flash_attention``, whose causal mask is aligned at the bottom right."""
    out, lse = _dense(query, key, value, "HND", is_causal, None, scale)
    return out, lse, None, None, query.shape[2], key.shape[2], *_random_state(query), query.new_empty(0)


def sdpa_flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool,
    scale: float | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Results of ``_scaled_dot_product_flash_attention_backward``; out and logsumexp may be those of more keys."""
    return _dense_backward(grad_out, query, key, value, out, logsumexp, "HND", is_causal, None, scale)


def sdpa_cudnn(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Any, ...]:
    """Results of ``_scaled_dot_product_cudnn_attention``: mask, causality aligned at the top left, LSE of rank 4."""
    k, v, bias, causal, window = _top_left(query, key, value, attn_bias, is_causal)
    out, lse = _dense(query, k, v, "HND", causal, window, scale, bias)
    seed, offset = (torch.empty((), dtype=torch.long, device=query.device) for _ in range(2))
    return out, lse.unsqueeze(-1), None, None, query.shape[2], key.shape[2], seed, offset, None


def sdpa_cudnn_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    attn_bias: Tensor | None, is_causal: bool, scale: float | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Results of ``_scaled_dot_product_cudnn_attention_backward``."""
    k, v, bias, causal, window = _top_left(query, key, value, attn_bias, is_causal)
    lse = logsumexp.squeeze(-1) if logsumexp.dim() == 4 else logsumexp
    gradients = _gradients(query, key, value)
    results = tuple(gradients.values())
    if k is not key:
        # Keys behind the last query are seen by none.
        for name, x in (("dk", k), ("dv", v)):
            gradients[name][:, :, x.shape[2] :].zero_()
            gradients[name] = gradients[name][:, :, : x.shape[2]]
    _dense_backward(grad_out, query, k, v, out, lse, "HND", causal, window, scale, bias, gradients)
    return results


# --- (batch, seq, heads, head_dim), or packed rows (rows, heads, head_dim): what varlen_attn and nested tensors call --


def flash(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, max_q: int, max_k: int,
    is_causal: bool, scale: float | None, window: tuple[int, int] | None, out: Tensor | None = None,
    used_k: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Results of ``_flash_attention_forward``; the LSE of packed rows is (heads, rows)."""
    if starts_q is None:
        made, lse = _dense(query, key, value, "NHD", is_causal, window, scale, out=out)
    else:
        with torch.no_grad():
            made, lse = attention_varlen(
                *map(shapes.readable, (query, key, value)), cu_seqlens_q=_starts(starts_q),
                cu_seqlens_k=_starts(starts_k), max_seqlen_q=max_q, max_seqlen_k=max_k, causal=is_causal,
                seqused_k=used_k, window=window, softmax_scale=scale, out=_like(query) if out is None else out,
                return_lse=True,
            )  # fmt: skip
    return made, lse, *_random_state(query), query.new_empty(0)


def flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    starts_q: Tensor | None, starts_k: Tensor | None, max_q: int, max_k: int, is_causal: bool, scale: float | None,
    window: tuple[int, int] | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Results of ``_flash_attention_backward``."""
    if starts_q is None:
        return _dense_backward(grad_out, query, key, value, out, logsumexp, "NHD", is_causal, window, scale)
    q, k, v, o = map(shapes.readable, (query, key, value, out))
    with torch.no_grad():
        return attention_varlen_backward(
            grad_out, q, k, v, o, logsumexp.contiguous(), cu_seqlens_q=_starts(starts_q),
            cu_seqlens_k=_starts(starts_k), max_seqlen_q=max_q, max_seqlen_k=max_k, causal=is_causal, window=window,
            softmax_scale=scale, deterministic=_is_deterministic(),
            **_gradients(query, key, value),
        )  # fmt: skip


def _dense(
    query: Tensor, key: Tensor, value: Tensor, layout: str, causal: bool, window: Any, scale: float | None,
    mask: Tensor | None = None, out: Tensor | None = None,
) -> Any:  # fmt: skip
    # Kernels of the dispatcher are called with grad mode on, by tensors whose graph their caller makes. torch's own
    # give results in the memory layout of the query, and compiled graphs rely on it.
    with torch.no_grad():
        return attention(
            *map(shapes.readable, (query, key, value)), layout=layout, causal=causal, window=window,
            softmax_scale=scale, mask=mask, out=_like(query) if out is None else out, return_lse=True,
        )  # fmt: skip


def _dense_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, layout: str,
    causal: bool, window: Any, scale: float | None, mask: Tensor | None = None,
    gradients: dict[str, Tensor] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    q, k, v, o = map(shapes.readable, (query, key, value, out))
    with torch.no_grad():
        return attention_backward(
            grad_out, q, k, v, o, logsumexp.contiguous(), layout=layout, causal=causal, window=window,
            softmax_scale=scale, mask=mask, deterministic=_is_deterministic(),
            **(_gradients(query, key, value) if gradients is None else gradients),
        )  # fmt: skip


def _gradients(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Memory for gradients in the layouts that torch's own kernels give them."""
    return {name: _like(x) for name, x in (("dq", query), ("dk", key), ("dv", value))}


def _like(x: Tensor) -> Tensor:
    """Memory in x's layout where kernels can write that: a transposed last dimension they cannot."""
    made = torch.empty_like(x)
    return made if shapes.is_readable(made) else torch.empty_like(x, memory_format=torch.contiguous_format)


def _top_left(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor | None, bool, Any]:
    return shapes.causal_window(query, key, value, bias) if is_causal else (key, value, bias, False, None)


def _random_state(query: Tensor) -> tuple[Tensor, Tensor]:
    """What dropout's backward would need; never read, because calls with dropout are not ours."""
    return (
        torch.empty((2,), dtype=torch.uint64, device=query.device),
        torch.empty((), dtype=torch.uint64, device=query.device),
    )


def _starts(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


# --- What goes to the kernels that were there before ------------------------------------------------------------------


def lacks(tensors: tuple[Tensor, ...], rank: int | tuple[int, ...], dropout_p: float, **others: Any) -> str | None:
    """Why a call is not ours; None if it is.

    Parameters
    ----------
    tensors : tuple of tensor
        query, key, value.
    rank : int or tuple of int
        Dimensions that they may have.
    dropout_p : float
    **others
        Arguments that the kernels do not have: None or False where they are not used.
    """
    query, key, value = tensors
    for name, x in others.items():
        if x is not None and x is not False:
            return f"{name} is given"
    if dropout_p != 0.0:
        return "dropout_p is not 0"
    if query.dtype not in (_HALF if query.is_cuda else _FLOATS) or not query.dtype == key.dtype == value.dtype:
        return f"dtypes {query.dtype}, {key.dtype}, {value.dtype}"
    if query.dim() not in ((rank,) if isinstance(rank, int) else rank):
        return f"query has {query.dim()} dimensions"
    if key.shape != value.shape:
        return f"key has shape {tuple(key.shape)} and value {tuple(value.shape)}"
    size = query.shape[-1]
    if size % 8 != 0 or not 0 < size <= MAX_HEAD_DIM or key.shape[-1] != size:
        return f"head_dim {size}, {key.shape[-1]}"
    if query.is_cuda and not _has_kernels(query.get_device()):
        return "the GPU has a compute capability below 8.0"
    return None


@functools.cache
def _has_kernels(ordinal: int) -> bool:
    return torch.cuda.get_device_capability(ordinal) >= (8, 0)


def window_of(left: int | None, right: int | None) -> tuple[int, int] | None:
    """aten's window, where None and what is negative are unlimited."""
    left, right = (-1 if x is None or x < 0 else int(x) for x in (left, right))
    return None if left == right == -1 else (left, right)


class Handlers:
    """Kernels for the dispatcher: ours for what `lacks` allows, else those that were there before.

    Parameters
    ----------
    key : str
        Dispatch key: ``"CUDA"``. ``"CPU"`` serves tests.
    """

    def __init__(self, key: str = "CUDA") -> None:
        self.key = key
        #: Each operator's kernel of before, by the operator's name; None where it had none.
        self.before: dict[str, Any] = {}
        #: Our function of each operator.
        self.functions: dict[str, Callable[..., Any]] = {
            "_scaled_dot_product_flash_attention": self._sdpa_flash,
            "_scaled_dot_product_flash_attention_backward": self._sdpa_flash_backward,
            "_flash_attention_forward": self._flash,
            "_flash_attention_backward": self._flash_backward,
            # On GPUs of compute capability 9.0 and 10.0, SDPA asks cuDNN first.
            "_scaled_dot_product_cudnn_attention": self._sdpa_cudnn,
            "_scaled_dot_product_cudnn_attention_backward": self._sdpa_cudnn_backward,
        }
        if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
            self.functions["_flash_attention_forward_no_dropout_inplace"] = self._flash_inplace

    def _pass_on(self, why: str, operator: str, keys: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        kernel = self.before.get(operator)
        if kernel is None:
            raise UnsupportedError(
                f"aten::{operator} by omniattn: {why}, and torch has no other kernel of it for {self.key}",
                instead="torch.nn.attention.restore_flash_attention_impl()",
            )
        return kernel.call_boxed(keys, *args, **{name: x for name, x in options.items() if x is not None})

    def _sdpa_flash(
        self, keys: Any, query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False,
        return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        why = lacks((query, key, value), 4, dropout_p, return_debug_mask=return_debug_mask)
        if why is None:
            return sdpa_flash(query, key, value, is_causal, scale)
        args = (query, key, value, dropout_p, is_causal, return_debug_mask)
        return self._pass_on(why, "_scaled_dot_product_flash_attention", keys, args, {"scale": scale})

    def _sdpa_flash_backward(
        self, keys: Any, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any,
        cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any,
        philox_offset: Any, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        why = lacks((query, key, value), 4, dropout_p)
        if why is None:
            return sdpa_flash_backward(grad_out, query, key, value, out, logsumexp, is_causal, scale)
        args = (
            grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
            philox_seed, philox_offset,
        )  # fmt: skip
        return self._pass_on(why, "_scaled_dot_product_flash_attention_backward", keys, args, {"scale": scale})

    def _sdpa_cudnn(
        self, keys: Any, query: Any, key: Any, value: Any, attn_bias: Any, compute_log_sumexp: bool,
        dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
        scale: float | None = None,
    ) -> Any:  # fmt: skip
        why = lacks((query, key, value), 4, dropout_p, return_debug_mask=return_debug_mask)
        if why is None:
            return sdpa_cudnn(query, key, value, attn_bias, is_causal, scale)
        args = (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask)
        return self._pass_on(why, "_scaled_dot_product_cudnn_attention", keys, args, {"scale": scale})

    def _sdpa_cudnn_backward(
        self, keys: Any, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, philox_seed: Any,
        philox_offset: Any, attn_bias: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
        is_causal: bool, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        why = lacks((query, key, value), 4, dropout_p)
        if why is None:
            return sdpa_cudnn_backward(grad_out, query, key, value, out, logsumexp, attn_bias, is_causal, scale)
        args = (
            grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
            max_q, max_k, dropout_p, is_causal,
        )  # fmt: skip
        return self._pass_on(why, "_scaled_dot_product_cudnn_attention_backward", keys, args, {"scale": scale})

    def _flash(
        self, keys: Any, query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, **options: Any,
    ) -> Any:  # fmt: skip
        why = self._lacks_flash((query, key, value), cum_seq_q, cum_seq_k, dropout_p, return_debug_mask, options)
        if why is None:
            return flash(
                query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, options.get("scale"),
                window_of(options.get("window_size_left"), options.get("window_size_right")), options.get("out"),
                options.get("seqused_k"),
            )  # fmt: skip
        args = (query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask)
        return self._pass_on(why, "_flash_attention_forward", keys, args, options)

    def _flash_inplace(
        self, keys: Any, out: Any, query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int,
        max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, **options: Any,
    ) -> Any:  # fmt: skip
        why = self._lacks_flash((query, key, value), cum_seq_q, cum_seq_k, dropout_p, return_debug_mask, options)
        if why is None:
            return flash(
                query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, options.get("scale"),
                window_of(options.get("window_size_left"), options.get("window_size_right")), out,
                options.get("seqused_k"),
            )[1]  # fmt: skip
        args = (out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask)
        return self._pass_on(why, "_flash_attention_forward_no_dropout_inplace", keys, args, options)

    def _flash_backward(
        self, keys: Any, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any,
        cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Any, unused: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        why = self._lacks_flash((query, key, value), cum_seq_q, cum_seq_k, dropout_p, False, options)
        if why is None:
            return flash_backward(
                grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, is_causal,
                options.get("scale"), window_of(options.get("window_size_left"), options.get("window_size_right")),
            )  # fmt: skip
        args = (
            grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
            rng_state, unused,
        )  # fmt: skip
        return self._pass_on(why, "_flash_attention_backward", keys, args, options)

    def _lacks_flash(
        self, tensors: tuple[Any, ...], starts_q: Any, starts_k: Any, dropout_p: float, return_debug_mask: bool,
        options: dict[str, Any],
    ) -> str | None:  # fmt: skip
        served = ("scale", "window_size_left", "window_size_right", "out")
        others = {name: x for name, x in options.items() if name not in served}
        if starts_q is not None:
            others.pop("seqused_k", None)
        if (starts_q is None) != (starts_k is None):
            return "cum_seq_q or cum_seq_k is missing"
        rank = 4 if starts_q is None else 3
        return lacks(tensors, rank, dropout_p, return_debug_mask=return_debug_mask, **others)
