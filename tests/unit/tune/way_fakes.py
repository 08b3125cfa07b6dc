"""Runs of ``omniattn bench candidates`` on GPUs that are simulated, of operations beside attention."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from omniattn.bench.candidates import CandidateResult, WayResult
from omniattn.bench.timing import Timing
from omniattn.bench.way_cases import WayCase
from omniattn.plan.ways import asked_of
from omniattn.problems import Target
from omniattn.problems.target import Coefficients
from omniattn.tune.operations import MODELS


def other_costs(seed: int) -> dict[str, Any]:
    """Costs of a GPU on which everything costs something else than where a fit begins, by up to two thirds."""
    draw = random.Random(seed)
    return {
        op: type(start)(*(getattr(start, x.name) * math.exp(draw.uniform(-0.5, 0.5)) for x in fields(start)))
        for op, (start, _) in MODELS.items()
    }


def simulated_ways(
    cases: Sequence[WayCase], truth: dict[str, Any], shared: Coefficients, target: Target, noise: float = 0.02
) -> list[CandidateResult]:
    """Results of a run on such a GPU, on which the rules choose."""
    draw, results = random.Random(1), []
    for case in cases:
        asked = asked_of(case.problem(target), target)
        taken = asked.rule(None)
        ways = []
        for way in dict.fromkeys((taken, *asked.ways())):
            work = asked.count(way)
            us = asked.cost(work, truth.get(case.op), shared) if case.op in MODELS else 10.0
            ways.append(WayResult(way.text, Timing((us * math.exp(draw.gauss(0.0, noise)),)), 0.0, way == taken, work))
        results.append(CandidateResult(case, tuple(ways)))
    return results
