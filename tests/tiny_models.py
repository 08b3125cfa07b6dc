"""Tiny random models of transformers, from their own config classes. Imports transformers when it is called."""

from __future__ import annotations

from typing import Any

VOCABULARY = 96
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention"]

#: Name: config class, what differs from the others. Windows are 5 tokens, chunks too.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"use_sliding_window": True, "sliding_window": 5, "layer_types": _MIXED}),
    # Its layers do not hand the window to attention: only the mask knows it.
    "phimoe": ("PhimoeConfig", {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "gemma2": (
        "Gemma2Config", {"sliding_window": 5, "layer_types": _MIXED, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 5, "layer_types": _MIXED}),
    "gpt_oss": (
        "GptOssConfig",
        {"sliding_window": 5, "layer_types": _MIXED, "num_local_experts": 2, "num_experts_per_tok": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "llama4": (
        "Llama4TextConfig",
        {"attention_chunk_size": 5, "num_local_experts": 1, "intermediate_size_mlp": 64,
         "interleave_moe_layer_step": 1, "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 2, "n_routed_experts": 2},
    ),
}  # fmt: skip


def decoder(name: str, **changes: Any) -> Any:
    """A language model of `DECODERS` with random weights and, where it has them, random sinks."""
    import torch
    import transformers

    kind, special = DECODERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**_DECODER, **special, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_()
            elif parameter.dim() > 1:
                # Large enough for attention to be far from uniform.
                parameter.mul_(3.0)
    return model


def bert() -> Any:
    """An encoder without a window."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**_ENCODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertModel(config).eval()


def modernbert() -> Any:
    """An encoder with a window on both sides."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        **_ENCODER, local_attention=6, global_attn_every_n_layers=2, bos_token_id=1, eos_token_id=2, cls_token_id=3,
        sep_token_id=4,
    )  # fmt: skip
    return transformers.ModernBertModel(config).eval()


def t5() -> Any:
    """An encoder and decoder with learned position biases."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_(std=2.0)
    return model


def bart() -> Any:
    """An encoder and decoder with cross attention and no bias."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip
    return transformers.BartModel(config).eval()


def tokens(batch: int = 2, length: int = 11, seed: int = 1) -> Any:
    """(batch, length) random tokens that are neither padding nor special."""
    import torch

    return torch.randint(5, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str, batch: int = 2, length: int = 11) -> Any:
    """(batch, length), 0 for padding: 4 tokens of the first row on the left, or 3 of the last one on the right."""
    import torch

    mask = torch.ones(batch, length, dtype=torch.long)
    if side == "left":
        mask[0, :4] = 0
    elif side == "right":
        mask[-1, -3:] = 0
    return mask


def switch(model: Any, kind: str) -> None:
    """Choose attention in a model and in what it is made of: in transformers 5.17, T5's own parts keep theirs."""
    import transformers

    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation(kind)
