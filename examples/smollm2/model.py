"""SmolLM2 (Llama architecture), forward only, with the attention function as a parameter.

One layer, x of shape (batch, seq, hidden):

    x = x + Wo attention(rope(Wq n(x)), rope(Wk n(x)), Wv n(x))        n = RMS norm with a gain
    x = x + Wdown (silu(Wgate n(x)) * Wup n(x))

Everything goes through `backend.xp`, so the same lines run in NumPy and in torch. Matrices are stored (out, in).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_backend import Array, Backend

# (q, k, v) in (batch, seq, heads, dim) -> o in q's shape; causal, aligned to the end of k.
AttentionFn = Callable[[Array, Array, Array], Array]
Precision = Any  # what omniattn.attention takes as `precision=`: its name, an omniattn.Int8 or an omniattn.Int4
# Called once per layer with what attention gets: (layer index, q, k, v).
Observer = Callable[[int, Array, Array, Array], None]


@dataclass(frozen=True)
class Config:
    """Shape of the network; the defaults are SmolLM2-135M."""

    num_layers: int = 30
    hidden: int = 576
    intermediate: int = 1536
    num_q_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152
    rope_base: float = 100000.0
    norm_eps: float = 1e-5


@dataclass
class Layer:
    """Weights of one layer, matrices as (out, in)."""

    attn_norm: Array
    wq: Array
    wk: Array
    wv: Array
    wo: Array
    ffn_norm: Array
    w_gate: Array
    w_up: Array
    w_down: Array


@dataclass
class Weights:
    """All weights; the output projection is the embedding again (tied)."""

    embedding: Array
    layers: Sequence[Layer]
    output_norm: Array


def plain_attention(backend: Backend) -> AttentionFn:
    """Causal grouped-query attention written out with a full score matrix, in float32: the baseline."""
    xp = backend.xp

    def attend(q: Array, k: Array, v: Array) -> Array:
        batch, seq_q, num_q_heads, dim = q.shape
        seq_k, num_kv_heads = k.shape[1], k.shape[2]
        # Query head h reads kv head h // group: (batch, kv head, member of its group, seq, dim).
        group = num_q_heads // num_kv_heads
        qs = backend.to_float32(q).swapaxes(1, 2).reshape(batch, num_kv_heads, group, seq_q, dim)
        ks = backend.to_float32(k).swapaxes(1, 2)[:, :, None]
        vs = backend.to_float32(v).swapaxes(1, 2)[:, :, None]
        scores = (qs @ ks.swapaxes(-1, -2)) * dim**-0.5
        rows, columns = np.arange(seq_q)[:, None], np.arange(seq_k)[None, :]
        bias = backend.table(np.where(columns <= rows + (seq_k - seq_q), 0.0, -np.inf))
        scores = scores + bias
        weights = xp.exp(scores - xp.amax(scores, axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        o = (weights @ vs).reshape(batch, num_q_heads, seq_q, dim).swapaxes(1, 2)
        return backend.cast_like(o, q)

    return attend


def omniattn_attention(precision: Precision = "exact") -> AttentionFn:
    """The same operation through omniattn; it takes NumPy arrays and torch tensors alike."""
    import omniattn as oa

    def attend(q: Array, k: Array, v: Array) -> Array:
        return oa.attention(q, k, v, causal=True, precision=precision)

    return attend


@dataclass(frozen=True)
class Predictions:
    """Of one sequence or several, a prediction for each token but the first of each.

    Attributes
    ----------
    losses : ndarray, float64
        -log p(token i + 1 | tokens 0..i) in nats.
    best : ndarray, int64
        The token with the largest score; -1 where the scores hold a NaN.
    """

    losses: np.ndarray
    best: np.ndarray


class KVCache:
    """Keys (after rotary) and values of the tokens seen so far, per layer; grows by concatenation."""

    def __init__(self, num_layers: int) -> None:
        self.entries: list[tuple[Array, Array] | None] = [None] * num_layers

    @property
    def length(self) -> int:
        """Number of tokens held."""
        first = self.entries[0]
        return 0 if first is None else int(first[0].shape[1])

    def extend(self, layer: int, k: Array, v: Array, xp: Any) -> tuple[Array, Array]:
        """Append to one layer and return all its keys and values."""
        held = self.entries[layer]
        if held is not None:
            k, v = xp.concatenate((held[0], k), axis=1), xp.concatenate((held[1], v), axis=1)
        self.entries[layer] = (k, v)
        return k, v


def rotary_tables(config: Config, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, each (length, 1, head_dim), of the angles position * base^(-2 i / head_dim)."""
    half = config.head_dim // 2
    frequency = config.rope_base ** (-np.arange(half, dtype=np.float64) / half)
    angle = np.arange(start, start + length, dtype=np.float64)[:, None] * frequency
    angle = np.concatenate((angle, angle), axis=-1)[:, None, :]
    return np.cos(angle), np.sin(angle)


class Model:
    """Weights, a backend and an attention function.

    `attention` is a plain attribute: assign another function to compare implementations on the same weights.
    """

    def __init__(self, config: Config, weights: Weights, backend: Backend, attention: AttentionFn) -> None:
        self.config = config
        self.weights = weights
        self.backend = backend
        self.attention = attention

    def _norm(self, x: Array, gain: Array) -> Array:
        x32 = self.backend.to_float32(x)
        mean_square = (x32 * x32).mean(axis=-1, keepdims=True)
        return self.backend.cast_like(x32 / self.backend.xp.sqrt(mean_square + self.config.norm_eps), x) * gain

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        # Channel i is paired with channel i + head_dim / 2 (see weights.py for the order of the rows in the file).
        half = self.config.head_dim // 2
        x32 = self.backend.to_float32(x)
        partner = self.backend.xp.concatenate((-x32[..., half:], x32[..., :half]), axis=-1)
        return self.backend.cast_like(x32 * cos + partner * sin, x)

    def _silu(self, x: Array) -> Array:
        # 1 / (1 + exp(-x)) by tanh, which cannot overflow.
        return x * (0.5 + 0.5 * self.backend.xp.tanh(0.5 * x))

    def hidden(self, tokens: np.ndarray, *, cache: KVCache | None = None, observe: Observer | None = None) -> Array:
        """Last hidden states (batch, seq, hidden), normalized, of integer tokens (batch, seq).

        With a cache the tokens continue the ones it holds, and it is extended.
        """
        config, backend = self.config, self.backend
        batch, seq = tokens.shape
        start = cache.length if cache is not None else 0
        cos, sin = (backend.table(t) for t in rotary_tables(config, start, seq))
        x = self.weights.embedding[backend.indices(tokens)]
        for index, layer in enumerate(self.weights.layers):
            y = self._norm(x, layer.attn_norm)
            q = (y @ layer.wq.T).reshape(batch, seq, config.num_q_heads, config.head_dim)
            k = (y @ layer.wk.T).reshape(batch, seq, config.num_kv_heads, config.head_dim)
            v = (y @ layer.wv.T).reshape(batch, seq, config.num_kv_heads, config.head_dim)
            q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
            if cache is not None:
                k, v = cache.extend(index, k, v, backend.xp)
            if observe is not None:
                observe(index, q, k, v)
            o = self.attention(q, k, v)
            x = x + o.reshape(batch, seq, config.num_q_heads * config.head_dim) @ layer.wo.T
            y = self._norm(x, layer.ffn_norm)
            x = x + (self._silu(y @ layer.w_gate.T) * (y @ layer.w_up.T)) @ layer.w_down.T
        return self._norm(x, self.weights.output_norm)

    def logits(self, hidden: Array) -> Array:
        """Scores over the vocabulary, float32, for hidden states (..., hidden)."""
        return self.backend.to_float32(hidden @ self.weights.embedding.T)

    def predictions(self, tokens: np.ndarray, chunk: int = 256) -> Predictions:
        """What the model expects after tokens 0..i, for every i but the last, of one sequence (seq,).

        Logits are made `chunk` rows at a time: a full matrix of 8192 tokens would take 1.6 GB.
        """
        states = self.hidden(tokens[None, :])[0]
        losses, best = [np.zeros(0)], [np.zeros(0, dtype=np.int64)]
        for begin in range(0, len(tokens) - 1, chunk):
            targets = tokens[begin + 1 : begin + 1 + chunk]
            scores = self.backend.to_numpy(self.logits(states[begin : begin + len(targets)]))
            peak = scores.max(axis=-1, keepdims=True)
            log_sum = np.log(np.exp(scores - peak).sum(axis=-1, dtype=np.float64)) + peak[:, 0]
            losses.append(log_sum - scores[np.arange(len(targets)), targets])
            best.append(np.where(np.isnan(peak[:, 0]), -1, scores.argmax(axis=-1)))
        return Predictions(np.concatenate(losses), np.concatenate(best))

    def negative_log_likelihood(self, tokens: np.ndarray, chunk: int = 256) -> np.ndarray:
        """The losses of `predictions` alone."""
        return self.predictions(tokens, chunk).losses
