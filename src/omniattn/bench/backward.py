"""``omniattn bench backward``: gradients alone, and forward and backward together, beside torch's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from omniattn.bench.backward_cases import BackwardShape
from omniattn.bench.backward_contenders import (
    DENSE,
    DETERMINISTIC,
    LAYOUTS,
    LIBRARIES,
    OURS,
    Calls,
    Library,
    asked,
    ours,
)
from omniattn.bench.backward_problem import INPUT_SETS, BackwardProblem
from omniattn.bench.backward_report import BACKWARD, BOTH, BackwardEntry, BackwardReport, BackwardResult
from omniattn.bench.ceilings import measure_ceilings
from omniattn.bench.document import environment
from omniattn.bench.sustained import choose_timer
from omniattn.bench.timing import Candidate, Timer, require_torch
from omniattn.errors import OmniattnError

#: Timed rounds a shape: a round of 16k tokens takes a fifth of a second.
DEFAULT_ITERS = 8
#: Largest relative L1 error of a gradient, and of 64 of its rows: 64 keys of 16384 that are lost cost 0.06 of a row.
ERROR_LIMIT, ROWS_LIMIT = 0.02, 0.05


def run_backward(
    shapes: Sequence[BackwardShape],
    *,
    iters: int,
    only: Sequence[str] = (),
    use_flex: bool = True,
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> BackwardReport:
    """Time the gradients of every shape, on torch's current CUDA device.

    Parameters
    ----------
    shapes : sequence of BackwardShape
    iters : int
        Timed rounds a shape; every contender runs in each.
    only : sequence of str
        Keys of the other libraries to run; none: all.
    use_flex : bool
        False: without FlexAttention, whose compilation takes seconds a shape.
    command : str
        The command line, for the report.
    progress : callable, optional
        Called with one line of text before each shape.

    Returns
    -------
    BackwardReport
        What could not run or was wrong is in it, with the reason; this package's calls too.

    Raises
    ------
    BenchError
        torch or a CUDA device is missing.
    """
    torch = require_torch()
    libraries, missing = asked(only, use_flex)
    results: list[BackwardResult] = []
    with choose_timer(torch, iters, None) as timer:
        progress("ceilings")
        ceilings = measure_ceilings(torch, timer)
        for shape in shapes:
            progress(shape.long_name)
            results.append(_run_shape(torch, timer, shape, libraries))
            torch.cuda.empty_cache()
    return BackwardReport(
        environment=environment(torch, [library.package for library in libraries if library.package]),
        matmul_tflops=ceilings.matmul_tflops,
        copy_tb_per_s=ceilings.copy_tb_per_s,
        results=tuple(results),
        labels={library.key: library.label for library in LIBRARIES},
        missing=missing,
        command=command,
    )


class _Attempt:
    """A contender on the first input set: its calls that were right, and what is said of all.

    Parameters
    ----------
    key, layout : str
        layout: of the memory that it is handed.
    problem : BackwardProblem
    build : callable
        Gives the calls.
    """

    def __init__(self, key: str, layout: str, problem: BackwardProblem, build: Callable[[], Calls]) -> None:
        self.key, self.layout, self.problem, self.build = key, layout, problem, build
        self.calls: dict[str, Callable[[int], Any]] = {}
        #: By what is timed: errors, and the reason why there is no time.
        self.facts: dict[str, dict[str, Any]] = {}
        calls = self._guarded(BACKWARD, build)
        if calls is None:
            return
        for what, call in ((BACKWARD, calls.backward), (BOTH, calls.both)):
            if call is not None:
                self._check(what, call, calls)

    def _guarded(self, what: str, call: Callable[[], Any]) -> Any:
        """What a call gives; None, with the reason noted, where it raises what may be raised."""
        try:
            made = call()
            self.problem.torch.cuda.synchronize()
        except Exception as error:
            # Other packages raise whatever they like. Where this one refuses a shape its row says so, and the other
            # rows are still worth having; anything else of it is a fault and not hidden.
            if self.key in (OURS, DETERMINISTIC, DENSE) and not isinstance(error, OmniattnError):
                raise
            self.facts[what] = {"reason": f"{type(error).__name__}: {error}".split("\n", 1)[0]}
        else:
            return made
        return None

    def _check(self, what: str, call: Callable[[int], Any], calls: Calls) -> None:
        """Note the errors of a call, and the call itself if they are small. NaN is wrong."""
        made = self._guarded(what, lambda: call(0))
        if made is None:
            return
        whole, rows = self.problem.errors(calls.as_inputs(made))
        self.facts[what] = {"relative_l1": whole, "rows_l1": rows}
        if not whole <= ERROR_LIMIT:
            self.facts[what]["reason"] = f"wrong result: relative L1 {whole:.3g} against fp32, limit {ERROR_LIMIT}"
        elif not rows <= ROWS_LIMIT:
            reason = f"wrong result: relative L1 of 64 rows {rows:.3g} against fp32, limit {ROWS_LIMIT}"
            self.facts[what]["reason"] = reason
        else:
            self.calls[what] = call


def _run_shape(torch: Any, timer: Timer, shape: BackwardShape, libraries: Sequence[Library]) -> BackwardResult:
    problem = BackwardProblem(torch, shape)
    attempts = [_Attempt(OURS, LAYOUTS[0], problem, lambda: ours(problem))]
    if not shape.generic:
        attempts.append(_Attempt(DETERMINISTIC, LAYOUTS[0], problem, lambda: ours(problem, deterministic=True)))
    if shape.packed:
        dense = BackwardProblem(torch, shape.dense_twin())
        attempts.append(_Attempt(DENSE, LAYOUTS[0], dense, lambda: ours(dense)._replace(both=None)))
    for library in libraries:
        attempts += [_attempt_of(library, layout, problem) for layout in library.layouts(shape)]
    candidates: dict[str, Candidate] = {
        _name(a, what): _candidate(call) for a in attempts for what, call in a.calls.items()
    }
    # One round for each input set at least: what a contender does once for a set must not be in a timed round.
    timings = timer(candidates, warmup=INPUT_SETS)
    entries = tuple(
        BackwardEntry(a.key, a.layout, what, timings.get(_name(a, what)), **facts)
        for a in attempts
        for what, facts in a.facts.items()
    )
    return BackwardResult(shape, entries)


def _attempt_of(library: Library, layout: str, problem: BackwardProblem) -> _Attempt:
    return _Attempt(library.key, layout, problem, lambda: library.build(problem, layout))


def _name(attempt: _Attempt, what: str) -> str:
    return f"{attempt.key} {attempt.layout} {what}"


def _candidate(call: Callable[[int], Any]) -> Candidate:
    return lambda number: call(number % INPUT_SETS)
