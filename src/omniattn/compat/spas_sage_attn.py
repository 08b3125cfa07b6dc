"""SpargeAttn's functions of SageAttention2 (``spas_sage_attn`` 0.1) on omniattn: the same signatures.

``import omniattn.compat.spas_sage_attn as spas_sage_attn``, or ``compat.install("spas_sage_attn")`` for code that
imports the original. Tensors are torch's, on a GPU of compute capability 9.0 or on the CPU (NumPy reference).

Differences
-----------
- ``attn_mask`` raises where it is given; the original drops it. So does ``dropout_p`` above 0.
- ``simthreshd1`` is a number; a tensor with one for each head raises. Those of ``cdfthreshd`` and ``topk`` are read by
  the host, which waits for one on a GPU: give a tuple of numbers where calls are to be captured in a graph.
- ``pvthreshd`` is checked and changes nothing: no product with V is left out where P is small. Results are closer to
  those of all products.
- ``output_dtype`` is checked and changes nothing, as in the original: o has q's dtype, float16 for float32 on a GPU.
- Blocks of queries that see nothing of what they keep are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import arguments
from ..errors import ArgumentError, DtypeError, UnsupportedError
from ..ops import attention, sparse_blocks
from ..problems import Int8
from ..problems.sparse_blocks import visible_count
from . import common

__version__ = "0.1.0"

__all__ = ["block_sparse_sage2_attn_cuda", "spas_sage2_attn_meansim_cuda", "spas_sage2_attn_meansim_topk_cuda"]

#: Queries and keys of a block.
_BLOCK = (128, 64)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Of k and v, which are made like q.
_INPUTS = (*_DTYPES, torch.float64)


class _Options(NamedTuple):
    """Arguments that all functions have, as the caller gave them, and the function's name."""

    function: str
    dropout_p: Any
    scale: Any
    smooth_k: Any
    pvthreshd: Any
    attention_sink: Any
    layout: Any
    output_dtype: Any
    return_sparsity: Any
    return_lse: Any

    def flag(self, name: str) -> bool:
        """One of them that has to be True or False."""
        return common.flag(getattr(self, name), name, self.function)

    @property
    def axis(self) -> int:
        """Of tokens; the layout has been checked."""
        return 1 if self.layout == "NHD" else 2


def spas_sage2_attn_meansim_topk_cuda(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: float = -0.1,
    cdfthreshd: float | None = None,
    topk: float | None = 0.35,
    pvthreshd: float = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: Any = torch.float16,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Any:
    """8-bit attention over the blocks that `omniattn.sparse_blocks` keeps.

    Parameters
    ----------
    q : tensor, (batch, num_q_heads, q_len, head_dim) for "HND", (batch, q_len, num_q_heads, head_dim) for "NHD"
    k, v : tensor
        The same with kv_len and num_kv_heads, which divides num_q_heads. Of another floating point type they are made
        like q, as in the original.
    attn_mask : None
    dropout_p : float
        0.
    is_causal : bool
        With as many keys as queries.
    scale : float, optional
        1 / sqrt(head_dim) unless given.
    smooth_k : bool
        Quantize K minus its mean, which also decides how similar the rows of a block are.
    simthreshd1 : float
        ``similarity`` of `omniattn.sparse_blocks`.
    cdfthreshd, topk : float, or tensor or tuple with a number for each query head
        One of them, the other None: ``cdf`` and ``topk``.
    pvthreshd : float
        A number.
    attention_sink : bool
        Keep the first block of keys.
    tensor_layout : "HND" or "NHD"
    output_dtype : torch.dtype
        float16, bfloat16 or float32.
    return_sparsity : bool
        Also return the share of the visible blocks that are left out, a Python number, for which the host waits.
    return_lse : bool
        Also return LSE. Not with return_sparsity.

    Returns
    -------
    o : tensor
        Shape, layout and dtype of q.
    sparsity : float
    lse : tensor, (batch, num_q_heads, q_len), float32
        Natural logarithm.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.attention`.

    Notes
    -----
    SpargeAttn (Zhang et al. 2025).
    """
    function = "spas_sage2_attn_meansim_topk_cuda"
    if (topk is None) == (cdfthreshd is None):
        received = "neither" if topk is None else "both"
        raise ArgumentError("topk", "a number and cdfthreshd=None, or the reverse", received, function=function)
    options = _Options(
        function, dropout_p, scale, smooth_k, pvthreshd, attention_sink, tensor_layout, output_dtype, return_sparsity,
        return_lse,
    )  # fmt: skip
    return _predicted(options, q, k, v, attn_mask, is_causal, simthreshd1, cdfthreshd, topk)


def spas_sage2_attn_meansim_cuda(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: float = 0.6,
    cdfthreshd: float = 0.98,
    pvthreshd: float = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: Any = torch.float16,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Any:
    """`spas_sage2_attn_meansim_topk_cuda` by a share of the weights."""
    function = "spas_sage2_attn_meansim_cuda"
    if cdfthreshd is None:
        raise ArgumentError("cdfthreshd", "a number above 0, at most 1", "None", function=function)
    options = _Options(
        function, dropout_p, scale, smooth_k, pvthreshd, attention_sink, tensor_layout, output_dtype, return_sparsity,
        return_lse,
    )  # fmt: skip
    return _predicted(options, q, k, v, attn_mask, is_causal, simthreshd1, cdfthreshd, None)


def block_sparse_sage2_attn_cuda(
    q: Any,
    k: Any,
    v: Any,
    mask_id: Any = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    smooth_k: bool = True,
    pvthreshd: float = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: Any = torch.float16,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Any:
    """8-bit attention over the blocks of a mask.

    Parameters
    ----------
    mask_id : tensor, (batch, num_q_heads, ceil(q_len / 128), ceil(kv_len / 64))
        Blocks of 128 queries and 64 keys: bool, or integers that are not 0. Shapes that broadcast to it will do.

    The others, results and errors as those of `spas_sage2_attn_meansim_topk_cuda`; there is no causal form.
    """
    function = "block_sparse_sage2_attn_cuda"
    options = _Options(
        function, dropout_p, scale, smooth_k, pvthreshd, attention_sink, tensor_layout, output_dtype, return_sparsity,
        return_lse,
    )  # fmt: skip
    common.check_tensors(function, mask_id=mask_id)
    if mask_id.is_floating_point() or mask_id.is_complex():
        received = str(mask_id.dtype).removeprefix("torch.")
        raise DtypeError("mask_id", "bool, or an integer type", received, function=function)
    q, k, v = _tensors(options, q, k, v)
    blocks = mask_id if mask_id.dtype == torch.bool else mask_id != 0
    if options.flag("attention_sink"):
        columns = -(-k.shape[options.axis] // _BLOCK[1])
        if blocks.ndim == 0 or blocks.shape[-1] == 1:  # one element for all blocks of keys is not that of the first
            blocks = blocks.expand(*blocks.shape[:-1], columns)
        blocks = blocks.clone()
        blocks[..., :1] = True
    with common.told(function, block_mask="mask_id", softmax_scale="scale"):
        return _attend(options, q, k, v, blocks, False)


def _predicted(
    options: _Options,
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    is_causal: Any,
    simthreshd1: Any,
    cdfthreshd: Any,
    topk: Any,
) -> Any:
    function = options.function
    common.refuse(
        function, "blocks are what is left out", "omniattn.attention(mask=, precision='int8')",
        attn_mask=(attn_mask, None),
    )  # fmt: skip
    if isinstance(simthreshd1, torch.Tensor) and simthreshd1.ndim:
        raise UnsupportedError(f"{function}(): simthreshd1 for each head", instead="a number for all heads")
    q, k, v = _tensors(options, q, k, v)
    axis = options.axis  # of a layout that has been checked
    causal, smooth_k = common.flag(is_causal, "is_causal", function), options.flag("smooth_k")
    if causal and q.shape[axis] != k.shape[axis]:
        raise UnsupportedError(
            f"{function}(): is_causal=True with {q.shape[axis]} queries and {k.shape[axis]} keys",
            instead="omniattn.attention(causal=True), aligned at the bottom right",
        )
    names = {"topk": "topk", "cdf": "cdfthreshd", "similarity": "simthreshd1", "softmax_scale": "scale"}
    with common.told(function, **names):
        similarity = arguments.check_number(simthreshd1, "similarity", function)
        # Of all blocks no similarity is below 0: then the mean of K changes nothing.
        centred = k - k.mean(axis, keepdim=True) if smooth_k and similarity >= 0 and k.shape[axis] else k
        blocks = sparse_blocks(
            q, centred, topk=topk, cdf=cdfthreshd, similarity=similarity, block_size=_BLOCK, causal=causal,
            keep_first=int(options.flag("attention_sink")), layout=options.layout,
        )  # fmt: skip
        return _attend(options, q, k, v, blocks, causal)


def _tensors(options: _Options, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """q, k and v in one type that our functions take; what does not depend on their shapes is checked."""
    function, layout, pvthreshd = options.function, options.layout, options.pvthreshd
    common.refuse_dropout(options.dropout_p, function)
    common.check_tensors(function, q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        common.check_rank(x, name, "(batch, heads, seqlen, head_dim)", function)
    if not isinstance(layout, str) or layout not in ("HND", "NHD"):
        raise ArgumentError("tensor_layout", "'HND' or 'NHD'", repr(layout), function=function)
    for name, x in (("k", k), ("v", v)):
        if x.dtype not in _INPUTS:
            received = str(x.dtype).removeprefix("torch.")
            raise DtypeError(name, "float16, bfloat16, float32 or float64", received, function=function)
    if not isinstance(options.output_dtype, torch.dtype) or options.output_dtype not in _DTYPES:
        received = repr(options.output_dtype)
        raise ArgumentError("output_dtype", "float16, bfloat16 or float32", received, function=function)
    if not (isinstance(pvthreshd, torch.Tensor) and pvthreshd.ndim):
        arguments.check_number(pvthreshd, "pvthreshd", function)
    wanted = torch.float16 if q.dtype == torch.float32 and q.is_cuda else q.dtype
    return q.to(wanted), k.to(wanted), v.to(wanted)


def _attend(options: _Options, q: Any, k: Any, v: Any, blocks: torch.Tensor, causal: bool) -> Any:
    with_sparsity, with_lse = options.flag("return_sparsity"), options.flag("return_lse")
    if with_sparsity and with_lse:
        raise ArgumentError("return_lse", "False with return_sparsity=True", "True", function=options.function)
    result = attention(
        q, k, v, layout=options.layout, causal=causal, softmax_scale=options.scale, block_mask=blocks,
        block_size=_BLOCK, precision=Int8(smooth_k=options.flag("smooth_k")), return_lse=with_lse,
    )  # fmt: skip
    if not with_sparsity:
        return result
    every = blocks.numel()  # of the caller's mask, which may have one for several
    if causal:
        every = (
            visible_count(q.shape[options.axis], k.shape[options.axis], _BLOCK, causal) * q.shape[0] * blocks.shape[1]
        )
    return result, 1.0 - blocks.sum().item() / max(every, 1)
