"""vLLM's own classes for latent attention on a machine without a GPU: a layer, its cache, steps, and what they are.

Its compiled operations, which write rows and gather them, stand here in torch. What `MLAAttention` and vLLM's builder
read of a model's configuration is in `model`; that of vLLM looks for files.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import vllm._custom_ops as ops
from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import sparse_utils
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

from tests import vllm_host as host
from tests.latent_steps import NOPE, RANK, ROPE, V, Weights, decoded, encoded

HEADS, BLOCK, BLOCKS, TOPK = 4, 16, 40, 128
NAME = "model.layers.0.self_attn.attn"


# vLLM's compiled operations


def concat_and_cache_mla(
    kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: str, scale: Any, skip_scale: bool = False
) -> None:
    """New rows into a cache; slots below 0 are left out."""
    rows = encoded(torch.cat([kv_c, k_pe], -1), kv_cache_dtype, scale)
    for row, slot in zip(rows, slot_mapping.tolist(), strict=False):
        if slot >= 0:
            kv_cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1]] = row.view(kv_cache.dtype)


def _gathered(src: Any, dst: Any, table: Any, starts_of_rows: Any, starts: Any, name: str, scale: Any) -> None:
    for i, (first, end) in enumerate(itertools.pairwise(starts_of_rows.tolist())):
        at = torch.arange(end - first) + (0 if starts is None else int(starts[i]))
        rows = src[table[i, at // src.shape[1]].long(), at % src.shape[1]]
        dst[first:end] = decoded(rows, name, scale).to(dst.dtype)


def gather_and_maybe_dequant_cache(
    src_cache: Any, dst: Any, block_table: Any, cu_seq_lens: Any, token_to_seq: Any, num_tokens: int,
    kv_cache_dtype: str, scale: Any, seq_starts: Any = None,
) -> None:  # fmt: skip
    _gathered(src_cache, dst, block_table, cu_seq_lens, seq_starts, kv_cache_dtype, scale)


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Any, dst: Any, block_table: Any, workspace_starts: Any, batch_size: int, seq_starts: Any = None
) -> None:
    _gathered(src_cache, dst, block_table, workspace_starts, seq_starts, "fp8_ds_mla", None)


def merge_attn_states(
    output: Any, prefix_output: Any, prefix_lse: Any, suffix_output: Any, suffix_lse: Any, output_lse: Any = None
) -> None:
    total = torch.logaddexp(prefix_lse.double(), suffix_lse.double())
    parts = ((prefix_output, prefix_lse), (suffix_output, suffix_lse))
    merged = sum(o.double() * (lse.double() - total).exp().T.unsqueeze(-1) for o, lse in parts)
    output.copy_(merged)
    if output_lse is not None:
        output_lse.copy_(total)


def convert_rows(
    req_id: Any, block_table: Any, token_indices: Any, BLOCK_SIZE: int = 64, NUM_TOPK_TOKENS: int = 2048,
    return_valid_counts: bool = False, **others: Any,
) -> Any:  # fmt: skip
    assert return_valid_counts
    assert not others
    assert token_indices.shape[1] == NUM_TOPK_TOKENS
    at = token_indices.clamp_min(0).long()
    rows = block_table[req_id.long()[:, None], at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
    return torch.where(token_indices < 0, -1, rows).int(), (token_indices >= 0).sum(1).int()


@contextlib.contextmanager
def operations() -> Iterator[None]:
    """torch in the place of vLLM's compiled operations and Triton."""
    places: list[tuple[Any, str, Any]] = [
        (ops, f.__name__, f)
        for f in (concat_and_cache_mla, gather_and_maybe_dequant_cache, cp_gather_and_upconvert_fp8_kv_cache)
    ]
    places += [
        (mla_attention, "merge_attn_states", merge_attn_states),
        (sparse_utils, "triton_convert_req_index_to_global_index", convert_rows),
        (sparse_mla_attention, "get_tensor_model_parallel_world_size", lambda: 1),  # there is no group of one process
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, function in places:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


# A model


def model(dtype: Any = torch.bfloat16) -> Any:
    """What vLLM's classes read of a configuration of DeepSeek's models."""
    text = SimpleNamespace(
        kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V, q_lora_rank=None,
        index_topk=TOPK,
    )  # fmt: skip
    return SimpleNamespace(
        hf_text_config=text, hf_config=text, dtype=dtype, max_model_len=512, use_mla=True, rswa_window=None,
        model_arch_config=SimpleNamespace(total_num_attention_heads=HEADS), get_head_size=lambda: RANK + ROPE,
        get_num_attention_heads=lambda parallel: HEADS,
    )  # fmt: skip


class UpProjection(torch.nn.Module):
    """``kv_b_proj``: heads of keys and values of latent rows."""

    def __init__(self, weights: Weights, dtype: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weights.of_linear().to(dtype), requires_grad=False)
        self.quant_method = None
        self.params_dtype = dtype

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


@contextlib.contextmanager
def config(
    cache_dtype: str = "auto", dtype: Any = torch.bfloat16, prefill: Any = "CUSTOM", **more: Any
) -> Iterator[Any]:
    """vLLM's configuration with our backend, as ``--attention-backend CUSTOM`` has it."""
    chosen = None if prefill is None else MLAPrefillBackendEnum[prefill]
    made = VllmConfig(attention_config=AttentionConfig(backend="CUSTOM", mla_prefill_backend=chosen, **more))
    object.__setattr__(made, "model_config", model(dtype))
    made.cache_config.cache_dtype = cache_dtype
    made.cache_config.block_size = BLOCK
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(made), operations():
            yield made
    finally:
        torch.set_default_dtype(before)


@dataclass
class Request:
    """What a request has had computed."""

    blocks: list[int]
    rows: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(x.shape[0] for x in self.rows)


class Engine:
    """Steps of requests through one layer, by vLLM's builder, forward context and layer."""

    def __init__(
        self, made: Any, *, sparse: bool = False, scale: float | None = None, layout: str = "LBNHC", seed: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        self.made, self.dtype, self.sparse = made, made.model_config.dtype, sparse
        self.rng = torch.Generator().manual_seed(seed)
        self.weights = Weights(HEADS, self.rng, self.dtype)
        self.topk = torch.full((256, TOPK), -1, dtype=torch.int32) if sparse else None
        if sparse:
            options = {"use_sparse": True, "topk_indices_buffer": self.topk, **options}
        self.layer = mla_attention.MLAAttention(
            HEADS, scale or (NOPE + ROPE) ** -0.5, NOPE, ROPE, V, None, RANK, UpProjection(self.weights, self.dtype),
            cache_config=made.cache_config, prefix=NAME, **options,
        )  # fmt: skip
        self.layer.process_weights_after_loading(self.dtype)
        self.spec = self.layer.get_attn_backend().customize_spec(self.layer.get_kv_cache_spec(made))
        self.layer.bind_kv_cache(host.pool_of(self.spec, layout, BLOCKS))
        builder = self.layer.get_attn_backend().get_builder_cls()
        self.builder = builder(self.spec, [NAME], made, torch.device("cpu"))
        self.free = (torch.randperm(BLOCKS - 1, generator=self.rng) + 1).tolist()  # block 0 is nobody's
        self.requests: dict[str, Request] = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float32).to(self.dtype)

    def metadata(self, news: Sequence[tuple[str, int]], padding: int = 0, **more: Any) -> Any:
        """vLLM's metadata of a step, single tokens first; the blocks that it needs are taken."""
        lengths, slots = [], []
        table = torch.zeros(len(news) + padding, BLOCKS, dtype=torch.int32)
        for i, (name, count) in enumerate(news):
            request = self.requests.setdefault(name, Request([]))
            before = request.tokens
            while len(request.blocks) * BLOCK < before + count:
                request.blocks.append(self.free.pop())
            lengths.append(before + count)
            slots += [request.blocks[t // BLOCK] * BLOCK + t % BLOCK for t in range(before, before + count)]
            table[i, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        counts = [count for _, count in news] + [0] * padding
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lens = torch.tensor(lengths + [0] * padding, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=len(counts),
            num_actual_tokens=len(slots), max_query_len=max(counts), max_seq_len=int(lens.max()),
            block_table_tensor=table, slot_mapping=torch.tensor(slots, dtype=torch.int64), causal=True,
            seq_lens_cpu_upper_bound=lens, **more,
        )  # fmt: skip

    def step(self, *news: tuple[str, int], padding: int = 0, rows_of_padding: int = 0) -> list[Any]:
        """(o, q, rows, lists) of each request: its new o and q, the rows that they attend to, and lists of tokens.

        Rows are as the cache keeps them, but for new tokens of prompts, which attend to each other as they come.
        """
        common = self.metadata(news, padding)
        if self.sparse:  # Triton has no CPU
            counts = common.query_start_loc.diff().tolist()
            of_tokens = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts))
            self.builder._build_req_id_per_token = lambda _: of_tokens
        built = self.builder.build(0, common)
        rows = common.num_actual_tokens
        total = rows + rows_of_padding
        q = self.random(total, HEADS, NOPE + ROPE)
        latent, rope = self.random(total, RANK), self.random(total, 1, ROPE)
        lists = self.choose(news)
        with (
            torch.inference_mode(),
            set_forward_context({NAME: built}, self.made, slot_mapping={NAME: common.slot_mapping}),
        ):
            out = self.layer(q, latent, rope, output_shape=torch.Size((total, HEADS * V)))
        results, at = [], 0
        kind, scale = self.layer.kv_cache_dtype, self.layer._k_scale
        dense = not self.sparse or (built.prefill is not None and built.prefill.use_dense_mha)
        for i, (name, count) in enumerate(news):
            part = slice(at, at + count)
            self.requests[name].rows.append(torch.cat([latent[part], rope[part, 0]], -1))
            rows_of_all = torch.cat(self.requests[name].rows)
            all_rows = decoded(encoded(rows_of_all, kind, scale), kind, scale)
            if dense and i >= built.num_decodes:
                all_rows[-count:] = rows_of_all[-count:].float()
            results.append((out[part].unflatten(-1, (HEADS, V)).clone(), q[part], all_rows, lists.get(name)))
            at += count
        return results

    def choose(self, news: Sequence[tuple[str, int]]) -> dict[str, list[torch.Tensor]]:
        """Lists of tokens as an indexer writes them: all that a query sees where they fit, else some of them."""
        if self.topk is None:
            return {}
        found: dict[str, list[torch.Tensor]] = {}
        self.topk.fill_(-1)
        at = 0
        for name, count in news:
            before = self.requests[name].tokens
            for i in range(count):
                seen = before + i + 1
                some = torch.randperm(seen, generator=self.rng)[:TOPK]
                self.topk[at, : len(some)] = some.int()
                found.setdefault(name, []).append(some)
                at += 1
        return found

    def check(self, results: Sequence[Any], bound: float = 1.2e-2) -> None:
        """Each request's o against the model's equations in fp64."""
        for o, q, rows, lists in results:
            want = self.weights.attention(q, rows, self.layer.scale, lists)
            assert not o.isnan().any()
            error = (o.double() - want).norm() / want.norm()
            assert error < bound, float(error)
