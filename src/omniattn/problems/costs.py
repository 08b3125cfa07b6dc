"""What work costs in operations beside attention: few numbers of each, beside attention's `Coefficients`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Of ``decode``.

    Attributes
    ----------
    begin : float
        µs of a split: to fill the pipeline of a CTA, to merge its warps and to write what they have.
    latency : float
        µs from a copy's issue to its data: a CTA reads no more in that time than its stages hold.
    convert : float
        µs of an SM for an element of a quantized cache.
    combine : float
        µs of a warp of the second kernel for a partial result.
    """

    begin: float
    latency: float
    convert: float
    combine: float

    of_clock: ClassVar[tuple[str, ...]] = ("begin", "convert", "combine")


@dataclass(frozen=True, slots=True)
class BackwardCosts:
    """Of the backward of attention.

    Attributes
    ----------
    wait, scores : float
        µs of a step on wgmma: waiting, and P and dS of 64 queries with a key.
    sums : float
        Time of additions to dq in global memory, as a multiple of that of so many bytes from L2.
    order : float
        µs of a step besides, where additions have an order.
    sync_wait, sync_scores : float
        As on wgmma, on mma.sync, of 16 queries.
    """

    wait: float
    scores: float
    sums: float
    order: float
    sync_wait: float
    sync_scores: float

    of_clock: ClassVar[tuple[str, ...]] = ("wait", "scores", "order", "sync_wait", "sync_scores")


@dataclass(frozen=True, slots=True)
class QuantizeCosts:
    """Of quantizers.

    Attributes
    ----------
    item : float
        µs of a CTA for a block of rows, of 64 channels.
    decoded, rows : float
        What part of ``item`` it takes with items that are decoded ahead, and in kernels that make e4m3 of rows alone.
    cache : float
        Bytes that L2 holds between two readings of K and V.
    group : float
        µs to begin a group of heads.
    """

    item: float
    decoded: float
    rows: float
    cache: float
    group: float

    of_clock: ClassVar[tuple[str, ...]] = ("item", "group")


OperationCosts = DecodeCosts | BackwardCosts | QuantizeCosts
#: By operation, in the order of reports.
COSTS: dict[str, type[DecodeCosts] | type[BackwardCosts] | type[QuantizeCosts]] = {
    "decode": DecodeCosts, "backward": BackwardCosts, "quantize": QuantizeCosts,
}  # fmt: skip
