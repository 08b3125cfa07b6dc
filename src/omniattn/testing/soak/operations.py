"""The operations that problems are drawn of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omniattn.testing.expected import Grade
from omniattn.testing.soak import (
    attention,
    blocks,
    caches,
    gradients,
    indexer,
    latent,
    latent_own,
    low,
    merging,
    quantizers,
    sparse,
    with_cache,
)
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.machines import Machine
from omniattn.testing.soak.problem import Problem


@dataclass(frozen=True)
class Operation:
    """How problems of one kind are drawn and checked.

    Attributes
    ----------
    weight : float
        How often, beside the others.
    draw : callable
        Facts of a problem.
    check : callable
        Runs a problem; what is found of each result.
    """

    weight: float
    draw: Callable[[Draw], dict[str, Any]]
    check: Callable[[Machine, Problem], list[Grade]]


OPERATIONS: dict[str, Operation] = {
    "attention": Operation(5.0, lambda d: attention.draw(d, packed=False), attention.check),
    "attention_varlen": Operation(3.0, lambda d: attention.draw(d, packed=True), attention.check),
    "low precision": Operation(3.0, low.draw, low.check),
    "attention_backward": Operation(2.5, lambda d: gradients.draw(d, packed=False), gradients.check),
    "attention_varlen_backward": Operation(1.5, lambda d: gradients.draw(d, packed=True), gradients.check),
    "merge_states": Operation(0.7, merging.draw, merging.check),
    "quantize": Operation(1.5, quantizers.draw, quantizers.check),
    "caches": Operation(3.0, caches.draw, caches.check),
    "attention_with_kvcache": Operation(1.5, with_cache.draw, with_cache.check),
    "latent caches": Operation(0.7, latent.draw, latent.check),
    "own latent caches": Operation(0.4, latent_own.draw, latent_own.check),
    "sparse attention": Operation(0.7, sparse.draw, sparse.check),
    "e4m3 arrays": Operation(1.0, low.draw_e4m3, low.check_e4m3),
    "index_logits": Operation(0.4, indexer.draw_logits, indexer.check_logits),
    "sparse_blocks": Operation(0.5, blocks.draw, blocks.check),
    "top_k": Operation(0.4, indexer.draw_top_k, indexer.check_top_k),
}


def problem(seed: int, number: int, *, cpu: bool) -> Problem:
    """The problem of a number: the same at every run, on every machine of its kind (GPU or CPU)."""
    d = Draw(seed, number, cpu=cpu)
    operation = d.weighted({name: o.weight for name, o in OPERATIONS.items()})
    return Problem(operation, seed, number, OPERATIONS[operation].draw(d))


def check(m: Machine, of: Problem) -> list[Grade]:
    """Run a problem."""
    return OPERATIONS[of.operation].check(m, of)
