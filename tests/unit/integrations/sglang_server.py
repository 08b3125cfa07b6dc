"""A model's layers, SGLang's pools and batches, and the backend that SGLang builds: everything but its scheduler.

Needs SGLang; test modules that import it have skipped themselves where that is missing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner_components import attention_backend_setup

from omniattn.integrations import sglang as integration
from tests.slot_requests import Batch, Requests

HEADS, KV_HEADS, DIM, SCALE, CONTEXT, PAGES = 4, 2, 16, 0.3, 320, 24
LLAMA = transformers.LlamaConfig(architectures=["LlamaForCausalLM"])

integration.register()


def configuration(**fields: Any) -> AbstractContextManager[Any]:
    """SGLang's configuration of a process."""
    return runtime_context.get_context().override_server_args(
        **{"attention_backend": "omniattn", "device": "cpu", **fields}
    )


class Server:
    """A model of one layer or a few, its pools, and requests; what SGLang's scheduler would make of them."""

    def __init__(
        self,
        page_size: int = 16,
        *,
        layer: dict[str, Any] | None = None,
        cache_dtype: Any = torch.float16,
        dtype: Any = torch.float32,
        scales: tuple[float, float] | None = None,
        window_pool: bool = False,
        **of_runner: Any,
    ) -> None:
        size = PAGES * max(page_size, 16)
        self.slots = ReqToTokenPool(8, CONTEXT, "cpu", False)
        sizes = {"page_size": page_size, "dtype": cache_dtype, "head_num": KV_HEADS, "head_dim": DIM, "device": "cpu"}
        if window_pool:
            pool = SWAKVPool(size, size, swa_attention_layer_ids=[0], full_attention_layer_ids=[1], **sizes)
            pool.register_mapping(_mapping(size, page_size))
        else:
            pool = MHATokenToKVPool(size, layer_num=2, enable_memory_saver=False, **sizes)
        self.pool = pool
        options = {"logit_cap": 0.0, "sliding_window_size": -1, **(layer or {})}
        self.layers = torch.nn.ModuleList(
            RadixAttention(HEADS, DIM, SCALE, KV_HEADS, layer_id=i, **options) for i in range(2)
        )
        for x in self.layers:
            if scales is not None:
                x.k_scale, x.v_scale = (torch.nn.Parameter(torch.tensor(s), requires_grad=False) for s in scales)
        self.runner = runner(self.pool, self.slots, page_size, self.layers, **of_runner)
        self.backend = attention_backend_setup.build_attention_backends(model_runner=self.runner).attn_backend
        self.requests = Requests(
            self.slots.req_to_token, size // page_size, page_size, heads=HEADS,
            kv_heads=KV_HEADS, dim=DIM, dtype=dtype, cache_dtype=cache_dtype, scales=scales or (1.0, 1.0),
        )  # fmt: skip

    def batch(self, step: Batch, mode: Any = ForwardMode.EXTEND, **more: Any) -> Any:
        return ForwardBatch(**step.fields(mode, counts_new=not mode.is_target_verify()), **more)

    def call(self, step: Batch, batch: Any, layer: int = 0, backend: Any = None, **more: Any) -> Any:
        """The layer's own call, as a model makes it."""
        with forward_context(ForwardContext(attn_backend=backend or self.backend)):
            return self.layers[layer](
                step.q.reshape(-1, HEADS * DIM), step.k.clone(), step.v.clone(), batch, **more
            )  # fmt: skip

    def run(self, new: dict[int, int], mode: Any = ForwardMode.EXTEND, layer: int = 0, **more: Any) -> tuple[Any, Any]:
        """A step in one layer: what came, and the step."""
        step = self.requests.step(new)
        batch = self.batch(step, mode)
        self.backend.init_forward_metadata(batch)
        return self.call(step, batch, layer, **more), step

    def check(self, got: Any, step: Batch, atol: float = 2e-5, **options: Any) -> None:
        want, _ = self.requests.expected(step, scale=SCALE, **options)
        assert got.shape == (sum(step.new), HEADS * DIM)
        torch.testing.assert_close(got.double().view_as(want), want, rtol=0, atol=atol)


def runner(pool: Any, slots: Any, page_size: int, model: Any, **more: Any) -> Any:
    """What the backend and SGLang's builder of backends read of a ModelRunner."""
    config = SimpleNamespace(
        attention_arch=AttentionArch.MHA, is_encoder_decoder=False, is_local_attention_model=False,
        hf_config=LLAMA, hf_text_config=LLAMA, linear_attn_registry_result=None, is_draft_model=False,
        quantization=None,
    )  # fmt: skip
    return SimpleNamespace(
        **{
            "model_config": config, "model": model, "token_to_kv_pool": pool, "req_to_token_pool": slots,
            "page_size": page_size, "device": "cpu", "use_mla_backend": False, "is_draft_worker": False,
            "kv_index_translator": None, "draft_attention_backend": None, "prefill_attention_backend_str": "omniattn",
            "decode_attention_backend_str": "omniattn", "server_args": runtime_context.get_server_args(), **more,
        }
    )  # fmt: skip


def _mapping(size: int, page_size: int) -> Any:
    """Slots of the windows' pool: its pages in another order, and a sentinel for -1, as SGLang's allocator has it."""
    pages = size // page_size
    order = torch.cat((torch.zeros(1, dtype=torch.int64), torch.roll(torch.arange(1, pages + 1), 5)))
    slots = (order[:, None] * page_size + torch.arange(page_size)).reshape(-1)
    return torch.cat((slots, torch.tensor([-1])))


STEPS: tuple[tuple[Any, dict[int, int]], ...] = (
    (ForwardMode.EXTEND, {3: 70, 1: 1, 5: 33}),  # prompts
    (ForwardMode.EXTEND, {1: 40, 3: 7}),  # chunks behind others
    (ForwardMode.DECODE, {5: 1, 3: 1, 1: 1}),
    (ForwardMode.MIXED, {2: 65, 5: 1, 1: 16, 3: 1}),
    (ForwardMode.DECODE, {2: 1}),
)


def check_steps(server: Server, layer: int = 0, atol: float = 2e-5, kwargs: Any = None, **options: Any) -> None:
    for mode, new in STEPS:
        got, step = server.run(new, mode, layer, **(kwargs or {}))
        server.check(got, step, atol, **options)


def guess(topk: int = 1, **more: Any) -> Any:
    """What a step of speculative decoding has."""
    return SimpleNamespace(topk=topk, custom_mask=None, ragged_verify_layout=None, **more)
