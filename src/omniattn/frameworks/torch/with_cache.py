"""`attention_with_kvcache` as an operator, as those of `caches`."""

from __future__ import annotations

from typing import Any

import torch

from ...plan.engine import Call
from .. import FUNCTIONS
from .caches import arrays_of, cache_of, check_no_gradient, value_dim
from .library import LIBRARY, TAGS, fail, plain
from .operators import score_mod_of, score_mod_text

_NAME = "attention_with_kvcache"
LIBRARY.define(
    f"{_NAME}(Tensor[] planes, Tensor[] key_arrays, int cache, Tensor q, Tensor? cu_seqlens_q, Tensor seq_lens, "
    "Tensor? block_table, Tensor? recent_slots, Tensor? batch_index, Tensor? leftpad_k, Tensor? sinks, "
    "Tensor[] arrays, "
    "SymInt? max_seqlen_q, bool causal, SymInt[]? window, float? softmax_scale, float softcap, str? score_mod, "
    "bool return_lse, bool deterministic, SymInt shared_prefix, SymInt? num_splits) "
    "-> (Tensor, Tensor)",
    tags=TAGS,
)


def _kernel(
    planes: Any, key_arrays: Any, number: int, q: Any, starts: Any, seq_lens: Any, block_table: Any, recent_slots: Any,
    batch_index: Any, leftpad_k: Any, sinks: Any, arrays: Any, max_seqlen_q: Any, causal: bool, window: Any,
    softmax_scale: Any, softcap: float, score_mod: Any, return_lse: bool, deterministic: bool, shared_prefix: int,
    num_splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    results = FUNCTIONS[_NAME](
        q, cache_of(number, planes, key_arrays, _NAME), cu_seqlens_q=starts, seq_lens=seq_lens,
        block_table=block_table, recent_slots=recent_slots, batch_index=batch_index, leftpad_k=leftpad_k, sinks=sinks,
        max_seqlen_q=max_seqlen_q, causal=causal, window=None if window is None else tuple(window),
        softmax_scale=softmax_scale, softcap=softcap, score_mod=score_mod_of(score_mod, arrays), return_lse=return_lse,
        deterministic=deterministic, shared_prefix=shared_prefix, num_splits=num_splits,
    )  # fmt: skip
    # As `_shapes` says: the function's own LSE may be a view.
    return (results[0], results[1].contiguous()) if return_lse else (results, q.new_empty((0,), dtype=torch.float32))


def _shapes(
    planes: Any, key_arrays: Any, number: int, q: Any, starts: Any, *more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *_, return_lse, _, _, _ = more
    rows, heads = q.shape[-3], q.shape[-2]
    shape = (heads, rows) if starts is not None else (q.shape[0], heads, rows)
    o = q.new_empty((*q.shape[:-1], value_dim(number, q.shape[-1])))
    return o, q.new_empty(shape if return_lse else (0,), dtype=torch.float32)


for _key in ("CPU", "CUDA"):
    LIBRARY.impl(_NAME, _kernel, _key)
torch.library.register_fake(f"omniattn::{_NAME}", _shapes, lib=LIBRARY)


def run(call: Call) -> list[Any]:
    """A call of `attention_with_kvcache` by its operator; results as `plan.engine.run`."""
    given, cache, mod, x = arrays_of(call), call.cache, call.subject, plain(call.options)
    assert cache is not None
    text, arrays = None, ()
    if mod is not None:
        if not isinstance(mod, FUNCTIONS["ScoreMod"]):  # type: ignore[arg-type]
            fail("argument", "score_mod", "an omniattn.ScoreMod", type(mod).__name__, function=_NAME)
        parts, arrays = mod.facts
        text = score_mod_text(*parts)
        check_no_gradient(dict(zip(parts[-1], arrays, strict=True)))
    planes, key_arrays = cache.operands
    names = ("cu_seqlens_q", "seq_lens", "block_table", "recent_slots", "batch_index", "leftpad_k", "sinks")
    o, lse = torch.ops.omniattn.attention_with_kvcache.default(
        list(planes), list(key_arrays), cache.key, given["q"], *(given[name] for name in names), list(arrays),
        x.max_seqlen_q, x.causal, None if x.window is None else list(x.window), x.softmax_scale, float(x.softcap),
        text, x.return_lse, x.deterministic, x.shared_prefix, x.num_splits,
    )  # fmt: skip
    return [o, lse] if x.return_lse else [o]
