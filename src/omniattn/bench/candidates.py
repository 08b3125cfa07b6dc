"""``omniattn bench candidates``: every way of running a call, checked and timed, beside the one that is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omniattn.bench import ways
from omniattn.bench.attempt import ERROR_LIMITS, Attempt, candidate
from omniattn.bench.document import document, environment
from omniattn.bench.option_problem import Result
from omniattn.bench.report import geometric_mean
from omniattn.bench.shape_cases import ShapeCase
from omniattn.bench.shape_contenders import OwnCall, Tensors, own_call, tensors_of
from omniattn.bench.timing import BenchError, Clock, Timing, TorchClock, measure, require_torch
from omniattn.errors import UnsupportedError
from omniattn.plan.ways import describe_call
from omniattn.runtime.env import forced_kernels
from omniattn.select import Candidate, candidates, choices
from omniattn.select.features import features

#: What is written between timed calls: longer than the host takes to enqueue one by Python alone, and all of L2.
_FLUSH_BYTES = 2 << 30


@dataclass(frozen=True)
class WayResult:
    """One way of running a call.

    Attributes
    ----------
    way : str
        `select.Candidate.text`.
    timing : Timing, optional
        None where the way could not run, or was wrong: ``reason`` says why.
    error : float, optional
        Relative L1 error of sampled rows against fp64.
    chosen : bool
        It is what the call takes.
    features : tuple, optional
        What it has to do, as the model of its operation counts it (`Features` of attention); None of a way in a file
        that is no candidate any more.
    reason : str
    """

    way: str
    timing: Timing | None
    error: float | None
    chosen: bool
    features: tuple[Any, ...] | None
    reason: str = ""


@dataclass(frozen=True)
class CandidateResult:
    """All ways of a call.

    Attributes
    ----------
    case : ShapeCase or way_cases.WayCase
    ways : tuple of WayResult
        Empty where this GPU has no kernel for the call: ``refused`` says why.
    refused : str
    """

    case: Any
    ways: tuple[WayResult, ...]
    refused: str = ""

    @property
    def op(self) -> str:
        """The operation: of `way_cases.OPERATIONS`."""
        return "attention" if isinstance(self.case, ShapeCase) else str(self.case.op)

    @property
    def timed(self) -> list[tuple[float, WayResult]]:
        """The ways that have a time, with it, the fastest first."""
        return sorted(((w.timing.median_us, w) for w in self.ways if w.timing is not None), key=lambda pair: pair[0])

    @property
    def regret(self) -> float | None:
        """How much longer the chosen way takes than the fastest one, as a fraction; None if it has no time."""
        timed = self.timed
        return next((us / timed[0][0] - 1 for us, way in timed if way.chosen), None)


@dataclass(frozen=True)
class CandidateReport:
    """All results of a run."""

    environment: dict[str, str]
    results: tuple[CandidateResult, ...]
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As `document.document` has it: a row a way."""
        rows = [
            {
                "operation": result.op,
                "case": result.case.long_name,
                "way": way.way,
                "us": None if way.timing is None else round(way.timing.median_us, 3),
                "spread": None if way.timing is None else round(way.timing.spread, 4),
                "relative_l1": way.error,
                "chosen": way.chosen,
                "reason": way.reason,
            }
            for result in self.results
            for way in result.ways
        ]
        return document(
            "candidates", protocol="interleaved", command=self.command, environment=self.environment, rows=rows
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: each call's chosen way beside the fastest one."""
        rows = []
        for result in self.results:
            timed = result.timed
            us, way = next(((us, w.way) for us, w in timed if w.chosen), (float("nan"), ""))
            best_us, best = (timed[0][0], timed[0][1].way) if timed else (float("nan"), "")
            regret = "" if result.regret is None else f"{100 * result.regret:.1f}"
            ways = str(len(result.ways))
            rows.append([result.case.long_name, ways, f"{us:.1f}", way, f"{best_us:.1f}", regret, best])
        return ["call", "ways", "chosen, µs", "chosen", "fastest, µs", "regret, %", "fastest"], rows

    def summary(self) -> list[str]:
        """Mean and worst regret of what is chosen, and what was wrong or could not run."""
        regrets = [(r.regret, r.case.long_name) for r in self.results if r.regret is not None]
        ways = sum(len(r.ways) for r in self.results)
        lines = [f"{len(self.results)} calls, {ways} ways"]
        if regrets:
            mean = (geometric_mean(1 + regret for regret, _ in regrets) or 1.0) - 1
            worst, name = max(regrets)
            at_most = f"{100 * worst:.0f} % at most ({name})"
            lines.append(f"chosen: {100 * mean:.1f} % slower than the fastest way in the mean, {at_most}")
        for r in self.results:
            if r.refused:
                lines.append(f"{r.case.long_name}: not measured, {r.refused}")
            elif r.regret is None:
                lines.append(f"{r.case.long_name}: what is chosen has no time")
        lines += [f"{r.case.long_name}, {w.way}: {w.reason}" for r in self.results for w in r.ways if w.reason]
        return lines


def run_candidates(
    cases: Sequence[Any],
    *,
    iters: int,
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> CandidateReport:
    """Check and time all ways of each call, on torch's current CUDA device.

    Parameters
    ----------
    cases : sequence of ShapeCase or way_cases.WayCase
    iters : int
        Timed rounds a call; all of its ways run in each.
    command : str
        The command line, for the report.
    progress : callable, optional
        Called with one line of text before each call.

    Raises
    ------
    BenchError
        torch or a CUDA device is missing; OMNIATTN_FORCE_KERNEL is set.
    """
    if forced_kernels() is not None:
        raise BenchError("OMNIATTN_FORCE_KERNEL names kernels: unset it, as all ways are measured here")
    torch = require_torch()
    clock = TorchClock(torch, _FLUSH_BYTES)
    results = []
    for case in cases:
        progress(case.long_name)
        run_one = _run_case if isinstance(case, ShapeCase) else _run_other
        try:
            results.append(run_one(torch, clock, case, iters))
        except RuntimeError as error:
            if "OutOfMemory" not in type(error).__name__:
                raise
            results.append(CandidateResult(case, (), "the GPU has too little memory"))
        torch.cuda.empty_cache()
    return CandidateReport(environment(torch), tuple(results), command)


def _run_case(torch: Any, clock: Clock, case: ShapeCase, iters: int) -> CandidateResult:
    problem = tensors_of(torch, case)
    call = own_call(problem, case)
    try:
        described = describe_call(call.function, *call.arrays(problem.check), **call.options)
    except UnsupportedError as error:
        return CandidateResult(case, (), str(error).partition(":")[0])
    chosen = choices(described.problem, described.target)[0].candidate
    # The chosen way comes first: the others are compared with it.
    found = sorted(candidates(described.problem, described.target), key=lambda way: way != chosen)
    attempts: dict[Candidate, Attempt] = {}
    first: Attempt | None = None
    for way in found:
        attempts[way] = Attempt(way.text, _build(call, way), problem, ERROR_LIMITS[case.precision], first, own=True)
        first = first or attempts[way]
    for attempt in attempts.values():
        attempt.o = None
    runs = {a.key: candidate(a.forward, a.problem) for a in attempts.values() if a.forward is not None}
    timings = measure(runs, clock, iters=iters, warmup=2)
    return CandidateResult(
        case,
        tuple(
            WayResult(
                a.key,
                timings.get(a.key),
                a.facts.get("relative_l1"),
                way == chosen,
                features(way, described.problem, described.target),
                a.reason,
            )
            for way, a in attempts.items()
        ),
    )


def _run_other(torch: Any, clock: Clock, case: ways.WayCase, iters: int) -> CandidateResult:
    found, refused = ways.run_case(torch, clock, case, iters)
    return CandidateResult(case, tuple(WayResult(*one) for one in found), refused)


def _build(call: OwnCall, way: Candidate) -> Callable[[Tensors], Callable[[Any], Result]]:
    """What makes the call in that way, for `Attempt`: planned once for each set of inputs."""

    def build(problem: Tensors) -> Callable[[Any], Result]:
        planned: dict[int, Callable[[], list[Any]]] = {}

        def forward(inputs: Any) -> Result:
            if id(inputs) not in planned:
                described = describe_call(call.function, *call.arrays(inputs), **call.options)
                planned[id(inputs)] = described.in_way(way)
            return Result(planned[id(inputs)]()[0])

        return forward

    return build
