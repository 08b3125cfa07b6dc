"""Random facts of a problem: everything is drawn by its seed and number, without a look at the machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

from omniattn.testing.soak.views import View

T = TypeVar("T")

#: Lengths at which tiles of 16 to 512 rows begin and end, and very short ones.
_EDGES = tuple(
    sorted(
        {0, 1, 2, 3, 5, 7, *(n + d for n in (8, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048) for d in (-1, 0, 1))}
    )
)
#: Kinds of numbers: `omniattn.testing.inputs`.
KINDS = ("normal", "outlier", "channel_bias", "mean_shift", "zero_channel")


class Draw:
    """Choices of one problem.

    Parameters
    ----------
    seed, number : int
    cpu : bool
        Small problems, and the element types that only the CPU has.
    """

    def __init__(self, seed: int, number: int, *, cpu: bool) -> None:
        self.cpu = cpu
        self._rng = random.Random(f"omniattn soak, seed {seed}, problem {number}")

    def chance(self, p: float) -> bool:
        """True with this probability."""
        return self._rng.random() < p

    def pick(self, choices: Sequence[T]) -> T:
        """One of them."""
        return choices[self._rng.randrange(len(choices))]

    def weighted(self, choices: dict[T, float]) -> T:
        """One of them, by its weight."""
        return self._rng.choices(list(choices), list(choices.values()))[0]

    def integer(self, least: int, most: int) -> int:
        """From least to most."""
        return self._rng.randint(least, most)

    def uniform(self, least: float, most: float) -> float:
        """Between them, with few digits."""
        return float(f"{self._rng.uniform(least, most):.4g}")

    def length(self, most: int | None = None) -> int:
        """Rows of a sequence: half of the time at the edge of a tile, else of any order of magnitude."""
        most = (270 if self.cpu else 2100) if most is None else most
        if self.chance(0.5):
            return self.pick([n for n in _EDGES if n <= most])
        return min(most, int(2 ** self._rng.uniform(0, (most + 1).bit_length())))

    def lengths(self) -> tuple[int, int]:
        """Queries and keys of a batch: alike, few queries on many keys, or anything."""
        kind = self.weighted({"same": 3.0, "few": 2.0, "any": 3.0})
        if kind == "same":
            n = self.length()
            return n, n
        if kind == "few":
            long = 2000 if self.cpu else self.pick((2000, 8000, 33000))
            return self.integer(1, 17), self.length(long)
        return self.length(), self.length()

    def heads(self) -> tuple[int, int]:
        """Query heads and kv heads."""
        kv = self.weighted({1: 3.0, 2: 3.0, 3: 1.0, 4: 1.0, 8: 0.0 if self.cpu else 1.0})
        group = self.weighted({1: 4.0, 2: 2.0, 3: 1.0, 4: 2.0, 7: 0.5, 8: 1.0})
        return kv * group, kv

    def head_dim(self) -> int:
        """A multiple of 8 from 8 to 256."""
        return self.pick((64, 128, 96, 256, 192)) if self.chance(0.5) else 8 * self.integer(1, 32)

    def wide_head_dim(self) -> int:
        """A multiple of 8 from 264 to 512: what quantized operands and caches do not have."""
        return self.pick((512, 384, 320)) if self.chance(0.5) else 8 * self.integer(33, 64)

    def fit(self, batch: int, heads: tuple[int, int], queries: int, keys: int, dim: int) -> tuple[int, tuple[int, int]]:
        """Batch and heads that leave the problem small enough."""
        scores, elements = (1 << 18, 1 << 17) if self.cpu else (1 << 27, 1 << 24)
        while batch > 1 and not self._fits(batch, heads, queries, keys, dim, scores, elements):
            batch -= 1
        while heads[1] > 1 and not self._fits(batch, heads, queries, keys, dim, scores, elements):
            heads = (heads[0] // heads[1] * (heads[1] - 1), heads[1] - 1)
        while heads[0] > 1 and not self._fits(batch, heads, queries, keys, dim, scores, elements):
            heads = (heads[0] - 1, 1)
        return batch, heads

    @staticmethod
    def _fits(
        batch: int, heads: tuple[int, int], queries: int, keys: int, dim: int, scores: int, elements: int
    ) -> bool:
        big = max(heads[0] * queries, heads[1] * keys) * batch * dim
        return batch * heads[0] * queries * keys <= scores and big <= elements

    def dtype(self) -> str:
        """Element type of q, k and v."""
        if self.cpu:
            return self.weighted({"float16": 3.0, "bfloat16": 3.0, "float32": 2.0, "float64": 1.0})
        return self.pick(("float16", "bfloat16"))

    def numbers(
        self, shape: Sequence[int], dtype: str, *, loud: bool = True, scale: float | None = None
    ) -> dict[str, Any]:
        """Recipe of an operand. loud: whether it may be much larger or smaller than 1."""
        if scale is None:
            scale = self.weighted({1.0: 6.0, 2.0**-10: 0.5, 2.0**-4: 0.5, 4.0: 0.7, 16.0: 0.5 if loud else 0.0})
        kind = self.pick(KINDS) if self.chance(0.4) else "normal"
        return {"shape": tuple(shape), "dtype": dtype, "kind": kind, "scale": scale}

    def view(self, shape: Sequence[int], unit: int, *, written: bool = False) -> View:
        """How an operand lies; ``unit``: elements that strides and the address are multiples of."""
        ndim = len(shape)
        if ndim < 2 or self.chance(0.4):
            return {}
        found: dict[str, tuple[int, ...]] = {}
        if self.chance(0.5):
            order = list(range(ndim - 1))
            self._rng.shuffle(order)
            found["order"] = (*order, ndim - 1)
        if self.chance(0.5):
            found["before"] = (*(self.integer(0, 2) for _ in range(ndim - 1)), unit * self.integer(0, 2))
            found["after"] = (*(self.integer(0, 2) for _ in range(ndim - 1)), unit * self.integer(0, 2))
        if self.chance(0.3):
            found["step"] = (*(self.pick((1, 1, 2, -1)) for _ in range(ndim - 1)), 1)
        if not written and self.chance(0.1):
            found["expand"] = (self.integer(0, ndim - 2),)
        return found
