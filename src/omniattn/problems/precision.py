"""Precision as a value, the public classes ``Int8``, ``Int4`` and ``Fp8`` whose knobs describe one, and ``Auto``."""

from __future__ import annotations

import dataclasses
import numbers
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ArgumentError
from .sparse import Sparse, make_plain

#: What ``precision=`` may be called. Besides, ``"auto"`` is a choice among these (`Auto`).
PRECISIONS: tuple[str, ...] = ("exact", "int8", "int4", "fp8")
#: How many rows share a scale, from many to one.
GRANULARITIES: tuple[str, ...] = ("per_tensor", "per_block", "per_warp", "per_thread", "per_token")
#: Of e4m3: a head, or 128 rows.
FP8_GRANULARITIES: tuple[str, ...] = ("per_tensor", "per_block")
#: Which rows a per-thread or per-warp group has, and how many keys a tile: as the tensor cores of these GPUs want it.
GROUPINGS: tuple[str, ...] = ("sm90", "sm80")
#: Element type of P and V in the second product: what suits the GPU, e4m3, float16, or no rounding of either.
PV_TYPES: tuple[str, ...] = ("auto", "fp8", "fp16", "exact")
#: What the tensor cores sum P V in, over the keys of a tile: what suits the GPU, fp32, or fp16.
PV_ACCUMULATORS: tuple[str, ...] = ("auto", "fp32", "fp16")


def check_choice(value: object, argument: str, choices: tuple[str, ...], function: str) -> str:
    """One of ``choices``; the error names argument, expected and received."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(argument, " or ".join(map(repr, choices)), repr(value), function=function)
    return value


@dataclass(frozen=True)
class Precision:
    """What the two products of attention are computed in.

    Attributes
    ----------
    qk, pv : str
        Element types of Q K^T and of P V: ``"io"`` (that of the arrays), ``"int8"``, ``"int4"``, ``"fp8"`` (e4m3);
        ``"fp8"``, ``"fp16"``, ``"exact"`` (no rounding) or ``"auto"`` (what suits the GPU).
    pv_accumulator : str
        What P V is summed in over the keys of a tile: ``"fp32"``, ``"fp16"`` or ``"auto"``.
    granularity : str
        Rows of Q and K that share a scale: ``"none"`` (no scales, or those of the caller) or one of `GRANULARITIES`.
    smooth_q, smooth_k, smooth_v : bool
        Transforms before the quantization: means that are taken away.
    hadamard : bool
        Rotation of Q and K behind that: random signs and a Hadamard transform.
    seed : int
        Of the signs; 0 without a rotation.
    min_seqlen : int
        With fewer keys the call is an exact one.
    sparse : Sparse, optional
        Blocks that are left out.
    fast_exp : bool
        Whether all P may be made of integers with a linear mantissa, where a kernel has it.
    """

    qk: str = "io"
    pv: str = "io"
    pv_accumulator: str = "fp32"
    granularity: str = "none"
    smooth_q: bool = False
    smooth_k: bool = False
    smooth_v: bool = False
    hadamard: bool = False
    seed: int = 0
    min_seqlen: int = 0
    sparse: Sparse | None = None
    fast_exp: bool = False

    @property
    def name(self) -> str:
        """What ``precision=`` calls it."""
        return "exact" if self.qk == "io" else self.qk

    @property
    def quantized(self) -> bool:
        """Whether Q and K are multiplied as numbers of 8 bits or fewer."""
        return self.qk != "io"

    @property
    def on_cpu(self) -> Precision:
        """With a type and an accumulator in place of "auto": those of the CPU reference."""
        return dataclasses.replace(
            self,
            pv="fp8" if self.pv == "auto" else self.pv,
            pv_accumulator="fp32" if self.pv_accumulator == "auto" else self.pv_accumulator,
        )


EXACT = Precision()
#: Of arrays that come in e4m3, whose scales are the caller's.
FP8_ARRAYS = Precision("fp8", "fp8")


def _check_common(knobs: Int8 | Int4 | Fp8, name: str) -> None:
    if knobs.sparse is not None and not isinstance(knobs.sparse, Sparse):
        raise ArgumentError("sparse", "None or a Sparse", repr(knobs.sparse), function=name)
    for argument in ("smooth_k", "smooth_q", "smooth_v", "hadamard"):
        value = getattr(knobs, argument, False)
        if not isinstance(value, bool):
            raise ArgumentError(argument, "True or False", repr(value), function=name)
    for argument, most in (("seed", 2**32 - 1), ("min_seqlen", 2**31 - 1)):
        value = getattr(knobs, argument)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise ArgumentError(argument, f"an integer from 0 to {most}", repr(value), function=name)


@dataclass(frozen=True)
class _Knobs:
    """What `Int8` and `Int4` have in common."""

    qk: ClassVar[str]

    granularity: str = "per_thread"
    smooth_k: bool = True
    smooth_q: bool = False
    smooth_v: bool = True
    pv: str = "auto"
    pv_accumulator: str = "auto"
    hadamard: bool = False
    seed: int = 0
    min_seqlen: int = 0
    sparse: Sparse | None = None

    def __post_init__(self) -> None:
        """Raise ArgumentError for a value that no kernel knows."""
        make_plain(self)
        name = type(self).__name__
        check_choice(self.granularity, "granularity", GRANULARITIES, name)
        check_choice(self.pv, "pv", PV_TYPES, name)
        check_choice(self.pv_accumulator, "pv_accumulator", PV_ACCUMULATORS, name)
        if self.pv == "exact" and self.pv_accumulator == "fp16":
            raise ArgumentError("pv_accumulator", "'fp32' with pv='exact'", "'fp16'", function=name)
        _check_common(self, name)  # type: ignore[arg-type]

    @property
    def precision(self) -> Precision:
        """The precision that these knobs describe."""
        return Precision(
            self.qk, self.pv, self.pv_accumulator, self.granularity, self.smooth_q, self.smooth_k, self.smooth_v,
            self.hadamard, self.seed if self.hadamard else 0, self.min_seqlen, self.sparse,
        )  # fmt: skip


@dataclass(frozen=True)
class Int8(_Knobs):
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
    hadamard : bool
        Rotate Q and K before they are quantized: a random sign for each channel, then a Hadamard transform. It spreads
        a large channel over all of them, and leaves q . k as it is (QuaRot, Ashkboos et al. 2024).
    seed : int
        Of the signs, 0 to 2^32 - 1.
    min_seqlen : int
        With fewer keys (of packed sequences: max_seqlen_k) the call runs as ``precision="exact"``.
    sparse : Sparse, optional
        Leave out the blocks that `sparse_blocks` predicts to matter least. On compute capability 9.0 and on the CPU.
    fast_exp : bool
        Allow exponentials with a linear mantissa, up to 6 % off before P is rounded to e4m3: faster at up to 64
        channels, with an error up to 10 % of itself larger (docs/precision.md). For plain batches with up to 64
        channels on compute capability 9.0, and on the CPU; elsewhere it changes nothing, and `omniattn.explain` says
        so.
    """

    qk: ClassVar[str] = "int8"

    fast_exp: bool = False

    def __post_init__(self) -> None:
        """Raise ArgumentError for a value that no kernel knows."""
        super().__post_init__()
        if not isinstance(self.fast_exp, bool):
            raise ArgumentError("fast_exp", "True or False", repr(self.fast_exp), function="Int8")

    @property
    def precision(self) -> Precision:
        """The precision that these knobs describe."""
        return dataclasses.replace(super().precision, fast_exp=self.fast_exp)


@dataclass(frozen=True)
class Int4(_Knobs):
    """4-bit integers (-7 to 7) for Q and K; the knobs of `Int8`. Smooths Q as well unless told otherwise."""

    qk: ClassVar[str] = "int4"

    smooth_q: bool = True


@dataclass(frozen=True)
class Fp8:
    """8-bit floats (e4m3) for Q, K, P and V, a scale for each block of 128 rows (FlashAttention-3, Shah et al. 2024).

    Attributes
    ----------
    granularity : str
        Rows of Q and K that share a scale: "per_block" (128; in Hopper's kernel for batches each row of Q has its own)
        or "per_tensor" (a head; CPU reference only).
    hadamard : bool
        Rotate Q and K before they are quantized, as `Int8` has it: the incoherent processing of FlashAttention-3.
    smooth_k : bool
        Quantize K minus its mean over the keys, as `Int8` does.
    smooth_v : bool, optional
        As `Int8` has it. None: the library chooses, and takes the mean away.
    seed : int
        Of the signs, 0 to 2^32 - 1.
    min_seqlen : int
        With fewer keys (of packed sequences: max_seqlen_k) the call runs as ``precision="exact"``.
    sparse : Sparse, optional
        As `Int8` has it.
    """

    qk: ClassVar[str] = "fp8"

    granularity: str = "per_block"
    hadamard: bool = True
    smooth_k: bool = False
    smooth_v: bool | None = None
    seed: int = 0
    min_seqlen: int = 0
    sparse: Sparse | None = None

    def __post_init__(self) -> None:
        """Raise ArgumentError for a value that no kernel knows."""
        make_plain(self)
        check_choice(self.granularity, "granularity", FP8_GRANULARITIES, "Fp8")
        if self.smooth_v is not None and not isinstance(self.smooth_v, bool):
            raise ArgumentError("smooth_v", "True, False or None", repr(self.smooth_v), function="Fp8")
        _check_common(dataclasses.replace(self, smooth_v=False) if self.smooth_v is None else self, "Fp8")

    @property
    def precision(self) -> Precision:
        """The precision that these knobs describe."""
        return Precision(
            "fp8", "fp8", "auto", self.granularity, False, self.smooth_k, self.smooth_v is not False, self.hadamard,
            self.seed if self.hadamard else 0, self.min_seqlen, self.sparse,
        )  # fmt: skip


#: The classes of knobs.
KNOBS: tuple[type[Int8 | Int4 | Fp8], ...] = (Int8, Int4, Fp8)


def knobs_of(precision: Precision) -> Int8 | Int4 | Fp8:
    """What a caller writes for a quantized precision."""
    if precision.qk == "fp8":
        return Fp8(
            precision.granularity, precision.hadamard, precision.smooth_k, precision.smooth_v, precision.seed,
            precision.min_seqlen, precision.sparse,
        )  # fmt: skip
    kind: type[Int8 | Int4] = Int8 if precision.qk == "int8" else Int4
    knobs = kind(
        precision.granularity, precision.smooth_k, precision.smooth_q, precision.smooth_v, precision.pv,
        precision.pv_accumulator, precision.hadamard, precision.seed, precision.min_seqlen, precision.sparse,
    )  # fmt: skip
    return dataclasses.replace(knobs, fast_exp=precision.fast_exp) if isinstance(knobs, Int8) else knobs


#: What each name of ``precision=`` means.
NAMED: dict[str, Precision] = {
    "exact": EXACT, "int8": Int8().precision, "int4": Int4().precision, "fp8": Fp8().precision,
}  # fmt: skip


#: Mean relative L1 of each name: of its column in the table ``accuracy_rotated`` of docs/precision.md, over all inputs
#: there. tests/unit/select/test_auto.py compares with docs/performance/results/low_precision_accuracy.json, which that
#: page is made of.
MEAN_ERRORS: dict[str, float] = {"exact": 0.0, "int8": 0.0286, "fp8": 0.0479, "int4": 0.2225}


@dataclass(frozen=True)
class Auto:
    """The fastest precision whose error is small enough: ``precision=Auto(max_error=0.05)``, or ``"auto"``.

    Chosen on a GPU by the model of costs, from shapes, options and the GPU, and never from values. A low precision has
    to be predicted faster than exact attention by a margin; otherwise the call is an exact one, and so is one that has
    no kernel at 8 bits, and every call on the CPU. `omniattn.explain` says which was taken, and why.

    Attributes
    ----------
    max_error : float
        Bound of the mean relative L1 of a precision, as docs/precision.md has it for its inputs (int8 0.028, fp8 0.048,
        int4 0.22): greater than 0, finite. It is no promise for the values of a call.
    """

    max_error: float = 0.05

    def __post_init__(self) -> None:
        """Raise ArgumentError for what is no number above 0; NaN is none."""
        make_plain(self)
        value: Any = self.max_error
        known = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not known or not 0.0 < value <= sys.float_info.max:
            raise ArgumentError("max_error", "a finite number > 0", repr(value), function="Auto")
        object.__setattr__(self, "max_error", float(value))


#: What an `Auto` may choose besides exact attention: by their names, with default knobs.
CHOSEN_BY_AUTO: tuple[Precision, ...] = tuple(NAMED[name] for name in ("int8", "fp8", "int4"))


def auto_of(precision: object) -> Auto | None:
    """What chooses the precision of a call that leaves it open; None where ``precision`` says which."""
    if isinstance(precision, Auto):
        return precision
    return Auto() if isinstance(precision, str) and precision == "auto" else None


def value_levels(pv: str, pv_accumulator: str) -> float:
    """What the largest magnitude of a channel of V becomes in e4m3: less where sums have to stay below fp16's 65504."""
    return 32.0 if (pv, pv_accumulator) == ("fp8", "fp16") else 448.0
