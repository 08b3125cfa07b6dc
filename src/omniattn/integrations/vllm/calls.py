"""What the backend calls, on vLLM's arrays; nothing of vLLM is imported here.

A layer's keys and values are one tensor (blocks, num_kv_heads, block_size, row) of any strides. Its rows are K | V, or,
with a scale for each token and head, K | V | scale of K | scale of V | 8 bytes of padding, which keep rows on 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import omniattn

from ...arguments import MAX_HEAD_DIM, MAX_QUANTIZED_HEAD_DIM
from ...errors import ShapeError
from .common import EXACT, FUNCTION, check_format

__all__ = [
    "FORMATS", "Layer", "Scales", "Step", "attend", "attend_divided", "attend_encoder", "pool_of", "row_bytes",
    "why_not", "write",
]  # fmt: skip

#: vLLM's names of cache formats: element type of the rows, and whether each row has a scale.
_CODES = {
    "fp8": (torch.float8_e4m3fn, False),
    "fp8_e4m3": (torch.float8_e4m3fn, False),
    "fp8_per_token_head": (torch.float8_e4m3fn, True),
    "int8_per_token_head": (torch.int8, True),
}
#: Formats that are served.
FORMATS = ("auto", *EXACT, *_CODES)
#: Of (o, lse) over some keys, those over all keys.
Combine = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
#: Scales of K and of V, fp32, one or one for each kv head; read where the cache has none of its own.
Scales = tuple[Any, Any]
_SCALE_BYTES = 16


@dataclass
class Step:
    """The requests of one step, as vLLM's other backends name them.

    Attributes
    ----------
    num_actual_tokens : int
        Rows of q, those of padding that a CUDA graph has included.
    max_query_len, max_seq_len : int
        At least those of the longest request.
    query_start_loc : tensor, (requests + 1,), int32
    seq_lens : tensor, (requests,), int32
        With the new tokens; 0 of padding.
    block_table : tensor, (requests, max_blocks), int32
    slot_mapping : tensor, (tokens,), int64
    causal : bool
    context_lens : tensor, (requests,), int32, or None
        Under context parallelism: tokens of this rank's part of the cache that are older than the new ones.
    has_context : bool
        Whether any rank has such tokens.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    context_lens: torch.Tensor | None = None
    has_context: bool = True


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer of attention does not change.

    Attributes
    ----------
    num_heads, num_kv_heads, head_size : int
    scale, softcap : float
    sliding_window : int or None
        Keys that a query sees at most, its own included.
    kv_cache_dtype : str
        vLLM's name of the cache's format.
    deterministic : bool
        Results do not depend on the batch.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    softcap: float
    sliding_window: int | None
    kv_cache_dtype: str
    deterministic: bool

    def window(self, causal: bool) -> tuple[int, int] | None:
        """The window; of queries that see keys behind their own it is as wide there, as in vLLM."""
        if self.sliding_window is None:
            return None
        left = self.sliding_window - 1
        return left, 0 if causal else left


def why_not(head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None) -> str | None:
    """Why a layer is not served, by its head and formats; None if it is."""
    if dtype not in EXACT.values():
        return f"{dtype}: only torch.float16 and torch.bfloat16"
    if kv_cache_dtype is not None and kv_cache_dtype not in FORMATS:
        return f"kv_cache_dtype {kv_cache_dtype!r}: only {', '.join(FORMATS)}"
    codes = kv_cache_dtype in _CODES
    step = 16 if codes else 8
    most = MAX_QUANTIZED_HEAD_DIM if codes else MAX_HEAD_DIM
    if head_size % step or not step <= head_size <= most:
        of = f" with kv_cache_dtype {kv_cache_dtype!r}" if codes else ""
        return f"head_size {head_size}{of}: only multiples of {step} up to {most}"
    if EXACT.get(str(kv_cache_dtype), dtype) != dtype:
        return f"kv_cache_dtype {kv_cache_dtype!r} with {dtype}: only 'auto', or that of the model"
    return None


def row_bytes(head_size: int, kv_cache_dtype: str) -> int | None:
    """Bytes of a token and head, K and V, where they are not those of vLLM's own packing."""
    if _CODES.get(kv_cache_dtype, (None, False))[1]:
        return 2 * head_size + _SCALE_BYTES
    return None


def pool_of(kv_cache: torch.Tensor, layer: Layer, scales: Scales) -> Any:
    """A layer's pool as a `PagedKVCache`."""
    dim = layer.head_size
    check_format(kv_cache, layer.kv_cache_dtype, FORMATS, tuple(_CODES))
    dtype, each_row = _CODES.get(layer.kv_cache_dtype, (None, False))
    width = 2 * dim + (_SCALE_BYTES if each_row else 0)
    if kv_cache.dim() != 4 or kv_cache.shape[1] != layer.num_kv_heads or kv_cache.shape[3] != width:
        expected = f"(blocks, {layer.num_kv_heads} kv heads, tokens, {width})"
        raise ShapeError("kv_cache", expected, tuple(kv_cache.shape), function=FUNCTION)
    if dtype is None:
        return omniattn.PagedKVCache.from_arrays(kv_cache, layout="HND")
    if kv_cache.dtype != dtype:
        kv_cache = kv_cache.view(dtype)
    if not each_row:
        return omniattn.PagedKVCache.from_arrays(kv_cache, layout="HND", k_scale=scales[0], v_scale=scales[1])
    k, v, of_rows = kv_cache.split([dim, dim, _SCALE_BYTES], dim=3)
    of_k, of_v, *_ = of_rows.view(torch.float32).unbind(3)
    return omniattn.PagedKVCache.from_arrays(k, v, layout="HND", k_scale=of_k, v_scale=of_v)


def write(
    kv_cache: torch.Tensor, layer: Layer, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, scales: Scales
) -> None:
    """New tokens into a layer's pool; k, v: (tokens, num_kv_heads, head_size), at least as many as there are slots."""
    omniattn.append(pool_of(kv_cache, layer, scales), k, v, slot_mapping=slots)


def attend(
    q: torch.Tensor, kv_cache: torch.Tensor, layer: Layer, step: Step, out: torch.Tensor, sinks: Any, scales: Scales
) -> None:
    """Attention of a step's new tokens over the pool; q, out: (num_actual_tokens, num_heads, head_size)."""
    omniattn.attention_with_kvcache(
        q, pool_of(kv_cache, layer, scales), seq_lens=step.seq_lens, block_table=step.block_table.contiguous(),
        cu_seqlens_q=step.query_start_loc, max_seqlen_q=step.max_query_len, causal=step.causal,
        window=layer.window(step.causal), softmax_scale=layer.scale, softcap=layer.softcap, sinks=sinks, out=out,
        deterministic=layer.deterministic,
    )  # fmt: skip


def attend_encoder(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, step: Step, causal: bool, sinks: Any,
    out: torch.Tensor, *, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of each request's new tokens over themselves, without a pool: encoders."""
    return omniattn.attention_varlen(
        q, k, v, cu_seqlens_q=step.query_start_loc, cu_seqlens_k=step.query_start_loc,
        max_seqlen_q=step.max_query_len, max_seqlen_k=step.max_query_len, causal=causal, window=layer.window(causal),
        softmax_scale=layer.scale, softcap=layer.softcap, sinks=sinks, out=out, return_lse=return_lse,
        deterministic=layer.deterministic,
    )  # fmt: skip


def attend_divided(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, layer: Layer, step: Step,
    out: torch.Tensor, sinks: Any, gather: Callable[[torch.Tensor], torch.Tensor], combine: Combine,
    scales: Scales,
) -> None:  # fmt: skip
    """`attend` under context parallelism of decoding: each rank's pool has a part of each request's tokens.

    Parameters
    ----------
    gather : function
        q of all ranks, (tokens, ranks * num_heads, head_size).
    combine : function
        (o, lse) of all ranks' heads over this rank's older tokens -> (o, lse) of this rank's heads over those of all
        ranks; lse (tokens, heads), natural log.
    """
    new, lse_new = attend_encoder(q, k, v, layer, step, step.causal, sinks, out, return_lse=True)
    if not step.has_context:
        return
    assert step.context_lens is not None
    everybody = gather(q)
    older, lse = omniattn.attention_with_kvcache(
        everybody, pool_of(kv_cache, layer, scales), seq_lens=step.context_lens,
        block_table=step.block_table.contiguous(), cu_seqlens_q=step.query_start_loc, max_seqlen_q=step.max_query_len,
        causal=False, softmax_scale=layer.scale, softcap=layer.softcap, return_lse=True,
        deterministic=layer.deterministic,
    )  # fmt: skip
    older, lse = combine(older, lse.transpose(0, 1).contiguous())
    omniattn.merge_states(new, lse_new, older, lse.transpose(0, 1), out=out)
