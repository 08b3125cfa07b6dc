"""The packages whose names are replaced or that are plugged into, and what is looked at in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from build_tools.peer_checks import (
    Check,
    aten,
    constants_of,
    declared,
    entries,
    functions,
    keywords,
    needs,
    signature,
    uses,
)
from build_tools.peer_source import Tree

_COMPAT, _INTEGRATIONS = "omniattn.compat.", "omniattn.integrations."
_PRIVATE = ("_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward")
_BACKEND = "vllm.v1.attention.backend"


@dataclass(frozen=True)
class Peer:
    """A package: its name on PyPI, its checks, and where its sources are.

    Attributes
    ----------
    folders : tuple of str
        Below the sources, what is importable.
    sdist : bool
        PyPI has no wheel.
    elsewhere : str
        For what is not on PyPI: where it is.
    options : dict
        Of `peer_wheels.fetch`.
    """

    name: str
    checks: tuple[Check, ...]
    folders: tuple[str, ...] = ("",)
    sdist: bool = False
    elsewhere: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def _transformers_keywords(ours: Tree) -> Iterable[str]:
    """What attention's function names, knows, ignores or refuses by name."""
    module = ours.module(f"{_INTEGRATIONS}transformers_keywords")
    assert module is not None
    values = constants_of(ours, f"{_INTEGRATIONS}transformers_keywords")
    yield from (*values["PACKED"], *values["_NOT_OF_ATTENTION"], *values["_NOT_SERVED"])
    yield from ("dropout", "scaling", "is_causal", "sliding_window", "softcap", "s_aux", "position_bias")
    yield from ("module", "query", "key", "value", "attention_mask")


_FA3 = functions("flash_attn_interface", f"{_COMPAT}flash_attn_interface")

_ALL = (
    Peer(
        "torch",
        (
            uses("torch", "omniattn", aside=r"torch\.ops\."),
            needs(
                {
                    "torch.nn.attention.register_flash_attention_impl": ("register_fn",),
                    "torch.nn.attention.activate_flash_attention_impl": ("impl",),
                    "torch.nn.attention.restore_flash_attention_impl": (),
                },
                text="registry of flash-attention implementations",
            ),
            needs(
                {
                    "torch.distributed.tensor.experimental._context_parallel._attention._SDPAMerger.__init__": (
                        "convert_to_f32", "seq_dim",
                    ),
                    "torch.distributed.tensor.experimental._context_parallel._attention._SDPAMerger.step": (
                        "out", "lse", "partial",
                    ),
                    "torch.distributed.tensor.experimental._context_parallel._attention._SDPAMerger.results": (),
                },
                exact=True, text="the merger of `context_parallel`",
            ),
            aten("omniattn.torch.operators", "torchgen/packaged/ATen/native/native_functions.yaml"),
            signature("torch._C._nn.scaled_dot_product_attention", "omniattn.torch.functional.sdpa",
                      aside=("precision='exact'",)),
            signature("torch.nn.attention.flex_attention.flex_attention", "omniattn.torch.flex.flex_attention"),
        ),
        # The smallest: its Python files are those of the others.
        options={"platforms": ("macosx_14_0_arm64", "macosx_11_0_arm64")},
    ),
    Peer(
        "jax",
        (
            # These two are read of older versions alone.
            uses("jax", "omniattn", aside=r"jax\.core\.get_opaque_trace_state|jax\.lax\.pvary"),
            needs({"jax.extend.core.get_opaque_trace_state": (), "jax.lax.pcast": ("to",)}, text="tracing"),
            needs({"jax.experimental.buffer_callback.buffer_callback": (
                "callback", "result_shape_dtypes", "vmap_method", "command_buffer_compatible", "has_side_effect",
                "input_output_aliases",
            )}, exact=True, text="`buffer_callback`"),
            signature("jax.nn.dot_product_attention", "omniattn.jax.functional.dot_product_attention",
                      aside=("precision='exact'",)),
        ),
    ),
    Peer(
        "transformers",
        (
            uses("transformers", "omniattn/integrations"),
            needs({
                "transformers.modeling_utils.AttentionInterface.register": ("key", "value"),
                "transformers.masking_utils.AttentionMaskInterface.register": ("key", "value"),
            }, text="registries of attention and of masks"),
            declared(f"{_INTEGRATIONS}transformers", {"_SDPA_MASK": "transformers.masking_utils.sdpa_mask"}),
            keywords("models' attention", "attention_interface", "transformers/models/*/modeling_*.py",
                     _transformers_keywords),
            needs({
                "transformers.generation.continuous_batching.PagedAttentionCache.update": (
                    "key_states", "value_states", "layer_idx",
                ),
                "transformers.generation.continuous_batching.ContinuousBatchingManager.switch_to_cb_friendly_attn": (
                    "model",
                ),
                "transformers.modeling_flash_attention_utils._lazy_imports": ("implementation",),
            }, text="continuous batching"),
        ),
    ),
    Peer(
        "diffusers",
        (
            uses("diffusers", "omniattn/integrations"),
            declared(f"{_INTEGRATIONS}diffusers", {"_EXPECTED": "diffusers.models.attention_dispatch."}),
            entries("diffusers.models.attention_dispatch.dispatch_attention_fn",
                    f"{_INTEGRATIONS}diffusers._backend.attention"),
        ),
    ),
    Peer(
        "flash-attn",
        (
            functions("flash_attn.flash_attn_interface", f"{_COMPAT}flash_attn", *_PRIVATE),
            functions("flash_attn.bert_padding", f"{_COMPAT}bert_padding"),
            _FA3,
        ),
        folders=("", "hopper"), sdist=True,
    ),
    Peer("tokenspeed-fa3", (_FA3,)),
    Peer("fa3-fwd", (functions("fa3_fwd_interface", f"{_COMPAT}flash_attn_interface"),)),
    Peer(
        "flash-attn-4",
        (
            needs({
                "flash_attn.cute.flash_attn_func": ("causal", "window_size", "softcap"),
                "flash_attn.cute.flash_attn_varlen_func": (
                    "causal", "window_size", "softcap", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
                ),
            }, text="what `omniattn bench` calls"),
        ),
        options={"pre": True},
    ),
    Peer("sageattention", (functions("sageattention", f"{_COMPAT}sageattention"),)),
    Peer(
        "spas_sage_attn", (functions("spas_sage_attn.core", f"{_COMPAT}spas_sage_attn"),),
        elsewhere="`thu-ml/SpargeAttn` on GitHub",
    ),
    Peer("flashinfer-python", (functions("flashinfer", f"{_COMPAT}flashinfer"),)),
    Peer("flash-mla", (functions("flash_mla", f"{_COMPAT}flash_mla"),), sdist=True),
    Peer("sgl-flash-mla", (functions("flash_mla", f"{_COMPAT}flash_mla"),)),
    Peer(
        "vllm",
        (
            uses("vllm", "omniattn/integrations"),
            needs({
                "vllm.v1.attention.backends.registry.register_backend": ("backend", "class_path"),
                "vllm.v1.attention.backends.registry.AttentionBackendEnum.CUSTOM": (),
                "vllm.v1.attention.backends.mla.prefill.registry.register_mla_prefill_backend": (
                    "backend", "class_path",
                ),
            }, text="registries of backends"),
            declared(
                f"{_INTEGRATIONS}vllm.versions",
                {
                    "_CALLED": f"{_BACKEND}.", "_USED": "", "_NEEDED": "*", "_FIELDS":
                    f"{_BACKEND}.CommonAttentionMetadata",
                },
                exact=("_CALLED", "_FIELDS"),
            ),
            declared(
                f"{_INTEGRATIONS}vllm.versions",
                {"_LATENT_CALLED": "", "_LATENT_NEEDED": "*", "_SPARSE_NEEDED": "*", "_SPARSE_USED": ""},
                exact=("_LATENT_CALLED",),
            ),
        ),
    ),
    Peer(
        "sglang",
        (
            uses("sglang", "omniattn/integrations"),
            declared(f"{_INTEGRATIONS}sglang_backend", {
                "_EXPECTED": "", "_LAYER": "sglang.srt.layers.radix_attention.RadixAttention",
            }),
            needs({
                "sglang.srt.layers.attention.attention_registry.register_attention_backend": ("name",),
                "sglang.srt.arg_groups.choices.add_attention_backend_choices": (),
                "sglang.srt.arg_groups.choices.add_deterministic_attention_backend_choices": (),
                "sglang.srt.arg_groups.choices.add_chunked_prefix_cache_attention_backend": (),
            }, text="registry of backends"),
        ),
    ),
    Peer(
        "ComfyUI",
        (
            needs({"comfy.ldm.modules.attention.attention_pytorch": (
                "q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape",
            )}, text="what `optimized_attention_override` replaces"),
        ),
        elsewhere="`Comfy-Org/ComfyUI` on GitHub",
    ),
    Peer(
        "kernels",
        (needs({"kernels.get_local_kernel": ("repo_path",), "kernels.get_kernel": ("repo_id",)},
               text="what loads the folder of `build_tools/hub_kernel.py`"),),
    ),
)  # fmt: skip

PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}
