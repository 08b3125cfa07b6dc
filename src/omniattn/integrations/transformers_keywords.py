"""What comes down to an attention function of transformers besides q, k, v and a mask: known, ignored, or refused."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ..errors import UnsupportedError
from .transformers_checks import check_dropout

#: The versions that tests ran with, for errors.
TESTED = "transformers 5.17, 5.20, 5.23 and 5.24, with which this was tested"
EAGER = 'attn_implementation="eager"'

#: Lengths of sequences that are packed into one row of the batch.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

#: Keywords of models' forward functions that come down to attention and do not concern it.
_NOT_OF_ATTENTION = {
    "attention_mask", "cache_position", "decoder_attention_mask", "decoder_input_ids", "encoder_attention_mask",
    "encoder_hidden_states", "image_grid_thw", "image_sizes", "input_features", "input_ids", "inputs_embeds",
    "interpolate_pos_encoding", "labels", "layer_idx", "logits_to_keep", "mm_token_type_ids", "num_items_in_batch",
    "num_logits_to_keep", "output_hidden_states", "output_router_logits", "past_key_values", "pixel_values",
    "pixel_values_videos", "position_embeddings", "position_ids", "return_dict", "return_loss", "seq_idx",
    "token_type_ids", "use_cache", "video_grid_thw",
}  # fmt: skip

#: Keywords that change the result of attention in a way that is not served, and why.
_NOT_SERVED = {
    "output_attentions": "attention weights are never formed",
    "head_mask": "there is no mask of heads",
    "cache": "the paged cache of continuous batching is read under generate_batch only",
    "indices": "there is no sparse attention on indices of keys",
    "block_indices": "there is no sparse attention on indices of blocks",
    "sinks": "sinks that differ between queries are not taken (s_aux, one for each head, is)",
}

#: With those that the user named.
IGNORED: set[str] = set(_NOT_OF_ATTENTION)


def check(dropout: float, kwargs: dict[str, Any], known: frozenset[str]) -> None:
    """Refuse dropout, and keywords that may change the result; ``known`` ones are the caller's."""
    if check_dropout(dropout) > 0:
        raise UnsupportedError(
            f"dropout={dropout} of attention over pages",
            instead="model.config.attention_dropout = 0.0 before the model is made, model.eval(), or " + EAGER,
        )
    for name, what in kwargs.items():
        if name in known or what is None or what is False:
            continue
        if name == "cache" and isinstance(what, transformers.Cache) and type(what).__name__ != "PagedAttentionCache":
            # From 5.24 on what was ``past_key_values``: some models hand it on, updated.
            continue
        if name in _NOT_SERVED:
            raise UnsupportedError(f"{name} of attention: {_NOT_SERVED[name]}", instead=EAGER)
        if name not in IGNORED:
            raise UnsupportedError(
                f"keyword {name!r} of attention is not known, and could change its result",
                instead=f"{EAGER}, or register(ignore=[{name!r}]) if it does not concern attention",
            )


def refused(what: str) -> UnsupportedError:
    """That continuous batching is not what it was."""
    return UnsupportedError(
        f"continuous batching of transformers {transformers.__version__}: {what}",
        instead=f'{TESTED}, or attn_implementation="sdpa"',
    )


def as_int32(x: torch.Tensor) -> torch.Tensor:
    """Lengths as kernels read them; themselves where they are int32."""
    return x if x.dtype is torch.int32 else x.to(torch.int32)
