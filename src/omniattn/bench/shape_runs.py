"""``omniattn bench few``, ``short``, ``packed``, ``windows``: calls of other shapes beside the best other library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from omniattn.bench.anchors import EXACT_ERROR
from omniattn.bench.attempt import ERROR_LIMITS, Attempt, candidate
from omniattn.bench.ceilings import measure_ceilings
from omniattn.bench.document import environment
from omniattn.bench.option_contenders import FLEX, OURS
from omniattn.bench.option_problem import INPUT_SETS, Forward
from omniattn.bench.option_report import Entry
from omniattn.bench.shape_cases import REFERENCES, ShapeCase
from omniattn.bench.shape_contenders import (
    FA4,
    SHAPE_OTHERS,
    WAYS,
    Other,
    Tensors,
    cudnn,
    forced_way,
    ours,
    own_call,
    tensors_of,
)
from omniattn.bench.shape_report import REFERENCE, ShapeReport, ShapeResult
from omniattn.bench.sustained import choose_timer
from omniattn.bench.timing import Timer, require_torch
from omniattn.errors import OmniattnError


def run_shapes(
    bench: str,
    cases: Sequence[ShapeCase],
    *,
    iters: int,
    use_flex: bool = True,
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> ShapeReport:
    """Time cases, on torch's current CUDA device.

    Parameters
    ----------
    bench : str
        Key of `shape_cases.SHAPE_CASES`.
    cases : sequence of ShapeCase
    iters : int
        Timed rounds a case; all contenders run in each.
    use_flex : bool
        False: without FlexAttention, whose compilation takes seconds a case.
    command : str
        The command line, for the report.
    progress : callable, optional
        Called with one line of text before each case.

    Returns
    -------
    ShapeReport
        What could not run or was wrong is in it, with the reason; this package's calls too.

    Raises
    ------
    BenchError
        torch or a CUDA device is missing.
    """
    torch = require_torch()
    missing = {} if use_flex else {FLEX: "left out by --no-flex"}
    if not _has_fa4():
        missing[FA4] = "flash_attn.cute cannot be imported"
    others = [other for other in SHAPE_OTHERS if other.key not in missing]
    results: list[ShapeResult] = []
    references: dict[str, Attempt] = {}
    with choose_timer(torch, iters, None) as timer:
        progress("ceilings")
        ceilings = measure_ceilings(torch, timer)
        for case in cases:
            progress(case.long_name)
            if case.mark is not None and case.mark.reference and case.mark.reference not in references:
                references[case.mark.reference] = _reference(torch, case.mark.reference)
            results.append(_run_case(torch, timer, case, others, references))
            torch.cuda.empty_cache()
    return ShapeReport(
        bench=bench,
        environment=environment(torch, ["flash-attn-4"] if FA4 not in missing else []),
        matmul_tflops=ceilings.matmul_tflops,
        copy_tb_per_s=ceilings.copy_tb_per_s,
        results=tuple(results),
        labels={other.key: other.label for other in SHAPE_OTHERS},
        missing=missing,
        command=command,
    )


def _has_fa4() -> bool:
    try:
        import flash_attn.cute  # noqa: F401
    except ImportError:
        return False
    return True


def _reference(torch: Any, key: str) -> Attempt:
    """cuDNN on the shape that a mark is scaled by."""
    shape, _ = REFERENCES[key]
    lengths = (shape.seqlen,) * shape.batch
    case = ShapeCase(shape.head_dim, shape.heads, lengths, lengths, causal=shape.causal)
    return Attempt(REFERENCE, _of(case, cudnn), tensors_of(torch, case), EXACT_ERROR)


def _run_case(
    torch: Any, timer: Timer, case: ShapeCase, others: Sequence[Other], references: dict[str, Attempt]
) -> ShapeResult:
    problem, limit = tensors_of(torch, case), ERROR_LIMITS[case.precision]
    own = Attempt(OURS, _of(case, ours), problem, limit, own=True)
    attempts = [own]
    for way in WAYS if case.both else ():
        build = functools.partial(forced_way, case=case, way=way)
        attempts.append(Attempt(way, build, problem, limit, own))
    for other in others:
        if other.key == FLEX and not case.flex:
            continue
        attempts.append(Attempt(other.key, _of(case, other.build), problem, EXACT_ERROR, own))
    for attempt in attempts:
        # Nothing compares with it any more, and a result takes as much memory as q.
        attempt.o = None
    if case.mark is not None and case.mark.reference:
        attempts.append(references[case.mark.reference])
    candidates = {a.key: candidate(a.forward, a.problem) for a in attempts if a.forward is not None}
    # One round for each input set at least: what a contender does once for a set must not be in a timed round.
    timings = timer(candidates, warmup=max(2, INPUT_SETS))
    entries = tuple(Entry(a.key, timings.get(a.key), reason=a.reason, **a.facts) for a in attempts)
    return ShapeResult(case, entries, *_kernels(problem, case))


def _of(case: ShapeCase, build: Callable[[Tensors, ShapeCase], Forward]) -> Callable[[Tensors], Forward]:
    return lambda problem: build(problem, case)


def _kernels(problem: Tensors, case: ShapeCase) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Kernel of this package's call, all its launches, and why; empty where it refuses the call."""
    try:
        explained = own_call(problem, case).explain(problem.check)
    except OmniattnError:
        return "", (), ()
    return explained.kernel, tuple(launch.kernel for launch in explained.launches), tuple(explained.why)
