"""SmolLM2 (Llama architecture) on packed rows: the new tokens of many requests in one array, keys and values in pages.

One layer, x of shape (rows, hidden); weights and tokenizer are those of ../smollm2:

    x = x + Wo attention(rope(Wq n(x)), rope(Wk n(x)), Wv n(x))        n = RMS norm with a gain
    x = x + Wdown (silu(Wgate n(x)) * Wup n(x))
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import omniattn as oa

sys.path.append(str(Path(__file__).resolve().parents[1] / "smollm2"))

from array_backend import TorchBackend
from model import Config, Weights, rotary_tables
from tokenizer import load_tokenizer
from weights import load_weights, locate_gguf, metadata, open_gguf, read_config


@dataclass(frozen=True)
class Step:
    """What a step computes, in int32. Requests without rows, and rows behind the last request, are padding."""

    table: Tensor  # (requests, max_blocks): blocks of each request
    tokens: Tensor  # (rows,)
    positions: Tensor  # (rows,)
    wanted: Tensor  # (n,): rows whose logits are asked for
    seq_lens: Tensor  # (requests,): tokens of each request, the new ones included
    starts: Tensor  # (requests + 1,): first row of each request, and the end of the last one's
    longest: int  # rows of a request at most


class PagedAttention:
    """omniattn's: `append` rotates, quantizes and writes K and V, `attention_with_kvcache` reads them.

    ``like`` is a tensor of the model's dtype and device; a 16-bit ``kv`` has to be that dtype on a GPU. ``options`` are
    those of `attention_with_kvcache`, e.g. ``deterministic=True``.
    """

    def __init__(self, config: Config, num_blocks: int, block_size: int, max_tokens: int, like: Tensor, kv: str,
                 **options: Any) -> None:  # fmt: skip
        dim, shape = config.head_dim, (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.caches = [oa.PagedKVCache(*shape, like=like, k_dtype=kv) for _ in range(config.num_layers)]
        tables = (x[:, 0, : dim // 2].astype("float32") for x in rotary_tables(config, 0, max_tokens))
        self.cos, self.sin = (torch.from_numpy(x).contiguous().to(like.device) for x in tables)
        self.options = options

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """o in the shape of q, (rows, heads, head_dim). q is rotated already, k is not."""
        places = {"seq_lens": step.seq_lens, "block_table": step.table}
        oa.append(self.caches[layer], k, v, cu_seqlens=step.starts, cos=self.cos, sin=self.sin, **places)
        return self.attend(self.caches[layer], q, step, **places)

    def attend(self, cache: oa.PagedKVCache, q: Tensor, step: Step, **places: Tensor) -> Tensor:
        """Attention over the cache, in which the new tokens are."""
        rows = {"cu_seqlens_q": step.starts, "max_seqlen_q": step.longest}
        return oa.attention_with_kvcache(q, cache, **rows, **places, **self.options)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channels i and i + head_dim / 2 by the angles of their row; the first half of ``sin`` is negated."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class Network:
    """Weights, and one forward pass with whichever attention, `PagedAttention` or one like it."""

    def __init__(self, config: Config, weights: Weights, max_tokens: int) -> None:
        self.config, self.weights, self.like = config, weights, weights.output_norm
        self.qkv = [torch.cat((layer.wq, layer.wk, layer.wv)) for layer in weights.layers]
        self.gate_up = [torch.cat((layer.w_gate, layer.w_up)) for layer in weights.layers]
        cos, sin = rotary_tables(config, 0, max_tokens)
        sin[..., : config.head_dim // 2] *= -1
        self.cos, self.sin = (torch.from_numpy(x).float().to(self.like.device) for x in (cos, sin))

    def __call__(self, step: Step, attention: Any) -> Tensor:
        """Logits (n, vocab) of the rows ``step.wanted``."""
        c = self.config
        heads = [c.num_q_heads, c.num_kv_heads, c.num_kv_heads]
        angles = self.cos.index_select(0, step.positions), self.sin.index_select(0, step.positions)
        x = functional.embedding(step.tokens, self.weights.embedding)
        for i, layer in enumerate(self.weights.layers):
            y = functional.rms_norm(x, (c.hidden,), layer.attn_norm, c.norm_eps)
            q, k, v = functional.linear(y, self.qkv[i]).unflatten(1, (-1, c.head_dim)).split(heads, 1)
            x = x + functional.linear(attention(i, rotate(q, *angles), k, v, step).flatten(1), layer.wo)
            y = functional.rms_norm(x, (c.hidden,), layer.ffn_norm, c.norm_eps)
            gate, up = functional.linear(y, self.gate_up[i]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer.w_down)
        x = functional.rms_norm(x.index_select(0, step.wanted), (c.hidden,), self.weights.output_norm, c.norm_eps)
        return functional.linear(x, self.weights.embedding)


def load_smollm2(gguf: str | None, device: str, max_tokens: int) -> tuple[Network, Any, int]:
    """The network, in bfloat16 on a GPU; its tokenizer, and the token that ends an answer. None: the package's file."""
    reader = open_gguf(locate_gguf(gguf))
    config = read_config(reader)
    weights = load_weights(reader, config, TorchBackend(device, "float32" if device == "cpu" else "bfloat16"))
    return Network(config, weights, max_tokens), load_tokenizer(reader), metadata(reader, "tokenizer.ggml.eos_token_id")
