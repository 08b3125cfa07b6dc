"""Results beside what must come out, each element with a tolerance of its own; NaN cannot pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from omniattn.testing.expected import Grade
from omniattn.testing.soak.machines import Machine, Placed

#: Outputs of fewer elements have no bound of their mean error.
_LEAST_COUNT = 1024


def grade(m: Machine, name: str, got: Any, wanted: Any, bound: Any, *, mean: float = 0.0, size: Any = None) -> Grade:
    """Compare an array of a call with float64.

    Parameters
    ----------
    got : array
        Of the library, any element type.
    wanted, bound : array
        float64 of the machine, the same shape: what must come out, and how far each element may be from it.
    mean, size : float, array
        The sum of all errors may be at most ``mean`` times the sum of ``size``.
    """
    if tuple(got.shape) != tuple(wanted.shape):
        return Grade(name, math.inf, f"shape {tuple(got.shape)}, expected {tuple(wanted.shape)}")
    if 0 in wanted.shape:
        return Grade(name, 0.0, "empty")
    found = m.f64(got)
    both = m.isfinite(found) & m.isfinite(wanted)
    alike = both | (m.isnan(found) & m.isnan(wanted)) | (found == wanted)
    error = m.where(both, abs(m.where(both, found, 0.0) - m.where(both, wanted, 0.0)), 0.0)
    ratio = m.where(error == 0, 0.0, error / m.where(error == 0, 1.0, m.maximum(bound, 1e-300)))
    ratio = m.where(m.isnan(ratio) | ~alike, math.inf, ratio)
    at = int(ratio.reshape(-1).argmax())
    worst = float(ratio.reshape(-1)[at])
    index = tuple(int(i) for i in np.unravel_index(at, tuple(wanted.shape)))
    text = (
        f"max error {float(error.max()):.3e}; worst at {index}: got {float(found.reshape(-1)[at])!r}, expected "
        f"{float(m.broadcast(wanted, wanted.shape).reshape(-1)[at])!r}, tolerance "
        f"{float(m.broadcast(bound, wanted.shape).reshape(-1)[at]):.3e}"
    )
    wrong = int((ratio > 1).sum())
    if wrong:
        text += f"; {wrong} of {math.prod(wanted.shape)} elements are outside of their tolerance"
    if mean and math.prod(wanted.shape) >= _LEAST_COUNT:
        # What counts beside the tolerances of numbers near 0 does not.
        total, allowed = float(error.sum()), mean * float(size.sum()) + 0.1 * float((bound + 0.0 * wanted).sum())
        if total > allowed:
            worst = max(worst, total / max(allowed, 1e-300))
            text += f"; mean error {total / max(float(size.sum()), 1e-300):.3f} of the values, allowed {mean}"
    return Grade(name, worst, text)


def equal(m: Machine, name: str, a: Any, b: Any, what: str) -> Grade:
    """Two arrays bit for bit."""
    same = tuple(a.shape) == tuple(b.shape) and m.same(m.bits(a), m.bits(b))
    return Grade(name, 0.0 if same else math.inf, "equal" if same else what)


def truth(name: str, good: bool, what: str) -> Grade:
    """Something that has to be so."""
    return Grade(name, 0.0 if good else math.inf, "as it should be" if good else what)


def unchanged(m: Machine, operands: dict[str, Placed], call: Callable[[], Any]) -> tuple[Any, list[Grade]]:
    """Run a call; whether it left the memory of its operands as it was."""
    before = {name: m.bits(placed.base) for name, placed in operands.items()}
    m.dirty([placed.array for placed in operands.values()])
    result = call()
    m.synchronize()
    changed = [name for name, placed in operands.items() if not m.same(before[name], m.bits(placed.base))]
    return result, [truth("operands", not changed, f"the call has written into {', '.join(changed)}")]


def repeated(m: Machine, first: tuple[Any, ...], call: Callable[[], tuple[Any, ...]], times: int) -> list[Grade]:
    """Whether a call gives the same bits again."""
    kept = [m.bits(x) for x in first]
    for _ in range(times):
        again = call()
        m.synchronize()
        different = [i for i, (a, x) in enumerate(zip(kept, again, strict=True)) if not m.same(a, m.bits(x))]
        if different:
            return [truth("repeated", False, f"result {different[0]} has other bits in a repeated call")]
    return [truth("repeated", True, "")]
