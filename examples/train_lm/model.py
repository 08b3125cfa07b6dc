"""A small GPT in torch: learned positions, layers that normalize first, and the attention that it is given."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import omniattn

#: (q, k, v), each (batch, seq, heads, head_dim), to the output of causal attention in the same layout.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_omniattn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of this package; autograd does the rest."""
    return omniattn.attention(q, k, v, causal=True)


def by_precision(precision: str | omniattn.Fp8) -> Attention:
    """Attention of this package with a forward in 8 bits; gradients are those of exact attention, straight through."""

    def by_omniattn_in_8_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return omniattn.attention(q, k, v, causal=True, precision=precision)

    return by_omniattn_in_8_bits


def by_fp8_with_exact_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The result of fp8 and the gradients of an exact forward, which is run for them: it saves no time.

    Gradients of ``precision="fp8"`` take the o of fp8 for the mean of v, which exact probabilities do not have: the
    gradients of a row's scores do not sum to 0. These do.
    """
    exact = by_omniattn(q, k, v)
    with torch.no_grad():
        apart = omniattn.attention(q, k, v, causal=True, precision="fp8") - exact
    return exact + apart


def by_fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4, of the package flash-attn-4."""
    made = fa4_function()(q, k, v, causal=True)
    # Some releases return (o, lse), some return o.
    return made[0] if isinstance(made, tuple) else made


@functools.cache
def fa4_function() -> Callable[..., Any]:
    """FlashAttention-4's function of dense batches.

    Raises
    ------
    ImportError
        It is not installed, or cannot be imported; the text says why.
    """
    try:
        function: Callable[..., Any] = importlib.import_module("flash_attn.cute").flash_attn_func
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "fa4: expected flash_attn.cute with flash_attn_func (pip install flash-attn-4), received "
            f"{type(error).__name__}: {error}"
        ) from error
    return function


def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of torch, which wants heads first."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {
    "omniattn": by_omniattn,
    "sdpa": by_sdpa,
    "fa4": by_fa4,
    "int8": by_precision("int8"),
    "fp8": by_precision("fp8"),
    "fp8_smooth_k": by_precision(omniattn.Fp8(smooth_k=True)),
    "fp8_exact_gradients": by_fp8_with_exact_gradients,
}


@dataclass(frozen=True)
class Config:
    """Sizes of a model.

    Attributes
    ----------
    layers, heads, head_dim : int
    context : int
        Tokens of a sequence, at most.
    vocabulary : int
        Bytes are the tokens.
    """

    layers: int = 12
    heads: int = 12
    head_dim: int = 64
    context: int = 2048
    vocabulary: int = 256

    @property
    def width(self) -> int:
        """Channels of the residual stream."""
        return self.heads * self.head_dim


class Block(nn.Module):
    """One layer: attention and a perceptron, each added to what comes in."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        width = config.width
        self.config, self.attention = config, attention
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, width)."""
        heads = self.qkv(self.norm_in(x)).unflatten(-1, (3, self.config.heads, self.config.head_dim))
        # Three views of one array: kernels read them where they lie.
        q, k, v = heads.unbind(2)
        x = x + self.project(self.attention(q, k, v).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_out(x))))


class Gpt(nn.Module):
    """The model; its weights depend on torch's seed alone, not on the attention."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, weights in self.named_parameters():
            if weights.ndim == 2:
                # What is added to the residual stream is smaller the more layers add to it (GPT-2).
                adds = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(weights, std=0.02 / (2 * config.layers) ** 0.5 if adds else 0.02)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """(batch, seq) to logits (batch, seq, vocabulary); positions (seq,), 0, 1, ... unless given."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
