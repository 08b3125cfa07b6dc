"""The classes that vLLM asks for in models with DeepSeek sparse attention: latent attention over lists of rows.

vLLM's indexer has chosen the tokens of each query by then; its operation makes rows of the cache of them. Short prompts
are dense, as in `latent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from . import latent_calls
from .latent import LatentImpl, OmniattnMLABackend, put_prefill, refused
from .versions import check_latent_version

check_latent_version(sparse=True)  # before names are used that another version may not have

from vllm.model_executor.layers.attention.sparse_mla_attention import (  # noqa: E402
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport  # noqa: E402
from vllm.v1.attention.backends.mla import sparse_utils  # noqa: E402
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup  # noqa: E402

__all__ = ["OmniattnSparseMLABackend", "OmniattnSparseMLAImpl", "OmniattnSparseMLAMetadataBuilder"]

#: Requests with more new tokens are prompts. Over lists of rows both are computed alike; dense attention is faster for
#: prompts that are short enough to see all of their tokens.
_SINGLE_TOKENS = 128


class OmniattnSparseMLABackend(OmniattnMLABackend):
    """What vLLM may ask of the backend for sparse latent attention."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """The class of a layer."""
        return OmniattnSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """The class that makes a step's metadata."""
        return OmniattnSparseMLAMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        """Over lists of rows."""
        return True


@dataclass(kw_only=True)
class OmniattnSparseMLAMetadata(SparseMLACommonMetadata):
    """Of a step."""


class OmniattnSparseMLAMetadataBuilder(SparseMLACommonMetadataBuilder[OmniattnSparseMLAMetadata]):
    """vLLM's own."""

    metadata_cls = OmniattnSparseMLAMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.attention_config.hisparse_config is not None:
            raise refused("HiSparse (hisparse_config)")
        # The lists say what a query sees, so that drafts may be of any lengths, under context parallelism too.
        interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        self._init_reorder_batch_threshold(
            _SINGLE_TOKENS, supports_spec_as_decode=True, supports_dcp_with_varlen=interleave == 1
        )
        put_prefill(self, vllm_config, layer_names)


class OmniattnSparseMLAImpl(LatentImpl, SparseMLACommonImpl[OmniattnSparseMLAMetadata]):
    """Sparse latent attention of one layer."""

    options = (*LatentImpl.options, "topk_indices_buffer", "index_group_builder")

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        if isinstance(self.index_group, HiSparseMLAIndexGroup):
            raise refused("HiSparse (hisparse_config)")

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: OmniattnSparseMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of tokens over the rows that the indexer has chosen: (o, lse or None)."""
        assert self.topk_indices_buffer is not None, "sparse attention has an indexer"
        rows = latent_calls.joined(q)
        tokens = self.topk_indices_buffer[: rows.shape[0]]
        requests = attn_metadata.req_id_per_token[: rows.shape[0]]
        where: dict[str, Any] = {
            "BLOCK_SIZE": attn_metadata.block_size, "NUM_TOPK_TOKENS": tokens.shape[1], "return_valid_counts": True,
        }  # fmt: skip
        if self.dcp_world_size > 1:
            indices, lengths = sparse_utils.triton_filter_and_convert_dcp_index(
                requests, attn_metadata.block_table, tokens, dcp_size=self.dcp_world_size, dcp_rank=self.dcp_rank,
                cp_kv_cache_interleave_size=attn_metadata.cp_kv_cache_interleave_size, **where,
            )  # fmt: skip
        else:
            indices, lengths = sparse_utils.triton_convert_req_index_to_global_index(
                requests, attn_metadata.block_table, tokens, **where
            )
        found = latent_calls.attend_rows(
            rows, kv_c_and_k_pe_cache, self.latent, indices=indices, lengths=lengths, k_scale=layer._k_scale,
            return_lse=self.need_to_return_lse_for_decode,
        )  # fmt: skip
        return found if self.need_to_return_lse_for_decode else (found, None)
