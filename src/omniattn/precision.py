"""Precisions with their knobs, for ``precision=`` where ``"int8"`` or ``"int4"`` is not precise enough a wish."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .errors import ArgumentError

#: How many rows share a scale, from many to one.
GRANULARITIES: tuple[str, ...] = ("per_tensor", "per_block", "per_warp", "per_thread", "per_token")
#: Which rows a per-thread or per-warp group has, and how many keys a tile: as the tensor cores of these GPUs want it.
GROUPINGS: tuple[str, ...] = ("sm90", "sm80")
#: Element type of P and V in the second product: what suits the GPU, e4m3, float16, or no rounding of either.
PV_TYPES: tuple[str, ...] = ("auto", "fp8", "fp16", "exact")
#: What the tensor cores sum P V in, over the keys of a tile: what suits the GPU, fp32, or fp16.
PV_ACCUMULATORS: tuple[str, ...] = ("auto", "fp32", "fp16")


def check_choice(value: Any, argument: str, choices: tuple[str, ...], function: str) -> str:
    """One of ``choices``; the error names argument, expected and received."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(argument, " or ".join(map(repr, choices)), repr(value), function=function)
    return value


def _check_bool(value: Any, argument: str, function: str) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(argument, "True or False", repr(value), function=function)


@dataclass(frozen=True)
class Int8:
    """8-bit integers for Q and K, fp8 or fp16 for P and V (SageAttention2, Zhang et al. 2024).

    Attributes
    ----------
    granularity : str
        Rows that share a scale: "per_tensor" (a head), "per_block" (128 queries, a tile of keys), "per_warp" (16 or 32
        queries), "per_thread" (2 or 4 queries, 16 or 32 keys: no slower than per_block, and between it and per_token
        in accuracy), "per_token" (CPU reference only).
    smooth_k : bool
        Quantize K minus its mean over the keys (a sample of long sequences), which no softmax sees.
    smooth_q : bool
        Quantize Q minus its mean over 128 queries; the difference is added to the scores.
    smooth_v : bool
        Quantize V minus its mean over the keys, where that is more than 1/16 of a channel's range; the mean is added to
        the output. Tensor cores that multiply 8-bit floats cut off small summands of a large sum; without the mean
        sums stay small, and more of them may be left to these cores. The mean of V's rounding errors is added back too.
    pv : str
        "fp8": P and V in e4m3; "fp16": both in float16; "exact": neither is rounded (CPU reference only). "auto": what
        is fastest on the GPU (`omniattn.explain` says which; docs/precision.md has the table), "fp8" on the CPU.
    pv_accumulator : str
        What P V is summed in over the 64 keys of a tile, before fp32: "fp16" is twice as fast as "fp32" on some GPUs.
        "auto": what is fastest on the GPU, "fp32" on the CPU.
    """

    granularity: str = "per_thread"
    smooth_k: bool = True
    smooth_q: bool = False
    smooth_v: bool = True
    pv: str = "auto"
    pv_accumulator: str = "auto"

    def __post_init__(self) -> None:
        """Raise ArgumentError for a value that no kernel knows."""
        name = type(self).__name__
        check_choice(self.granularity, "granularity", GRANULARITIES, name)
        check_choice(self.pv, "pv", PV_TYPES, name)
        check_choice(self.pv_accumulator, "pv_accumulator", PV_ACCUMULATORS, name)
        if self.pv == "exact" and self.pv_accumulator == "fp16":
            raise ArgumentError("pv_accumulator", "'fp32' with pv='exact'", "'fp16'", function=name)
        for argument in ("smooth_k", "smooth_q", "smooth_v"):
            _check_bool(getattr(self, argument), argument, name)

    @property
    def bits(self) -> int:
        """Bits of an element of Q and K."""
        return 8

    @property
    def on_cpu(self) -> Int8:
        """With a type and an accumulator in place of "auto": those of the CPU reference."""
        if "auto" not in (self.pv, self.pv_accumulator):
            return self
        accumulator = "fp32" if self.pv_accumulator == "auto" else self.pv_accumulator
        return dataclasses.replace(self, pv="fp8" if self.pv == "auto" else self.pv, pv_accumulator=accumulator)


def value_levels(pv: str, pv_accumulator: str) -> float:
    """What the largest magnitude of a channel of V becomes in e4m3: less where sums have to stay below fp16's 65504."""
    return 32.0 if (pv, pv_accumulator) == ("fp8", "fp16") else 448.0


@dataclass(frozen=True)
class Int4(Int8):
    """4-bit integers (-7 to 7) for Q and K; `Int8` says the rest. Smooths Q as well unless told otherwise."""

    smooth_q: bool = True

    @property
    def bits(self) -> int:
        """Bits of an element of Q and K."""
        return 4
