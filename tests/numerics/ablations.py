"""The ablations of docs/precision.md in NumPy; prints its tables: ``python -m tests.numerics.ablations``.

Cosine similarity / relative L1 against double precision, in the sm80 grouping. Synthetic inputs: 512 queries, 2048
keys, 2 heads, d128, full; SmolLM2-135M: 320 tokens of text, d64, causal. Only what a table is about is quantized
coarsely: the first two have 4-bit Q and K and leave P and V alone, the others have Q and K in 8 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import omniattn as oa
from omniattn import reference, testing
from omniattn.bench.document import reference_environment
from omniattn.data import load_activations
from omniattn.problems.precision import GRANULARITIES
from omniattn.reference import ablation, low_precision
from omniattn.testing import Report, compare
from tests.numerics.accuracy_report import Row, row, run

SYNTHETIC = ("normal", "outlier", "channel_bias", "mean_shift")
LAYERS = tuple(range(4))
#: Whether K and Q lose their means and whether both are rotated.
SMOOTHINGS: dict[str, tuple[bool, bool, bool]] = {
    "none": (False, False, False),
    "Hadamard": (False, False, True),
    "K": (True, False, False),
    "Q": (False, True, False),
    "Q+K": (True, True, False),
    "Q+K, Hadamard": (True, True, True),
}
#: Type of P and V: what `low_precision.attention` takes as ``pv``, or what `Int8` does.
PRODUCTS: dict[str, str] = {"fp16": "fp16", "e4m3": "fp8", "e5m2": "e5m2", "int8": "int8"}
#: Products with more and more keys.
BY_KEYS = ("normal", "channel_bias")
LENGTHS = (512, 4096, 32768)


@dataclass(frozen=True)
class Inputs:
    """q, k, v, the options of attention, and its result in double precision."""

    q: Any
    k: Any
    v: Any
    options: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def exact(self) -> Any:
        return reference.attention(self.q, self.k, self.v, compute_dtype=np.float64, **self.options)[0]


@functools.cache
def synthetic(kind: str, seqlen_k: int = 2048, seqlen_q: int = 512, seed: int = 0) -> Inputs:
    return Inputs(*testing.make_qkv(kind, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=2, head_dim=128, seed=seed))


@functools.cache
def recorded(index: int) -> Inputs:
    x = load_activations()[index]
    return Inputs(x.q, x.k, x.v, {"causal": True})


def smoothing(x: Inputs, name: str) -> Report:
    smooth_k, smooth_q, rotated = SMOOTHINGS[name]
    q, k = ablation.rotate(x.q, x.k) if rotated else (x.q, x.k)
    precision = oa.Int4(smooth_k=smooth_k, smooth_q=smooth_q, pv="exact")
    o, _ = low_precision.attention(q, k, x.v, precision=precision, grouping="sm80", **x.options)
    return compare(o, x.exact)


def granularity(x: Inputs, name: str) -> Report:
    precision = oa.Int4(granularity=name, pv="exact")
    o, _ = low_precision.attention(x.q, x.k, x.v, precision=precision, grouping="sm80", **x.options)
    return compare(o, x.exact)


def product(x: Inputs, name: str, smooth_v: bool = False) -> Report:
    """P V in one type, and V as it is unless told otherwise: as the papers have it."""
    pv = PRODUCTS[name]
    research = pv in ablation.FORMATS
    precision = oa.Int8(smooth_v=smooth_v, pv="exact" if research else pv)
    o, _ = low_precision.attention(
        x.q, x.k, x.v, precision=precision, grouping="sm80", pv=pv if research else None, **x.options
    )
    return compare(o, x.exact)


def layer_name(index: int) -> str:
    return load_activations()[index].name


def measure() -> Iterator[Row]:
    """All rows."""
    every = {kind.replace("_", " "): synthetic(kind) for kind in SYNTHETIC}
    every |= {layer_name(index): recorded(index) for index in LAYERS}
    longer = {f"{kind.replace('_', ' ')}, {n} keys": synthetic(kind, n, 64) for kind in BY_KEYS for n in LENGTHS}
    smooth_v = functools.partial(product, smooth_v=True)
    for table, of, variants, inputs in (
        ("smoothing", smoothing, tuple(SMOOTHINGS), every),
        ("granularity", granularity, GRANULARITIES, every),
        ("products", product, tuple(PRODUCTS), every),
        ("products by keys", product, tuple(PRODUCTS), longer),
        ("products, V smoothed", smooth_v, tuple(PRODUCTS), every),
    ):
        for label, x in inputs.items():
            for name in variants:
                found = of(x, name)
                yield row(table, label, name, found.cosine, found.rel_l1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and show."""
    run("ablations", "python -m tests.numerics.ablations", reference_environment, measure, arguments)


if __name__ == "__main__":
    main()
