"""FlashAttention-3's functions (``flash_attn_interface``) on omniattn: the same signatures, defaults and results.

``import omniattn.compat.flash_attn_interface as flash_attn_interface``, or `omniattn.compat.install` for code that
imports the original. Every GPU from compute capability 8.0 on; tensors are float16 or bfloat16, on the CPU (NumPy
reference) float32 and float64 too.

What is not served raises: ``qv``, ``attention_chunk``. ``num_splits``, ``pack_gqa``, ``sm_margin`` and scheduler
metadata change the last bits of the original's results and its time; they are taken, and have no effect: the kernels
here divide the work themselves. LSE of a row that attends to nothing is -inf, as in the original, and LSE can be
differentiated.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import arguments
from ..errors import ArgumentError, DeviceError, DtypeError, ShapeError
from ..ops import merge_states
from . import common
from .cached import attend_cached

__version__ = "3.0.0"

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of a batch of equally long sequences (`omniattn.attention`), differentiable by q, k and v.

    Parameters
    ----------
    q : tensor, (batch, seqlen_q, nheads, headdim)
    k, v : tensor, (batch, seqlen_k, nheads_k, headdim)
        nheads_k divides nheads.
    softmax_scale : float, optional
        1 / sqrt(headdim) unless given.
    causal : bool
        Query i sees the keys j <= i + seqlen_k - seqlen_q.
    window_size : (left, right)
        Query i sees the keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right; -1: no limit.
    softcap : float
        0 for none.
    deterministic : bool
        Same bits at every run, in the backward pass too.
    num_splits, pack_gqa, sm_margin
        Without effect: keys are split, and query heads share tiles, where that is faster.
    q_descale, k_descale, v_descale : tensor, (batch, nheads_k), float32, optional
        Factors of tensors in float8_e4m3fn; what else `omniattn.attention` takes is taken too, a number say.
    qv, attention_chunk
        Their defaults.
    return_attn_probs : bool
        Also return LSE.

    Returns
    -------
    out : tensor, (batch, seqlen_q, nheads, headdim)
    softmax_lse : tensor, (batch, nheads, seqlen_q), float32
        Natural logarithm; -inf where a row attends to nothing.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.attention`.

    Notes
    -----
    FlashAttention-3 (Shah et al. 2024).
    """
    function = "flash_attn_func"
    _refuse(function, qv, attention_chunk, num_splits, pack_gqa, sm_margin)
    return _attend(
        function, (q, k, v), None, return_attn_probs, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, deterministic=deterministic,
        descales=(q_descale, k_descale, v_descale),
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q, k and v in one tensor.

    qkv is (batch, seqlen, 3, nheads, headdim), or with ``num_heads_q`` (batch, seqlen, nheads + 2 * nheads_k, headdim),
    the heads of q first.
    """
    function = "flash_attn_qkvpacked_func"
    _refuse(function, None, attention_chunk, 1, None, sm_margin)
    common.check_tensors(function, qkv=qkv)
    if qkv.ndim == 5:
        if num_heads_q is not None:
            expected = "None with qkv of 5 dimensions"
            raise ArgumentError("num_heads_q", expected, repr(num_heads_q), function=function)
        qkv = common.parts(qkv, "qkv", 3, "(batch, seqlen, 3, nheads, headdim)", function)
    else:
        common.check_rank(qkv, "qkv", "(batch, seqlen, nheads + 2 * nheads_k, headdim)", function)
        heads = qkv.shape[2]
        queries = arguments.check_int(num_heads_q, "num_heads_q", function, least=1, most=heads)
        if (heads - queries) % 2:
            expected = f"{queries} heads of q, and as many of k as of v"
            raise ShapeError("qkv", expected, f"{heads} heads", function=function)
        qkv = qkv.split([queries, (heads - queries) // 2, (heads - queries) // 2], dim=2)
    return _attend(
        function, qkv, None, return_attn_probs, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, deterministic=deterministic,
        descales=(q_descale, k_descale, v_descale), names=common.QKV_PACKED,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of packed sequences (`omniattn.attention_varlen`).

    Parameters
    ----------
    q, k, v : tensor, (total_q, nheads, headdim) and (total_k, nheads_k, headdim)
    cu_seqlens_q, cu_seqlens_k : tensor, (batch + 1,), int32
        Row at which each sequence begins, and the end of the last one.
    max_seqlen_q, max_seqlen_k : int
        At least the longest sequence.
    seqused_q, seqused_k : tensor, (batch,), int32, optional
        How many of a sequence's first rows count. Other rows of out are 0, where the original leaves them unwritten.
    softmax_scale, causal, window_size, softcap, deterministic, num_splits, pack_gqa, sm_margin, return_attn_probs
        As in `flash_attn_func`, for each sequence.
    q_descale, k_descale, v_descale : tensor, (batch, nheads_k), float32, optional
        Factors of tensors in float8_e4m3fn; what else `omniattn.attention` takes is taken too, a number say.
    qv, attention_chunk
        Their defaults.

    Returns
    -------
    out : tensor, (total_q, nheads, headdim)
    softmax_lse : tensor, (nheads, total_q), float32
        With ``return_attn_probs``.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.attention_varlen`.
    """
    function = "flash_attn_varlen_func"
    _refuse(function, qv, attention_chunk, num_splits, pack_gqa, sm_margin)
    packed = common.packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    return _attend(
        function, (q, k, v), packed, return_attn_probs, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, deterministic=deterministic,
        descales=(q_descale, k_descale, v_descale),
    )  # fmt: skip


#: What `flash_attn_combine` calls arguments of `merge_states`.
_OF_PARTS = {"o_a": "out_partial", "o_b": "out_partial", "lse_a": "lse_partial", "lse_b": "lse_partial"}


def flash_attn_combine(
    out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of keys (`omniattn.merge_states`).

    Parameters
    ----------
    out_partial : tensor, (num_splits, batch, seqlen, nheads, headdim), float32
        Any headdim. What is no multiple of 8 is padded, and more than 512 channels are merged as those of more heads.
    lse_partial : tensor, (num_splits, batch, seqlen, nheads), float32
    out : tensor, (batch, seqlen, nheads, headdim), optional
        Where out goes.
    out_dtype : torch.dtype, optional
        That of ``out``, else float32.

    Returns
    -------
    out : tensor, (batch, seqlen, nheads, headdim)
    lse : tensor, (batch, seqlen, nheads), float32
    """
    function = "flash_attn_combine"
    common.check_tensors(function, out_partial=out_partial, lse_partial=lse_partial)
    common.check_rank(out_partial, "out_partial", "(num_splits, batch, seqlen, nheads, headdim)", function)
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if x.dtype != torch.float32:
            raise DtypeError(name, "torch.float32", x.dtype, function=function)
    if lse_partial.shape != out_partial.shape[:-1] or not lse_partial.shape[0]:
        expected = f"shape {tuple(out_partial.shape[:-1])} of at least one split, like out_partial"
        raise ShapeError("lse_partial", expected, f"{tuple(lse_partial.shape)}", function=function)
    for name, x in (("lse_partial", lse_partial), *(() if out is None else (("out", out),))):
        if isinstance(x, torch.Tensor) and x.device != out_partial.device:
            raise DeviceError(name, f"{out_partial.device}, like out_partial", x.device, function=function)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise ArgumentError("out_dtype", "a torch.dtype", repr(out_dtype), function=function)
    for name, dtype in (("out_dtype", out_dtype), ("out", getattr(out, "dtype", None))):
        if dtype is not None and not dtype.is_floating_point:
            raise DtypeError(name, "a floating-point type", dtype, function=function)
    if out is not None:
        common.check_tensors(function, out=out)
        if out.shape != out_partial.shape[1:]:
            expected = f"shape {tuple(out_partial.shape[1:])}"
            raise ShapeError("out", expected, f"{tuple(out.shape)}", function=function)
        if out_dtype not in (None, out.dtype):
            raise DtypeError("out", f"{out_dtype}, as out_dtype says", out.dtype, function=function)
    dim, heads = out_partial.shape[-1], out_partial.shape[-2]
    parts = max(-(-dim // arguments.MAX_HEAD_DIM), 1)
    if dim % (8 * parts):
        out_partial = torch.nn.functional.pad(out_partial, (0, -dim % (8 * parts)))
    if parts > 1:
        out_partial = out_partial.unflatten(-1, (parts, -1)).flatten(-3, -2)
        lse_partial = lse_partial.repeat_interleave(parts, -1)
    states = zip(out_partial.contiguous().unbind(0), lse_partial.transpose(-1, -2).contiguous().unbind(0), strict=True)
    o, lse = next(states)
    for other, other_lse in states:
        o, lse = common.call(function, merge_states, o, lse, other, other_lse, names=_OF_PARTS)
    if out_partial.shape[0] == 1:  # the output of a split that has seen no key may be anything
        o = o.masked_fill((lse == -torch.inf).transpose(-1, -2)[..., None], 0)
    o, lse = o.unflatten(-2, (heads, parts)).flatten(-2)[..., :dim], lse[:, ::parts]
    made = o.to(out_dtype or o.dtype) if out is None else out.copy_(o)
    return made, lse.transpose(-1, -2)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a KV cache, into which new keys and values are written first.

    Parameters
    ----------
    q : tensor, (batch, seqlen_q, nheads, headdim), or (total_q, nheads, headdim) with ``cu_seqlens_q``
        Of the caches' type; over those in e4m3 also float16 or bfloat16.
    k, v : tensor, (batch, seqlen_new, nheads_k, headdim), or (total_new, nheads_k, headdim) with ``cu_seqlens_k_new``
        Of the caches' type. Over caches in e4m3 their bytes are written as they are, for k_descale and v_descale to
        hold for them too; rotated keys are rounded once, to at most 448 (the original rounds rotated queries too).
    k_cache, v_cache : tensor
        As in `omniattn.compat.flash_attn.flash_attn_with_kvcache`, or float8_e4m3fn: headdim is a multiple of 16 then.
    q_descale, k_descale, v_descale : tensor, (batch, nheads_k), float32, any strides, optional
        Factors of what is in e4m3: of q by the kv head that a query head reads. Read when a call runs, in a CUDA graph
        too. q becomes bfloat16, which is exact, and its factor one with k's in float32; products are in 16 bits.
    page_table : tensor, (batch, max_blocks), int32, optional
        The ``block_table`` of FlashAttention-2. With ``cache_batch_idx``, which names its rows, any number of them.
        ``cache_leftpad`` goes with it; the keys are copied then.
    cu_seqlens_q, cu_seqlens_k_new : tensor, (batch + 1,), int32, optional
        Row at which each sequence's queries, or new keys, begin, and the end of the last one's; each without the other
        too. Checked on the CPU.
    max_seqlen_q : int, with ``cu_seqlens_q``
        At least the queries of a sequence.
    rotary_seqlens : tensor, (batch,), int32, optional
        Position by whose angle the first of the new tokens of a sequence is rotated, in place of cache_seqlens. No
        more than checked without ``rotary_cos``.
    scheduler_metadata : tensor, optional
        What `get_scheduler_metadata` returns. Without effect.
    pack_gqa, sm_margin
        Without effect.
    qv, attention_chunk
        Their defaults.
    rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, softmax_scale,
    causal, window_size, softcap, rotary_interleaved, num_splits
        As in `omniattn.compat.flash_attn.flash_attn_with_kvcache`; lengths on a GPU are not looked at.

    Returns
    -------
    out : tensor, (batch, seqlen_q, nheads, headdim)
        Or as q is packed; bfloat16 where q is in e4m3. With ``return_softmax_lse`` (out, softmax_lse, out_accum,
        softmax_lse_accum): LSE, (batch, nheads, seqlen_q) or (nheads, total_q), -inf where a row attends to nothing,
        and two empty tensors, as the original without splits.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        Before anything is written, where arguments are wrong.
    """
    function = "flash_attn_with_kvcache"
    _refuse(function, qv, attention_chunk, num_splits, pack_gqa, sm_margin)
    _check_metadata(function, scheduler_metadata)
    with_lse = common.flag(return_softmax_lse, "return_softmax_lse", function)
    out, lse = attend_cached(
        function, q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=page_table, table_name="page_table",
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        rotary_interleaved=rotary_interleaved, alibi_slopes=None, num_splits=num_splits, rotary_seqlens=rotary_seqlens,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    return (out, lse, lse.new_empty(0), lse.new_empty(0)) if with_lse else out


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Any,
    qkv_dtype: Any = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    cache_leftpad: Any = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """What `flash_attn_with_kvcache` takes as ``scheduler_metadata``: an empty tensor of int32, where cache_seqlens is.

    The kernels divide the work on the device at each call, and have no metadata. A CUDA graph may be replayed with
    other lengths. Nothing else is looked at than cache_seqlens and the knobs that have no effect.
    """
    function = "get_scheduler_metadata"
    common.check_tensors(function, cache_seqlens=cache_seqlens)
    _check_knobs(function, num_splits, pack_gqa, sm_margin)
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _check_metadata(function: str, metadata: Any) -> None:
    if metadata is None:
        return
    common.check_tensors(function, scheduler_metadata=metadata)
    if metadata.numel() or metadata.dtype != torch.int32:
        expected = "None, or what get_scheduler_metadata() of this module returns"
        received = f"a tensor of shape {tuple(metadata.shape)} in {metadata.dtype}"
        raise ArgumentError("scheduler_metadata", expected, received, function=function)


def _refuse(function: str, qv: Any, chunk: Any, splits: Any, pack: Any, margin: Any) -> None:
    common.refuse(function, "scores have one product, q times k", None, qv=(qv, None))
    common.refuse(
        function, "there are no chunks", "a ScoreMod with mask= for omniattn.attention", attention_chunk=(chunk, 0)
    )
    _check_knobs(function, splits, pack, margin)


def _check_knobs(function: str, splits: Any, pack: Any, margin: Any) -> None:
    """Knobs of the original's scheduler, which change no result but its last bits."""
    arguments.check_int(splits, "num_splits", function)
    arguments.check_int(margin, "sm_margin", function)
    if pack is not None:
        common.flag(pack, "pack_gqa", function)


def _attend(function: str, qkv: Any, packed: dict[str, Any] | None, return_attn_probs: Any, **options: Any) -> Any:
    return_lse = common.flag(return_attn_probs, "return_attn_probs", function)
    out, lse = common.attend(function, *qkv, packed=packed, return_lse=return_lse, **options)
    return (out, lse) if return_lse else out
