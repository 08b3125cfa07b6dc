"""``omniattn bench options``: every option beside the plain call of its shape and beside the best other library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from omniattn.bench.anchors import EXACT_ERROR
from omniattn.bench.attempt import ERROR_LIMITS, Attempt, candidate
from omniattn.bench.ceilings import measure_ceilings
from omniattn.bench.document import environment
from omniattn.bench.option_cases import PLAIN, Case, OptionShape
from omniattn.bench.option_contenders import FLEX, MATH, OTHERS, OURS, PLAIN_CALL, Other, ours
from omniattn.bench.option_problem import INPUT_SETS, Problem
from omniattn.bench.option_report import CaseResult, Entry, OptionReport
from omniattn.bench.sustained import choose_timer
from omniattn.bench.timing import Timer, require_torch


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


def _run_case(
    timer: Timer, problem: Problem, plain: Problem, precision: str, others: Sequence[Other]
) -> tuple[Entry, ...]:
    build, limit = functools.partial(ours, precision=precision), ERROR_LIMITS[precision]
    own = Attempt(OURS, build, problem, limit, own=True)
    attempts = [own]
    if problem is not plain:
        attempts.append(Attempt(PLAIN_CALL, build, plain, limit, own=True))
    found = False
    for other in others:
        if other.key == MATH and found:
            continue
        attempt = Attempt(other.key, other.build, problem, EXACT_ERROR, own)
        # Nothing compares with it, and a result takes as much memory as q.
        attempt.o = None
        found = found or attempt.forward is not None
        attempts.append(attempt)
    candidates = {a.key: candidate(a.forward, a.problem) for a in attempts if a.forward is not None}
    # One round for each input set at least: what a contender does once for a set must not be in a timed round.
    timings = timer(candidates, warmup=max(2, INPUT_SETS))
    return tuple(Entry(a.key, timings.get(a.key), reason=a.reason, **a.facts) for a in attempts)
