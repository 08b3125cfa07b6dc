"""Perplexity for each precision of omniattn's attention, and how often the likeliest next token stays the same.

Runs as `python examples/smollm2/perplexity.py --precisions`. Every row has the same weights, text and sequences; only
the attention of the prompt changes. On the CPU omniattn computes a low precision as the GPU kernels define it: the same
integers, scales and 8-bit floats, in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from model import Model, Precision, Predictions, omniattn_attention


@dataclass(frozen=True)
class Variant:
    """One row: what is passed as `precision=`, and what is quantized minus its mean."""

    precision: Precision
    label: str
    smoothed: str


def variants() -> list[Variant]:
    """The rows of the table; the first is what the others are compared with."""
    import omniattn as oa

    return [
        Variant("exact", '"exact"', ""),
        Variant("int8", '"int8"', "K, V"),
        Variant(oa.Int8(smooth_q=True), "Int8(smooth_q=True)", "Q, K, V"),
        Variant("int4", '"int4"', "Q, K, V"),
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


def predict(model: Model, precision: Precision, windows: list[np.ndarray]) -> Predictions:
    """Predictions of all windows, one after the other; windows do not see each other."""
    model.attention = omniattn_attention(precision)
    parts = [model.predictions(window) for window in windows]
    return Predictions(np.concatenate([p.losses for p in parts]), np.concatenate([p.best for p in parts]))


def format_row(variant: Variant, row: Comparison, is_base: bool) -> str:
    """One line of the Markdown table."""
    label = f"`{variant.label}`"
    if is_base:
        return f"| {label} | | {row.perplexity:.4f} | | |"
    change = f"{100 * row.difference:+.2f} % ± {100 * row.error:.2f} %"
    return f"| {label} | {variant.smoothed} | {row.perplexity:.4f} | {change} | {100 * row.agreement:.2f} % |"


def write_table(model: Model, windows: list[np.ndarray], write: Callable[[str], None]) -> None:
    """Measure every variant and hand the lines of a Markdown table to `write`, each as soon as it is known.

    A variant that the device cannot run is named below the table with the reason; without the first one there is
    nothing to compare with, and its error passes through.
    """
    from omniattn.errors import UnsupportedError

    write("| `precision=` | Smoothed | Perplexity | Difference | Same top-1 |")
    write("|---|---|---|---|---|")
    base: Predictions | None = None
    unavailable = []
    for variant in variants():
        try:
            found = predict(model, variant.precision, windows)
        except UnsupportedError as error:
            if base is None:
                raise
            unavailable.append(f"- `{variant.label}` is not available: {error}")
            continue
        is_base = base is None
        base = found if base is None else base
        write(format_row(variant, compare(base, found), is_base))
    if unavailable:
        write("")
    for line in unavailable:
        write(line)
