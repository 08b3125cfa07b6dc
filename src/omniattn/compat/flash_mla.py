"""FlashMLA's dense functions (``flash_mla`` 1.0) on omniattn: the same signatures, defaults and results.

``from omniattn.compat.flash_mla import flash_mla_with_kvcache``, or ``omniattn.compat.install("flash_mla")`` for code
that imports the original. Decoding runs on compute capability 9.0, with pages of any size, and on the CPU (NumPy
reference). Tensors are float16 or bfloat16.

Scheduling metadata is not needed, as the kernels divide the work themselves: what `get_mla_metadata` gives may be
reused for other shapes and lengths. Sparse attention (``indices``) and rows in 8 bits raise, and
``flash_mla_sparse_fwd`` is not here.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import arguments
from ..errors import ArgumentError, ShapeError
from ..kv.cache import PagedKVCache
from ..ops import decode
from . import common

__version__ = "1.0.0"

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]


class FlashMLASchedMeta:
    """What `flash_mla_with_kvcache` takes as ``tile_scheduler_metadata``; it holds nothing."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Metadata for `flash_mla_with_kvcache`, and None for its ``num_splits``; arguments have no effect."""
    return FlashMLASchedMeta(), None


@torch.compiler.disable
@torch.no_grad()
def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent attention of new tokens over a cache in pages (`omniattn.decode`), without gradients.

    Parameters
    ----------
    q : tensor, (batch_size, seq_len_q, num_heads_q, 576), float16 or bfloat16
        With ``causal`` at most 16 tokens a sequence; without, any number of rows.
    k_cache : tensor, (num_blocks, page_block_size, 1, 576), like q
        A token's row; its first ``head_dim_v`` channels are the value. Pages of any size.
    block_table : tensor, (batch_size, max_num_blocks_per_seq), int32
    cache_seqlens : tensor, (batch_size,), int32
        Tokens of each sequence, the new ones included.
    head_dim_v : int
        512; on the CPU other multiples of 8 below the rows' width too.
    tile_scheduler_metadata : FlashMLASchedMeta
        Without effect. None is taken as well.
    softmax_scale : float, optional
        576^-0.5 unless given.
    causal : bool
        The last token sees all keys, each token before it one less; otherwise all of them see all keys.
    num_splits, is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, \
extra_topk_length
        Their defaults.

    Returns
    -------
    out : tensor, (batch_size, seq_len_q, num_heads_q, head_dim_v)
    softmax_lse : tensor, (batch_size, num_heads_q, seq_len_q), float32
        Natural logarithm; +inf, with an out of 0, where a row has no key.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.decode`; before anything is written.
    """
    name = "flash_mla_with_kvcache"
    common.check_tensors(name, q=q, k_cache=k_cache, block_table=block_table, cache_seqlens=cache_seqlens)
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta | None):
        received, expected = type(tile_scheduler_metadata).__name__, "what get_mla_metadata of this module gives"
        raise ArgumentError("tile_scheduler_metadata", expected, received, function=name)
    if num_splits is not None:
        raise ArgumentError("num_splits", "None", type(num_splits).__name__, function=name)
    common.refuse(
        name, "attention over chosen rows and over rows in 8 bits has no kernel here", None, indices=(indices, None),
        attn_sink=(attn_sink, None), extra_k_cache=(extra_k_cache, None), topk_length=(topk_length, None),
        extra_indices_in_kvcache=(extra_indices_in_kvcache, None), extra_topk_length=(extra_topk_length, None),
        is_fp8_kvcache=(common.flag(is_fp8_kvcache, "is_fp8_kvcache", name), False),
    )  # fmt: skip
    common.check_rank(q, "q", "(batch_size, seq_len_q, num_heads_q, head_dim)", name)
    common.check_rank(k_cache, "k_cache", "(num_blocks, page_block_size, 1, head_dim)", name)
    if k_cache.shape[-1] != q.shape[-1]:
        expected = f"{q.shape[-1]} channels, like q"
        raise ShapeError("k_cache", expected, f"shape {tuple(k_cache.shape)}", function=name)
    cache = PagedKVCache.from_arrays(k_cache, head_dim_v=arguments.check_int(head_dim_v, "head_dim_v", name))
    batch, rows, heads, _ = q.shape
    is_one = not common.flag(causal, "causal", name) and rows > 1
    if is_one:
        # Rows that see the same keys are heads of one token.
        q = q.reshape(batch, 1, rows * heads, q.shape[-1])
    out, lse = decode(
        common.contiguous_rows(q), cache, seq_lens=cache_seqlens, block_table=block_table,
        softmax_scale=softmax_scale, return_lse=True,
    )  # fmt: skip
    if is_one:
        out = out.reshape(batch, rows, heads, out.shape[-1])
        lse = lse.reshape(batch, rows, heads).transpose(1, 2).contiguous()
    return out, common.infinite(lse)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_qo: Any,
    cu_seqlens_kv: Any,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed sequences (`omniattn.attention_varlen`), differentiable by q, k and v.

    Parameters
    ----------
    q, k, v : tensor, (total, heads, head_dim)
        Heads of k and v divide those of q; v may have another head_dim than q and k.
    cu_seqlens_qo, cu_seqlens_kv : tensor, (batch + 1,), int32
    max_seqlen_qo, max_seqlen_kv : int
    dropout_p : float
        0.
    softmax_scale : float, optional
        1 / sqrt(head_dim) of q unless given.
    causal, deterministic : bool
        As `omniattn.attention_varlen`.
    is_varlen : bool
        Without effect: cu_seqlens say the lengths.

    Returns
    -------
    out : tensor, (total_q, heads, head_dim of v)
    softmax_lse : tensor, (total_q, heads), float32
        Natural logarithm; -inf where a row has no key.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.attention_varlen`.
    """
    name = "flash_attn_varlen_func"
    common.refuse_dropout(dropout_p, name)
    common.flag(is_varlen, "is_varlen", name)
    packed = {
        "cu_seqlens_q": cu_seqlens_qo, "cu_seqlens_k": cu_seqlens_kv, "max_seqlen_q": max_seqlen_qo,
        "max_seqlen_k": max_seqlen_kv,
    }  # fmt: skip
    out, lse = common.attend(
        name, q, k, v, packed=packed, softmax_scale=softmax_scale, causal=causal, deterministic=deterministic,
        return_lse=True,
    )  # fmt: skip
    assert lse is not None
    return out, lse.T


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn_varlen_func` of rows that hold q, k and v.

    Parameters
    ----------
    qkv : tensor, (total, heads, 2 * head_dim_qk + head_dim of v)
    head_dim_qk : int
        Channels of q, and of k.
    cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, deterministic, is_varlen
        As there.
    """
    q, k, v = _split(qkv, "qkv", head_dim_qk, 2, "flash_attn_varlen_qkvpacked_func")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, deterministic,
        is_varlen,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_qo: Any,
    cu_seqlens_kv: Any,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn_varlen_func` of rows that hold k and v.

    Parameters
    ----------
    kv : tensor, (total, heads, head_dim_qk + head_dim of v)
    head_dim_qk : int
        Channels of k.
    q, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, dropout_p, softmax_scale, causal, deterministic, \
is_varlen
        As there.
    """
    name = "flash_attn_varlen_kvpacked_func"
    k, v = _split(kv, "kv", head_dim_qk, 1, name)
    common.check_tensors(name, q=q)
    if q.shape[-1] != head_dim_qk:
        raise ArgumentError("head_dim_qk", f"{q.shape[-1]}, the channels of q", f"{head_dim_qk}", function=name)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, dropout_p, softmax_scale, causal,
        deterministic, is_varlen,
    )  # fmt: skip


def _split(x: Any, name: str, head_dim_qk: Any, count: int, function: str) -> tuple[torch.Tensor, ...]:
    """Parts of rows: ``count`` of head_dim_qk channels, and the rest."""
    common.check_tensors(function, **{name: x})
    common.check_rank(x, name, "(total, heads, channels)", function)
    width = arguments.check_int(head_dim_qk, "head_dim_qk", function, least=1)
    rest = x.shape[-1] - count * width
    if rest < 1:
        expected = f"more than {count * width} channels with head_dim_qk={width}"
        raise ShapeError(name, expected, f"shape {tuple(x.shape)}", function=function)
    return x.split([*[width] * count, rest], -1)
