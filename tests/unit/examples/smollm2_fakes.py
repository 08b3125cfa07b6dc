"""A tiny random network for the tests of the examples."""

from __future__ import annotations

from typing import Any

import numpy as np


def tiny_weights(ex: Any, config: Any, backend: Any) -> Any:
    rng = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> Any:
        return backend.array(rng.standard_normal((rows, columns)) / np.sqrt(columns))

    def gain() -> Any:
        return backend.array(1 + 0.1 * rng.standard_normal(config.hidden))

    q_rows, kv_rows = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = [
        ex.model.Layer(
            attn_norm=gain(),
            wq=matrix(q_rows, config.hidden),
            wk=matrix(kv_rows, config.hidden),
            wv=matrix(kv_rows, config.hidden),
            wo=matrix(config.hidden, q_rows),
            ffn_norm=gain(),
            w_gate=matrix(config.intermediate, config.hidden),
            w_up=matrix(config.intermediate, config.hidden),
            w_down=matrix(config.hidden, config.intermediate),
        )
        for _ in range(config.num_layers)
    ]
    return ex.model.Weights(matrix(config.vocab, config.hidden), layers, gain())
