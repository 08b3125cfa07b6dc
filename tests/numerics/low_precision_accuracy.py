"""Errors of INT8 and INT4 attention in NumPy: tables of docs/precision.md and docs/quantization.md.

``PYTHONPATH=src:. python -m tests.numerics.low_precision_accuracy`` prints them. Against double precision. Synthetic
inputs: 2048 tokens, 2 heads, d128, full; SmolLM2-135M: 320 tokens of text, d64, causal.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import omniattn as oa
from omniattn import testing
from omniattn.bench.document import reference_environment
from omniattn.problems.precision import GRANULARITIES
from omniattn.reference import low_precision
from omniattn.testing import compare
from tests.numerics.ablations import LAYERS, Inputs, layer_name, recorded, synthetic
from tests.numerics.accuracy_report import Row, row, run

#: Cosine similarity and relative L1 of SageAttention2 (8-bit, d128, s4096) on these inputs. Outliers are few, and so
#: the L1 of one draw differs by 3 %: several draws are averaged.
PUBLISHED = {"normal": (0.99928, 0.038), "outlier": (0.99931, 0.043), "channel_bias": (0.99972, 0.020)}
PUBLISHED_SOURCE = "SageAttention2's published kernel on such inputs on an H200; not measured by this command"
TOKENS = 2048
#: By product: in the sm80 grouping.
PRODUCTS: dict[str, oa.Int8] = {
    f"{name}, {pv}, {sums} sums": kind(pv=knob, pv_accumulator=sums)
    for name, kind in (("int8", oa.Int8), ("int4", oa.Int4))
    for pv, knob in (("fp16", "fp16"), ("e4m3", "fp8"))
    for sums in ("fp32", "fp16")
}
PRECISIONS: dict[str, oa.Int8] = {
    "int8": oa.Int8(),
    "int8, V as it is": oa.Int8(smooth_v=False),
    "int8, smooth Q": oa.Int8(smooth_q=True),
    "int8, fp16 PV": oa.Int8(pv="fp16"),
    "int4": oa.Int4(),
    "int4, smooth K": oa.Int4(smooth_q=False),
    "int4, none": oa.Int4(smooth_q=False, smooth_k=False),
}


#: 8-bit floats and rotations beside the integers.
ROTATED: dict[str, oa.Int8 | oa.Int4 | oa.Fp8] = {
    "fp8": oa.Fp8(),
    "fp8, not rotated": oa.Fp8(hadamard=False),
    "fp8, smooth K": oa.Fp8(smooth_k=True),
    "int8": oa.Int8(),
    "int8, rotated": oa.Int8(hadamard=True),
    "int4": oa.Int4(),
    "int4, rotated": oa.Int4(hadamard=True),
}


def accuracy(x: Inputs, precision: oa.Int8 | oa.Int4 | oa.Fp8, grouping: str = "sm90") -> tuple[float, float]:
    """Cosine similarity and relative L1 of the NumPy reference in one precision."""
    o, _ = low_precision.attention(x.q, x.k, x.v, precision=precision, grouping=grouping, **x.options)
    found = compare(o, x.exact)
    return found.cosine, found.rel_l1


@functools.cache
def narrow(kind: str) -> Inputs:
    """Two heads of d64."""
    return Inputs(*testing.make_qkv(kind, seqlen_q=TOKENS, seqlen_k=TOKENS, heads_q=2, head_dim=64))


@functools.cache
def four_heads() -> Inputs:
    """1024 tokens with channel bias: what the granularities are compared on."""
    return Inputs(*testing.make_qkv("channel_bias", seqlen_q=1024, heads_q=4, head_dim=128))


def measure() -> Iterator[Row]:
    """All rows."""
    drawn = {kind.replace("_", " "): synthetic(kind, TOKENS, TOKENS) for kind in PUBLISHED}
    model = {layer_name(index): recorded(index) for index in LAYERS}
    for label, x in {**drawn, **model}.items():
        for name, precision in PRECISIONS.items():
            yield row("precisions", label, name, *accuracy(x, precision))
    for label, x in drawn.items():
        for name, precision in PRODUCTS.items():
            yield row("products", label, name, *accuracy(x, precision, "sm80"))
    for label, x in {**drawn, "outlier, d64": narrow("outlier"), **model}.items():
        for name, knobs in ROTATED.items():
            yield row("rotated", label, name, *accuracy(x, knobs))
    for smooth_v in (False, True):
        for grouping in ("sm90", "sm80"):
            label = f"{'smoothed' if smooth_v else 'as it is'}, {grouping}"
            for name in GRANULARITIES:
                precision = oa.Int4(granularity=name, smooth_v=smooth_v)
                yield row("granularity", label, name, *accuracy(four_heads(), precision, grouping))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and show."""
    command = "python -m tests.numerics.low_precision_accuracy"
    run("low_precision_accuracy", command, reference_environment, measure, arguments)


if __name__ == "__main__":
    main()
