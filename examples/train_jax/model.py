"""A small transformer in plain JAX, which gets its attention as a function, and Adam."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import numpy as jnp

from omniattn.jax import dot_product_attention

#: (q, k, v), each (batch, seq, heads, head_dim), to the output of causal attention in the same layout.
Attention = Callable[[Any, Any, Any], Any]

ATTENTIONS: dict[str, Attention] = {
    name: functools.partial(dot_product_attention, is_causal=True, implementation=name)
    for name in ("omniattn", "xla", "cudnn")
}


@dataclass(frozen=True)
class Config:
    """Sizes of a model.

    Attributes
    ----------
    layers, heads, kv_heads, head_dim : int
    context : int
        Tokens of a sequence.
    vocabulary : int
    dtype : str
        Of products and attention; weights are float32.
    """

    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    context: int = 512
    vocabulary: int = 256
    dtype: str = "bfloat16"

    @property
    def width(self) -> int:
        """Channels of the residual stream."""
        return self.heads * self.head_dim


def initial(config: Config, key: Any) -> dict[str, Any]:
    """Weights by name; those of all layers in one array, for `jax.lax.scan`."""
    c = config
    shapes = {
        "embedding": (c.vocabulary, c.width),
        "positions": (c.context, c.width),
        "qkv": (c.layers, c.width, (c.heads + 2 * c.kv_heads) * c.head_dim),
        "out": (c.layers, c.width, c.width),
        "up": (c.layers, c.width, 4 * c.width),
        "down": (c.layers, 4 * c.width, c.width),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) * (0.02 if len(shape) == 2 else shape[-2] ** -0.5)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def logits(config: Config, attention: Attention, weights: dict[str, Any], tokens: Any) -> Any:
    """Scores of the next token, (batch, seq, vocabulary), float32."""
    heads = (config.heads, config.kv_heads, config.kv_heads)

    def layer(x: Any, w: Any) -> Any:
        rows = (_normalized(x) @ w["qkv"].astype(x.dtype)).reshape(*x.shape[:2], sum(heads), config.head_dim)
        q, k, v = jnp.split(rows, (heads[0], heads[0] + heads[1]), axis=2)
        x = x + attention(q, k, v).reshape(x.shape) @ w["out"].astype(x.dtype)
        return x + jax.nn.gelu(_normalized(x) @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype), None

    x = (weights["embedding"][tokens] + weights["positions"][: tokens.shape[1]]).astype(config.dtype)
    x, _ = jax.lax.scan(layer, x, {name: weights[name] for name in ("qkv", "out", "up", "down")})
    return _normalized(x).astype(jnp.float32) @ weights["embedding"].T


def _normalized(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def loss(config: Config, attention: Attention, weights: dict[str, Any], tokens: Any) -> Any:
    """Mean cross entropy, nats a token, of the tokens that can be known: the second half repeats the first."""
    # All tokens, the last one too, of which nothing is asked: lengths of 128 and the like are what kernels are good at.
    scores = jax.nn.log_softmax(logits(config, attention, weights, tokens)[:, :-1])
    known = jnp.take_along_axis(scores, tokens[:, 1:, None], -1)[:, config.context // 2 :, 0]
    return -known.mean()


def step(
    config: Config, attention: Attention, rate: float, state: tuple[Any, ...], tokens: Any
) -> tuple[tuple[Any, ...], Any]:
    """One step of Adam on (weights, first moments, second moments, number): the new state and the loss."""
    weights, first, second, number = state
    value, gradients = jax.value_and_grad(functools.partial(loss, config, attention))(weights, tokens)
    number = number + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, second, gradients)
    size = rate * jnp.sqrt(1 - 0.99**number) / (1 - 0.9**number)
    weights = jax.tree.map(lambda w, m, s: w - size * m / (jnp.sqrt(s) + 1e-8), weights, first, second)
    return (weights, first, second, number), value
