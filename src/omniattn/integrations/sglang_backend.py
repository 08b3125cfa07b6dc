"""The attention backend that `sglang` registers: SGLang's classes in front of `SlotBackend`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnsupportedError
from .latent_limits import HEAD_DIM, HEAD_DIM_V
from .latent_slots import LatentSlotBackend
from .sglang_versions import TESTED, unknown_version, version
from .token_slots import SlotBackend, of_drafts, of_encoders, of_trees

try:
    from sglang.srt import runtime_context
    from sglang.srt.layers.attention import base_attn_backend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache import memory_pool, swa_memory_pool
    from sglang.srt.model_executor import forward_batch_info
except ImportError as error:
    raise unknown_version(str(error)) from error

__all__ = ["OmniattnBackend", "OmniattnMLABackend", "backend_of", "check_version"]

_LOGGER = logging.getLogger(__name__)
_OTHER = "another --attention-backend"

_CALL = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")
_WRITE = ("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale")
#: What has to be there: functions and classes, and their arguments.
_EXPECTED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "AttentionBackend.forward_decode": (base_attn_backend, _CALL),
    "AttentionBackend.forward_extend": (base_attn_backend, _CALL),
    "AttentionBackend.init_forward_metadata": (base_attn_backend, ("forward_batch",)),
    "AttentionBackend.init_forward_metadata_out_graph": (base_attn_backend, ("forward_batch", "in_capture")),
    "AttentionBackend.init_forward_metadata_in_graph": (base_attn_backend, ("forward_batch",)),
    "AttentionBackend.init_cuda_graph_state": (base_attn_backend, ("max_bs", "max_num_tokens")),
    "AttentionBackend.get_cuda_graph_seq_len_fill_value": (base_attn_backend, ()),
    "KVWriteLoc": (memory_pool, ("loc", "swa_loc")),
    "MHATokenToKVPool.get_kv_buffer": (memory_pool, ("layer_id",)),
    "MHATokenToKVPool.set_kv_buffer": (memory_pool, _WRITE),
    "MLATokenToKVPool.get_key_buffer": (memory_pool, ("layer_id",)),
    "MLATokenToKVPool.set_kv_buffer": (memory_pool, ("layer", "loc_info", "cache_k", "cache_v")),
    "SWAKVPool.get_kv_buffer": (swa_memory_pool, ("layer_id",)),
    "SWAKVPool.set_kv_buffer": (swa_memory_pool, _WRITE),
    "ForwardBatch": (
        forward_batch_info,
        (
            "forward_mode", "batch_size", "input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "encoder_lens",
            "spec_info", "extend_seq_lens", "extend_seq_lens_cpu", "extend_prefix_lens_cpu",
        ),
    ),
    **{
        f"ForwardMode.is_{name}": (forward_batch_info, ())
        for name in (
            "idle", "decode", "decode_or_idle", "extend", "target_verify", "draft_extend_v2", "dllm_extend",
        )
    },
    **{f"get_{name}": (runtime_context, ()) for name in ("exec", "parallel", "spec")},
}  # fmt: skip
#: Of a layer.
_LAYER = (
    "num_heads", "head_dim", "scaling", "num_kv_heads", "layer_id", "logit_cap", "v_head_dim", "sliding_window_size",
    "is_cross_attention", "attn_type",
)  # fmt: skip

#: Algorithms of speculative decoding whose guesses are a chain where topk is 1. Those of NGRAM branch at the root for
#: each length of the suffix that they continue, with a breadth of 1 too.
_CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


def check_version() -> None:
    """Look whether SGLang's interface is the one that this was made for.

    Raises
    ------
    UnsupportedError
        It is not; names what is missing.
    """
    missing = []
    expected = {**_EXPECTED, "RadixAttention": (inspect.getmodule(RadixAttention), _LAYER)}
    for name, (module, arguments) in expected.items():
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            missing.append(name)
            continue
        there = inspect.signature(found).parameters
        missing += [f"{name}({argument}=)" for argument in arguments if argument not in there]
    if missing:
        raise unknown_version(", ".join(missing))
    if version() not in TESTED:
        text = "omniattn was tested with sglang %s, not with %s, whose interface looks the same"
        _LOGGER.warning(text, ", ".join(TESTED), version())


class OmniattnBackend(SlotBackend, base_attn_backend.AttentionBackend):
    """The backend ``"omniattn"`` of one model.

    Parameters
    ----------
    runner : sglang.srt.model_executor.model_runner.ModelRunner
        With its pools, and the model that is loaded.

    Raises
    ------
    UnsupportedError
        The model, its cache or the way it is to run is not served; names what, and what to choose instead.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(**_known_of(runner, _check_pool))
        _settle(self, runner)

    def _store(
        self, layer: Any, slots: torch.Tensor, window_slots: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        in_8_bits = self.token_to_kv_pool.dtype.itemsize == 1
        self.token_to_kv_pool.set_kv_buffer(
            layer, memory_pool.KVWriteLoc(slots, window_slots), k, v,
            layer.k_scale if in_8_bits else None, layer.v_scale if in_8_bits else None,
        )  # fmt: skip


class OmniattnMLABackend(LatentSlotBackend, base_attn_backend.AttentionBackend):
    """The backend ``"omniattn"`` of a model with latent attention.

    Parameters
    ----------
    runner : sglang.srt.model_executor.model_runner.ModelRunner
        With its pools, and the model that is loaded.

    Raises
    ------
    UnsupportedError
        As `OmniattnBackend`'s.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(**_known_of(runner, _check_latent_pool))
        _register_methods()
        _settle(self, runner)

    def _store_rows(self, layer: Any, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self.token_to_kv_pool.set_kv_buffer(layer, memory_pool.KVWriteLoc(slots, None), rows, None)


def backend_of(runner: Any) -> Any:
    """The backend of one model, of the class for its attention."""
    return (OmniattnMLABackend if runner.use_mla_backend else OmniattnBackend)(runner)


def _known_of(runner: Any, check_pool: Callable[[Any], None]) -> dict[str, Any]:
    """The arguments of a `SlotBackend` for a model, after a look whether it is served."""
    _check_runner(runner)
    pool = runner.token_to_kv_pool
    check_pool(pool)
    _check_gpu(runner, pool.dtype)
    return {
        "pool": pool, "req_to_token": runner.req_to_token_pool.req_to_token, "page_size": int(runner.page_size or 1),
        "deterministic": bool(runtime_context.get_exec().deterministic.enable_deterministic_inference),
    }  # fmt: skip


def _settle(backend: Any, runner: Any) -> None:
    """What SGLang reads of a backend, and a look at the model's layers."""
    backend.req_to_token_pool = runner.req_to_token_pool
    backend.kv_index_translator = runner.kv_index_translator
    backend.kv_cache_dtype = runner.token_to_kv_pool.dtype
    for module in runner.model.modules():
        if isinstance(module, RadixAttention):
            backend.check_layer(module)


def _register_methods() -> None:
    """Tell SGLang's models with latent attention which way each step goes."""
    try:
        from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

        captured = (handlers.is_in_tc_piecewise_cuda_graph, handlers.is_in_breakable_cuda_graph)
        methods, register = handlers.AttnForwardMethod, handlers.AttentionBackendRegistry.register
        absorbed, own = methods.MLA, methods.MHA_CHUNKED_KV
    except (ImportError, AttributeError) as error:
        raise unknown_version(str(error)) from error

    def method(attn: Any, forward_batch: Any) -> Any:
        """Absorbed, but for prompts with no older tokens or with many of them."""
        deterministic = runtime_context.get_exec().deterministic.enable_deterministic_inference
        if deterministic or any(is_now() for is_now in captured):
            return absorbed
        if not forward_batch.forward_mode.is_extend_without_speculative():
            return absorbed
        older = sum(forward_batch.extend_prefix_lens_cpu or ())
        merges = not attn.disable_chunked_prefix_cache and older >= attn.chunked_prefix_cache_threshold
        return own if older == 0 or merges else absorbed

    register("omniattn", method)


def _check_latent_pool(pool: Any) -> None:
    """The class and element types of pools of latent rows that are read."""
    if type(pool) is not memory_pool.MLATokenToKVPool:
        raise UnsupportedError(
            f"omniattn for latent attention on SGLang's {type(pool).__name__}",
            instead="MLATokenToKVPool, or " + _OTHER,
        )
    if pool.kv_lora_rank != HEAD_DIM_V or pool.kv_lora_rank + pool.qk_rope_head_dim != HEAD_DIM:
        raise UnsupportedError(
            f"omniattn for latent rows of {pool.kv_lora_rank} and {pool.qk_rope_head_dim} channels",
            instead=f"{HEAD_DIM_V} and {HEAD_DIM - HEAD_DIM_V}, or {_OTHER}",
        )
    _check_dtype(pool.dtype)


def _check_runner(runner: Any) -> None:
    """What a model has and how it runs, as far as it is known when it is loaded."""
    config = runner.model_config
    if config.is_encoder_decoder:
        raise of_encoders()
    if getattr(config, "is_local_attention_model", False):
        raise UnsupportedError("omniattn for attention in chunks", instead=_OTHER)
    if runner.is_draft_worker:
        raise of_drafts()
    if getattr(runner, "prefill_aware_swa", False):
        raise UnsupportedError("omniattn for windows that depend on the prompt (prefill_aware_swa)", instead=_OTHER)
    if getattr(runner, "enable_hisparse", False):
        raise UnsupportedError("omniattn with --enable-hisparse", instead=_OTHER)
    if runner.kv_index_translator is not None and runner.kv_index_translator.is_translating:
        raise UnsupportedError("omniattn with --enable-unified-memory", instead="SGLang's pools without it")
    parallel = runtime_context.get_parallel()
    for name, what in (("attn_dcp_size", "decoding"), ("attn_cp_size", "prompts")):
        ranks = getattr(parallel, name)
        if ranks is not None and ranks > 1:
            raise UnsupportedError(f"omniattn with {what} divided among {ranks} ranks ({name})", instead="one rank")
    guesses = runtime_context.get_spec()
    algorithm = guesses.speculative_algorithm
    if algorithm is not None:
        if algorithm not in _CHAINS:
            raise UnsupportedError(
                f"omniattn with --speculative-algorithm {algorithm}", instead=f"one of {', '.join(_CHAINS)}"
            )
        if (guesses.speculative_eagle_topk or 1) > 1:
            raise of_trees(guesses.speculative_eagle_topk)


def _check_pool(pool: Any) -> None:
    """The classes, layouts and element types of pools that are read."""
    pools = (pool.full_kv_pool, pool.swa_kv_pool) if type(pool) is swa_memory_pool.SWAKVPool else (pool,)
    for part in pools:
        if type(part) is not memory_pool.MHATokenToKVPool:
            raise UnsupportedError(
                f"omniattn on SGLang's {type(part).__name__}", instead="MHATokenToKVPool, SWAKVPool of it, or " + _OTHER
            )
        if getattr(part, "is_quantized_kv_cache", False):
            raise UnsupportedError("omniattn with a KV cache in 4 bits", instead="--kv-cache-dtype auto or fp8_e4m3")
        layout = getattr(part, "kv_cache_layout", "nhd")
        if layout not in ("nhd", "hnd"):
            raise UnsupportedError(f"omniattn with a KV cache in the layout {layout}", instead="nhd or hnd")
        _check_dtype(part.dtype)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        raise UnsupportedError(
            f"omniattn with a KV cache in {dtype}", instead="--kv-cache-dtype auto, bfloat16 or fp8_e4m3"
        )


def _check_gpu(runner: Any, cache: torch.dtype) -> None:
    """What the kernels of a GPU do not take; on the CPU NumPy takes it."""
    if torch.device(runner.device).type != "cuda":
        return
    capability = torch.cuda.get_device_capability(runner.gpu_id)
    if capability < (8, 0):
        found = ".".join(map(str, capability))
        raise UnsupportedError(f"omniattn on a GPU of compute capability {found}", instead=f"8.0 or newer, {_OTHER}")
    if runner.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(f"omniattn with a model in {runner.dtype}", instead="--dtype bfloat16 or float16")
    if cache.itemsize == 2 and cache != runner.dtype:
        raise UnsupportedError(
            f"omniattn with a KV cache in {cache} of a model in {runner.dtype}", instead="--kv-cache-dtype auto"
        )
