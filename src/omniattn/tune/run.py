"""Measure the ways of running attention on this GPU, and fit what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from omniattn.bench.candidates import CandidateReport, CandidateResult, run_candidates
from omniattn.bench.shape_cases import ShapeCase
from omniattn.bench.timing import BenchError
from omniattn.plan.tuning import FORMAT, target_of
from omniattn.problems.target import Coefficients
from omniattn.runtime.device import DeviceInfo
from omniattn.select.model import NAMES, Rates, expected
from omniattn.tune.fit import Measured, Quality, fit, fit_rows, judge
from omniattn.tune.operations import FEWEST, PARTS, OperationFit, fit_operations
from omniattn.version import __version__

#: One call in so many is measured with ``--quick``.
QUICK = 5


def class_of(case: ShapeCase) -> str:
    """The class of calls that a gain is reported for."""
    if case.precision != "exact":
        return "8 bits"
    if case.packed:
        return "packed sequences"
    if case.mask or case.softcap:
        return "masks and softcap"
    if case.window is not None:
        return "windows"
    queries, keys = case.lengths_q[0], case.lengths_k[0]
    if keys >= 16 * queries:
        return "few queries"
    return "short sequences" if max(queries, keys) <= 640 else "long sequences"


@dataclass(frozen=True)
class Gain:
    """How much longer than the fastest way the chosen ones take in a class of calls, before and with the file.

    Attributes
    ----------
    calls : int
    before, after : float
        Means, as fractions; after: by coefficients that were fitted to other calls.
    worst_before, worst_after : float
    """

    calls: int
    before: float
    after: float
    worst_before: float
    worst_after: float


@dataclass(frozen=True)
class TuneResult:
    """What was measured, and what it gains.

    Attributes
    ----------
    report : CandidateReport
    coefficients : Coefficients
    gains : dict of str to Gain
        By class, and ``"all"``.
    error : float
        Median of the relative error of all times.
    operations : tuple of OperationFit
        Of operations beside attention that were measured.
    """

    report: CandidateReport
    coefficients: Coefficients
    gains: dict[str, Gain]
    error: float
    operations: tuple[OperationFit, ...] = ()

    @property
    def gains_of_all(self) -> dict[str, Gain]:
        """`gains`, and those of other operations beside what rules choose, which stay where no model is better."""
        after = {of.op: of.model if of.is_better else of.rule for of in self.operations}
        return self.gains | {
            of.op: Gain(of.calls, fmean(of.rule), fmean(after[of.op]), max(of.rule), max(after[of.op]))
            for of in self.operations
        }

    def to_dict(self, device: DeviceInfo) -> dict[str, Any]:
        """What the file holds."""
        return {
            "format": FORMAT,
            "omniattn": __version__,
            "device": device.name,
            "cc": list(device.cc),
            "sm_count": device.sm_count,
            "date": self.report.environment.get("date", ""),
            "calls": len(self.report.results),
            "error": round(self.error, 4),
            "gains": [{"class": name, **asdict(gain)} for name, gain in self.gains_of_all.items()],
            "coefficients": {name: getattr(self.coefficients, name) for name in NAMES},
            "rows": dict(self.coefficients.rows),
            "operations": {of.op: asdict(of.costs) for of in self.operations if of.is_better},
        }


def tune(
    cases: Sequence[Any],
    device: DeviceInfo,
    *,
    iters: int,
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> TuneResult:
    """Measure all ways of each call on torch's current CUDA device, and fit the coefficients of their costs.

    Parameters
    ----------
    cases : sequence of ShapeCase or way_cases.WayCase
        A dozen of attention at least.
    device : DeviceInfo
        The GPU.
    iters : int
        Timed rounds a call.
    command : str
        The command line, for the report.
    progress : callable, optional
        Called with one line of text before each call.

    Raises
    ------
    BenchError
        torch or a CUDA device is missing; too few calls have a time.
    """
    report = run_candidates(cases, iters=iters, command=command, progress=progress)
    progress("fitting")
    usable = with_a_choice([result for result in report.results if result.op == "attention"])
    start = expected(Rates(device.cc, device.sm_count, device.clock_mhz, device.memory_gb_s))
    found = fitted(report, usable, start)
    operations = fit_operations(report.results, found.coefficients, target_of(device))
    return replace(found, operations=operations)


def fitted(report: CandidateReport, results: Sequence[CandidateResult], start: Coefficients) -> TuneResult:
    """The coefficients that explain results, and how good the choices are that they make.

    Raises
    ------
    BenchError
        They are too few.
    """
    if len(results) < FEWEST:
        raise BenchError(f"{len(results)} calls have times of several ways, and a fit needs {FEWEST}")
    calls = [measured(result) for result in results]
    start = replace(start, rows={})  # factors of kernels are found behind the rest, and anew
    after: dict[str, float] = {}
    for part in range(PARTS):
        others = [call for i, call in enumerate(calls) if i % PARTS != part]
        after.update(judge(calls[part::PARTS], fit_rows(others, fit(others, start))).regrets)
    found = fit_rows(calls, fit(calls, start))
    return TuneResult(report, found, _gains(results, after), judge(calls, found).error)


def with_a_choice(results: Sequence[CandidateResult]) -> list[CandidateResult]:
    """Calls of which several ways have a time and are candidates: others say nothing about choosing."""
    return [result for result in results if result.regret is not None and len(measured(result).ways) > 1]


def measured(result: CandidateResult) -> Measured:
    """The ways of a call that have a time."""
    ways = [(way.features, us) for us, way in result.timed if way.features is not None]
    return Measured(result.case.long_name, tuple(f for f, _ in ways), tuple(us for _, us in ways), result.timed[0][0])


def _gains(results: Sequence[CandidateResult], after: dict[str, float]) -> dict[str, Gain]:
    by_class: dict[str, list[tuple[float, float]]] = {"all": []}
    for result in results:
        pair = (result.regret or 0.0, after[result.case.long_name])
        for name in (class_of(result.case), "all"):
            by_class.setdefault(name, []).append(pair)
    return {
        name: Gain(
            len(pairs), sum(b for b, _ in pairs) / len(pairs), sum(a for _, a in pairs) / len(pairs),
            max(b for b, _ in pairs), max(a for _, a in pairs),
        )
        for name, pairs in sorted(by_class.items(), key=lambda item: (item[0] == "all", item[0]))
        if pairs
    }  # fmt: skip


__all__ = [
    "FEWEST",
    "QUICK",
    "Gain",
    "Quality",
    "TuneResult",
    "class_of",
    "fitted",
    "measured",
    "tune",
    "with_a_choice",
]
