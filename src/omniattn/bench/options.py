"""``omniattn bench options``: every option beside the plain call of its shape and beside the best other library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omniattn.bench.anchors import EXACT_ERROR, INT4_ERROR, QUANTIZED_ERROR
from omniattn.bench.ceilings import measure_ceilings
from omniattn.bench.document import environment
from omniattn.bench.option_cases import PLAIN, Case, OptionShape
from omniattn.bench.option_contenders import FLEX, MATH, OTHERS, OURS, PLAIN_CALL, Other, UnfitError, ours
from omniattn.bench.option_problem import INPUT_SETS, Forward, Problem, Result
from omniattn.bench.option_report import CaseResult, Entry, OptionReport
from omniattn.bench.sustained import choose_timer
from omniattn.bench.timing import Candidate, Timer, require_torch
from omniattn.errors import OmniattnError, UnsupportedError

#: Largest relative L1 error of this package against fp64. Of others: the exact one.
_ERROR_LIMITS = {"exact": EXACT_ERROR, "int8": QUANTIZED_ERROR, "int4": INT4_ERROR}
#: Largest error of the LSE; 4-bit scores cost a few hundredths.
_LSE_LIMIT = 0.1


def run_options(
    cases: Mapping[OptionShape, Sequence[Case]],
    *,
    precision: str,
    iters: int,
    use_flex: bool = True,
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> OptionReport:
    """Time the cases of every shape, on torch's current CUDA device.

    Parameters
    ----------
    cases : mapping of OptionShape to sequence of Case
        As `option_cases.chosen` gives it.
    precision : {"exact", "int8", "int4", "fp8"}
        Of this package's calls; others compute in 16 bits.
    iters : int
        Timed rounds a case; this package, its plain call and all others run in each.
    use_flex : bool
        False: without FlexAttention, whose compilation takes seconds a case.
    command : str
        The command line, for the report.
    progress : callable, optional
        Called with one line of text before each case.

    Returns
    -------
    OptionReport
        What could not run or was wrong is in it, with the reason; this package's calls too.

    Raises
    ------
    BenchError
        torch or a CUDA device is missing.
    """
    torch = require_torch()
    others = [other for other in OTHERS if use_flex or other.key != FLEX]
    results: list[CaseResult] = []
    with choose_timer(torch, iters, None) as timer:
        progress("ceilings")
        ceilings = measure_ceilings(torch, timer)
        for shape, of_shape in cases.items():
            plain = Problem(torch, Case(PLAIN), shape)
            for case in of_shape:
                progress(f"{shape.long_name}, {case.name}")
                problem = plain if case.name == PLAIN else Problem(torch, case, shape)
                results.append(CaseResult(shape, case, _run_case(timer, problem, plain, precision, others)))
                torch.cuda.empty_cache()
    return OptionReport(
        precision=precision,
        environment=environment(torch),
        matmul_tflops=ceilings.matmul_tflops,
        copy_tb_per_s=ceilings.copy_tb_per_s,
        results=tuple(results),
        labels={other.key: other.label for other in OTHERS},
        missing={} if use_flex else {FLEX: "left out by --no-flex"},
        command=command,
    )


class _Attempt:
    """A contender on the inputs that results are checked on: its call if that was right, and what is said of it.

    Parameters
    ----------
    key : str
    build : callable
        As `Other.build`.
    problem : Problem
    limit : float
        Largest relative L1 error against fp64.
    beside : _Attempt, optional
        This package's, which all of o is compared with, by a limit of the sum of both.
    """

    def __init__(
        self, key: str, build: Callable[[Problem], Forward], problem: Problem, limit: float, beside: Any = None
    ) -> None:
        self.key = key
        self.problem = problem
        self.limit = limit
        self.forward: Forward | None = None
        self.o: Any = None
        self.facts: dict[str, Any] = {}
        self.reason = ""
        try:
            forward = build(problem)
            result = forward(problem.check)
            problem.torch.cuda.synchronize()
        except UnfitError as error:
            self.reason = str(error)
            return
        except Exception as error:
            # Other packages raise whatever they like. Where this one refuses a case its row says so, and the other rows
            # are still worth having; anything else of it is a fault and not hidden.
            if key in (OURS, PLAIN_CALL) and not isinstance(error, OmniattnError):
                raise
            self.reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            if key == OURS:
                self.facts["unsupported"] = isinstance(error, UnsupportedError)
            return
        self.reason = self._judge(result, beside)
        if not self.reason:
            self.forward, self.o = forward, result.o

    def _judge(self, result: Result, beside: Any) -> str:
        """Why the result is wrong; empty if it is right. NaN is wrong."""
        error, lse = self.problem.errors(result)
        self.facts = {"relative_l1": error, "lse_error": lse}
        if not error <= self.limit:
            return f"wrong result: relative L1 {error:.3g} against fp64, limit {self.limit}"
        if lse is not None and not lse <= _LSE_LIMIT:
            return f"wrong result: LSE off by {lse:.3g}, limit {_LSE_LIMIT}"
        if beside is not None and beside.o is not None:
            own = beside.o.float()
            difference = float((result.o.float() - own).abs().sum() / own.abs().sum())
            self.facts["difference"] = difference
            apart = self.limit + beside.limit
            if not difference <= apart:
                # One of the two is wrong in rows that are not sampled.
                return f"wrong result: relative L1 {difference:.3g} from omniattn, limit {apart:.3g}"
        return ""


def _run_case(
    timer: Timer, problem: Problem, plain: Problem, precision: str, others: Sequence[Other]
) -> tuple[Entry, ...]:
    build, limit = functools.partial(ours, precision=precision), _ERROR_LIMITS[precision]
    own = _Attempt(OURS, build, problem, limit)
    attempts = [own]
    if problem is not plain:
        attempts.append(_Attempt(PLAIN_CALL, build, plain, limit))
    found = False
    for other in others:
        if other.key == MATH and found:
            continue
        attempt = _Attempt(other.key, other.build, problem, EXACT_ERROR, own)
        # Nothing compares with it, and a result takes as much memory as q.
        attempt.o = None
        found = found or attempt.forward is not None
        attempts.append(attempt)
    candidates = {a.key: _candidate(a.forward, a.problem) for a in attempts if a.forward is not None}
    # One round for each input set at least: what a contender does once for a set must not be in a timed round.
    timings = timer(candidates, warmup=max(2, INPUT_SETS))
    return tuple(Entry(a.key, timings.get(a.key), reason=a.reason, **a.facts) for a in attempts)


def _candidate(forward: Forward, problem: Problem) -> Candidate:
    return lambda number: forward(problem.sets[number % len(problem.sets)])
