"""Perplexity for each product of omniattn's low-precision kernels on mma.sync.

Runs as `python examples/smollm2/perplexity.py --products`. Q and K become 8-bit or 4-bit integers in groups of 4
queries and 16 keys (`grouping="sm80"`), whatever device the arrays are on; P and V are float16 or e4m3, and the
products of 64 keys are summed in fp32 or float16. On the CPU omniattn computes these products as the GPU kernels define
them; float16 sums take it longer, and so they come last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from array_backend import Array
from model import AttentionFn, Model, Precision, Predictions, omniattn_attention
from precisions import compare


@dataclass(frozen=True)
class ProductVariant:
    """One row: what is passed as `precision=`, and the names of Q·Kᵀ, of P·V and of what P·V is summed in."""

    precision: Precision
    qk: str
    pv: str
    sums: str


def variants() -> list[ProductVariant]:
    """The rows of the table; the first is what the others are compared with."""
    import omniattn as oa

    return [
        ProductVariant("exact", "exact", "exact", "fp32"),
        *(
            ProductVariant(kind(pv=pv, pv_accumulator=sums), qk, name, sums)
            for sums in ("fp32", "fp16")
            for qk, kind in (("int8", oa.Int8), ("int4", oa.Int4))
            for pv, name in (("fp16", "fp16"), ("fp8", "e4m3"))
        ),
    ]


def product_attention(precision: Precision) -> AttentionFn:
    """Causal self-attention of operands that are quantized in the sm80 grouping; "exact" is not quantized."""
    import omniattn as oa

    if precision == "exact":
        return omniattn_attention()
    bits = 4 if isinstance(precision, oa.Int4) else 8

    def attend(q: Array, k: Array, v: Array) -> Array:
        qk = oa.quantize_qk(
            q, k, dtype=f"int{bits}", grouping="sm80", smooth_q=precision.smooth_q, smooth_k=precision.smooth_k
        )
        values = oa.quantize_v(
            v,
            dtype="float16" if precision.pv == "fp16" else "float8_e4m3",
            smooth_v=precision.smooth_v,
            pv_accumulator=precision.pv_accumulator,
        )
        return oa.attention(qk.q, qk.k, values, causal=True, precision=precision)

    return attend


def write_table(model: Model, windows: list[np.ndarray], write: Callable[[str], None]) -> None:
    """Measure every variant and hand the lines of a Markdown table to `write`, each as soon as it is known.

    A product that the device lacks (e4m3 before compute capability 8.9) is named below the table with the reason.
    """
    from omniattn.errors import UnsupportedError

    write("| Q·Kᵀ | P·V | sums | Perplexity | Difference | Same top-1 |")
    write("|---|---|---|---|---|---|")
    base: Predictions | None = None
    unavailable = []
    for variant in variants():
        model.attention = product_attention(variant.precision)
        label = f"| {variant.qk} | {variant.pv} | {variant.sums} |"
        try:
            parts = [model.predictions(window) for window in windows]
        except UnsupportedError as error:
            if base is None:
                raise
            unavailable.append(f"- {variant.qk}, {variant.pv}, {variant.sums} sums: not available: {error}")
            continue
        found = Predictions(np.concatenate([p.losses for p in parts]), np.concatenate([p.best for p in parts]))
        if base is None:
            base = found
            write(f"{label} {compare(base, found).perplexity:.4f} | | |")
            continue
        row = compare(base, found)
        change = f"{100 * row.difference:+.2f} % ± {100 * row.error:.2f} %"
        write(f"{label} {row.perplexity:.4f} | {change} | {100 * row.agreement:.2f} % |")
    if unavailable:
        write("")
    for line in unavailable:
        write(line)
