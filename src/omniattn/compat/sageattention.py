"""SageAttention's functions (``sageattention`` 2.2) on omniattn: the same signatures, with masks and gradients.

``import omniattn.compat.sageattention as sageattention``, or `omniattn.compat.install` for code that imports the
original. Tensors are torch's, on a GPU float16 or bfloat16, on the CPU (NumPy reference) float32 and float64 too;
head_dim up to 256.

Differences
-----------
- ``attn_mask`` and ``dropout_p`` are named parameters, as in scaled_dot_product_attention. The original drops them, and
  any other keyword that it does not know; here an unknown one raises TypeError, and a dropout above 0 too.
- Tensors that require gradients get them: 8-bit forward, exact backward (straight-through).
- ``smooth_v`` is done where it is asked for; the original ignores it with most accumulators.
- A name does not choose a GPU: the kernels are those of the GPU at hand, with the element types that the name says.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError, DtypeError, UnsupportedError
from ..ops import attention, attention_varlen
from ..problems import Int8
from . import common

__version__ = "2.2.0"

__all__ = [
    "sageattn",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_varlen",
]

#: What these functions call our arguments.
_NAMES = {"softmax_scale": "sm_scale", "mask": "attn_mask", "causal": "is_causal", "layout": "tensor_layout"}


def sageattn(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    smooth_k: bool = True,
) -> Any:
    """8-bit attention with what is fastest on the GPU: ``omniattn.attention(precision="int8")``.

    Parameters
    ----------
    q : tensor, (batch, num_qo_heads, qo_len, head_dim) for "HND", (batch, qo_len, num_qo_heads, head_dim) for "NHD"
    k, v : tensor
        The same with kv_len and num_kv_heads, which divides num_qo_heads.
    tensor_layout : "HND" or "NHD"
    is_causal : bool
        Query i sees the keys j <= i. With as many keys as queries, the only case that the original documents, that is
        causal attention; otherwise it is aligned at the top left, as scaled_dot_product_attention has it.
    sm_scale : float, optional
        1 / sqrt(head_dim) unless given.
    return_lse : bool
        Also return LSE.
    attn_mask : tensor, optional
        Broadcastable to (batch, num_qo_heads, qo_len, kv_len): bool (True: visible), or float32 or q's dtype, added.
    dropout_p : float
        0.
    smooth_k : bool
        Take the mean of the keys off before they are quantized. SageAttention 1 has it here, 2 ignores it.

    Returns
    -------
    o : tensor
        Shape, layout and dtype of q.
    lse : tensor, (batch, num_qo_heads, qo_len), float32
        Natural logarithm, that of the unsmoothed keys; -inf where a row attends to nothing.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.attention`.

    Notes
    -----
    SageAttention2 (Zhang et al. 2024).
    """
    precision = Int8(smooth_k=common.flag(smooth_k, "smooth_k", "sageattn"))
    return _attend("sageattn", q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask, dropout_p, precision)


def sageattn_qk_int8_pv_fp16_triton(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
) -> Any:
    """`sageattn` with one scale a block, P and V in float16, summed in float16 over a tile of keys and then in float32.

    ``quantization_backend``, "triton" or "cuda", chooses between two kernels of the original that compute the same.
    """
    function = "sageattn_qk_int8_pv_fp16_triton"
    _choose(quantization_backend, "quantization_backend", ("triton", "cuda"), function)
    precision = _precision(function, "per_block", smooth_k, False, "fp16", "fp16")
    return _attend(function, q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask, dropout_p, precision)


def sageattn_qk_int8_pv_fp16_cuda(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
) -> Any:
    """`sageattn` with P and V in float16.

    ``qk_quant_gran`` is "per_warp" or "per_thread"; ``pv_accum_dtype`` "fp32", or "fp16+fp32": sums in float16 over a
    tile of keys. "fp16", all sums in float16, raises.
    """
    function = "sageattn_qk_int8_pv_fp16_cuda"
    _choose(qk_quant_gran, "qk_quant_gran", ("per_warp", "per_thread"), function)
    if isinstance(pv_accum_dtype, str) and pv_accum_dtype == "fp16":
        raise UnsupportedError(
            f"{function}(): pv_accum_dtype='fp16'; the sum of all keys may overflow float16",
            instead="'fp16+fp32' or 'fp32'",
        )
    _choose(pv_accum_dtype, "pv_accum_dtype", ("fp32", "fp16+fp32"), function)
    sums = "fp16" if pv_accum_dtype == "fp16+fp32" else "fp32"
    precision = _precision(function, qk_quant_gran, smooth_k, smooth_v, "fp16", sums)
    return _attend(function, q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask, dropout_p, precision)


def sageattn_qk_int8_pv_fp8_cuda(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
) -> Any:
    """`sageattn` with P and V in e4m3. Compute capability 8.9 and newer.

    ``qk_quant_gran`` is "per_warp" or "per_thread"; ``pv_accum_dtype`` "fp32+fp16": sums in float16 over a tile of
    keys, or "fp32+fp32" and "fp32", which both sum tiles in float32.
    """
    function = "sageattn_qk_int8_pv_fp8_cuda"
    _choose(qk_quant_gran, "qk_quant_gran", ("per_warp", "per_thread"), function)
    _choose(pv_accum_dtype, "pv_accum_dtype", ("fp32+fp16", "fp32+fp32", "fp32"), function)
    sums = "fp16" if pv_accum_dtype == "fp32+fp16" else "fp32"
    precision = _precision(function, qk_quant_gran, smooth_k, smooth_v, "fp8", sums)
    return _attend(function, q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask, dropout_p, precision)


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: Any,
    k: Any,
    v: Any,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
) -> Any:
    """`sageattn` with P and V in e4m3 and sums of tiles in float32 (``pv_accum_dtype="fp32+fp32"``, the only one)."""
    function = "sageattn_qk_int8_pv_fp8_cuda_sm90"
    _choose(qk_quant_gran, "qk_quant_gran", ("per_warp", "per_thread"), function)
    _choose(pv_accum_dtype, "pv_accum_dtype", ("fp32+fp32",), function)
    precision = _precision(function, qk_quant_gran, smooth_k, False, "fp8", "fp32")
    return _attend(function, q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask, dropout_p, precision)


def sageattn_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
) -> torch.Tensor:
    """8-bit attention of packed sequences: `omniattn.attention_varlen` with the element types of the GPU at hand.

    Parameters
    ----------
    q, k, v : tensor, (total_q, num_qo_heads, head_dim) and (total_k, num_kv_heads, head_dim)
    cu_seqlens_q, cu_seqlens_k : tensor, (batch + 1,), int32 or int64
        Row at which each sequence begins, and the end of the last one.
    max_seqlen_q, max_seqlen_k : int
        At least the longest sequence.
    is_causal : bool
        For sequences with as many keys as queries, as in the original. Others raise, on a GPU and under torch.compile
        where it can be told without reading values: from the totals and the longest sequences.
    sm_scale : float, optional
        1 / sqrt(head_dim) unless given.
    smooth_k : bool
        Quantize K minus the mean of its sequence.

    Returns
    -------
    tensor
        Shape and dtype of q.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.attention_varlen`.
    """
    function = "sageattn_varlen"
    common.check_tensors(function, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for name, x in (("q", q), ("k", k), ("v", v)):
        common.check_rank(x, name, "(total, heads, head_dim)", function)
    common.check_channels(q, k, function)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x.dtype not in (torch.int32, torch.int64):  # others would be rounded to int32
            raise DtypeError(name, "int32 or int64", str(x.dtype).removeprefix("torch."), function=function)
    smooth_k = common.flag(smooth_k, "smooth_k", function)
    is_causal = common.flag(is_causal, "is_causal", function)
    if is_causal:
        equal = q.shape[0] == k.shape[0] and max_seqlen_q == max_seqlen_k
        if equal and cu_seqlens_q.device.type == "cpu" and not torch.compiler.is_compiling():
            equal = torch.equal(cu_seqlens_q, cu_seqlens_k)
        if not equal:
            raise UnsupportedError(
                f"{function}(): is_causal=True with sequences that have more or fewer keys than queries",
                instead="omniattn.attention_varlen(precision='int8', causal=True), aligned at the bottom right",
            )
    dim_v = v.shape[-1]
    out = common.call(
        function, attention_varlen, *common.padded(q, k, v), cu_seqlens_q=cu_seqlens_q.to(torch.int32),
        cu_seqlens_k=cu_seqlens_k.to(torch.int32), max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        causal=is_causal, softmax_scale=common.scale_of(sm_scale, "sm_scale", q, function),
        precision=Int8(smooth_k=smooth_k), names=_NAMES,
    )  # fmt: skip
    return out if out.shape[-1] == dim_v else out[..., :dim_v]


def _choose(value: Any, name: str, choices: tuple[str, ...], function: str) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(name, " or ".join(map(repr, choices)), repr(value), function=function)


def _precision(function: str, granularity: Any, smooth_k: Any, smooth_v: Any, pv: str, sums: str) -> Int8:
    smooth_k = common.flag(smooth_k, "smooth_k", function)
    smooth_v = common.flag(smooth_v, "smooth_v", function)
    return Int8(granularity=granularity, smooth_k=smooth_k, smooth_v=smooth_v, pv=pv, pv_accumulator=sums)


def _attend(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    layout: Any,
    is_causal: Any,
    sm_scale: Any,
    return_lse: Any,
    mask: Any,
    dropout_p: Any,
    precision: Int8,
) -> Any:
    common.refuse_dropout(dropout_p, function)
    common.check_tensors(function, q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        common.check_rank(x, name, "(batch, heads, seqlen, head_dim)", function)
    common.check_channels(q, k, function)
    _choose(layout, "tensor_layout", ("HND", "NHD"), function)
    return_lse = common.flag(return_lse, "return_lse", function)
    causal, window = common.flag(is_causal, "is_causal", function), None
    axis = 1 if layout == "NHD" else 2
    queries, keys = q.shape[axis], k.shape[axis]
    if causal and queries < keys:
        # Aligned at the top left the last keys are seen by nobody.
        k, v = k.narrow(axis, 0, queries), v.narrow(axis, 0, queries)
        if mask is not None and mask.ndim and mask.shape[-1] == keys:
            mask = mask[..., :queries]
    elif causal and queries > keys:
        causal, window = False, (-1, queries - keys)
    dim_v = v.shape[-1]
    results = common.call(
        function, attention, *common.padded(q, k, v), layout=layout, causal=causal, window=window,
        softmax_scale=common.scale_of(sm_scale, "sm_scale", q, function), mask=mask, precision=precision,
        return_lse=return_lse, names=_NAMES,
    )  # fmt: skip
    out, lse = results if return_lse else (results, None)
    out = out if out.shape[-1] == dim_v else out[..., :dim_v]
    return (out, lse) if return_lse else out
