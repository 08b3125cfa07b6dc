"""`compat`'s attention over caches in the caller's tensors, as operators.

Of FlashAttention's one reads the caches, and one writes them first: torch knows that it changes both, which may be
views of one tensor. FlashInfer's reads pages.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import FUNCTIONS
from .library import LIBRARY, TAGS

#: The function of `FUNCTIONS` that both run.
NAME = "attend_cached"
#: Tensors behind q and the caches, and then what is none, in the order of a call.
TENSORS = (
    "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table", "alibi_slopes",
    "rotary_seqlens", "cu_seqlens_q", "cu_seqlens_k_new", "q_descale", "k_descale", "v_descale",
)  # fmt: skip
_REST = (
    ", ".join(f"Tensor? {name}" for name in TENSORS) + ", SymInt? length, str function, str table_name, "
    "float? softmax_scale, bool causal, SymInt[] window_size, float softcap, bool rotary_interleaved, "
    "SymInt num_splits, SymInt? max_seqlen_q) -> (Tensor, Tensor)"
)
LIBRARY.define(f"attend_cached(Tensor q, Tensor k_cache, Tensor v_cache, {_REST}", tags=TAGS)
LIBRARY.define(
    f"attend_cached_(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, {_REST}", tags=TAGS
)


def _attend(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, given: tuple[Any, ...]) -> tuple[Any, Any]:
    tensors = dict(zip(TENSORS, given, strict=False))
    length, function, table_name, scale, causal, window, softcap, interleaved, splits, longest = given[len(TENSORS) :]
    if length is not None:
        tensors["cache_seqlens"] = length
    out, lse = FUNCTIONS[NAME](
        function, q, k_cache, v_cache, k, v, **tensors, table_name=table_name, softmax_scale=scale, causal=causal,
        window_size=tuple(window), softcap=softcap, rotary_interleaved=interleaved, num_splits=splits,
        max_seqlen_q=longest,
    )  # fmt: skip
    return out.contiguous(), lse.contiguous()  # as `_shapes` says


def _reads(q: Any, k_cache: Any, v_cache: Any, *given: Any) -> tuple[Any, Any]:
    return _attend(q, k_cache, v_cache, None, None, given)


def _writes(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, *given: Any) -> tuple[Any, Any]:
    return _attend(q, k_cache, v_cache, k, v, given)


def _shapes(q: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, rows, heads, _ = q.shape
    # Packed rows have no batch.
    shape = (*batch, heads, rows)
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    return q.new_empty(tuple(q.shape), dtype=dtype), q.new_empty(shape, dtype=torch.float32)


for _name, _kernel in ((NAME, _reads), (f"{NAME}_", _writes)):
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _key)
    torch.library.register_fake(f"omniattn::{_name}", _shapes, lib=LIBRARY)


def run(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, *given: Any) -> Any:
    """out and LSE by the operator of a call, without gradients."""
    with torch.no_grad():
        if k is None:
            return torch.ops.omniattn.attend_cached.default(q, k_cache, v_cache, *given)
        return torch.ops.omniattn.attend_cached_.default(q, k_cache, v_cache, k, v, *given)


# FlashInfer's

PAGES = "attend_pages"
LIBRARY.define(
    f"{PAGES}(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, str layout, Tensor seq_lens, "
    "Tensor block_table, Tensor? cu_seqlens_q, Tensor? sinks, SymInt? max_seqlen_q, bool causal, SymInt window_left, "
    "float softmax_scale, float softcap, bool deterministic, bool return_lse) -> (Tensor, Tensor)",
    tags=TAGS,
)


def _pages(q: Any, *given: Any) -> tuple[Any, Any]:
    made = FUNCTIONS[PAGES](q, *given)
    out, lse = made if given[-1] else (made, q.new_empty((0,), dtype=torch.float32))
    return out, lse.contiguous()


def _shapes_of_pages(q: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _shapes(q)
    return out, lse if given[-1] else lse.new_empty((0,))


for _key in ("CPU", "CUDA"):
    LIBRARY.impl(PAGES, _pages, _key)
torch.library.register_fake(f"omniattn::{PAGES}", _shapes_of_pages, lib=LIBRARY)


def run_pages(*given: Any) -> Any:
    """out and LSE; the LSE is empty where it is not asked for."""
    return torch.ops.omniattn.attend_pages.default(*given)
