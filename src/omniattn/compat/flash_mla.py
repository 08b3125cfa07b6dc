"""FlashMLA's functions (``flash_mla`` 1.0) on omniattn: the same signatures, defaults and results.

``from omniattn.compat.flash_mla import flash_mla_with_kvcache``, or ``omniattn.compat.install("flash_mla")`` for code
that imports the original. Decoding, dense and sparse, and sparse prefill run on the GPUs of `omniattn.decode` over
latent caches, with pages of any size and any number of heads, and on the CPU (NumPy reference).

Scheduling metadata is not needed, as the kernels divide the work themselves: what `get_mla_metadata` gives may be
reused for other shapes and lengths. A second cache (``extra_k_cache``) raises.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import arguments
from ..errors import ArgumentError, DtypeError, ShapeError
from ..kv.cache import PagedKVCache
from ..kv.formats import LATENT_656_DIM, LATENT_ROW_BYTES
from ..ops import attention_sparse, decode
from . import common

__version__ = "1.0.0"

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

#: What the functions of packed sequences call our arguments.
_NAMES = {
    "cu_seqlens_q": "cu_seqlens_qo", "cu_seqlens_k": "cu_seqlens_kv", "max_seqlen_q": "max_seqlen_qo",
    "max_seqlen_k": "max_seqlen_kv",
}  # fmt: skip
#: And what those of packed rows call theirs.
_KV_PACKED = {"k": "kv", "v": "kv"}
_QKV_PACKED = {
    "q": "qkv", "k": "qkv", "v": "qkv", "cu_seqlens_qo": "cu_seqlens", "cu_seqlens_kv": "cu_seqlens",
    "max_seqlen_qo": "max_seqlen", "max_seqlen_kv": "max_seqlen",
}  # fmt: skip


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
        With ``causal`` at most 16 tokens a sequence; without, or with ``indices``, any number of rows.
    k_cache : tensor, (num_blocks, page_block_size, 1, 576) or (num_blocks, page_block_size, 1, 656)
        A token's row; its first ``head_dim_v`` channels are the value. Pages of any size. In q's type; or, with
        ``is_fp8_kvcache``, rows of 656 bytes (`omniattn.KVCache.from_arrays`) as float8_e4m3fn, uint8 or int8, or of
        576 channels as float8_e4m3fn.
    block_table : tensor, (batch_size, max_num_blocks_per_seq), int32
        Without effect with ``indices``, as ``cache_seqlens``: tensors or None then.
    cache_seqlens : tensor, (batch_size,), int32
        Tokens of each sequence, the new ones included.
    head_dim_v : int
        512; on the CPU, of rows in 16 bits, other multiples of 8 below the rows' width too.
    tile_scheduler_metadata : FlashMLASchedMeta
        Without effect. None is taken as well.
    softmax_scale : float, optional
        576^-0.5 unless given.
    causal : bool
        The last token sees all keys, each token before it one less; otherwise all of them see all keys. False with
        ``indices``.
    is_fp8_kvcache : bool
        Whether ``k_cache`` is in 8 bits. FlashMLA wants True with ``indices``; here rows in 16 bits are served too.
    indices : tensor, (batch_size, seq_len_q, topk), int32, optional
        Rows that each query token attends to, block * page_block_size + token. Those below 0 or beyond the cache are
        no keys.
    attn_sink : tensor, (num_heads_q,), float32, optional
        With ``indices``: out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)), and rounded again; the LSE does
        not count it. +inf makes out 0, -inf has no effect.
    topk_length : tensor, (batch_size,), int32, optional
        With ``indices``: entries of each list of a sequence that count, from the first on.
    num_splits, extra_k_cache, extra_indices_in_kvcache, extra_topk_length
        None.

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
    common.check_tensors(name, q=q, k_cache=k_cache)
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta | None):
        received, expected = type(tile_scheduler_metadata).__name__, "what get_mla_metadata of this module gives"
        raise ArgumentError("tile_scheduler_metadata", expected, received, function=name)
    if num_splits is not None:
        raise ArgumentError("num_splits", "None", type(num_splits).__name__, function=name)
    common.refuse(
        name, "keys of a second cache have no kernel here", None, extra_k_cache=(extra_k_cache, None),
        extra_indices_in_kvcache=(extra_indices_in_kvcache, None), extra_topk_length=(extra_topk_length, None),
    )  # fmt: skip
    common.check_rank(q, "q", "(batch_size, seq_len_q, num_heads_q, head_dim)", name)
    common.check_rank(k_cache, "k_cache", "(num_blocks, page_block_size, 1, head_dim)", name)
    rows = _rows(q, k_cache, common.flag(is_fp8_kvcache, "is_fp8_kvcache", name), name)
    width = arguments.check_int(head_dim_v, "head_dim_v", name)
    with common.told(name, k="k_cache"):
        cache = PagedKVCache.from_arrays(rows, head_dim_v=width)
    is_causal = common.flag(causal, "causal", name)
    if indices is not None:
        if is_causal:
            raise ArgumentError("causal", "False with indices, which name each key", "True", function=name)
        unused = {"block_table": block_table, "cache_seqlens": cache_seqlens}
        common.check_tensors(name, **{of_pages: x for of_pages, x in unused.items() if x is not None})
        return _sparse(q, cache, indices, attn_sink, topk_length, softmax_scale, name)
    for of_lists, x in (("attn_sink", attn_sink), ("topk_length", topk_length)):
        if x is not None:
            raise ArgumentError(of_lists, "None without indices", type(x).__name__, function=name)
    common.check_tensors(name, block_table=block_table, cache_seqlens=cache_seqlens)
    batch, tokens, heads, _ = q.shape
    is_one = not is_causal and tokens > 1
    if is_one:
        # Rows that see the same keys are heads of one token.
        q = q.reshape(batch, 1, tokens * heads, q.shape[-1])
    with common.told(name, seq_lens="cache_seqlens"):
        out, lse = decode(
            common.contiguous_rows(q), cache, seq_lens=cache_seqlens, block_table=block_table,
            softmax_scale=softmax_scale, return_lse=True,
        )  # fmt: skip
    if is_one:
        out = out.reshape(batch, tokens, heads, out.shape[-1])
        lse = lse.reshape(batch, tokens, heads).transpose(1, 2).contiguous()
    return out, common.infinite(lse)


def _rows(q: torch.Tensor, k_cache: torch.Tensor, is_fp8: bool, name: str) -> torch.Tensor:
    """``k_cache`` as `PagedKVCache.from_arrays` takes it."""
    is_byte = k_cache.element_size() == 1
    if is_byte != is_fp8:
        expected = f"{is_byte} with a k_cache of {str(k_cache.dtype).removeprefix('torch.')}"
        raise ArgumentError("is_fp8_kvcache", expected, f"{is_fp8}", function=name)
    has_own_scales = is_byte and k_cache.shape[-1] == LATENT_ROW_BYTES and q.shape[-1] == LATENT_656_DIM
    if k_cache.shape[-1] != q.shape[-1] and not has_own_scales:
        expected = f"{q.shape[-1]} channels, like q" + (f", or rows of {LATENT_ROW_BYTES} bytes" if is_byte else "")
        raise ShapeError("k_cache", expected, f"shape {tuple(k_cache.shape)}", function=name)
    if is_byte and not has_own_scales and k_cache.dtype != torch.float8_e4m3fn:
        expected = f"float8_e4m3fn, or rows of {LATENT_ROW_BYTES} bytes"
        raise DtypeError("k_cache", expected, str(k_cache.dtype).removeprefix("torch."), function=name)
    return k_cache.view(torch.uint8) if k_cache.dtype == torch.int8 else k_cache


def _sparse(
    q: torch.Tensor, cache: Any, indices: Any, attn_sink: Any, topk_length: Any, softmax_scale: Any, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoding over lists of rows."""
    common.check_tensors(name, indices=indices)
    batch, tokens = q.shape[:2]
    _check_sink(attn_sink, q, name)
    if topk_length is not None:
        common.check_tensors(name, topk_length=topk_length)
        if tuple(topk_length.shape) != (batch,):
            raise ShapeError("topk_length", f"shape ({batch},)", f"{tuple(topk_length.shape)}", function=name)
        topk_length = topk_length[:, None].expand(batch, tokens).contiguous()
    if q.stride(-1) != 1 or q.stride(0) != tokens * q.stride(1):
        q = q.contiguous()
    with common.told(name):
        out, lse = decode(
            q, cache, indices=indices.contiguous(), topk_length=topk_length, softmax_scale=softmax_scale,
            return_lse=True,
        )  # fmt: skip
    return _with_sink(out, lse.transpose(1, 2), attn_sink), common.infinite(lse)


def _check_sink(attn_sink: Any, q: torch.Tensor, name: str) -> None:
    if attn_sink is None:
        return
    heads = q.shape[-2]
    common.check_tensors(name, attn_sink=attn_sink)
    if attn_sink.device != q.device:
        raise ArgumentError("attn_sink", f"a tensor on {q.device}, like q", f"{attn_sink.device}", function=name)
    if attn_sink.dtype != torch.float32:
        raise DtypeError("attn_sink", "float32", str(attn_sink.dtype).removeprefix("torch."), function=name)
    if tuple(attn_sink.shape) != (heads,):
        raise ShapeError("attn_sink", f"shape ({heads},)", f"{tuple(attn_sink.shape)}", function=name)


def _with_sink(out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None) -> torch.Tensor:
    """``out`` (..., heads, dim) with its part of the softmax beside the sink; ``lse`` (..., heads) does not count it.

    The kernels' own sinks count in the LSE, from which they could be taken away only where they are small.
    """
    if attn_sink is None:
        return out
    # Of a row without keys out is 0 already, and lse - sink may be NaN.
    part = torch.sigmoid(lse - attn_sink).masked_fill_(lse == -torch.inf, 0.0)
    return out.mul_(part[..., None])


@torch.compiler.disable
@torch.no_grad()
def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Any = None,
    topk_length: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse attention of a prompt over latent rows (`omniattn.attention_sparse`), without gradients.

    Parameters
    ----------
    q : tensor, (s_q, h_q, 576), float16 or bfloat16
    kv : tensor, (s_kv, 1, 576), like q
        Rows, whose first ``d_v`` channels are the value.
    indices : tensor, (s_q, 1, topk), int32
        Rows that each query token attends to. Those below 0, or from s_kv on, are no keys.
    sm_scale : float
    d_v : int
        512; on the CPU other multiples of 8 below the rows' width too.
    attn_sink : tensor, (h_q,), float32, optional
        As in `flash_mla_with_kvcache`.
    topk_length : tensor, (s_q,), int32, optional
        Entries of each list that count, from the first on.

    Returns
    -------
    output : tensor, (s_q, h_q, d_v)
    max_logits : tensor, (s_q, h_q), float32
        The largest scaled score; -inf where a row has no key.
    lse : tensor, (s_q, h_q), float32
        Natural logarithm, without sinks; +inf, with an output of 0, where a row has no key.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.attention_sparse`; before anything is written.
    """
    name = "flash_mla_sparse_fwd"
    common.check_tensors(name, q=q, kv=kv, indices=indices)
    common.check_rank(q, "q", "(s_q, h_q, head_dim)", name)
    common.check_rank(kv, "kv", "(s_kv, 1, head_dim)", name)
    common.check_rank(indices, "indices", "(s_q, 1, topk)", name)
    if tuple(kv.shape[1:]) != (1, q.shape[-1]):
        expected = f"(s_kv, 1, {q.shape[-1]}): one head, and q's channels"
        raise ShapeError("kv", expected, f"shape {tuple(kv.shape)}", function=name)
    if kv.dtype != q.dtype:
        expected, received = (str(x.dtype).removeprefix("torch.") for x in (q, kv))
        raise DtypeError("kv", f"{expected}, like q", received, function=name)
    _check_sink(attn_sink, q, name)
    if topk_length is not None:
        common.check_tensors(name, topk_length=topk_length)
    width, scale = arguments.check_int(d_v, "d_v", name), arguments.check_number(sm_scale, "sm_scale", name)
    with common.told(name, head_dim_v="d_v"):
        out, lse, most = attention_sparse(
            common.contiguous_rows(q), common.contiguous_rows(kv), indices=indices.contiguous(),
            topk_length=topk_length, head_dim_v=width, softmax_scale=scale, return_lse=True, return_max=True,
        )  # fmt: skip
    return _with_sink(out, lse, attn_sink), most, common.infinite(lse)


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
        return_lse=True, names=_NAMES,
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
    name = "flash_attn_varlen_qkvpacked_func"
    q, k, v = _split(qkv, "qkv", head_dim_qk, 2, name)
    made: tuple[torch.Tensor, torch.Tensor] = common.call(
        name, flash_attn_varlen_func, q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, deterministic, is_varlen, names=_QKV_PACKED,
    )  # fmt: skip
    return made


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
    common.check_rank(q, "q", "(total, heads, head_dim_qk)", name)
    if q.shape[-1] != head_dim_qk:
        raise ArgumentError("head_dim_qk", f"{q.shape[-1]}, the channels of q", f"{head_dim_qk}", function=name)
    made: tuple[torch.Tensor, torch.Tensor] = common.call(
        name, flash_attn_varlen_func, q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, dropout_p,
        softmax_scale, causal, deterministic, is_varlen, names=_KV_PACKED,
    )  # fmt: skip
    return made


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
