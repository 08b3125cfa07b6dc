"""Arithmetic that the host does ahead for the kernels."""

from __future__ import annotations

import pytest

from omniattn.launch.numbers import quotient_factors


@pytest.mark.parametrize("divisor", [*range(1, 70), 132, 264, 396, 1000, 8191, 8192, 46340, 2**30 + 1, 2**31 - 1])
def test_quotients_by_a_product(divisor: int) -> None:
    multiplier, shift = quotient_factors(divisor)
    assert 0 <= multiplier < 2**32
    near = [0, 1, divisor - 1, divisor, 7 * divisor - 1, 7 * divisor, 2**31 - 1]
    last = (2**31 - 1) // divisor * divisor
    for n in (n for n in (*near, last - 1, last) if 0 <= n < 2**31):
        assert (2 * n * multiplier >> 32) >> shift == n // divisor, n  # as the kernels compute it
