"""`token_slots` for latent attention (MLA): pools of rows that all query heads share.

A model calls two kinds of layers on one pool. One attends over the rows as they are, with queries that have been
multiplied by the up-projection of K ("absorbed"). The other attends over keys and values that the model has made of
rows, in heads of their own: of new tokens, or of a part of the older ones, merged by the LSE.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch

import omniattn

from ..errors import UnsupportedError
from .latent_limits import HEAD_DIM, HEAD_DIM_V, MOST_CHANNELS, most_queries, takes_heads
from .slot_steps import Step
from .token_slots import SlotBackend, check_scores

__all__ = ["LatentSlotBackend"]

_OTHER = "another --attention-backend"


class LatentSlotBackend(SlotBackend):
    """The calls of an attention backend of SGLang over a pool of latent rows.

    Parameters
    ----------
    pool : object
        ``get_key_buffer(layer_id)`` gives the rows, (slots, 1, 576); ``dtype`` is float16, bfloat16 or float8_e4m3fn.
    req_to_token, page_size, deterministic
        As `SlotBackend`'s.
    """

    def __init__(self, pool: Any, req_to_token: torch.Tensor, page_size: int, *, deterministic: bool = False) -> None:
        super().__init__(pool, req_to_token, page_size, deterministic=deterministic)
        #: A step of prompts, and its prompts as requests of few tokens.
        self._runs: tuple[Step, Step] | None = None

    def _forward(
        self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save: bool, kwargs: dict[str, Any], *, is_extend: bool
    ) -> Any:
        parts = {name: kwargs.pop(name, None) for name in ("q_rope", "k_rope")}
        step, sinks, wants_lse = self._begin(layer, batch, kwargs)
        if sinks is not None:
            raise UnsupportedError("omniattn for latent attention with sinks", instead=_OTHER)
        if not _is_absorbed(layer):
            if save:
                raise UnsupportedError(
                    "omniattn for latent attention with keys and values that the layer itself is to write",
                    instead="save_kv_cache=False: the model writes latent rows",
                )
            return self._over_own(q, k, v, layer, batch, step, wants_lse)
        heads = layer.tp_q_head_num
        q = _joined(q, parts["q_rope"], heads)
        if save and k is not None:
            rows = _joined(k, parts["k_rope"], 1)
            self._store_rows(layer, batch.out_cache_loc, rows[: batch.out_cache_loc.shape[0]])
        o, lse = self._over_rows(q, layer, step, wants_lse)
        found = o.reshape(-1, heads * HEAD_DIM_V)
        return found if lse is None else (found, lse)

    def _over_rows(
        self, q: torch.Tensor, layer: Any, step: Step, wants_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """o (rows, heads, 512) and lse (rows, heads) over the pool's rows."""
        heads = layer.tp_q_head_num
        options: dict[str, Any] = {
            "softmax_scale": layer.scaling, "softcap": layer.logit_cap, "return_lse": wants_lse,
            "deterministic": self.deterministic,
        }  # fmt: skip
        if step.starts is not None:
            runs = self._runs_of(step, heads)
            found = omniattn.attention_with_kvcache(
                q, self._cache(layer), seq_lens=runs.seq_lens, block_table=runs.table, cu_seqlens_q=runs.starts,
                max_seqlen_q=runs.longest, **options,
            )  # fmt: skip
            return (found[0], found[1].transpose(0, 1).contiguous()) if wants_lse else (found, None)
        requests = step.seq_lens.shape[0]
        rows = requests * step.longest
        found = omniattn.attention_with_kvcache(
            q[:rows].reshape(requests, step.longest, heads, HEAD_DIM), self._cache(layer), seq_lens=step.seq_lens,
            block_table=step.table, **options,
        )  # fmt: skip
        o, lse = found if wants_lse else (found, None)
        return _padded(
            o.reshape(rows, heads, HEAD_DIM_V), None if lse is None else lse.transpose(-1, -2).reshape(rows, heads),
            q.shape[0] - rows,
        )  # fmt: skip

    def _runs_of(self, step: Step, heads: int) -> Step:
        """The step's prompts in runs of as many tokens as one call takes, as requests that see those before and theirs.

        Made once a step.
        """
        if self._runs is None or self._runs[0] is not step:
            self._runs = step, self._divided(step, heads)
        return self._runs[1]

    def _divided(self, step: Step, heads: int) -> Step:
        in_8_bits = self.token_to_kv_pool.dtype.itemsize == 1
        most = most_queries(heads, deterministic=self.deterministic, in_8_bits=in_8_bits)
        if step.longest <= most:
            return replace(step, longest=max(step.longest, 1))
        owners, behind, ends, at = [], [], [0], 0
        for i, length in enumerate(step.lengths):
            for first in range(0, length, most):
                end = min(first + most, length)
                owners.append(i)
                behind.append(length - end)
                ends.append(at + end)
            at += length
        device = step.seq_lens.device
        # One copy to the device, which does not wait.
        host = torch.tensor(owners + behind + ends, dtype=torch.int32)
        if device.type == "cuda":
            host = host.pin_memory()
        owner, less, starts = host.to(device, non_blocking=True).split([len(owners), len(behind), len(ends)])
        seq_lens, table = step.seq_lens.index_select(0, owner) - less, step.table.index_select(0, owner)
        return replace(step, seq_lens=seq_lens, table=table, starts=starts, longest=most)

    def _over_own(
        self, q: Any, k: Any, v: Any, layer: Any, batch: Any, step: Step, wants_lse: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention over keys and values in heads of their own: the new tokens', or a part of the older ones'."""
        if step.starts is None:
            raise UnsupportedError(
                "omniattn for latent attention of single tokens over keys and values of their own", instead=_OTHER
            )
        if getattr(batch, "mha_one_shot", None):
            raise UnsupportedError("omniattn for latent attention by MHA_ONE_SHOT", instead="MHA_CHUNKED_KV, or MLA")
        heads, dim, dim_v = layer.tp_q_head_num, layer.head_dim, layer.v_head_dim
        rows = sum(step.lengths)
        of_keys, most, causal = step.starts, step.longest, True
        if getattr(batch, "attn_attend_prefix_cache", None):
            part = batch.prefix_chunk_idx
            of_keys, most, causal = batch.prefix_chunk_cu_seq_lens[part], batch.prefix_chunk_max_seq_lens[part], False
        else:
            k, v = k[:rows], v[:rows]
        q = q.reshape(-1, heads, dim)
        found = omniattn.attention_varlen(
            q[:rows], k.view(-1, layer.tp_k_head_num, dim), v.view(-1, layer.tp_k_head_num, dim_v),
            cu_seqlens_q=step.starts, cu_seqlens_k=of_keys.to(torch.int32), max_seqlen_q=step.longest,
            max_seqlen_k=int(most), causal=causal, softmax_scale=layer.scaling, softcap=layer.logit_cap,
            return_lse=wants_lse, deterministic=self.deterministic,
        )  # fmt: skip
        o, lse = (found[0], found[1].transpose(0, 1)) if wants_lse else (found, None)
        o, lse = _padded(o, lse, q.shape[0] - rows)
        return o.reshape(-1, heads * dim_v) if lse is None else (o, lse)

    @abstractmethod
    def _store_rows(self, layer: Any, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write latent rows (tokens, 1, 576) into the layer's pool."""

    def _store(
        self, layer: Any, slots: torch.Tensor, window_slots: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self._store_rows(layer, slots, k)

    def _cache(self, layer: Any) -> Any:
        """The layer's pool as a cache. It is asked for at each call: SGLang may have to load it first."""
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        key = (rows.data_ptr(), rows.shape, rows.dtype)
        known = self._caches.get(layer.layer_id)
        if known is not None and known[0] == key:
            return known[1]
        cache = omniattn.PagedKVCache.from_arrays(self._pages(rows), head_dim_v=HEAD_DIM_V)
        self._caches[layer.layer_id] = key, cache
        return cache

    def check_layer(self, layer: Any) -> None:
        """Refuse what a layer has and attention has not.

        Raises
        ------
        UnsupportedError
            Names it.
        """
        where = f"omniattn for layer {layer.layer_id} of latent attention"
        dims = f"heads of {layer.head_dim}, values of {layer.v_head_dim} and {layer.tp_k_head_num} heads of keys"
        if layer.tp_k_head_num == 1 and layer.tp_q_head_num > 1 and not _is_absorbed(layer):
            raise UnsupportedError(f"{where} with {dims}", instead=f"kv_lora_rank 512 with 64 beside it, or {_OTHER}")
        if not _is_absorbed(layer) and not takes_heads(layer.head_dim, layer.v_head_dim):
            raise UnsupportedError(f"{where} with {dims}", instead=f"multiples of 8 up to {MOST_CHANNELS}, or {_OTHER}")
        if layer.is_cross_attention or str(getattr(layer.attn_type, "value", layer.attn_type)) != "decoder":
            raise UnsupportedError(f"{where} of another kind than a causal decoder's", instead=_OTHER)
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            raise UnsupportedError(f"{where} with a sliding window", instead=_OTHER)
        check_scores(layer, where)
        # SGLang's two ways into the pool do not agree about it.
        scale = getattr(layer, "k_scale_float", None)
        if self.token_to_kv_pool.dtype.itemsize == 1 and scale not in (None, 1.0):
            raise UnsupportedError(
                f"{where} with a k_scale of {scale}", instead="a scale of 1, or --kv-cache-dtype auto"
            )


def _is_absorbed(layer: Any) -> bool:
    """Whether a layer attends over latent rows as they are."""
    return bool(layer.tp_k_head_num == 1 and layer.head_dim == HEAD_DIM and layer.v_head_dim == HEAD_DIM_V)


def _padded(o: torch.Tensor, lse: torch.Tensor | None, more: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """With so many rows of nobody behind: o is 0 there, and lse -inf."""
    if more > 0:
        o = torch.nn.functional.pad(o, (0, 0, 0, 0, 0, more))
        lse = None if lse is None else torch.nn.functional.pad(lse, (0, 0, 0, more), value=-torch.inf)
    return o, None if lse is None else lse.contiguous()


def _joined(x: torch.Tensor, rope: torch.Tensor | None, heads: int) -> torch.Tensor:
    """Rows (tokens, heads, 576), which models have in one part or in two."""
    if rope is None:
        return x.reshape(-1, heads, HEAD_DIM)
    return torch.cat([x.reshape(-1, heads, HEAD_DIM_V), rope.reshape(-1, heads, HEAD_DIM - HEAD_DIM_V)], -1)
