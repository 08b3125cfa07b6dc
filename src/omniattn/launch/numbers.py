"""Numbers that builders share."""

from __future__ import annotations

#: CTAs of a one-dimensional grid at most.
MAX_GRID_X = 2**31 - 1


def quotient_factors(divisor: int) -> tuple[int, int]:
    """Multiplier m and shift s with n // divisor == n * m >> 31 + s for all n from 0 to 2**31 - 1; m is below 2**32.

    With s = ceil(log2(divisor)) and m = ceil(2**(31 + s) / divisor) the product is too large by less than n * 2**s, so
    by less than 2**(31 + s): not enough to reach the next multiple (Granlund and Montgomery 1994).
    """
    shift = (divisor - 1).bit_length()
    return -(-(1 << (31 + shift)) // divisor), shift
