"""A problem as data: what a program can hold, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import omniattn
from omniattn.testing.inputs import GENERATORS
from omniattn.testing.soak.machines import Machine, Placed
from omniattn.testing.soak.views import stored

#: What keys are hidden by in masks of these kinds.
_HIDING = ("bool", "bool_rows", "bool_keys", "additive_hiding", "additive_keys")
_KNOBS = {"Int8": omniattn.Int8, "Int4": omniattn.Int4, "Fp8": omniattn.Fp8}


@dataclass(frozen=True)
class Problem:
    """One call, or a few that belong together.

    Attributes
    ----------
    operation : str
        A key of `omniattn.testing.soak.operations.OPERATIONS`.
    seed, number : int
        What its numbers are made of.
    facts : dict
        Literals. ``"arrays"``: recipes by argument, of shape, dtype, kind, scale, view or values; ``"options"``: other
        arguments; the rest belongs to the operation.
    """

    operation: str
    seed: int
    number: int
    facts: dict[str, Any]

    @property
    def dtype(self) -> str:
        """Element type of the operands."""
        return str(self.facts["dtype"])

    @property
    def precision(self) -> str:
        """What reports count it under."""
        return str(self.facts.get("counted", "exact"))

    def numbers(self, name: str, recipe: dict[str, Any]) -> npt.NDArray[Any]:
        """Values of an array; of one that is expanded, those that it has."""
        if "values" in recipe:
            return np.array(recipe["values"]).reshape(recipe["shape"])
        shape = stored(recipe["shape"], recipe.get("view", {}))
        seed = (self.seed * 1_000_003 + self.number) * 1009 + sum(i * ord(c) for i, c in enumerate(name, 1))
        kind = recipe["kind"]
        if kind in GENERATORS:
            made: npt.NDArray[Any] = GENERATORS[kind](shape, seed, "float32") * np.float32(recipe.get("scale", 1.0))
            return made
        rng = np.random.default_rng(seed)
        if kind.startswith("additive"):
            made = rng.standard_normal(shape).astype(np.float32) * np.float32(recipe.get("scale", 1.0))
            if kind == "additive_lowest":
                lowest = -65504.0 if recipe["dtype"] == "float16" else -3.3895e38
                made = np.where(rng.random(shape) < 0.5, made, np.float32(lowest))
                if made.ndim > 1:  # rows that have nothing else
                    made[..., : made.shape[-2] // 2, :] = lowest
            return np.where(_hidden(kind, rng, shape), np.float32(-np.inf), made)
        if kind.startswith("bool"):
            return ~_hidden(kind, rng, shape)
        if kind == "uniform":
            return rng.uniform(0.25, 4.0, shape).astype(np.float32)
        if kind == "angles":
            return rng.uniform(-1.0, 1.0, shape).astype(np.float32)
        raise ValueError(f"unknown kind of numbers {kind!r}")

    def place(self, m: Machine, name: str, recipe: dict[str, Any] | None = None) -> Placed:
        """An array of the problem."""
        recipe = self.facts["arrays"][name] if recipe is None else recipe
        dtype = self.dtype if recipe["dtype"] == "io" else recipe["dtype"]
        return m.place(self.numbers(name, recipe), dtype, recipe.get("view", {}), recipe["shape"])

    def options(self) -> dict[str, Any]:
        """Keyword arguments that are no arrays."""
        found = dict(self.facts["options"])
        if isinstance(found.get("precision"), tuple):
            name, knobs = found["precision"]
            found["precision"] = _KNOBS[name](**knobs)
        return found


def _hidden(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Elements of a mask that hide; rows that see nothing are among them."""
    if kind not in _HIDING:
        return np.zeros(shape, dtype=bool)
    hidden = rng.random(shape) < 0.4
    if kind in ("bool_keys", "additive_keys") and shape:
        # A prefix is visible, as padding masks have it: of some rows nothing.
        ends = rng.integers(0, shape[-1] + 1, size=(*shape[:-1], 1))
        return np.arange(shape[-1]) >= ends
    if kind == "bool_rows" and len(shape) > 1:
        hidden |= rng.random((*shape[:-1], 1)) < 0.3
    return hidden


def draw_mask(draw: Any, full: tuple[int, int, int, int], dtype: str) -> dict[str, Any]:
    """Recipe of a mask that broadcasts to ``full``."""
    kind = draw.weighted(
        {"bool": 2.0, "bool_rows": 1.0, "bool_keys": 2.0, "additive": 2.0, "additive_hiding": 2.0, "additive_keys": 1.5,
         "additive_lowest": 0.3}
    )  # fmt: skip
    shape = tuple(n if draw.chance(p) else 1 for n, p in zip(full, (0.5, 0.5, 0.7, 0.85), strict=True))
    if kind.endswith("keys"):
        shape = (*shape[:2], 1 if draw.chance(0.7) else shape[2], full[3])
    while len(shape) > 0 and shape[0] == 1 and draw.chance(0.3):
        shape = shape[1:]
    recipe: dict[str, Any] = {"shape": shape, "kind": kind, "view": draw.view(shape, 1)}
    if kind.startswith("bool"):
        return {**recipe, "dtype": "bool"}
    scale = draw.weighted({1.0: 4.0, 0.01: 1.0, 30.0: 1.0})
    return {**recipe, "dtype": draw.pick(("float32", "io")), "scale": scale}


def mask_f64(m: Machine, mask: Any) -> Any:
    """A mask to be added, in float64 and with four dimensions."""
    added = m.where(mask, 0.0, -float("inf")) if m.dtype_name(mask) == "bool" else m.f64(mask)
    return added[(None,) * (4 - len(added.shape))]
