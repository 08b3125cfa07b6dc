"""Comparison of a result with its reference. Every figure is such that NaN, infinity or a wrong shape cannot pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omniattn.errors import DtypeError, ShapeError
from omniattn.testing.rounding import rounding_bound


@dataclass(frozen=True)
class Report:
    """How far a result is from its reference.

    Attributes
    ----------
    max_abs, mean_abs : float
        Largest and mean absolute difference. All figures are NaN when the NaN or Inf masks differ, so that
        `report.max_abs <= tolerance` is then false; else they are taken over the finite elements.
    rel_l1 : float
        sum|o - ref| / sum|ref|; 0 when both sums are 0.
    rmse : float
        Root of the mean squared difference.
    cosine : float
        Cosine similarity of the flattened arrays; 1 when both are 0.
    nan_equal, inf_equal : bool
        NaN at the same places; infinities at the same places with the same signs.
    worst_index : tuple of int or None
        Where the largest difference is, or the first place where the masks differ; None for an empty array.
    worst_values : tuple of float or None
        (o, ref) there.
    tolerance : float
        The bound that `ok` applies to `max_abs`.
    naive_max_abs : float or None
        max|naive - ref|, when a baseline was given.
    """

    max_abs: float
    mean_abs: float
    rel_l1: float
    rmse: float
    cosine: float
    nan_equal: bool
    inf_equal: bool
    worst_index: tuple[int, ...] | None
    worst_values: tuple[float, float] | None
    tolerance: float
    naive_max_abs: float | None = None

    @property
    def ok(self) -> bool:
        """True if the masks are equal and the largest difference is within the tolerance."""
        return self.nan_equal and self.inf_equal and self.max_abs <= self.tolerance

    def __str__(self) -> str:
        lines = [
            f"max abs {self.max_abs:.3e} (tolerance {self.tolerance:.3e}), mean abs {self.mean_abs:.3e}, "
            f"rmse {self.rmse:.3e}, rel L1 {self.rel_l1:.3e}, cosine {self.cosine:.8f}"
        ]
        if self.naive_max_abs is not None:
            lines.append(f"same-dtype baseline: max abs {self.naive_max_abs:.3e}")
        if not self.nan_equal:
            lines.append("NaN at different places")
        if not self.inf_equal:
            lines.append("infinities at different places or with different signs")
        if self.worst_index is not None and self.worst_values is not None:
            got, wanted = self.worst_values
            lines.append(f"worst at {self.worst_index}: got {got!r}, reference {wanted!r}")
        return "; ".join(lines)


def compare(
    o: npt.ArrayLike,
    ref: npt.ArrayLike,
    *,
    naive: npt.ArrayLike | None = None,
    atol: float = 0.0,
    dtype: str | None = None,
) -> Report:
    """Measure a result against its reference.

    Parameters
    ----------
    o : array_like, floating
        The result. bfloat16 has to come as float32.
    ref : array_like, floating
        The reference, same shape; float64 or float32.
    naive : array_like, optional
        The same operation as a plain framework computes it (`same_dtype_naive`); widens the tolerance by
        2 max|naive - ref|.
    atol : float
        Absolute part of the tolerance.
    dtype : {"float16", "bfloat16", "float32"}, optional
        Type in which `o` was stored: adds the largest rounding error of `ref` in it.

    Returns
    -------
    Report
        With tolerance = atol + 2 max|naive - ref| + rounding. `Report.ok` says whether `o` is within it.

    Raises
    ------
    omniattn.errors.ShapeError
        The shapes differ. Nothing is broadcast.
    omniattn.errors.DtypeError
        An array is not floating.
    """
    got, wanted = _floats(o, "o"), _floats(ref, "ref")
    if got.shape != wanted.shape:
        raise ShapeError("o", f"shape {wanted.shape} as ref", f"shape {got.shape}", function="compare")
    tolerance = float(atol)
    naive_max: float | None = None
    if naive is not None:
        baseline = _floats(naive, "naive")
        if baseline.shape != wanted.shape:
            raise ShapeError("naive", f"shape {wanted.shape} as ref", f"shape {baseline.shape}", function="compare")
        both = np.isfinite(baseline) & np.isfinite(wanted)
        naive_max = float(np.max(np.abs(_difference(baseline, wanted)), where=both, initial=0.0))
        tolerance += 2.0 * naive_max
    if dtype is not None:
        tolerance += rounding_bound(wanted, dtype)

    nan_differs = np.isnan(got) != np.isnan(wanted)
    inf_differs = (np.isposinf(got) != np.isposinf(wanted)) | (np.isneginf(got) != np.isneginf(wanted))
    masks_differ = nan_differs | inf_differs
    nan_equal, inf_equal = not nan_differs.any(), not inf_differs.any()
    finite = np.isfinite(got) & np.isfinite(wanted)
    error = np.where(finite, np.abs(_difference(got, wanted)), 0.0)

    index: tuple[int, ...] | None = None
    values: tuple[float, float] | None = None
    if got.size:
        flat = int(np.argmax(error if nan_equal and inf_equal else masks_differ))
        index = tuple(int(i) for i in np.unravel_index(flat, got.shape))
        values = (float(got[index]), float(wanted[index]))
    if not (nan_equal and inf_equal):
        nan = math.nan
        return Report(nan, nan, nan, nan, nan, nan_equal, inf_equal, index, values, tolerance, naive_max)

    count = int(finite.sum())
    reference_sum = float(np.sum(np.abs(wanted), where=finite))
    error_sum = float(error.sum())
    if error_sum == 0:
        rel_l1 = 0.0
    else:
        rel_l1 = error_sum / reference_sum if reference_sum > 0 else math.inf
    return Report(
        max_abs=float(error.max(initial=0.0)),
        mean_abs=error_sum / count if count else 0.0,
        rel_l1=rel_l1,
        rmse=math.sqrt(float(np.square(error).sum()) / count) if count else 0.0,
        cosine=_cosine(np.where(finite, got, 0.0), np.where(finite, wanted, 0.0)),
        nan_equal=nan_equal,
        inf_equal=inf_equal,
        worst_index=index,
        worst_values=values,
        tolerance=tolerance,
        naive_max_abs=naive_max,
    )


def assert_close(
    o: npt.ArrayLike,
    ref: npt.ArrayLike,
    *,
    naive: npt.ArrayLike | None = None,
    atol: float = 0.0,
    dtype: str | None = None,
    label: str = "",
) -> Report:
    """Raise AssertionError unless `compare` says that `o` is within the tolerance.

    Parameters
    ----------
    o, ref, naive, atol, dtype
        As in `compare`.
    label : str
        Put in front of the message.

    Returns
    -------
    Report
        The figures, when they pass.

    Raises
    ------
    AssertionError
        A difference above the tolerance, or NaN or infinity at different places; the text holds the whole report.
    """
    report = compare(o, ref, naive=naive, atol=atol, dtype=dtype)
    # An assert statement would vanish under python -O.
    if not report.ok:
        raise AssertionError(f"{label}: {report}" if label else str(report))
    return report


def _floats(value: npt.ArrayLike, argument: str) -> npt.NDArray[np.float64]:
    array = np.asarray(value)
    if array.dtype.kind != "f":
        raise DtypeError(argument, "a floating-point array", f"dtype {array.dtype}", function="compare")
    return array.astype(np.float64)


def _difference(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # inf - inf, left out by the callers
        return np.asarray(a - b)


def _cosine(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    # Scaling first keeps the squares in range; the cosine does not see it.
    scale_a, scale_b = float(np.abs(a).max(initial=0.0)), float(np.abs(b).max(initial=0.0))
    if scale_a == 0 or scale_b == 0:
        return 1.0 if scale_a == scale_b else 0.0
    a, b = (a / scale_a).ravel(), (b / scale_b).ravel()
    return float(a @ b / math.sqrt(float(a @ a) * float(b @ b)))
