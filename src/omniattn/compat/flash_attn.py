"""FlashAttention-2's functions (``flash_attn`` 2.8) on omniattn: the same signatures, defaults and results.

``import omniattn.compat.flash_attn as flash_attn``, or `omniattn.compat.install` for code that imports the original.
Tensors are torch's, on a GPU float16 or bfloat16, on the CPU (NumPy reference) float32 and float64 too.

Differences
-----------
- ``dropout_p`` is rounded to a multiple of 1/256, and drops what `omniattn.dropout_mask` says: other scores than the
  original. With ``alibi_slopes`` it raises. S_dmask is empty.
- LSE of a row that attends to nothing is +inf, as in the original; the functions take +inf and -inf.
- LSE can be differentiated. With ``alibi_slopes`` it is that of the biased scores, as the documentation of the original
  has them; the kernels of the original leave out a constant of each row with ``causal``.
- The functions whose names begin with an underscore have no gradients; `_flash_attn_backward` returns None.
- What the original leaves in memory for rows that belong to no packed sequence is 0 here.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import arguments
from . import common
from .cached import attend_cached

__version__ = "2.8.3"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of a batch of equally long sequences (`omniattn.attention`), differentiable by q, k and v.

    Parameters
    ----------
    q : tensor, (batch, seqlen_q, nheads, headdim)
        headdim up to 512; q, k and v are padded with zeros to a multiple of 8 channels.
    k, v : tensor, (batch, seqlen_k, nheads_k, headdim)
        nheads_k divides nheads.
    dropout_p : float
        Share of the probabilities that are dropped, drawn from torch's generator (`omniattn.attention`).
    softmax_scale : float, optional
        1 / sqrt(headdim) unless given.
    causal : bool
        Query i sees the keys j <= i + seqlen_k - seqlen_q.
    window_size : (left, right)
        Query i sees the keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right; -1: no limit.
    softcap : float
        0 or less: none.
    alibi_slopes : tensor, (nheads,) or (batch, nheads), optional
        The bias -slope * abs(i + seqlen_k - seqlen_q - j). It has no gradient.
    deterministic : bool
        Same bits at every run, in the backward pass too.
    return_attn_probs : bool
        Also return LSE and S_dmask.

    Returns
    -------
    out : tensor, (batch, seqlen_q, nheads, headdim)
    softmax_lse : tensor, (batch, nheads, seqlen_q), float32
        Natural logarithm; +inf where a row attends to nothing.
    S_dmask : tensor, (0,)
        Empty, as in the original without dropout.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.attention`.

    Notes
    -----
    FlashAttention-2 (Dao 2023).
    """
    return common.func(
        "flash_attn_func", q, k, v, None, dropout_p, return_attn_probs, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q, k and v in one tensor, qkv: (batch, seqlen, 3, nheads, headdim)."""
    function = "flash_attn_qkvpacked_func"
    q, k, v = common.parts(qkv, "qkv", 3, "(batch, seqlen, 3, nheads, headdim)", function)
    return common.func(
        function, q, k, v, None, dropout_p, return_attn_probs, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
        names=common.QKV_PACKED,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with k and v in one tensor, kv: (batch, seqlen_k, 2, nheads_k, headdim)."""
    function = "flash_attn_kvpacked_func"
    k, v = common.parts(kv, "kv", 2, "(batch, seqlen, 2, nheads, headdim)", function)
    return common.func(
        function, q, k, v, None, dropout_p, return_attn_probs, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
        names=common.KV_PACKED,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Attention of packed sequences (`omniattn.attention_varlen`).

    Parameters
    ----------
    q, k, v : tensor, (total_q, nheads, headdim) and (total_k, nheads_k, headdim)
    cu_seqlens_q, cu_seqlens_k : tensor, (batch + 1,), int32
        Row at which each sequence begins, and the end of the last one.
    max_seqlen_q, max_seqlen_k : int
        At least the longest sequence.
    block_table : tensor, (batch, max_blocks), int32, optional
        K and V lie in blocks, (blocks, tokens, nheads_k, headdim), and cu_seqlens_k counts the keys of each sequence.
        Any number of tokens. No gradients then.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As in `flash_attn_func`, for each sequence.

    Returns
    -------
    out : tensor, (total_q, nheads, headdim)
    softmax_lse : tensor, (nheads, total_q), float32
    S_dmask : tensor, (0,)
        The last two with ``return_attn_probs``.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.attention_varlen`.
    """
    function = "flash_attn_varlen_func"
    packed = common.packed_of(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table=block_table, function=function
    )
    return common.func(
        function, q, k, v, packed, dropout_p, return_attn_probs, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q, k and v in one tensor, qkv: (total, 3, nheads, headdim)."""
    function = "flash_attn_varlen_qkvpacked_func"
    q, k, v = common.parts(qkv, "qkv", 3, "(total, 3, nheads, headdim)", function)
    packed = common.packed_of(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return common.func(
        function, q, k, v, packed, dropout_p, return_attn_probs, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
        names=common.QKV_PACKED_VARLEN,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor, kv: (total_k, 2, nheads_k, headdim)."""
    function = "flash_attn_varlen_kvpacked_func"
    k, v = common.parts(kv, "kv", 2, "(total, 2, nheads, headdim)", function)
    packed = common.packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return common.func(
        function, q, k, v, packed, dropout_p, return_attn_probs, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
        names=common.KV_PACKED,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a KV cache, into which new keys and values are written first. No gradients, as in the original.

    Parameters
    ----------
    q : tensor, (batch, seqlen_q, nheads, headdim)
        headdim up to 512.
    k_cache, v_cache : tensor, (batch_cache, seqlen_cache, nheads_k, headdim)
        Or with ``block_table`` (num_blocks, page_size, nheads_k, headdim), any page size. Written in place.
    k, v : tensor, (batch, seqlen_new, nheads_k, headdim), optional
        Go to the positions cache_seqlens, cache_seqlens + 1, ... of each sequence. The cache has to have room: checked
        on the CPU; on a GPU that would need a synchronization, and indexing asserts.
    rotary_cos, rotary_sin : tensor, (positions, rotary_dim / 2), optional
        With k and v: rotate k by the angles of its positions, and q by those of cache_seqlens + i if causal or with a
        window, else of cache_seqlens. At least as many positions as the cache has. Not with ``cache_leftpad``.
    cache_seqlens : int or tensor, (batch,), int32
        Tokens of each sequence before the new ones. All of the cache unless given.
    cache_batch_idx : tensor, (batch,), int32, optional
        Row of the cache of each sequence. Not with ``block_table``.
    cache_leftpad : tensor, (batch,), int32, optional
        Position of a sequence's first key: padding is before it. Not with ``block_table``.
    block_table : tensor, (batch, max_blocks), int32, optional
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`, with seqlen_k the tokens of a sequence, the new ones included.
    rotary_interleaved : bool
        Pairs of channels are (2i, 2i + 1), or (i, i + rotary_dim / 2).
    num_splits : int
        1: a sequence's bits do not depend on its batch (``deterministic`` of `omniattn.decode`). Otherwise the kernel
        divides the keys by rules of its own.
    return_softmax_lse : bool

    Returns
    -------
    out : tensor, (batch, seqlen_q, nheads, headdim)
    softmax_lse : tensor, (batch, nheads, seqlen_q), float32
        With ``return_softmax_lse``; +inf where a row attends to nothing.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        Before anything is written, where arguments are wrong.

    Notes
    -----
    Up to 16 queries of 64, 128, 256 or 512 16-bit channels read contiguous caches where they lie, blocks or not
    (`omniattn.decode`, split-KV), longer prompts and ALiBi pages of them (`omniattn.attention_varlen`), and
    ``cache_leftpad`` a copy of the keys in scratch memory (`omniattn.attention_with_kvcache`). Other head dims and
    strides gather the keys of the cache into packed sequences first: a copy of as many rows as the cache can hold for
    the batch, and where headdim is no multiple of 8, one more that is padded. The cache itself is never copied, and
    written where it lies.
    """
    function = "flash_attn_with_kvcache"
    with_lse = common.flag(return_softmax_lse, "return_softmax_lse", function)
    out, lse = attend_cached(
        function, q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        block_table=block_table, table_name="block_table", softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, rotary_interleaved=rotary_interleaved, alibi_slopes=alibi_slopes,
        num_splits=num_splits,
    )  # fmt: skip
    return (out, common.infinite(lse)) if with_lse else out


# For projects that drive forward and backward themselves (ring attention). Not differentiable.


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, LSE, S_dmask (empty) and rng_state (seed and offset; of no meaning without dropout) of `flash_attn_func`."""
    return common.forward(
        "_flash_attn_forward", q, k, v, None, dropout_p, return_softmax, softmax_scale=softmax_scale, causal=causal,
        window_size=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_flash_attn_forward`, of packed sequences. Rows that belong to none are 0 with and without zero_tensors.

    ``num_splits`` has no effect: the kernels divide the keys by rules of their own.
    """
    function = "_flash_attn_varlen_forward"
    arguments.check_int(num_splits, "num_splits", function)
    common.refuse(
        function, "a sequence's keys begin where it does", "keys without padding before them",
        leftpad_k=(leftpad_k, None),
    )  # fmt: skip
    packed = common.packed_of(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k=seqused_k, block_table=block_table,
        function=function,
    )  # fmt: skip
    return common.forward(
        function, q, k, v, packed, dropout_p, return_softmax, softmax_scale=softmax_scale, causal=causal,
        window_size=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> None:
    """Write dq, dk, dv (those that are given), from out and LSE of this attention or of a larger one.

    Returns None. The original returns scratch, the row sums of dout * out, which nobody should pay for here.
    """
    common.backward(
        "_flash_attn_backward", dout, q, k, v, out, softmax_lse, (dq, dk, dv), None, dropout_p, alibi_slopes,
        (softmax_scale, causal, (window_size_left, window_size_right), softcap, deterministic), rng_state,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    """As `_flash_attn_backward`, of packed sequences. Rows that belong to none have gradient 0 in any case."""
    packed = common.packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    common.backward(
        "_flash_attn_varlen_backward", dout, q, k, v, out, softmax_lse, (dq, dk, dv), packed, dropout_p, alibi_slopes,
        (softmax_scale, causal, (window_size_left, window_size_right), softcap, deterministic), rng_state,
    )  # fmt: skip


#: The operators of the original, under the names by which it calls them itself.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
