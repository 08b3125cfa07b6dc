"""The classes that vLLM asks for in models with latent attention (MLA); `latent_calls` has what they do.

vLLM's common classes divide a step into single tokens and prompts, gather older tokens for prompts in parts, and merge
the results: these say what computes each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..latent_limits import HEAD_DIM, HEAD_DIM_V, most_queries
from . import common, latent_calls
from .common import Common, dtype_of
from .versions import check_latent_version

check_latent_version()  # before names are used that another version may not have

from vllm import envs  # noqa: E402
from vllm.model_executor.layers.attention.mla_attention import (  # noqa: E402
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf  # noqa: E402
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend  # noqa: E402

__all__ = [
    "LatentImpl", "OmniattnMLABackend", "OmniattnMLAImpl", "OmniattnMLAMetadataBuilder", "OmniattnMLAPrefill",
    "put_prefill", "refused",
]  # fmt: skip

#: What vLLM tells a layer of latent attention besides.
_OF_MLA = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj", "indexer")


#: The error for what is not served with latent attention.
refused = functools.partial(common.refused, of=" for MLA")


class OmniattnMLAPrefill(MLAPrefillBackend):
    """Attention of prompts, in heads that vLLM makes of the latent rows."""

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration; it has one for all backends of others."""
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        """Ampere and newer."""
        return bool(device_capability is not None and device_capability.major >= 8)

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        """Heads of up to 256 channels."""
        of_keys = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        return latent_calls.why_not_prompt(of_keys, mla_dimensions.v_head_dim) is None

    def supports_out(self) -> bool:
        """``out`` is written."""
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Any:
        """Attention of the new tokens over themselves."""
        if output_scale is not None:
            raise refused("an output that is quantized in the same call")
        step = self._prefill_metadata
        return latent_calls.attend_prompt(
            q, k, v, cu_seqlens_q=step.query_start_loc, cu_seqlens_k=step.query_start_loc,
            max_seqlen_q=step.max_query_len, max_seqlen_k=step.max_query_len, scale=self.scale, causal=True,
            return_lse=return_softmax_lse, deterministic=bool(envs.VLLM_BATCH_INVARIANT), out=out,
        )  # fmt: skip

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> Any:
        """Attention of the new tokens over a part of the older ones, (o, lse)."""
        return latent_calls.attend_prompt(
            q, k, v, cu_seqlens_q=chunk.query_start_loc, cu_seqlens_k=chunk.cu_seq_lens,
            max_seqlen_q=chunk.max_query_len, max_seqlen_k=chunk.max_seq_len, scale=self.scale, causal=False,
            return_lse=True, deterministic=bool(envs.VLLM_BATCH_INVARIANT), out=out,
        )  # fmt: skip


def put_prefill(builder: Any, vllm_config: Any, layer_names: list[str]) -> None:
    """Give layers and their builder our attention of prompts, unless the user has chosen one, mla_prefill_backend."""
    chosen = vllm_config.attention_config.mla_prefill_backend
    layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
    if chosen is not None or any(layer.prefill_backend is None for layer in layers):
        return
    for layer in layers:
        reason = latent_calls.why_not_prompt(layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim)
        if reason is not None:
            raise refused(f"prompts with {reason}")
        # The layer asks it whether outputs are quantized in the same call, so that it has to be the same one.
        layer.prefill_backend = OmniattnMLAPrefill(
            num_heads=layer.num_heads, scale=layer.scale, kv_lora_rank=layer.kv_lora_rank,
            qk_nope_head_dim=layer.qk_nope_head_dim, qk_rope_head_dim=layer.qk_rope_head_dim,
            v_head_dim=layer.v_head_dim, vllm_config=vllm_config,
        )  # fmt: skip
    builder._prefill_backend = layers[0].prefill_backend.clone()


class OmniattnMLABackend(Common, MLACommonBackend):
    """What vLLM may ask of the backend for latent attention."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(latent_calls.LATENT_FORMATS)
    why_not = staticmethod(latent_calls.why_not_latent)

    @staticmethod
    def get_impl_cls() -> type[OmniattnMLAImpl]:
        """The class of a layer."""
        return OmniattnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[OmniattnMLAMetadataBuilder]:
        """The class that makes a step's metadata."""
        return OmniattnMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Blocks of 16, 32 ... tokens; 64 and more are faster."""
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """At least 64; vLLM's default is 16."""
        return max(64, super().get_preferred_block_size(default_block_size))

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """DeepSeek's and Kimi's."""
        return [HEAD_DIM]


@dataclass
class OmniattnMLADecodeMetadata(MLACommonDecodeMetadata):
    """Of single tokens and drafts.

    Attributes
    ----------
    query_start_loc : tensor, (requests + 1,), int32
    max_query_len : int
        At least that of the request with the most rows.
    """

    query_start_loc: torch.Tensor
    max_query_len: int


@dataclass
class OmniattnMLAMetadata(MLACommonMetadata[OmniattnMLADecodeMetadata]):
    """Of a step."""


class OmniattnMLAMetadataBuilder(MLACommonMetadataBuilder[OmniattnMLAMetadata]):
    """vLLM's own; of single tokens and drafts it has views of vLLM's arrays, so that a graph reads later values."""

    # Prompts read lengths on the host, in vLLM's common classes.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, OmniattnMLAMetadata)
        if self.q_data_type not in (torch.float16, torch.bfloat16):
            raise refused(f"queries of prompts in {self.q_data_type} (use_prefill_query_quantization)")
        put_prefill(self, vllm_config, layer_names)
        limit = most_queries(
            self.num_heads * self.dcp_world_size, deterministic=bool(envs.VLLM_BATCH_INVARIANT),
            in_8_bits=kv_cache_spec.dtype.itemsize == 1,
        )  # fmt: skip
        if self.reorder_batch_threshold > limit:
            invariant = " with VLLM_BATCH_INVARIANT" if envs.VLLM_BATCH_INVARIANT else ""
            raise refused(f"{self.reorder_batch_threshold} tokens a request of speculative decoding{invariant}")
        # Drafts read the same arrays, whatever is in them; lengths of a rank are vLLM's to make.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> OmniattnMLADecodeMetadata:
        return OmniattnMLADecodeMetadata(
            block_table=block_table_tensor, seq_lens=seq_lens_device, dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device, max_query_len=max_query_len,
        )  # fmt: skip

    def update_draft_decode_metadata(self, metadata: OmniattnMLAMetadata) -> None:
        """Nothing: `latent_calls` reads the arrays that vLLM writes."""


class LatentImpl:
    """What dense and sparse attention of a layer have in common; it stands before vLLM's class.

    Attributes
    ----------
    options : tuple of str
        What vLLM tells a layer besides; anything else is refused.
    """

    options: ClassVar[tuple[str, ...]] = _OF_MLA
    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        **of_mla: Any,
    ) -> None:
        if alibi_slopes is not None:
            raise refused("ALiBi slopes")
        if sliding_window is not None:
            raise refused("a sliding window")
        if logits_soft_cap:
            raise refused("a softcap")
        if attn_type != AttentionType.DECODER:
            raise refused(f"attention of type {attn_type}")
        if kv_sharing_target_layer_name is not None:
            raise refused("a layer on another layer's KV cache")
        reason = latent_calls.why_not_latent(head_size, dtype_of(kv_cache_dtype), kv_cache_dtype)
        if reason is not None:
            raise refused(reason)
        if kv_lora_rank != HEAD_DIM_V:
            raise refused(f"kv_lora_rank {kv_lora_rank}: only {HEAD_DIM_V}")
        unknown = sorted(name for name, value in of_mla.items() if name not in self.options and value is not None)
        if unknown:
            raise refused(f"layers with {', '.join(unknown)}")
        self.latent = latent_calls.Latent(float(scale), kv_cache_dtype, bool(envs.VLLM_BATCH_INVARIANT))
        super().__init__(  # type: ignore[call-arg]
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, kv_lora_rank=kv_lora_rank,
            **{name: value for name, value in of_mla.items() if name in self.options},
        )  # fmt: skip
        self.supports_quant_query_input = False  # queries stay in 16 bits


class OmniattnMLAImpl(LatentImpl, MLACommonImpl[OmniattnMLAMetadata]):
    """Latent attention of one layer."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: OmniattnMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of single tokens and drafts over the cache: (o, lse or None)."""
        step = attn_metadata.decode
        assert step is not None, "a step without single tokens has none to attend"
        found = latent_calls.attend_latent(
            latent_calls.joined(q), kv_c_and_k_pe_cache, self.latent, seq_lens=step.seq_lens,
            block_table=step.block_table, query_start_loc=step.query_start_loc, max_query_len=step.max_query_len,
            k_scale=layer._k_scale, return_lse=self.need_to_return_lse_for_decode,
        )  # fmt: skip
        return found if self.need_to_return_lse_for_decode else (found, None)
