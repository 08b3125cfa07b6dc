"""How far a kernel's arithmetic may be from float64: one number for each thing that it rounds.

The constants are twice to four times what rounding to nearest gives; tensor cores truncate sums, and exponentials and
tangents of the hardware are off by some units in the last place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Half the distance of neighbouring numbers, relative.
ROUNDING = {
    "float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53, "float8_e4m3": 2.0**-4,
}  # fmt: skip
#: Absolute: half the distance of the smallest numbers, or where exponentials in fp32 become 0.
LEAST = {"float16": 2.0**-25, "bfloat16": 2.0**-110, "float32": 2.0**-110, "float64": 2.0**-960}


@dataclass(frozen=True)
class Limits:
    """Bounds of relative errors unless said otherwise.

    Attributes
    ----------
    qk : float
        Of a score, relative to the sum of |q_d k_d|.
    fp : float
        Of an operation in the arithmetic of scores.
    function : float
        Of tanh, and of a user's function.
    p : float
        Of a probability as it is multiplied.
    subnormal : float
        Of a probability, relative to the largest of its row: what 8 and 16 bits lose of small ones.
    out : float
        Of o as it is stored.
    least : float
        Absolute, of o.
    lse, lse_relative : float
        Absolute and relative, of the LSE beside what errors of scores make.
    mean : float
        Mean error of o in parts of sum w |v|; 0: not bounded.
    """

    qk: float
    fp: float
    function: float
    p: float
    subnormal: float
    out: float
    least: float
    lse: float
    lse_relative: float
    mean: float = 0.0


def exact(dtype: str, *, cpu: bool, sums: int = 1) -> Limits:
    """Of exact attention. sums: how often o is rounded on its way."""
    unit, out = ROUNDING["float64" if dtype == "float64" else "float32"], 1.01 * sums * ROUNDING[dtype]
    if cpu:
        # The LSE is stored in fp32, whatever it was computed in.
        relative = 4 * unit + ROUNDING["float32"]
        return Limits(16 * unit, 4 * unit, 8 * unit, 32 * unit, 0.0, out + 4 * unit, LEAST[dtype], 32 * unit, relative)
    least = 2 * LEAST[dtype]
    subnormal = 2 * LEAST[dtype] if dtype == "float16" else 0.0
    return Limits(16 * unit, 8 * unit, 4e-6, 2 * ROUNDING[dtype], subnormal, 2 * out, least, 3e-5, 2e-6)


#: What the kernels make of a row's largest probability at least: 28, or half of that where bases are whole steps.
_LEAST_TOP = 13.5


def low(dtype: str, qk: str, pv: str, accumulator: str, *, cpu: bool, rounds_q: bool = False) -> Limits:
    """Of attention on quantized operands, beside attention on what they stand for.

    qk: ``"int8"``, ``"int4"`` or ``"fp8"``; pv: ``"fp8"``, ``"fp16"`` or ``"exact"``; rounds_q: whether the kernel has
    made e4m3 of q itself, with other scales than the operands have.
    """
    unit = ROUNDING["float32"]
    # Sums of 8-bit floats keep 13 bits in the tensor cores; products of integers are exact.
    products = 16 * unit if cpu or qk != "fp8" else 2.0**-11
    if rounds_q:
        products += 2 * ROUNDING["float8_e4m3"]
    levels = 28.0 if accumulator == "fp16" else 448.0
    p = {"fp8": 1.3 * ROUNDING["float8_e4m3"], "fp16": 2 * ROUNDING["float16"], "exact": 32 * unit}[pv]
    # P is rounded against another base than its row's maximum, and o divided by sums of P before or after rounding.
    subnormal = {"fp8": 4 * 2.0**-10 / levels, "fp16": 2.0**-24, "exact": 0.0}[pv]
    if pv == "fp8" and not cpu:
        subnormal = max(subnormal, 2.0**-10 / _LEAST_TOP)
    if accumulator == "fp16":
        p += 8 * ROUNDING["float16"]
    p += 0.0 if cpu else 2.0**-9
    divided = 0.0 if pv != "fp8" else ROUNDING["float8_e4m3"]
    out = 2 * ROUNDING[dtype] + divided + 8 * unit
    lse = 64 * unit if cpu else 0.02
    # All of it is fp32, whatever the arrays are.
    least = max(2 * LEAST[dtype], LEAST["float32"])
    return Limits(products, 8 * unit, 8 * unit if cpu else 4e-6, p, subnormal, out, least, lse, 4e-6,
                  (0.1 if rounds_q else 0.06) if pv == "fp8" else 0.0)  # fmt: skip


def decode(
    dtype: str,
    *,
    codes: bool,
    value_codes: bool,
    recent: bool,
    cpu: bool,
    rounded: bool = False,
    merged: bool = False,
) -> Limits:
    """Of decoding.

    codes, value_codes: whether K, and V, are quantized; recent: the newest tokens are not; rounded: quantized ones are
    multiplied in 16 bits, where many queries read them; merged: results over parts of the keys, rounded, are merged by
    their LSEs, which are fp32.
    """
    found = exact(dtype, cpu=cpu, sums=3 if recent else 2)
    weights = 2 * ROUNDING[dtype] + 64 * ROUNDING["float32"] if merged else 0.0
    if merged:
        found = replace(found, lse_relative=found.lse_relative + 4 * ROUNDING["float32"])
    if cpu:
        # Codes become fp32 numbers, whatever q is.
        unit = ROUNDING["float32"] if codes or value_codes or dtype != "float64" else ROUNDING["float64"]
        least = LEAST["float64" if unit < ROUNDING["float32"] else "float32"]
        return replace(
            found, qk=16 * unit, p=32 * unit + weights, out=found.out + 4 * unit, least=max(found.least, least)
        )
    half = ROUNDING["float16"]
    # With codes, q and the products of P with scales are fp16.
    qk = 4 * half if codes else found.qk
    p = weights + (max(found.p, 4 * half) if codes or value_codes else found.p)
    if rounded:
        qk, p = qk + 2 * ROUNDING[dtype], p + 2 * ROUNDING[dtype]
    return Limits(qk, found.fp, found.function, p, 2.0**-24, found.out, found.least, 1e-4, found.lse_relative)
