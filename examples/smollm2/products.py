"""Perplexity for each product of omniattn's low-precision kernels on mma.sync.

Runs as `python examples/smollm2/perplexity.py --products`. Q and K become 8-bit or 4-bit integers in groups of 4
queries and 16 keys (`grouping="sm80"`), whatever device the arrays are on; P and V are float16 or e4m3, and the
products of 64 keys are summed in fp32 or float16. On the CPU omniattn computes these products as the GPU kernels define
them; float16 sums take it longer, and so they come last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from array_backend import Array
from model import AttentionFn, Model, Precision, omniattn_attention
from precisions import Row, write_rows


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


def write_table(model: Model, windows: list[np.ndarray], write: Callable[[str], None]) -> list[dict[str, Any]]:
    """Write the table of all products, and return its rows; e4m3 needs compute capability 8.9."""
    rows = [
        Row((x.qk, x.pv, x.sums), partial(product_attention, x.precision), f"{x.qk}, {x.pv}, sums in {x.sums}")
        for x in variants()
    ]
    return write_rows(("Q·Kᵀ", "P·V", "sums"), rows, model, windows, write)
