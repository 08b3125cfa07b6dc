"""What changes scores and probabilities of a call of attention or of its gradients: one way for all of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..checks.extras import check_block_size
from ..errors import ArgumentError
from ..launch.dropout import RNG
from ..launch.score_mod import PREFIX
from ..plan.engine import Call
from ..problems import OPERANDS
from ..runtime import env
from .score_mod import ScoreMod


class Extras(NamedTuple):
    """A score modification, a block mask and dropout: some of them, or none.

    Attributes
    ----------
    score_mod, block_mask, block_size
        As the caller of `attention` gave them.
    dropout : float
        The share that is dropped, as `dropout.of_call` makes it.
    rng : array, optional
        Seed and offset, as `dropout.of_call` makes them; None without dropout.
    """

    score_mod: Any = None
    block_mask: Any = None
    block_size: Any = None
    dropout: float = 0.0
    rng: Any = None

    def has_any(self) -> bool:
        """Whether there is any of them."""
        return not (self.score_mod is self.block_mask is self.block_size is None and not self.dropout)

    def check_kinds(self, function: str, q: Any, k: Any, v: Any) -> None:
        """Raise ArgumentError for a score_mod that is none, and for quantized operands, which go with none of them."""
        if self.score_mod is not None and not isinstance(self.score_mod, ScoreMod):
            raise ArgumentError("score_mod", "an omniattn.ScoreMod", type(self.score_mod).__name__, function=function)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.__class__ in OPERANDS and self.has_any():
                raise ArgumentError(
                    name, "an array that is not quantized, with score_mod, block_mask or dropout_p", type(x).__name__,
                    function=function,
                )  # fmt: skip

    def operands(self, function: str, gradients: bool) -> tuple[tuple[str, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Names of the arrays that a call has more, the arrays, and `Call.facts`, which `checks.extras` reads.

        gradients: of a backward, which needs the derivative of a score modification.
        """
        names: tuple[str, ...] = ()
        arrays: tuple[Any, ...] = ()
        size: tuple[int, int] | None = None
        texts: tuple[Any, ...] | None = None
        if self.block_mask is not None:
            names, arrays = ("block_mask",), (self.block_mask,)
            size = check_block_size(128 if self.block_size is None else self.block_size, function)
        elif self.block_size is not None:
            raise ArgumentError("block_size", "nothing, without block_mask", repr(self.block_size), function=function)
        mod = self.score_mod
        if mod is not None:
            names += tuple(PREFIX + name for name in mod.arrays)
            arrays += tuple(mod.arrays.values())
            texts = (mod.expression, mod.mask, env.get("OMNIATTN_CHECK_SCORE_MOD"), mod.reference is None)
            if gradients:
                texts += (mod.grad, mod.reference_grad is None)
        if self.dropout:
            names += (RNG,)
            arrays += (self.rng,)
        return names, arrays, (texts, size, self.dropout)

    def traced(self) -> dict[str, Any]:
        """The keywords of `frameworks.torch.tracing` that say the same."""
        parts, arrays = (None, ()) if self.score_mod is None else self.score_mod.facts
        return {
            "score_mod": parts, "arrays": arrays, "block_mask": self.block_mask, "block_size": self.block_size,
            "dropout": (self.dropout, self.rng) if self.dropout else None,
        }  # fmt: skip


def of_forward(call: Call, given: dict[str, Any]) -> Extras:
    """Those of a call of `attention` or `attention_varlen`, whose arrays are given by name."""
    if call.facts.__class__ is not tuple:  # none, or how a plan divides a GPU
        return Extras()
    _, size, p = call.facts
    return Extras(call.subject, given.get("block_mask"), size, p, given.get(RNG))
