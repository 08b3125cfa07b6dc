"""The calls of an engine whose requests are rows of token slots, as SGLang has them.

Token t of request r lies in slot ``req_to_token[r, t]`` of every layer's pool, and the slots of a page are consecutive
tokens. Nothing here imports SGLang: `sglang` makes its backend of `SlotBackend`, and tests drive it on a GPU without.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

import omniattn

from ..arguments import MAX_HEAD_DIM, MAX_QUANTIZED_HEAD_DIM
from ..errors import ArgumentError, UnsupportedError
from .slot_steps import Step, Tables

__all__ = ["SlotBackend", "check_scores", "of_drafts", "of_encoders", "of_trees"]

_OTHER = "another --attention-backend"

#: Keywords of a layer's call that change its result in a way that is not served, and why.
_NOT_SERVED = {
    "q_rope": "latent attention has another cache",
    "k_rope": "latent attention has another cache",
    "rel_bias": "there is no relative bias",
    "score_mod": "its score modifications are of another language",
    "aux_tensors": "its score modifications are of another language",
    "topk_indices": "there is no sparse attention on indices of keys",
    "idx_q": "there is no sparse attention on indices of keys",
    "idx_k": "there is no sparse attention on indices of keys",
    "idx_v": "there is no sparse attention on indices of keys",
    "q_descale": "queries are in 16 bits",
    "k_descale": "scales come from the layer",
    "v_descale": "scales come from the layer",
}


class SlotBackend(ABC):
    """The calls of an attention backend of SGLang. A subclass says by `_store` how keys and values are written.

    Parameters
    ----------
    pool : object
        ``get_kv_buffer(layer_id)`` gives K and V: (slots, heads, head_dim), or (pages, heads, page_size, head_dim);
        ``dtype`` is float16, bfloat16 or float8_e4m3fn. A pair of pools, one of them for layers with a window, has
        ``layers_mapping`` and ``full_to_swa_index_mapping`` besides.
    req_to_token : tensor, (rows, tokens), int32
    page_size : int
    deterministic : bool
        The bits of a request do not depend on the others of a step.
    """

    #: Nothing is read from the host's copy of the lengths.
    needs_cpu_seq_lens = False

    def __init__(self, pool: Any, req_to_token: torch.Tensor, page_size: int, *, deterministic: bool = False) -> None:
        self.token_to_kv_pool = pool
        self.req_to_token = req_to_token
        self.page_size = page_size
        self.deterministic = deterministic
        self.forward_metadata: Step | None = None
        #: (index in its pool, whether that is the pool of layers with a window) of each layer, of pools that are two.
        self._layers: dict[int, tuple[int, bool]] | None = getattr(pool, "layers_mapping", None)
        to_window = None if self._layers is None else pool.full_to_swa_index_mapping
        if self._layers is not None and to_window is None:
            raise UnsupportedError(
                "omniattn on a pool for layers with a window that has no full_to_swa_index_mapping yet",
                instead="to register it before the backend is made, as SGLang's allocators do",
            )
        self.tables = Tables(req_to_token, page_size, to_window)
        self._graph: Step | None = None
        self._caches: dict[int, tuple[Any, Any]] = {}
        self._checked: set[int] = set()

    # The step, before its layers.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make tables and lengths of a step that is not in a graph."""
        mode = forward_batch.forward_mode
        if mode.is_idle() and not forward_batch.batch_size:
            self.forward_metadata = None
            return
        self._check_batch(forward_batch)
        requests, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
        slots = forward_batch.out_cache_loc
        rows = 0 if slots is None else slots.shape[0]
        if mode.is_decode_or_idle() or mode.is_target_verify():
            step = self.tables.empty(requests.shape[0], rows)
            more = self._set_rows(step, forward_batch)
        else:
            step, more = self._prompts(forward_batch, rows), 0
        self.tables.fill(step, requests, lengths, more, slots)
        self.forward_metadata = step

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured steps of up to ``max_bs`` requests read."""
        self._graph = self.tables.empty(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Choose the arrays of a captured step; their values are written in the graph."""
        self.forward_metadata = self._of_graph(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Write the values of a captured step, as kernels of the graph."""
        step = self._of_graph(forward_batch)
        bs = forward_batch.batch_size
        more = step.longest if forward_batch.forward_mode.is_target_verify() else 0
        self.tables.fill(
            step, forward_batch.req_pool_indices[:bs], forward_batch.seq_lens[:bs], more, forward_batch.out_cache_loc
        )
        self.forward_metadata = step

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Tokens of a padded request, which SGLang takes for its new tokens too."""
        return 1

    def update_verify_buffers_to_fill_after_draft(  # noqa: B027 - whole as it is
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Nothing depends on the mask of a chain."""

    def _of_graph(self, forward_batch: Any) -> Step:
        mode, state, bs = forward_batch.forward_mode, self._graph, forward_batch.batch_size
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            raise UnsupportedError(
                f"omniattn in a CUDA graph of {_name(mode)}: only steps with a fixed number of tokens a request are "
                "captured", instead="--cuda-graph-backend-prefill breakable, which runs attention beside the graph"
            )  # fmt: skip
        self._check_batch(forward_batch)
        if state is None:
            raise UnsupportedError(
                "omniattn in a CUDA graph before init_cuda_graph_state()",
                instead="SGLang's graph runners, which call it",
            )
        slots = forward_batch.out_cache_loc
        rows = 0 if slots is None else slots.shape[0]
        step = Step(
            state.seq_lens[:bs], state.table[:bs], None if state.window_table is None else state.window_table[:bs],
            None if state.window_slots is None else state.window_slots[:rows],
        )  # fmt: skip
        self._set_rows(step, forward_batch)
        return step

    @staticmethod
    def _set_rows(step: Step, forward_batch: Any) -> int:
        """The rows of each request of a step that has as many of each; those that seq_lens does not count."""
        if forward_batch.forward_mode.is_decode_or_idle():
            return 0
        guess = forward_batch.spec_info
        # The rows may be more: data parallel attention rounds them up.
        widths = (getattr(guess, name, None) or 0 for name in ("num_tokens_per_req", "draft_token_num"))
        rows, batch = forward_batch.input_ids.shape[0], forward_batch.batch_size
        step.longest = next((int(width) for width in widths if width > 0), rows // max(batch, 1))
        return step.longest

    def _prompts(self, forward_batch: Any, rows: int) -> Step:
        """A step of packed rows. How many of each request is on the host too, so that the table is no wider."""
        new, before = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
        lengths = [int(n) for n in new]
        columns, continues = None, True
        if before is not None:
            prefixes = [int(n) for n in before]
            columns = self.tables.columns_for(max(map(sum, zip(lengths, prefixes, strict=True)), default=1))
            continues = any(prefixes)
        step = self.tables.empty(forward_batch.req_pool_indices.shape[0], rows, columns)
        step.starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=step.seq_lens.device)
        step.starts[1:].copy_(torch.cumsum(forward_batch.extend_seq_lens, 0))
        step.longest, step.continues, step.lengths = max(lengths, default=0), continues, lengths
        return step

    def _check_batch(self, forward_batch: Any) -> None:
        mode, guess = forward_batch.forward_mode, forward_batch.spec_info
        if mode.is_draft_extend_v2() or (mode.is_decode() and guess is not None):
            raise of_drafts()
        if mode.is_dllm_extend():
            raise UnsupportedError("omniattn with diffusion language models (dLLM)", instead=_OTHER)
        if mode.is_target_verify():
            for name in ("topk", "tree_topk"):
                if (topk := getattr(guess, name, None)) not in (None, 1):
                    raise of_trees(topk)
            if getattr(guess, "ragged_verify_layout", None) is not None:
                raise UnsupportedError(
                    "omniattn with numbers of guessed tokens that differ between requests",
                    instead="SGLANG_RAGGED_VERIFY_MODE off",
                )
        if forward_batch.encoder_lens is not None:
            raise of_encoders()
        if getattr(forward_batch, "multi_item_delimiter_indices", None) is not None:
            raise UnsupportedError("omniattn with multi-item scoring", instead="--attention-backend flashinfer")

    # A layer.

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """Attention of one new token of each request."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs, is_extend=False)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """Attention of prompts, chunks of prompts, single tokens among them, or guessed tokens."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs, is_extend=True)

    def _begin(self, layer: Any, batch: Any, kwargs: dict[str, Any]) -> tuple[Step, Any, bool]:
        """The step of a layer's call, its sinks, and whether it wants the LSE; what is not served raises."""
        if id(layer) not in self._checked:
            self.check_layer(layer)
            self._checked.add(id(layer))
        sinks, wants_lse = _taken(kwargs)
        step = self.forward_metadata
        assert step is not None, "init_forward_metadata() comes before the layers"
        return step, sinks, wants_lse or bool(getattr(batch, "mha_return_lse", False))

    def _forward(
        self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save: bool, kwargs: dict[str, Any], *, is_extend: bool
    ) -> Any:
        step, sinks, wants_lse = self._begin(layer, batch, kwargs)
        in_window_pool = self._layers is not None and self._layers[layer.layer_id][1]
        causal = not (is_extend and _kind(layer) != "decoder")
        if not causal and step.continues:
            raise UnsupportedError(
                "omniattn for bidirectional attention over tokens of before the step, which have not seen the new ones",
                instead="--disable-radix-cache --chunked-prefill-size -1",
            )
        if save and k is not None:
            slots, window_slots = batch.out_cache_loc, step.window_slots
            if window_slots is not None:
                window_slots = window_slots[: slots.shape[0]]
            self._store(layer, slots, window_slots, k, v)
        left = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        heads, dim = layer.tp_q_head_num, layer.head_dim
        q = q.reshape(-1, heads, dim)
        out = getattr(batch, "_attn_output", None)
        out = out.view(q.shape) if out is not None and out.dtype == q.dtype else None
        whole = None
        if step.starts is None:
            requests = step.seq_lens.shape[0]
            if q.shape[0] > requests * step.longest:
                whole = torch.empty_like(q) if out is None else out
                whole[requests * step.longest :] = 0
                q, out = q[: requests * step.longest], whole[: requests * step.longest]
            q = q.reshape(requests, step.longest, heads, dim)
            out = None if out is None else out.view(q.shape)
        if sinks is not None and sinks.dtype not in (q.dtype, torch.float32):
            sinks = sinks.to(torch.float32)
        o = omniattn.attention_with_kvcache(
            q, self._cache(layer), seq_lens=step.seq_lens,
            block_table=step.window_table if in_window_pool else step.table, cu_seqlens_q=step.starts,
            max_seqlen_q=None if step.starts is None else step.longest, causal=causal,
            window=None if left < 0 else (left, 0 if causal else left), softmax_scale=layer.scaling,
            softcap=layer.logit_cap, sinks=sinks, return_lse=wants_lse, out=out, deterministic=self.deterministic,
        )  # fmt: skip
        o, lse = o if wants_lse else (o, None)
        if whole is not None:
            o = whole
        if lse is None:
            return o.view(-1, heads * dim)
        of_rows = lse.transpose(-1, -2).reshape(-1, heads)
        if whole is not None:
            of_rows = torch.nn.functional.pad(of_rows, (0, 0, 0, len(whole) - len(of_rows)), value=-torch.inf)
        return o.view(-1, heads * dim), of_rows.contiguous()

    @abstractmethod
    def _store(
        self, layer: Any, slots: torch.Tensor, window_slots: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write the new tokens into the layer's pool."""

    def _cache(self, layer: Any) -> Any:
        """The layer's pool as a cache. It is asked for at each call: SGLang may have to load it first."""
        k, v = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        given = (layer.k_scale, layer.v_scale) if k.dtype == torch.float8_e4m3fn else (None, None)
        key = (k.data_ptr(), v.data_ptr(), k.shape, k.dtype, *map(_place, given))
        known = self._caches.get(layer.layer_id)
        if known is not None and known[0] == key:
            return known[1]
        k_scale, v_scale = _scales(given, k)
        order = "NHD"
        if k.dim() == 4:
            order = "HND"
        else:
            k, v = self._pages(k), self._pages(v)
        cache = omniattn.PagedKVCache.from_arrays(k, v, layout=order, k_scale=k_scale, v_scale=v_scale)
        if all(not isinstance(x, torch.Tensor) or _is_read(x, k) for x in given):
            self._caches[layer.layer_id] = key, cache
        return cache

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        """A pool's slots as pages; a rest that is no page is left out."""
        pages = slots.shape[0] // self.page_size
        return slots[: pages * self.page_size].unflatten(0, (pages, self.page_size))

    def check_layer(self, layer: Any) -> None:
        """Refuse what a layer has and attention has not.

        Raises
        ------
        UnsupportedError
            Names it.
        """
        where = f"omniattn for layer {layer.layer_id}"
        if layer.is_cross_attention:
            raise of_encoders()
        if layer.v_head_dim != layer.head_dim:
            raise UnsupportedError(
                f"{where} with value heads of {layer.v_head_dim} beside key heads of {layer.head_dim}", instead=_OTHER
            )
        step = 16 // self.token_to_kv_pool.dtype.itemsize
        most = MAX_HEAD_DIM if step == 8 else MAX_QUANTIZED_HEAD_DIM
        if layer.head_dim % step or layer.head_dim > most:
            raise UnsupportedError(
                f"{where} with heads of {layer.head_dim} in {self.token_to_kv_pool.dtype}",
                instead=f"a multiple of {step} up to {most}, or {_OTHER}",
            )
        check_scores(layer, where)
        if _kind(layer) not in ("decoder", "decoder_bidirectional", "encoder_only"):
            raise UnsupportedError(f"{where} of type {_kind(layer)!r}", instead=_OTHER)


def check_scores(layer: Any, where: str) -> None:
    """Refuse scores of a layer that are of another kind than scale and softcap; ``where``: of errors."""
    if getattr(layer, "use_irope", False):
        raise UnsupportedError(f"{where} with attention in chunks (use_irope)", instead=_OTHER)
    if layer.logit_cap and getattr(layer, "logit_capping_method", "tanh") != "tanh":
        raise UnsupportedError(f"{where} with logits capped by {layer.logit_capping_method}", instead=_OTHER)
    if getattr(layer, "xai_temperature_len", -1) > 0:
        raise UnsupportedError(f"{where} with temperatures by position (xai_temperature_len)", instead=_OTHER)
    if getattr(layer, "pos_encoding_mode", "NONE") != "NONE":
        raise UnsupportedError(f"{where} with positions encoded in attention", instead=_OTHER)


def _taken(kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """sinks and return_lse of a layer's call; others that are given raise."""
    for name, value in kwargs.items():
        if name in ("sinks", "return_lse") or value is None or value is False:
            continue
        why = _NOT_SERVED.get(name, "it is not known, and could change the result")
        raise UnsupportedError(f"omniattn with {name!r} of a layer: {why}", instead=_OTHER)
    sinks = kwargs.get("sinks")
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        raise ArgumentError("sinks", "a tensor or None", repr(sinks), function="omniattn.integrations.sglang")
    return sinks, bool(kwargs.get("return_lse", False))


def _place(x: Any) -> Any:
    """What tells one factor from another: a number, or the place of a tensor, whose values may change."""
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


def _is_read(scale: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether kernels read this tensor, and not a copy that does not follow its values."""
    return scale.dtype == torch.float32 and scale.device == k.device


def _scales(given: tuple[Any, Any], k: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Factors of K and V in e4m3 as tensors; None for 1 and 1."""
    if given == (None, None):
        return None, None
    k_scale, v_scale = (
        torch.as_tensor(1.0 if x is None else x, dtype=torch.float32, device=k.device).detach().reshape(-1)
        for x in given
    )
    return k_scale, v_scale


def _kind(layer: Any) -> str:
    """One of "decoder", "decoder_bidirectional", "encoder_only"."""
    kind = layer.attn_type
    return str(getattr(kind, "value", kind))


def _name(mode: Any) -> str:
    return str(getattr(mode, "name", mode))


def of_drafts() -> UnsupportedError:
    return UnsupportedError(
        "omniattn for the draft model of speculative decoding",
        instead="--speculative-draft-attention-backend, with omniattn for the model that verifies",
    )


def of_trees(topk: int) -> UnsupportedError:
    return UnsupportedError(
        f"omniattn with trees of guessed tokens (topk {topk}), which need a mask of their own",
        instead="EAGLE, EAGLE3, NEXTN or STANDALONE with --speculative-eagle-topk 1, a chain",
    )


def of_encoders() -> UnsupportedError:
    return UnsupportedError(
        "omniattn for cross attention: SGLang keeps an encoder's tokens in front of the text's, in the same row",
        instead="--attention-backend flashinfer",
    )
