"""What selection and builders look at of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .costs import OperationCosts


class PerCycle(NamedTuple):
    """What an SM does in a cycle.

    Attributes
    ----------
    products : int
        Operations of dense 16-bit products with fp32 sums.
    sync_products : int
        Of those by mma.sync.
    """

    products: int
    sync_products: int


#: By compute capability: the vendor's TFLOP/s over SMs and boost clock (data sheets of A100, RTX 3090, L4, H100, B200,
#: RTX PRO 6000; GeForce has half of the last). On Hopper mma.sync reaches no more than six tenths.
PER_CYCLE = {
    (8, 0): PerCycle(2048, 2048),
    (8, 6): PerCycle(512, 512),
    (8, 9): PerCycle(1024, 1024),
    (9, 0): PerCycle(4096, 2458),
    (10, 0): PerCycle(8192, 8192),
    (12, 0): PerCycle(1024, 1024),
}  # fmt: skip
#: Rows of a product: of a warp by mma.sync, of the warps of a warpgroup by wgmma. Softmax of a warp's rows takes an SM
#: as long with either: all compute 16 exponentials a cycle (CUDA programming guide, "Arithmetic Instructions").
WARP_ROWS, WARPGROUP_ROWS = 16, 64
#: Bytes of a sector of memory: tensor maps bring rows that end within one at a fraction of the rate.
SECTOR = 32


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What work costs on a GPU, in microseconds and bytes a microsecond (`select.cost`).

    Attributes
    ----------
    launch, launch_more, merge : float
        The first kernel of a call; each one behind or before it; the one that merges partial results, which begins
        while they are made.
    memory, l2 : float
        Bytes a microsecond, of all SMs.
    parts : float
        How much slower L2 is where rows end within a sector.
    partial : float
        Bytes of partial results a microsecond.
    quantize : float
        Bytes a microsecond of the kernels that quantize operands.
    uneven : float
        What the busiest CTA has more than the mean, as a fraction, where tiles of different lengths are in no list.
    apart : float
        How much longer steps take, as a fraction, for each byte of K and V that is under way at one time because heads
        are interleaved.
    walk : float
        To look at the lengths of packed sequences.
    item : float
        To begin and end a tile on wgmma.
    store : float
        Besides, for an element of o where threads write it.
    stream : float
        Besides, where CTAs begin in the middle of tiles.
    wait, chain : float
        A step on wgmma: waiting; softmax, for each key.
    product, exp, issue : float
        What a warpgroup's step keeps the SM busy: for each key and channel, for each key, at all.
    exp_8 : float
        ``exp`` on 8 bits, whose products take half.
    masks, functions : float
        How much longer softmax takes with masks alone, and where functions of scores are computed.
    bias : float
        Besides, for each key, with numbers that are added to scores.
    sync_item, sync_wait, sync_product : float
        The same on mma.sync, for 16 rows of a warp; softmax, which products overlap with, is that of wgmma.
    rows : mapping of str to float
        Of few kernels, by their names without a dtype: how much longer their calls take than the rest says.
    """

    launch: float
    launch_more: float
    merge: float
    memory: float
    l2: float
    parts: float
    partial: float
    quantize: float
    uneven: float
    apart: float
    walk: float
    item: float
    store: float
    stream: float
    wait: float
    chain: float
    product: float
    exp: float
    issue: float
    exp_8: float
    masks: float
    functions: float
    bias: float
    sync_item: float
    sync_wait: float
    sync_product: float
    rows: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Tuning:
    """Coefficients from a file of ``omniattn tune``.

    Attributes
    ----------
    coefficients : Coefficients
    device : str
        The GPU that they were measured on.
    digest : str
        Of the file.
    operations : tuple of (str, OperationCosts)
        Of operations beside attention, those that were measured.
    """

    coefficients: Coefficients
    device: str
    digest: str
    operations: tuple[tuple[str, OperationCosts], ...] = ()


@dataclass(frozen=True)
class Target:
    """Facts of a GPU.

    Attributes
    ----------
    cc : (major, minor)
        Compute capability.
    max_smem : int
        Bytes of shared memory that one CTA can opt in to.
    sm_count : int
        Streaming multiprocessors.
    tuning : Tuning, optional
        What was measured on the GPU by its user.
    clock_mhz, memory_gb_s : float
        Clock, and bandwidth of memory, as the driver says them; 0: unknown, those of the GPU that was measured.
    is_shared : bool
        A kernel of another stream has further SMs for a part of the call's time: lists are handed out by the GPU.
    """

    cc: tuple[int, int]
    max_smem: int
    sm_count: int = 1
    tuning: Tuning | None = None
    clock_mhz: float = 0.0
    memory_gb_s: float = 0.0
    is_shared: bool = False
