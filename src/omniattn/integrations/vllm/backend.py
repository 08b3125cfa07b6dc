"""The classes that vLLM asks for; `calls` has what they do. Importing this imports vLLM's attention."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import threading
from typing import Any, ClassVar

import torch

from . import calls
from .common import Common, dtype_of, refused
from .versions import check_version

check_version()  # before names are used that another version may not have

from vllm import envs  # noqa: E402
from vllm.config import get_current_vllm_config_or_none  # noqa: E402
from vllm.distributed.parallel_state import get_dcp_group, get_dcp_world_size_and_rank  # noqa: E402
from vllm.v1.attention.backend import (  # noqa: E402
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens  # noqa: E402
from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce  # noqa: E402
from vllm.v1.worker.cp_utils import should_skip_dcp_context_attention  # noqa: E402

__all__ = ["ChosenBackend", "OmniattnBackend", "OmniattnImpl", "OmniattnMetadataBuilder"]

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
#: vLLM's modes of quantization that pack a scale into each row, and the formats' names.
_PACKED = {"FP8_PER_TOKEN_HEAD": "fp8_per_token_head", "INT8_PER_TOKEN_HEAD": "int8_per_token_head"}
#: Models pass some options to every layer: these values are how vLLM says that a layer does not have the option.
_INERT = {"chunk_lookback": -1}


class OmniattnBackend(Common, AttentionBackend):
    """What vLLM may ask of the backend: layers that it refuses are refused by vLLM itself, with the reason."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = list(calls.FORMATS)
    why_not = staticmethod(calls.why_not)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[OmniattnImpl]:
        """The class of a layer."""
        return OmniattnImpl

    @staticmethod
    def get_builder_cls() -> type[OmniattnMetadataBuilder]:
        """The class that makes a step's metadata."""
        return OmniattnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Blocks of 16, 32 ... tokens, any number of them: smaller ones are slow, and odd ones waste vLLM's memory."""
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Rows with scales of their own, on 16 bytes."""
        _check_spec(spec)
        name = _PACKED.get(spec.kv_quant_mode.name)
        width = None if name is None else calls.row_bytes(spec.head_size, name)
        if width is None or spec.state_content_bytes is not None:
            return spec
        return dataclasses.replace(spec, state_content_bytes=width)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 8 up to 512."""
        return calls.why_not(head_size, torch.bfloat16, None) is None

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks of each head."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """One scale a kv head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Any."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whole batches of them, not single requests."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """All of vLLM's."""
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_ENCODERS)


#: Classes for latent attention, which import vLLM's own: dense, and of lists of rows.
_LATENT = {False: ("latent", "OmniattnMLABackend"), True: ("latent_sparse", "OmniattnSparseMLABackend")}
_ASKED = threading.local()


class ChosenBackend(OmniattnBackend):
    """What is registered: stands for the class that serves a layer.

    vLLM has one name for backends of other packages, asks the class of that name whether it serves a layer, and then
    for the name of the class that does. A model may have layers of several kinds.
    """

    @classmethod
    def validate_configuration(cls, *arguments: Any, **asked: Any) -> list[str]:
        """Why a layer is not served, of the class that is for its kind."""
        _ASKED.kind = None
        if not asked.get("use_mla"):
            reasons: list[str] = super().validate_configuration(*arguments, **asked)
            return reasons
        module, name = _LATENT[bool(asked.get("use_sparse"))]
        kind = getattr(importlib.import_module(f".{module}", __package__), name)
        reasons = kind.validate_configuration(*arguments, **asked)
        if not reasons:
            _ASKED.kind = kind
        return reasons

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """The class for the layer that vLLM has asked about last."""
        kind, _ASKED.kind = getattr(_ASKED, "kind", None), None
        found: tuple[str, str] = (OmniattnBackend if kind is None else kind).full_cls_name()
        return found


def _check_spec(spec: Any) -> None:
    """Refuse what only the KV cache's description tells."""
    if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        raise refused(f"head_size {spec.head_size} with values of {spec.head_size_v} (MLA, or values of another size)")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise refused(f"a KV cache with tokens_per_state {spec.tokens_per_state}")


class OmniattnMetadataBuilder(AttentionMetadataBuilder[calls.Step]):
    """A step's metadata: views of vLLM's own arrays, so that a CUDA graph reads what later steps write there."""

    # Nothing is read on the host; requests without new tokens are padding. vLLM captures a graph for mixed batches with
    # max_query_len of all its rows.
    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _check_spec(kv_cache_spec)
        model = vllm_config.model_config
        if model is not None and getattr(model, "rswa_window", None) is not None:
            raise refused("a sliding window behind a reference (R-SWA)")
        sharded = bool(getattr(kv_cache_spec, "dcp_sharded", False))
        self._ranks, self._rank = get_dcp_world_size_and_rank(sharded)
        self._interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        self._context_lens: torch.Tensor | None = None
        if self._ranks > 1:
            most = vllm_config.scheduler_config.max_num_seqs
            self._context_lens = torch.zeros(most, dtype=torch.int32, device=device)
        # Drafts read the same arrays, whatever is in them.
        self.supports_draft_decode_metadata_update = self._ranks == 1

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> calls.Step:
        """The step's metadata; a common prefix is not used."""
        step = common_attn_metadata
        if not isinstance(step.causal, bool):
            raise refused("batches in which some requests are causal and others not")
        if step.mm_req_doc_ranges:
            raise refused("prompts of which parts see each other (mm_prefix)")
        count = step.num_reqs
        made = calls.Step(
            step.num_actual_tokens, step.max_query_len, step.max_seq_len, step.query_start_loc[: count + 1],
            step.seq_lens[:count], step.block_table_tensor[:count], step.slot_mapping, step.causal,
        )  # fmt: skip
        if self._context_lens is not None:
            older = made.seq_lens - made.query_start_loc.diff()
            made.context_lens = self._context_lens[:count]
            made.context_lens.copy_(get_dcp_local_seq_lens(older, self._ranks, self._rank, self._interleave))
            made.has_context = _any_context(step, count)
        return made

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> calls.Step:
        """The metadata that a graph is captured with: with older tokens, of which vLLM's dummies may have none."""
        made: calls.Step = super().build_for_cudagraph_capture(common_attn_metadata)
        # A graph keeps the branch for all later steps. What it reads there is context_lens, which each build writes;
        # requests of 0 older tokens have an lse of -inf, and are merged without a change.
        made.has_context = True
        return made

    def update_block_table(self, metadata: calls.Step, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        """The same requests in another group of pools."""
        other = copy.copy(metadata)
        other.block_table, other.slot_mapping = blk_table[: metadata.seq_lens.shape[0]], slot_mapping
        return other

    def update_draft_decode_metadata(self, metadata: calls.Step) -> None:
        """Nothing: `calls` reads the arrays that vLLM writes."""


def _any_context(step: Any, count: int) -> bool:
    """Whether a request may have tokens in any rank's pool; the same answer on all ranks."""
    if step.seq_lens_cpu_upper_bound is None:
        return True
    new = step.query_start_loc_cpu[1 : count + 1] - step.query_start_loc_cpu[:count]
    return not should_skip_dcp_context_attention(step.seq_lens_cpu_upper_bound[:count] - new)


class OmniattnImpl(AttentionImpl[calls.Step]):
    """Attention of one layer."""

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type, self.sinks = kv_cache_dtype, attn_type, sinks
        # Such a layer's pool is the other layer's, and vLLM leaves its update out.
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        given = {name: value for name, value in others.items() if value is not None}
        unknown = sorted(name for name, value in given.items() if name not in _INERT or value != _INERT[name])
        if unknown:
            raise refused(f"layers with {', '.join(unknown)}")
        if alibi_slopes is not None:
            raise refused("ALiBi slopes")
        of_cache = None if attn_type in _ENCODERS else kv_cache_dtype
        reason = calls.why_not(head_size, dtype_of(kv_cache_dtype), of_cache)
        if reason is not None:
            raise refused(reason)
        if self.dcp_world_size > 1 and sliding_window is not None:
            raise refused("a sliding window with decode context parallelism")
        # New tokens attend to the layer's own k and v there, and those of such layers are not what the pool has.
        if self.dcp_world_size > 1 and kv_sharing_target_layer_name is not None:
            raise refused("a layer on another layer's KV cache with decode context parallelism")
        if self.dcp_world_size > 1 and attn_type == AttentionType.ENCODER_DECODER:
            raise refused("cross attention with decode context parallelism")
        self.layer = calls.Layer(
            num_heads, self.num_kv_heads, head_size, self.scale, float(logits_soft_cap or 0.0), sliding_window,
            kv_cache_dtype, bool(envs.VLLM_BATCH_INVARIANT),
        )  # fmt: skip
        config = get_current_vllm_config_or_none()
        exchange = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
        self._combine = dcp_a2a_lse_reduce if exchange else cp_lse_ag_out_rs

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new tokens into the layer's pool; encoders have none."""
        if self.attn_type not in _ENCODERS:
            calls.write(kv_cache, self.layer, key, value, slot_mapping, (layer._k_scale, layer._v_scale))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: calls.Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the step's tokens, written into ``output`` (tokens, num_heads, head_size), which is returned."""
        if output_scale is not None or output_block_scale is not None:
            raise refused("an output that is quantized in the same call")
        if attn_metadata is None:  # vLLM looks how much memory a step needs
            return output.fill_(0)
        rows, scales = attn_metadata.num_actual_tokens, (layer._k_scale, layer._v_scale)
        q, out = _first(query, rows), _first(output, rows)
        if self.attn_type in _ENCODERS:
            calls.attend_encoder(
                q, _first(key, rows), _first(value, rows), self.layer, attn_metadata, False, self.sinks, out
            )
        elif self.dcp_world_size > 1:
            if key is None or value is None:
                raise refused("decode context parallelism with keys that another operation has written")
            group = get_dcp_group()
            calls.attend_divided(
                q, _first(key, rows), _first(value, rows), kv_cache, self.layer, attn_metadata, out, self.sinks,
                functools.partial(group.all_gather, dim=1), self._combined, scales,
            )  # fmt: skip
        else:
            calls.attend(q, kv_cache, self.layer, attn_metadata, out, self.sinks, scales)
        return output

    def _combined(self, o: torch.Tensor, lse: torch.Tensor) -> Any:
        return self._combine(o, lse, get_dcp_group(), return_lse=True)


def _first(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows, without the price of a view where it is all."""
    return x if x.shape[0] == rows else x[:rows]
