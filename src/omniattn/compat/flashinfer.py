"""FlashInfer's attention over KV caches (``flashinfer`` 0.7) on omniattn: the same signatures, defaults and results.

``from omniattn.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper`` and so on, in place of ``flashinfer``'s.
Tensors are torch's, float16 or bfloat16; on the CPU the NumPy reference runs. Not here: what does not attend over a
cache (sampling, norms, experts), MLA, cascades of several levels.

Differences
-----------
- A workspace is not needed: the tensor says the device, and is not kept.
- ``backend`` "auto", "fa2" and "fa3" are the same; the others raise, as they take other arguments.
- Sinks are taken. Pages in 8 bits are in e4m3; others, custom masks of batches, position encodings and ALiBi raise.
- Merged states of which neither has seen a key are 0 and -inf, where the original has NaN.
- Nothing here has gradients, as in the original.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import arguments
from ..errors import ArgumentError, DtypeError, ShapeError
from ..kv.cache import PagedKVCache
from ..ops import append, attention
from . import common
from . import flashinfer_plans as plans
from .flashinfer_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from .flashinfer_prefill import BatchPrefillWithPagedKVCacheWrapper
from .flashinfer_ragged import BatchPrefillWithRaggedKVCacheWrapper
from .flashinfer_states import merge_state, merge_state_in_place, merge_states

__version__ = "0.6.18"

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


@torch.no_grad()
def single_decode_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of the newest token of one request (`omniattn.attention`).

    Parameters
    ----------
    q : tensor, (num_qo_heads, head_dim)
    k, v : tensor, (keys, num_kv_heads, head_dim), or heads first by kv_layout
    kv_layout : "NHD" or "HND"
    q_scale, k_scale, v_scale : float, optional
        Factors of the scores (q, k) and of the output.
    window_left : int
        How many keys before its own it sees at most; -1: all.
    logits_soft_cap, sm_scale : float, optional
        No softcap and 1 / sqrt(head_dim) unless given.
    return_lse : bool
    use_tensor_cores, rope_scale, rope_theta
        Without effect.
    pos_encoding_mode : "NONE"

    Returns
    -------
    out : tensor, (num_qo_heads, head_dim)
    lse : tensor, (num_qo_heads,), float32
        With return_lse: base 2; -inf without keys.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.attention`.
    """
    function = "single_decode_with_kv_cache"
    common.check_tensors(function, q=q)
    common.check_rank(q, "q", "(num_qo_heads, head_dim)", function)
    common.flag(use_tensor_cores, "use_tensor_cores", function)
    plans.check_encoding(pos_encoding_mode, function)
    q_factor, k_factor, v_factor = (
        plans.factor(x, name, function)
        for name, x in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale))
    )
    made = _single(
        function, q[None], k, v, kv_layout, False, window_left, logits_soft_cap, sm_scale, q_factor * k_factor,
        v_factor, return_lse, None,
    )  # fmt: skip
    return (made[0][0], made[1][0]) if isinstance(made, tuple) else made[0]


@torch.no_grad()
def single_prefill_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    """Attention of the newest tokens of one request (`omniattn.attention`).

    Parameters
    ----------
    q : tensor, (rows, num_qo_heads, head_dim)
    k, v : tensor, (keys, num_kv_heads, head_dim), or heads first by kv_layout; v may have other channels
    o_dtype : torch.dtype, optional
        That of q.
    custom_mask : tensor, (rows, keys), bool, optional
        True where a row sees a key; in place of causal.
    packed_custom_mask : tensor, (ceil(rows * keys / 8),), uint8, optional
        The same, 8 of them in a byte, the first one in its lowest bit; in place of custom_mask.
    causal : bool
        The last row sees all keys, each one before it one less.
    k_scale, v_scale : float, optional
        Factors of the scores and of the output.
    kv_layout, sm_scale, window_left, logits_soft_cap, return_lse, rope_scale, rope_theta, pos_encoding_mode
        As in `single_decode_with_kv_cache`.
    backend : "auto", "fa2" or "fa3"
        All the same.
    scale_q, scale_k, scale_v, use_fp16_qk_reduction, kv_cache_sf
        Their defaults.

    Returns
    -------
    out : tensor, (rows, num_qo_heads, head_dim of v)
        0 where a row attends to nothing.
    lse : tensor, (rows, num_qo_heads), float32
        With return_lse: base 2; -inf where a row attends to nothing.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.attention`.
    """
    function = "single_prefill_with_kv_cache"
    common.check_tensors(function, q=q, k=k)
    common.check_rank(q, "q", "(rows, num_qo_heads, head_dim)", function)
    plans.check_encoding(pos_encoding_mode, function)
    plans.check_backend(backend, function)
    plans.refuse_reduction(use_fp16_qk_reduction, function)
    common.refuse(
        function, "16-bit tensors have no scales of heads", "k_scale and v_scale as numbers", scale_q=(scale_q, None),
        scale_k=(scale_k, None), scale_v=(scale_v, None), kv_cache_sf=(kv_cache_sf, None),
    )  # fmt: skip
    if o_dtype is not None and plans.dtype_of(o_dtype, "o_dtype", function) != q.dtype:
        raise DtypeError("o_dtype", f"{q.dtype}, like q", o_dtype, function=function)
    layout = plans.check_layout(kv_layout, function)
    common.check_rank(k, "k", "(keys, heads, dim)", function)
    mask = _mask(function, custom_mask, packed_custom_mask, q.shape[0], k.shape[0 if layout == "NHD" else 1], q.device)
    return _single(
        function, q, k, v, kv_layout, common.flag(causal, "causal", function) and mask is None, window_left,
        logits_soft_cap, sm_scale, plans.factor(k_scale, "k_scale", function),
        plans.factor(v_scale, "v_scale", function), return_lse, mask,
    )  # fmt: skip


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


def _mask(function: str, custom: Any, packed: Any, rows: int, keys: int, device: torch.device) -> Any:
    """A boolean mask (rows, keys), or None."""
    if packed is None:
        if custom is None:
            return None
        common.check_tensors(function, custom_mask=custom)
        if custom.dtype != torch.bool:
            raise DtypeError("custom_mask", "torch.bool", custom.dtype, function=function)
        if custom.numel() != rows * keys:
            raise ShapeError("custom_mask", f"shape ({rows}, {keys})", f"{tuple(custom.shape)}", function=function)
        return custom.reshape(rows, keys)
    common.check_tensors(function, packed_custom_mask=packed)
    name, count = "packed_custom_mask", -(-rows * keys // 8)
    if packed.dtype != torch.uint8:
        raise DtypeError(name, "torch.uint8", packed.dtype, function=function)
    if packed.ndim != 1 or packed.shape[0] < count:
        raise ShapeError(name, f"shape ({count},)", f"{tuple(packed.shape)}", function=function)
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:count, None] >> bits) & 1).bool().flatten()[: rows * keys].reshape(rows, keys)


def _single(
    function: str, q: torch.Tensor, k: Any, v: Any, kv_layout: Any, causal: bool, window_left: Any, softcap: Any,
    sm_scale: Any, factor: float, v_factor: float, return_lse: Any, mask: Any,
) -> Any:  # fmt: skip
    """out, or (out, lse), of one request's rows."""
    layout = plans.check_layout(kv_layout, function)
    common.check_tensors(function, k=k, v=v)
    with_lse = common.flag(return_lse, "return_lse", function)
    left = arguments.check_int(window_left, "window_left", function, least=-1)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else arguments.check_number(sm_scale, "sm_scale", function)
    for name, x in (("k", k), ("v", v)):
        common.check_rank(x, name, "(keys, heads, dim)", function)
    if layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    made = common.call(
        function, attention, q[None], k[None], v[None], causal=causal, window=(left, -1) if left >= 0 else None,
        softmax_scale=scale * factor, softcap=plans.softcap_of(softcap, function), mask=mask, return_lse=with_lse,
        names={"softmax_scale": "sm_scale", "mask": "custom_mask"},
    )  # fmt: skip
    out, lse = made if with_lse else (made, None)
    out = plans.scaled(out[0], v_factor)
    return out if lse is None else (out, plans.lse_as_asked(lse[0], q.shape[0], q.shape[1], None))


# Pages


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> torch.Tensor:
    """Tokens of each request, (batch,), as the original counts them: a request without pages has kv_last_page_len.

    Parameters
    ----------
    kv_indptr, kv_last_page_len : tensor, (batch + 1,) and (batch,)
    page_size : int
    """
    function = "get_seq_lens"
    common.check_tensors(function, kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
    common.check_rank(kv_indptr, "kv_indptr", "(batch + 1)", function)
    batch = max(kv_indptr.shape[0] - 1, 0)
    if kv_last_page_len.shape != (batch,):
        expected = f"shape ({batch},), one less than kv_indptr"
        raise ShapeError("kv_last_page_len", expected, f"{tuple(kv_last_page_len.shape)}", function=function)
    common.check_one_device(function, kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
    page = arguments.check_int(page_size, "page_size", function, least=1, most=arguments.MAX_ROWS)
    made: torch.Tensor = (kv_indptr.diff() - 1).clamp(min=0) * page + kv_last_page_len
    return made


def get_batch_indices_positions(
    append_indptr: Any, seq_lens: Any, nnz: int, batch_indices: Any = None, positions: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of each of ``nnz`` packed new tokens, the last ones of their requests.

    Parameters
    ----------
    append_indptr : tensor, (batch + 1,)
        Row that each request's new tokens begin with, and the end of the last one's.
    seq_lens : tensor, (batch,)
        Tokens of each request, the new ones included.
    nnz : int
        0 to 2^31 - 512.
    batch_indices, positions : tensor, (nnz,), int32, optional
        Where the results go.

    Returns
    -------
    batch_indices, positions : tensor, (nnz,), int32
        -1 and 0 of rows that belong to no request.

    Raises
    ------
    ArgumentError
        Another shape or type, a bad count, a tensor that is not on append_indptr's device.
    """
    function = "get_batch_indices_positions"
    common.check_tensors(function, append_indptr=append_indptr, seq_lens=seq_lens)
    starts, rows = append_indptr, arguments.check_int(nnz, "nnz", function, most=arguments.MAX_ROWS)
    if starts.ndim != 1 or seq_lens.shape != (starts.shape[0] - 1,):
        expected = f"shape ({max(starts.numel() - 1, 0)},), one less than append_indptr"
        raise ShapeError("seq_lens", expected, f"{tuple(seq_lens.shape)}", function=function)
    for name, x in (("batch_indices", batch_indices), ("positions", positions)):
        if x is not None:
            plans.check_numbers(x, name, rows, function)
    common.check_one_device(
        function, append_indptr=starts, seq_lens=seq_lens, batch_indices=batch_indices, positions=positions
    )
    row = torch.arange(rows, dtype=starts.dtype, device=starts.device)
    request = torch.bucketize(row, starts[1:].contiguous(), right=True)
    ends = torch.nn.functional.pad(seq_lens - starts[1:], (0, 1))
    nobody = request >= seq_lens.shape[0]
    made = request.masked_fill(nobody, -1).int(), (row + ends[request]).masked_fill(nobody, 0).int()
    given = (batch_indices, positions)
    found = [x if into is None else into.copy_(x) for x, into in zip(made, given, strict=True)]
    return found[0], found[1]


@torch.no_grad()
def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None:
    """Write new tokens into the pages (`omniattn.append` with slot_mapping). Nothing waits.

    Parameters
    ----------
    append_key, append_value : tensor, (tokens, num_kv_heads, head_dim)
        Of the pages' type. Of pages in e4m3 the bytes are written as they are, as the original does; float16 and
        bfloat16 are rounded to e4m3, without a scale, which the original does not do.
    batch_indices, positions : tensor, (tokens,), of integers
        Request of each token, and its place among the request's; see `get_batch_indices_positions`. Tokens of a
        negative request are not written.
    paged_kv_cache : tensor, (pages, 2, ...), or two tensors (k, v)
        As of `BatchPrefillWithPagedKVCacheWrapper.run`.
    kv_indices, kv_indptr : tensor, (pages,) and (batch + 1,), int32, where the tokens are
        Pages of each request.
    kv_last_page_len : tensor, (batch,)
        No more than checked: positions say where tokens go.
    kv_layout : "NHD" or "HND"

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.append`.
    """
    function = "append_paged_kv_cache"
    layout = plans.check_layout(kv_layout, function)
    common.check_tensors(
        function, append_key=append_key, batch_indices=batch_indices, positions=positions,
        kv_last_page_len=kv_last_page_len,
    )  # fmt: skip
    starts = plans.check_starts(kv_indptr, "kv_indptr", function)
    pages = plans.check_numbers(kv_indices, "kv_indices", None, function)
    batch, tokens = starts.shape[0] - 1, append_key.shape[:1]
    for name, x, shape in (
        ("batch_indices", batch_indices, tokens), ("positions", positions, tokens),
        ("kv_last_page_len", kv_last_page_len, (batch,)),
    ):  # fmt: skip
        if x.shape != shape:
            raise ShapeError(name, f"shape {tuple(shape)}", f"{tuple(x.shape)}", function=function)
    placed = {"kv_indptr": starts, "kv_indices": pages, "batch_indices": batch_indices, "positions": positions}
    for name, x in placed.items():
        if x.device != append_key.device:
            expected = f"a tensor on {append_key.device}, like append_key"
            raise ArgumentError(name, expected, f"{x.device}", function=function)
    k, v = plans.planes(paged_kv_cache, layout, function)
    cache = common.call(function, PagedKVCache.from_arrays, k, v, layout=layout, names=plans.OF_CACHE)
    page = cache.block_size
    if not pages.shape[0] or not batch:
        slots = torch.full(tokens, -1, dtype=torch.int64, device=append_key.device)
    else:
        request, at = batch_indices.long(), positions.long()
        first = starts[request.clamp(0, batch - 1)].long()
        number = pages[(first + at // page).clamp(0, pages.shape[0] - 1)].long()
        slots = torch.where(request < 0, -1, number * page + at % page)
    if k.dtype == plans.E4M3:  # every number of e4m3 is one of bfloat16, and comes back as the same byte
        append_key, append_value = (
            x.to(torch.bfloat16) if isinstance(x, torch.Tensor) and x.dtype == plans.E4M3 else x
            for x in (append_key, append_value)
        )
    names = {"k": "append_key", "v": "append_value"}
    common.call(function, append, cache, append_key, append_value, slot_mapping=slots, names=names)
