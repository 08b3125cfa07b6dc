"""Which versions of vLLM are served: what is there decides, the number only warns."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
from typing import Any

from ...errors import UnsupportedError

#: Versions that the tests ran with.
TRIED = ("0.31.0", "0.32.0", "0.33.0")

_BACKEND, _SPECS = "vllm.v1.attention.backend", "vllm.v1.kv_cache_interface"
#: Methods that vLLM calls, with their arguments: one more would be a feature that is not known here.
_CALLED = {
    "AttentionBackend.validate_configuration": (
        "head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse", "use_mm_prefix",
        "use_per_head_quant_scales", "device_capability", "attn_type", "has_sliding_window", "use_non_causal",
        "use_batch_invariant", "use_kv_connector", "use_pcp", "use_adaptive_verification", "use_dcp", "use_rswa",
    ),
    "AttentionBackend.supports_combination": (
        "head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse", "use_mm_prefix",
        "device_capability",
    ),
    "AttentionBackend.get_supported_kernel_block_sizes": ("kv_cache_spec",),
    "AttentionBackend.customize_spec": ("spec",),
    "AttentionMetadataBuilder.__init__": ("self", "kv_cache_spec", "layer_names", "vllm_config", "device"),
    "AttentionMetadataBuilder.build": ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    "AttentionMetadataBuilder.build_for_cudagraph_capture": ("self", "common_attn_metadata"),
    "AttentionMetadataBuilder.update_block_table": ("self", "metadata", "blk_table", "slot_mapping"),
    "AttentionMetadataBuilder.update_draft_decode_metadata": ("self", "metadata"),
    "AttentionImpl.__init__": (
        "self", "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
        "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
    ),
    "AttentionImpl.forward": (
        "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
        "output_block_scale",
    ),
}  # fmt: skip
#: What is called of vLLM, with the arguments that it is given.
_USED = {
    "vllm.v1.attention.ops.dcp.cp_lse_ag_out_rs": ("cp_attn_out", "cp_attn_lse", "cp_group", "return_lse"),
    "vllm.v1.attention.ops.dcp.dcp_a2a_lse_reduce": ("cp_attn_out", "cp_attn_lse", "cp_group", "return_lse"),
    "vllm.v1.attention.backends.utils.get_dcp_local_seq_lens": (
        "seq_lens", "dcp_size", "dcp_rank", "cp_kv_cache_interleave_size",
    ),
}  # fmt: skip
#: Fields of a step that are known; those that are not read change nothing of what is served.
_FIELDS = {
    "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
    "max_seq_len", "block_table_tensor", "slot_mapping", "causal", "logits_indices_padded", "num_logits_indices",
    "max_logits_per_req", "encoder_seq_lens", "encoder_seq_lens_cpu", "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu_upper_bound", "positions", "is_prefilling", "seq_lens_cpu_upper_bound", "req_idx",
    "mm_req_doc_ranges", "rswa_prefix_lens", "replayssm_decode_base_cpu", "_num_computed_tokens_cache",
    "_token_to_req_indices_cache",
}  # fmt: skip
#: What is called or read of vLLM besides, by module.
_NEEDED = {
    _BACKEND: ("AttentionCGSupport.ALWAYS", "AttentionType.ENCODER_ONLY", "AttentionType.ENCODER", "MultipleOf"),
    _SPECS: ("KVQuantMode.FP8_PER_TOKEN_HEAD", "KVQuantMode.INT8_PER_TOKEN_HEAD"),
    "vllm.envs": ("VLLM_BATCH_INVARIANT",),
    "vllm.config": ("get_current_vllm_config_or_none",),
    "vllm.platforms.interface": ("DeviceCapability",),
    "vllm.distributed.parallel_state": ("get_dcp_group", "get_dcp_world_size_and_rank"),
    "vllm.v1.worker.cp_utils": ("should_skip_dcp_context_attention",),
}


def check_version() -> None:
    """Refuse a vLLM whose attention is not that of the versions that were tried.

    Raises
    ------
    UnsupportedError
        Names what differs, and the versions that were tried.
    """
    version = str(getattr(importlib.import_module("vllm"), "__version__", "of no version"))
    differs = [*_missing(), *_moved()]
    tried = f"{', '.join(TRIED[:-1])} and {TRIED[-1]}"
    if differs:
        raise UnsupportedError(
            f"vllm {version}: its attention is not as it is in the versions that were tried: {'; '.join(differs)}",
            instead=f"vllm {tried}, or another attention backend",
        )
    if version.rsplit(".", 1)[0] not in {known.rsplit(".", 1)[0] for known in TRIED}:
        logging.getLogger(__name__).warning(
            "vllm %s has not been tried with omniattn; its attention has the interface of %s", version, tried
        )


def _missing() -> list[str]:
    """What is called or read, and is not there."""
    found = []
    for module, names in _NEEDED.items():
        found += [f"no {module}.{name}" for name in names if _of(module, name) is None]
    return found


def _moved() -> list[str]:
    """What has other arguments, fields or extents."""
    found = []
    for name, known in _CALLED.items():
        method = _of(_BACKEND, name)
        arguments = [] if method is None else [x for x in inspect.signature(method).parameters if x != "cls"]
        if set(arguments) != set(known):
            found.append(f"{name}({', '.join(arguments)}) in place of ({', '.join(known)})")
    for name, given in _USED.items():
        function = _of(*name.rsplit(".", 1))
        there = () if function is None else inspect.signature(function).parameters
        found += [f"no {name}({argument}=)" for argument in given if argument not in there]
    step = _of(_BACKEND, "CommonAttentionMetadata")
    fields = {field.name for field in dataclasses.fields(step)} if dataclasses.is_dataclass(step) else set()
    if fields != _FIELDS:
        new, gone = sorted(fields - _FIELDS), sorted(_FIELDS - fields)
        found.append(f"CommonAttentionMetadata with {new} and without {gone}")
    return found + _other_layout()


def _other_layout() -> list[str]:
    """Whether a layer's keys and values are one tensor (blocks, heads, tokens, K and V side by side)."""
    spec_of, extents_of = _of(_SPECS, "FullAttentionSpec"), _of(_SPECS, "compute_layer_kv_cache_shape_bytes")
    if spec_of is None or extents_of is None:
        return [f"no {_SPECS}.compute_layer_kv_cache_shape_bytes"]
    import torch

    try:
        spec = spec_of(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        extents = tuple(extents_of(spec, 3))
    except (TypeError, AttributeError) as error:
        return [f"FullAttentionSpec: {error}"]
    return [] if extents == (3, 2, 16, 256) else [f"a KV cache of {extents} bytes in place of (3, 2, 16, 256)"]


def _of(module: str, name: str) -> Any:
    """A name of a module of vLLM, with dots; None where it is not there."""
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
