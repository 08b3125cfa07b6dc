"""vLLM's own classes on a machine without a GPU: a platform, layers, KV caches in each of its layouts, and steps.

Its compiled operations are not there, and not needed: this module has to be imported before anything of vLLM. The
platform chooses backends as the one of CUDA does, by the same code.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.vllm_steps import reference

for _name in ("vllm._C", "vllm._C_stable_libtorch"):
    sys.modules.setdefault(_name, types.ModuleType(_name))

import vllm.platforms  # noqa: E402
from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402
from vllm.platforms.interface import DeviceCapability, PlatformEnum  # noqa: E402


class HostPlatform(NonNvmlCudaPlatform):  # type: ignore[misc]
    """A CPU that says that it is an H100."""

    _enum = PlatformEnum.OOT  # so that nobody imports compiled operations of CUDA
    device_name, device_type = "cpu", "cpu"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> Any:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "CPU"

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False  # there is no driver that could pin any

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return False  # layers call attention directly, and not by an operator of CUDA


vllm.platforms._current_platform = HostPlatform()

from vllm.utils import torch_utils  # noqa: E402

torch_utils.PIN_MEMORY = False  # some versions have asked the platform by now, others ask it later

from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 24
LAYERS_OF_A_POOL, LAYER = 3, 1


@dataclass
class Request:
    """What a request has had computed, as the reference needs it."""

    blocks: list[int]
    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(x.shape[0] for x in self.k)


@contextlib.contextmanager
def config(cache_dtype: str = "auto", **attention: Any) -> Iterator[Any]:
    """vLLM's configuration with our backend, as ``--attention-backend CUSTOM`` has it, and torch's default dtype."""
    made = VllmConfig(attention_config=AttentionConfig(backend="CUSTOM", **attention))
    made.cache_config.cache_dtype = cache_dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with set_current_vllm_config(made):
            yield made
    finally:
        torch.set_default_dtype(before)


def layer_of(made: Any, name: str = "model.layers.0.attn", kind: Any = Attention, **options: Any) -> Any:
    """A layer of vLLM."""
    options = {"num_kv_heads": KV_HEADS, "cache_config": made.cache_config, **options}
    options.setdefault("prefix", name)
    return kind(options.pop("num_heads", HEADS), options.pop("head_size", DIM), DIM**-0.5, **options)


def spec_of(layer: Any, made: Any) -> Any:
    """The layer's KV cache as the worker describes it: the backend packs it."""
    return layer.get_attn_backend().customize_spec(layer.get_kv_cache_spec(made))


def pool_of(spec: Any, layout: str = "LBNHC", blocks: int = BLOCKS) -> torch.Tensor:
    """One layer's view of a pool of several, by vLLM's own functions, full of NaN."""
    order = KVCacheLayout[layout]
    strides = compute_layout_strides(spec, blocks, LAYERS_OF_A_POOL, order)
    size = LAYERS_OF_A_POOL * blocks * spec.page_size_bytes
    raw = torch.full((size,), -1, dtype=torch.int8)  # NaN in 16 bits, in fp32 and in e4m3
    names = [f"layer {i}" for i in range(LAYERS_OF_A_POOL)]
    placed = KVCacheTensor(size=size, layers=names, layer_stride=strides[0], block_stride=strides[1])
    view: torch.Tensor = create_kv_cache_views(raw, spec, blocks, order, placed)[LAYER]
    return view


class Engine:
    """Steps of requests through one layer, by vLLM's builder, forward context and layer."""

    def __init__(self, layer: Any, made: Any, pool: torch.Tensor, spec: Any, seed: int = 0) -> None:
        self.layer, self.made, self.spec = layer, made, spec
        layer.kv_cache = pool
        self.name = layer.layer_name
        self.builder = layer.get_attn_backend().get_builder_cls()(spec, [self.name], made, torch.device("cpu"))
        self.rng = torch.Generator().manual_seed(seed)
        order = torch.randperm(BLOCKS - 1, generator=self.rng) + 1  # block 0 is nobody's
        self.free = order.tolist()
        self.requests: dict[str, Request] = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float32).to(torch.float16)

    def metadata(self, news: Sequence[tuple[str, int]], padding: int, causal: Any = True, **more: Any) -> Any:
        """vLLM's metadata of a step; the blocks that it needs are taken."""
        lengths, rows = [], []
        for name, count in news:
            request = self.requests.setdefault(name, Request([]))
            while len(request.blocks) * BLOCK < request.tokens + count:
                request.blocks.append(self.free.pop())
            lengths.append(request.tokens + count)
            rows.append(request.blocks)
        counts = [count for _, count in news] + [0] * padding
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        table = torch.zeros(len(counts), BLOCKS, dtype=torch.int32)
        for i, row in enumerate(rows):
            table[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
        slots = [
            self.requests[name].blocks[at // BLOCK] * BLOCK + at % BLOCK
            for name, count in news
            for at in range(self.requests[name].tokens, self.requests[name].tokens + count)
        ]
        lens = torch.tensor(lengths + [0] * padding, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=len(counts),
            num_actual_tokens=len(slots), max_query_len=max(counts), max_seq_len=int(lens.max()),
            block_table_tensor=table, slot_mapping=torch.tensor(slots, dtype=torch.int64), causal=causal,
            seq_lens_cpu_upper_bound=lens, **more,
        )  # fmt: skip

    def step(self, *news: tuple[str, int], padding: int = 0, rows_of_padding: int = 0, **more: Any) -> list[Any]:
        """(o, q, k, v) of each request: its new rows, and all its keys and values in the order of its tokens."""
        common = self.metadata(news, padding, **more)
        built = self.builder.build(0, common)
        rows = common.num_actual_tokens
        total = rows + rows_of_padding
        heads, dim = self.layer.num_kv_heads, self.layer.head_size
        # As a model's projection has them: q, k and v side by side.
        fused = self.random(total, (self.layer.num_heads + 2 * heads) * dim)
        q, k, v = fused.split([self.layer.num_heads * dim, heads * dim, heads * dim], dim=-1)
        with (
            torch.inference_mode(),
            set_forward_context({self.name: built}, self.made, slot_mapping={self.name: common.slot_mapping}),
        ):
            out = self.layer(q, k, v)
        results, at = [], 0
        for name, count in news:
            request = self.requests[name]
            request.k.append(k[at : at + count].unflatten(-1, (heads, dim)))
            request.v.append(v[at : at + count].unflatten(-1, (heads, dim)))
            part = slice(at, at + count)
            results.append(
                (
                    out[part].unflatten(-1, (-1, dim)).clone(), q[part].unflatten(-1, (-1, dim)),
                    torch.cat(request.k), torch.cat(request.v),
                )
            )  # fmt: skip
            at += count
        return results


def check(results: Sequence[Any], atol: float = 2e-3, **options: Any) -> None:
    """Each request's o against `reference`; atol is what the cache's format and fp16 round."""
    for o, q, k, v in results:
        torch.testing.assert_close(o.double(), reference(q, k, v, scale=DIM**-0.5, **options), rtol=0, atol=atol)
