"""The forward benchmark: shapes x contenders, one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from omniattn.bench import anchors, low_precision
from omniattn.bench.ceilings import measure_ceilings
from omniattn.bench.document import environment
from omniattn.bench.power import device_id, limits
from omniattn.bench.report import Measurement, Report
from omniattn.bench.shapes import ForwardShape
from omniattn.bench.sustained import choose_timer
from omniattn.bench.timing import BenchError, Candidate, Timer, require_torch

#: Different input sets that the timed calls rotate through.
_INPUT_SETS = 2


def run_forward(
    shapes: Sequence[ForwardShape],
    *,
    anchor: str,
    iters: int,
    contenders: Sequence[str] | None = None,
    precision: str = "exact",
    sustained_s: float | None = None,
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Time the forward pass of every contender on every shape, on torch's current CUDA device.

    Parameters
    ----------
    shapes : sequence of ForwardShape
    anchor : str
        Key of the contender that ratios are relative to.
    iters : int
        Timed rounds a shape, where they are interleaved.
    contenders : sequence of str, optional
        Keys to run; default: all that are installed. omniattn and the anchor always run.
    precision : {"exact", "int8", "int4", "fp8"}
        For a low one omniattn runs three times: exact, end to end in that precision, and the kernel of that precision
        alone, on operands that were quantized before. For fp8 more often (`low_precision.contenders`).
    sustained_s : float, optional
        Not interleaved: one contender at a time, for so many seconds each (`sustained.sustain`), ceilings too.
    command : str
        The command line, for the report.
    progress : callable, optional
        Called with one line of text before each shape.

    Returns
    -------
    Report

    Raises
    ------
    BenchError
        torch or a CUDA device is missing, or the anchor is not installed.
    ArgumentError
        Seconds out of bounds.
    UnsupportedError
        The GPU has no kernel of this precision.
    """
    everything = low_precision.contenders(precision)
    torch = require_torch()
    keys = None if contenders is None else {anchor, *contenders}
    usable, missing = anchors.available(None if keys is None else sorted(keys), everything)
    if anchor in missing:
        raise BenchError(f"the anchor {anchor!r} cannot run: {missing[anchor]}")
    with choose_timer(torch, iters, sustained_s) as timer:
        progress("ceilings")
        ceilings = measure_ceilings(torch, timer)
        measurements: list[Measurement] = []
        for shape in shapes:
            progress(shape.name)
            measurements += _run_shape(torch, timer, shape, usable)
            torch.cuda.empty_cache()
    facts = environment(torch, [contender.package for contender in usable])
    if sustained_s is not None:
        facts.update(limits(device_id(torch)))
    return Report(
        anchor=anchor,
        environment=facts,
        matmul_tflops=ceilings.matmul_tflops,
        copy_tb_per_s=ceilings.copy_tb_per_s,
        measurements=tuple(measurements),
        labels={c.key: c.label for c in usable},
        missing=missing,
        precision=precision,
        own=tuple(c.key for c in usable if c.own),
        sustained_s=sustained_s,
        command=command,
    )


def _run_shape(torch: Any, timer: Timer, shape: ForwardShape, usable: Sequence[anchors.Contender]) -> list[Measurement]:
    inputs = anchors.make_inputs(torch, shape, _INPUT_SETS)
    candidates: dict[str, Candidate] = {}
    errors: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for contender in usable:
        try:
            forward = contender.build(torch, shape)
            output = forward(*inputs[0].in_layout(contender.layout))
            torch.cuda.synchronize()
        except Exception as error:
            # Other packages raise whatever they like; the report carries it. Our own errors are not hidden.
            if contender.own:
                raise
            reasons[contender.key] = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            continue
        relative_l1 = anchors.sampled_error(torch, shape, inputs[0], output, contender.layout)
        errors[contender.key] = relative_l1
        limit = contender.error_limit
        if not relative_l1 <= limit:
            reasons[contender.key] = f"wrong result: relative L1 {relative_l1:.3g} against fp64, limit {limit}"
            continue
        candidates[contender.key] = _candidate(forward, [s.in_layout(contender.layout) for s in inputs])
    # One round for each input set at least: what a contender does once for a set must not be in a timed round.
    timings = timer(candidates, warmup=max(2, _INPUT_SETS))
    return [Measurement(shape, c.key, timings.get(c.key), errors.get(c.key), reasons.get(c.key, "")) for c in usable]


def _candidate(forward: anchors.Forward, sets: Sequence[tuple[Any, Any, Any]]) -> Candidate:
    return lambda round_number: forward(*sets[round_number % len(sets)])
