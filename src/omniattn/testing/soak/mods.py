"""Score modifications that problems are drawn with: as a `ScoreMod`, and as a formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import omniattn
from omniattn.testing.soak.machines import Machine

_CAP = 20.0


@dataclass(frozen=True)
class Mod:
    """One score modification.

    Attributes
    ----------
    made : ScoreMod
    apply : callable
        (machine, s, sequence, head, queries, keys) to the new scores and their derivative.
    slope_varies : bool
        Whether the derivative is another number than 1.
    """

    made: Any
    apply: Callable[..., tuple[Any, Any]]
    slope_varies: bool = False


def _slopes(heads: int) -> Any:
    return (2.0 ** -(1.0 + np.arange(heads) % 8)).astype(np.float32)


def build(name: str, m: Machine, heads: int, queries: int, keys: int) -> Mod:
    """A score modification for arrays of a machine."""
    if name == "alibi":
        slopes = _slopes(heads)
        made = omniattn.ScoreMod(
            "score + slopes[h] * (k - q)", grad="1.0f",
            reference=lambda score, b, h, q, k, slopes: score + slopes[h] * (k - q),
            reference_grad=lambda score, b, h, q, k, slopes: np.ones_like(score),
            slopes=m.place(slopes, "float32", {}).array,
        )  # fmt: skip
        return Mod(made, lambda m, s, b, h, i, j: (s + float(slopes[h]) * (j - i), 1.0))
    if name == "tanh":
        made = omniattn.ScoreMod(
            "20.0f * tanhf(score / 20.0f)", grad="1.0f - tanhf(score / 20.0f) * tanhf(score / 20.0f)",
            reference=lambda score, b, h, q, k: _CAP * np.tanh(score / _CAP),
            reference_grad=lambda score, b, h, q, k: 1 - np.tanh(score / _CAP) ** 2,
        )  # fmt: skip

        def capped(m: Machine, s: Any, b: int, h: int, i: Any, j: Any) -> tuple[Any, Any]:
            t = m.tanh(s / _CAP)
            return _CAP * t, 1.0 - t * t

        return Mod(made, capped, slope_varies=True)
    if name == "documents":
        most = max(queries, keys, 1)
        documents = (np.arange(most) // 37).astype(np.int32)[None]
        made = omniattn.ScoreMod(
            "score", mask="doc(0, q) == doc(0, k)", grad="1.0f",
            reference=lambda s, b, h, q, k, doc: np.where(doc[0, q] == doc[0, k], s, -np.inf),
            reference_grad=lambda s, b, h, q, k, doc: np.ones_like(s),
            doc=m.place(documents, "int32", {}).array,
        )  # fmt: skip
        of = m.number(documents[0])

        def within(m: Machine, s: Any, b: int, h: int, i: Any, j: Any) -> tuple[Any, Any]:
            rows, columns = of[m.int64(i)[:, 0]][:, None], of[m.int64(j)[0]][None, :]
            return m.where(rows == columns, s, -math.inf), 1.0

        return Mod(made, within)
    raise ValueError(f"unknown score modification {name!r}")


#: Their names.
MODS = ("alibi", "tanh", "documents")
