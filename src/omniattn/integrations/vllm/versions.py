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
_USED: dict[str, tuple[str, ...]] = {
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
    "vllm.distributed.parallel_state": ("get_dcp_group", "get_dcp_world_size_and_rank"),
    "vllm.v1.worker.cp_utils": ("should_skip_dcp_context_attention",),
}

_LATENT, _PREFILL = "vllm.model_executor.layers.attention.mla_attention", "vllm.v1.attention.backends.mla.prefill"
#: What is called of latent attention's classes, or what they call, with all arguments.
_LATENT_CALLED = {
    f"{_BACKEND}.MLAAttentionImpl.__init__": (
        "self", "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
        "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj", "indexer", "q_pad_num_heads",
    ),
    f"{_BACKEND}.MLAAttentionImpl.forward_mqa": ("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
    f"{_LATENT}.MLACommonMetadataBuilder.__init__": (
        "self", "kv_cache_spec", "layer_names", "vllm_config", "device", "metadata_cls", "supports_dcp_with_varlen",
    ),
    f"{_LATENT}.MLACommonMetadataBuilder._build_decode": (
        "self", "block_table_tensor", "seq_lens_device", "max_seq_len", "query_start_loc_cpu",
        "query_start_loc_device", "num_decode_tokens", "max_query_len", "dcp_tot_seq_lens_device",
    ),
    f"{_LATENT}.MLACommonDecodeMetadata": ("block_table", "seq_lens", "dcp_tot_seq_lens"),
    f"{_PREFILL}.base.MLAPrefillBackend.__init__": (
        "self", "num_heads", "scale", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "vllm_config",
    ),
    f"{_PREFILL}.base.MLAPrefillBackend.run_prefill_new_tokens": (
        "self", "q", "k", "v", "return_softmax_lse", "out", "output_scale",
    ),
    f"{_PREFILL}.base.MLAPrefillBackend.run_prefill_context_chunk": ("self", "chunk", "q", "k", "v", "out"),
}  # fmt: skip
#: What is called or read of latent attention besides, by module.
_LATENT_NEEDED = {
    _LATENT: (
        "MLACommonBackend.is_mla", "MLACommonImpl.forward_mha", "MLACommonMetadata", "QueryLenSupport.VARLEN",
        "MLACommonPrefillMetadata.ContextChunk",
    ),
    f"{_PREFILL}.registry": ("MLAPrefillBackendEnum.CUSTOM", "register_mla_prefill_backend"),
}  # fmt: skip
_SPARSE, _ROWS = "vllm.model_executor.layers.attention.sparse_mla_attention", f"{_BACKEND}s.mla.sparse_utils"
#: The same of attention over lists of rows; of functions the arguments that they are given.
_SPARSE_NEEDED = {
    _SPARSE: ("SparseMLACommonImpl.forward_mha", "SparseMLACommonMetadata", "SparseMLACommonMetadataBuilder.build"),
    f"{_BACKEND}s.mla.index_group": ("HiSparseMLAIndexGroup",),
}
_SPARSE_USED: dict[str, tuple[str, ...]] = {
    f"{_ROWS}.triton_convert_req_index_to_global_index": (
        "req_id", "block_table", "token_indices", "BLOCK_SIZE", "NUM_TOPK_TOKENS", "return_valid_counts",
    ),
    f"{_ROWS}.triton_filter_and_convert_dcp_index": (
        "req_id", "block_table", "token_indices", "dcp_size", "dcp_rank", "cp_kv_cache_interleave_size", "BLOCK_SIZE",
        "NUM_TOPK_TOKENS", "return_valid_counts",
    ),
}  # fmt: skip


def check_latent_version(*, sparse: bool = False) -> None:
    """`check_version` for latent attention, which is looked at when a model has it.

    Parameters
    ----------
    sparse : bool
        Over lists of rows.
    """
    differs = [*_missing(_LATENT_NEEDED), *_other_arguments(_LATENT_CALLED)]
    if sparse:
        differs += [*_missing(_SPARSE_NEEDED), *_without_arguments(_SPARSE_USED)]
    _refuse(differs, "latent attention")


def check_version() -> None:
    """Refuse a vLLM whose attention is not that of the versions that were tried.

    Raises
    ------
    UnsupportedError
        Names what differs, and the versions that were tried.
    """
    _refuse([*_missing(_NEEDED), *_moved()], "attention")
    version, tried = _version(), _tried()
    if version.rsplit(".", 1)[0] not in {known.rsplit(".", 1)[0] for known in TRIED}:
        logging.getLogger(__name__).warning(
            "vllm %s has not been tried with omniattn; its attention has the interface of %s", version, tried
        )


def _version() -> str:
    return str(getattr(importlib.import_module("vllm"), "__version__", "of no version"))


def _tried() -> str:
    return f"{', '.join(TRIED[:-1])} and {TRIED[-1]}"


def _refuse(differs: list[str], what: str) -> None:
    """The error for what differs, if anything does."""
    if differs:
        raise UnsupportedError(
            f"vllm {_version()}: its {what} is not as it is in the versions that were tried: {'; '.join(differs)}",
            instead=f"vllm {_tried()}, or another attention backend",
        )


def _missing(needed: dict[str, tuple[str, ...]]) -> list[str]:
    """What is called or read, and is not there."""
    found = []
    for module, names in needed.items():
        found += [f"no {module}.{name}" for name in names if _of(module, name) is None]
    return found


def _moved() -> list[str]:
    """What has other arguments, fields or extents."""
    found = _other_arguments({f"{_BACKEND}.{name}": known for name, known in _CALLED.items()})
    found += _without_arguments(_USED)
    step = _of(_BACKEND, "CommonAttentionMetadata")
    fields = {field.name for field in dataclasses.fields(step)} if dataclasses.is_dataclass(step) else set()
    if fields != _FIELDS:
        new, gone = sorted(fields - _FIELDS), sorted(_FIELDS - fields)
        found.append(f"CommonAttentionMetadata with {new} and without {gone}")
    return found + _other_layout()


def _other_arguments(called: dict[str, tuple[str, ...]]) -> list[str]:
    """Methods and classes that have other arguments."""
    found = []
    for name, known in called.items():
        module, short = _divided(name)
        method = _of(module, short)
        arguments = [] if method is None else [x for x in inspect.signature(method).parameters if x != "cls"]
        if set(arguments) != set(known):
            found.append(f"{short}({', '.join(arguments)}) in place of ({', '.join(known)})")
    return found


def _divided(name: str) -> tuple[str, str]:
    """Module, and what is in it: the first part that begins with a capital and what follows."""
    parts = name.split(".")
    first = next(i for i, part in enumerate(parts) if part[:1].isupper())
    return ".".join(parts[:first]), ".".join(parts[first:])


def _without_arguments(used: dict[str, tuple[str, ...]]) -> list[str]:
    """Functions without arguments that they are given."""
    found = []
    for name, given in used.items():
        function = _of(*name.rsplit(".", 1))
        there = () if function is None else inspect.signature(function).parameters
        found += [f"no {name}({argument}=)" for argument in given if argument not in there]
    return found


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
