"""What the backend calls for latent attention (MLA), on vLLM's arrays; nothing of vLLM is imported here.

A layer's cache is one tensor (blocks, block_size, 576) of any block stride: 512 latent channels and 64 with rotary
positions, or 656 bytes a token ("fp8_ds_mla"). vLLM's own operation writes the rows. Single tokens and drafts attend
over them as they are, with queries that vLLM has multiplied by the up-projection of K; prompts over keys and values
that vLLM has made of them, in heads of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import omniattn

from ...errors import ShapeError
from ...kv.formats import LATENT_ROW_BYTES
from ..latent_limits import HEAD_DIM, HEAD_DIM_V, MOST_CHANNELS, takes_heads
from .common import EXACT, FUNCTION, check_format

__all__ = [
    "LATENT_FORMATS", "Latent", "attend_latent", "attend_prompt", "attend_rows", "joined", "latent_pool",
    "why_not_latent", "why_not_prompt",
]  # fmt: skip

_CODES = ("fp8", "fp8_e4m3")
_OWN_SCALES = "fp8_ds_mla"
#: vLLM's names of cache formats that are served.
LATENT_FORMATS = ("auto", *EXACT, *_CODES, _OWN_SCALES)


@dataclass(frozen=True, slots=True)
class Latent:
    """What a layer of latent attention does not change.

    Attributes
    ----------
    scale : float
        Of the scores: 1 / sqrt of the channels before the up-projection was absorbed, times what the model has.
    kv_cache_dtype : str
        vLLM's name of the cache's format.
    deterministic : bool
        Results do not depend on the batch.
    """

    scale: float
    kv_cache_dtype: str
    deterministic: bool


def why_not_latent(head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None) -> str | None:
    """Why a layer is not served, by its rows and formats; None if it is."""
    if dtype not in EXACT.values():
        return f"{dtype}: only torch.float16 and torch.bfloat16"
    if head_size != HEAD_DIM:
        return f"head_size {head_size} with MLA: only {HEAD_DIM}, kv_lora_rank {HEAD_DIM_V} and qk_rope_head_dim 64"
    if kv_cache_dtype is not None and kv_cache_dtype not in LATENT_FORMATS:
        return f"kv_cache_dtype {kv_cache_dtype!r} with MLA: only {', '.join(LATENT_FORMATS)}"
    if kv_cache_dtype == _OWN_SCALES and dtype != torch.bfloat16:
        return f"kv_cache_dtype {kv_cache_dtype!r} with {dtype}: only torch.bfloat16"
    if EXACT.get(str(kv_cache_dtype), dtype) != dtype:
        return f"kv_cache_dtype {kv_cache_dtype!r} with {dtype}: only 'auto', or that of the model"
    return None


def why_not_prompt(qk_head_dim: int, v_head_dim: int) -> str | None:
    """Why the heads of prompts are not served; None if they are."""
    for name, dim in (("qk_nope_head_dim + qk_rope_head_dim", qk_head_dim), ("v_head_dim", v_head_dim)):
        if not takes_heads(dim):
            return f"{name} {dim}: only multiples of 8 up to {MOST_CHANNELS}"
    return None


def latent_pool(kv_cache: torch.Tensor, kv_cache_dtype: str, k_scale: torch.Tensor | None) -> Any:
    """A layer's cache as a `PagedKVCache`.

    Parameters
    ----------
    kv_cache : tensor, (blocks, block_size, 576), or of 656 bytes a row
    kv_cache_dtype : str
    k_scale : tensor of one element, fp32
        Of e4m3 rows.
    """
    has_own_scales = kv_cache_dtype == _OWN_SCALES
    check_format(kv_cache, kv_cache_dtype, LATENT_FORMATS, (*_CODES, _OWN_SCALES))
    width = LATENT_ROW_BYTES if has_own_scales else HEAD_DIM
    if kv_cache.dim() != 3 or kv_cache.shape[2] != width:
        raise ShapeError("kv_cache", f"(blocks, block_size, {width})", tuple(kv_cache.shape), function=FUNCTION)
    scale = None
    if kv_cache_dtype in _CODES:
        kv_cache = kv_cache if kv_cache.dtype == torch.float8_e4m3fn else kv_cache.view(torch.float8_e4m3fn)
        scale = None if k_scale is None else k_scale.reshape(1)
    elif has_own_scales and kv_cache.dtype != torch.uint8:
        kv_cache = kv_cache.view(torch.uint8)
    return omniattn.PagedKVCache.from_arrays(kv_cache.unsqueeze(2), head_dim_v=HEAD_DIM_V, k_scale=scale)


def joined(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Queries (tokens, heads, 576), which vLLM has in two parts or in one."""
    return torch.cat(q, dim=-1) if isinstance(q, tuple) else q


def attend_latent(
    q: torch.Tensor, kv_cache: torch.Tensor, latent: Latent, *, seq_lens: torch.Tensor, block_table: torch.Tensor,
    query_start_loc: torch.Tensor, max_query_len: int, k_scale: torch.Tensor | None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of single tokens and drafts over the cache.

    Parameters
    ----------
    q : tensor, (tokens, heads, 576)
    seq_lens : tensor, (requests,), int32
        With the new tokens.
    block_table : tensor, (requests, max_blocks), int32
    query_start_loc : tensor, (requests + 1,), int32
        Rows behind the last one are nobody's: their o is 0.
    max_query_len : int
        At least that of the request with the most rows.

    Returns
    -------
    o : tensor, (tokens, heads, 512)
    lse : tensor, (tokens, heads), fp32, natural logarithm
        With ``return_lse``; of a request whose length is 0 it is -inf.
    """
    found = omniattn.attention_with_kvcache(
        q, latent_pool(kv_cache, latent.kv_cache_dtype, k_scale), seq_lens=seq_lens,
        block_table=block_table.contiguous(), cu_seqlens_q=query_start_loc, max_seqlen_q=max(max_query_len, 1),
        causal=True, softmax_scale=latent.scale, return_lse=return_lse, deterministic=latent.deterministic,
    )  # fmt: skip
    if not return_lse:
        return found
    o, lse = found
    return o, lse.transpose(0, 1)


def attend_rows(
    q: torch.Tensor, kv_cache: torch.Tensor, latent: Latent, *, indices: torch.Tensor, lengths: torch.Tensor,
    k_scale: torch.Tensor | None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of each token over the rows that its list names (DeepSeek sparse attention).

    Parameters
    ----------
    q : tensor, (tokens, heads, 576)
    indices : tensor, (tokens, topk), int32
        block * block_size + token. Numbers below 0 are no rows.
    lengths : tensor, (tokens,), int32
        Entries of each list that count.

    Returns
    -------
    o : tensor, (tokens, heads, 512)
    lse : tensor, (tokens, heads), fp32, natural logarithm
        With ``return_lse``; -inf of a list without rows.
    """
    return omniattn.attention_sparse(
        q, latent_pool(kv_cache, latent.kv_cache_dtype, k_scale), indices=indices, topk_length=lengths,
        softmax_scale=latent.scale, return_lse=return_lse, deterministic=latent.deterministic,
    )  # fmt: skip


def attend_prompt(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, scale: float, causal: bool, return_lse: bool, deterministic: bool,
    out: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of prompts in heads of their own: over their new tokens, or over a part of the older ones.

    Parameters
    ----------
    q, k : tensor, (tokens, heads, qk_head_dim)
    v : tensor, (tokens, heads, v_head_dim)
        A part of rows that have the keys' channels beside it, as vLLM's up-projection gives them.

    Returns
    -------
    o : tensor, (tokens, heads, v_head_dim)
    lse : tensor, (heads, tokens), fp32, natural logarithm
        With ``return_lse``.
    """
    return omniattn.attention_varlen(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, causal=causal, softmax_scale=scale, return_lse=return_lse, out=out,
        deterministic=deterministic,
    )  # fmt: skip
