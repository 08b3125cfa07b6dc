"""Perplexity for each precision of omniattn's attention, and how often the likeliest next token stays the same.

Runs as `python examples/smollm2/perplexity.py --precisions`. Every row has the same weights, text and sequences; only
the attention of the prompt changes. On the CPU omniattn computes a low precision as the GPU kernels define it: the same
integers, scales and 8-bit floats, in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from model import AttentionFn, Model, Precision, Predictions, omniattn_attention


@dataclass(frozen=True)
class Variant:
    """One row: what is passed as `precision=`, what is quantized minus its mean, and whether Q and K are rotated."""

    precision: Precision
    label: str
    smoothed: str
    rotated: str = ""


def variants() -> list[Variant]:
    """The rows of the table; the first is what the others are compared with."""
    import omniattn as oa

    return [
        Variant("exact", '"exact"', ""),
        Variant("int8", '"int8"', "K, V"),
        Variant(oa.Int8(smooth_q=True), "Int8(smooth_q=True)", "Q, K, V"),
        Variant(oa.Int8(hadamard=True), "Int8(hadamard=True)", "K, V", "Q, K"),
        Variant("fp8", '"fp8"', "V", "Q, K"),
        Variant(oa.Fp8(smooth_k=True), "Fp8(smooth_k=True)", "K, V", "Q, K"),
        Variant(oa.Fp8(hadamard=False), "Fp8(hadamard=False)", "V"),
        Variant("int4", '"int4"', "Q, K, V"),
        Variant(oa.Int4(hadamard=True), "Int4(hadamard=True)", "Q, K, V", "Q, K"),
        Variant(oa.Int4(smooth_q=False), "Int4(smooth_q=False)", "K, V"),
        Variant(oa.Int4(smooth_k=False, smooth_q=False), "Int4(smooth_k=False, smooth_q=False)", "V"),
    ]


@dataclass(frozen=True)
class Comparison:
    """Predictions of one row beside those of the first.

    Attributes
    ----------
    perplexity : float
        exp of the mean loss.
    difference : float
        Perplexity over that of the first row, minus 1.
    error : float
        Standard error of `difference` from the losses' differences token by token, as if tokens were independent; NaN
        for a single prediction. Most of what a text adds to the spread of perplexities is in both rows and cancels.
    agreement : float
        Share of positions at which both rows give the same token the largest score.
    """

    perplexity: float
    difference: float
    error: float
    agreement: float


def compare(base: Predictions, other: Predictions) -> Comparison:
    """Two runs over the same tokens. Positions without a largest score (NaN) agree with nothing."""
    gap = other.losses - base.losses
    ratio = float(np.exp(gap.mean()))
    spread = float(gap.std(ddof=1)) if len(gap) > 1 else float("nan")
    same = (other.best == base.best) & (base.best >= 0)
    return Comparison(
        float(np.exp(other.losses.mean())), ratio - 1, ratio * spread / len(gap) ** 0.5, float(same.mean())
    )


def predict(model: Model, attention: AttentionFn, windows: list[np.ndarray]) -> Predictions:
    """Predictions of all windows, one after the other; windows do not see each other."""
    model.attention = attention
    parts = [model.predictions(window) for window in windows]
    return Predictions(np.concatenate([p.losses for p in parts]), np.concatenate([p.best for p in parts]))


@dataclass(frozen=True)
class Row:
    """One row of a table: its first cells, what makes its attention, and its name where the device cannot run it."""

    cells: tuple[str, ...]
    make: Callable[[], AttentionFn]
    name: str


def write_rows(
    columns: tuple[str, ...],
    rows: list[Row],
    model: Model,
    windows: list[np.ndarray],
    write: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measure every row and hand the lines of a Markdown table to `write`, each as soon as it is known.

    The first row is what the others are compared with. A row that the device cannot run is named below the table with
    the reason; without the first one there is nothing to compare with, and its error passes through.

    Returns the rows with all their digits, for JSON: the first cells by their columns, and the `Comparison`.
    """
    from omniattn.errors import UnsupportedError

    write(f"| {' | '.join(columns)} | Perplexity | Difference | Same top-1 |")
    write("|---" * (len(columns) + 3) + "|")
    base: Predictions | None = None
    unavailable = []
    measured = []
    for row in rows:
        try:
            found = predict(model, row.make(), windows)
        except UnsupportedError as error:
            if base is None:
                raise
            unavailable.append(f"- {row.name} is not available: {error}")
            continue
        change = agreement = ""
        if base is None:
            base = found
            made = compare(base, found)
        else:
            made = compare(base, found)
            change = f"{100 * made.difference:+.2f} % ± {100 * made.error:.2f} %"
            agreement = f"{100 * made.agreement:.2f} %"
        measured.append(dict(zip(columns, row.cells, strict=True)) | asdict(made))
        cells = (*row.cells, f"{made.perplexity:.4f}", change, agreement)
        write("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    if unavailable:
        write("")
    for line in unavailable:
        write(line)
    return measured


def write_table(model: Model, windows: list[np.ndarray], write: Callable[[str], None]) -> list[dict[str, Any]]:
    """Write the table of all precisions, and return its rows."""
    rows = [
        Row((f"`{x.label}`", x.smoothed, x.rotated), partial(omniattn_attention, x.precision), f"`{x.label}`")
        for x in variants()
    ]
    return write_rows(("`precision=`", "Smoothed", "Rotated"), rows, model, windows, write)
