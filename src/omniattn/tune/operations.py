"""Fit what work costs in operations beside attention, and compare what that chooses with what rules do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from omniattn.bench.candidates import CandidateResult, WayResult
from omniattn.bench.timing import Timing
from omniattn.bench.way_cases import way_cases
from omniattn.plan.ways import asked_of
from omniattn.problems import Target
from omniattn.problems.costs import BackwardCosts, DecodeCosts, OperationCosts, QuantizeCosts
from omniattn.problems.target import Coefficients
from omniattn.select.backward_ways import backward_us
from omniattn.select.decode_ways import decode_us
from omniattn.select.quantize_ways import quantize_us
from omniattn.tune.fit import Measured, fit, judge

#: Parts that calls are divided into: each is judged by coefficients that were fitted to the others.
PARTS = 3
#: Calls below which nothing is fitted.
FEWEST = 12
#: By operation: where a fit begins, which is the order of magnitude on Hopper, and the cost.
MODELS: dict[str, tuple[OperationCosts, Callable[[Any, Any, Coefficients], float]]] = {
    "decode": (DecodeCosts(begin=1.0, latency=1.0, convert=1e-5, combine=0.5), decode_us),
    "backward": (
        BackwardCosts(wait=0.4, scores=2e-3, sums=1.5, order=0.3, sync_wait=0.8, sync_scores=3e-4), backward_us
    ),
    "quantize": (QuantizeCosts(item=2.0, decoded=0.9, rows=0.8, cache=3e7, group=2.0), quantize_us),
}  # fmt: skip


@dataclass(frozen=True)
class OperationFit:
    """What was found of an operation.

    Attributes
    ----------
    op : str
    costs : OperationCosts
    calls : int
        That have several ways.
    rule, model : tuple of float
        How much longer than the fastest way the rule's, and the model's, take, call by call in the same order, as
        fractions; the model's is fitted to other calls.
    names : tuple of str
        Of the calls.
    error : float
        Median of the relative error of all times.
    """

    op: str
    costs: OperationCosts
    calls: int
    rule: tuple[float, ...]
    model: tuple[float, ...]
    names: tuple[str, ...]
    error: float

    @property
    def is_better(self) -> bool:
        """Whether the model chooses better than the rule: else the rule stays."""
        return sum(self.model) < sum(self.rule)

    @property
    def text(self) -> str:
        """Mean and worst of both, in a line."""
        said = []
        for regrets in (self.rule, self.model):
            worst, name = max(zip(regrets, self.names, strict=True))
            said.append(f"{100 * sum(regrets) / len(regrets):.1f} %, {100 * worst:.0f} % ({name})")
        return f"{self.op} | {self.calls} | {said[0]} | {said[1]} | median error of a time {100 * self.error:.1f} %"


def read_rows(rows: Iterable[Mapping[str, Any]], target: Target) -> list[CandidateResult]:
    """Results of a file's rows that are of operations beside attention, with the work of each way.

    Ways that are none any more have no work; calls that are none any more are left out.
    """
    by_name = {case.long_name: case for case in way_cases()}
    of_case: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("operation", "attention") != "attention" and row["case"] in by_name:
            of_case.setdefault(row["case"], []).append(row)
    results = []
    for name, timed in of_case.items():
        case = by_name[name]
        asked = asked_of(case.problem(target), target)
        known = {way.text: way for way in asked.ways()}
        ways = [
            WayResult(
                row["way"], Timing((row["us"],)), row["relative_l1"], row["chosen"],
                asked.count(known[row["way"]]) if row["way"] in known else None,
            )
            for row in timed
            if row["us"] is not None
        ]  # fmt: skip
        results.append(CandidateResult(case, tuple(ways)))
    return results


def fit_operations(
    results: Sequence[CandidateResult], shared: Coefficients, target: Target
) -> tuple[OperationFit, ...]:
    """Coefficients of every operation that enough calls were measured of; those of attention stay as they are.

    Parameters
    ----------
    results : sequence of CandidateResult
        Of any operations.
    shared : Coefficients
        Attention's.
    target : Target
        The GPU.
    """
    found = []
    for op, (start, cost) in MODELS.items():
        calls, rule = measured_of(op, results, target)
        if len(calls) >= FEWEST:
            found.append(_fitted(op, start, partial(_of_shared, cost, shared), calls, rule))
    return tuple(found)


def measured_of(op: str, results: Sequence[CandidateResult], target: Target) -> tuple[list[Measured], list[float]]:
    """Calls of an operation of which several ways have a time, the rule's too, and how much longer that takes."""
    calls, rule = [], []
    for result in results:
        us = {way.way: us for us, way in result.timed}
        ways = [(way.features, us) for us, way in result.timed if way.features is not None]
        if result.op != op or len(ways) < 2:
            continue
        taken = asked_of(result.case.problem(target), target).rule(None).text
        if taken in us:
            fastest = min(us.values())
            name = result.case.long_name
            calls.append(Measured(name, tuple(f for f, _ in ways), tuple(t for _, t in ways), fastest))
            rule.append(us[taken] / fastest - 1.0)
    return calls, rule


def judged(of: OperationFit, results: Sequence[CandidateResult], shared: Coefficients, target: Target) -> str:
    """What another GPU's results say of costs that were not fitted to them; empty without any."""
    calls, rule = measured_of(of.op, results, target)
    if not calls:
        return ""
    quality = judge(calls, of.costs, partial(_of_shared, MODELS[of.op][1], shared))
    worst, name = quality.worst
    by_rule = f"{100 * sum(rule) / len(rule):.1f} %, {100 * max(rule):.0f} %"
    return f"{of.op} | {len(calls)} | {by_rule} | {100 * quality.mean:.1f} %, {100 * worst:.0f} % ({name}) | not fitted"


def _of_shared(
    cost: Callable[[Any, Any, Coefficients], float], shared: Coefficients, work: Any, costs: OperationCosts
) -> float:
    return cost(work, costs, shared)


def _fitted(
    op: str,
    start: Any,
    cost: Callable[[Any, Any], float],
    calls: Sequence[Measured],
    rule: Sequence[float],
) -> OperationFit:
    held_out: dict[str, float] = {}
    for part in range(PARTS):
        others = [call for i, call in enumerate(calls) if i % PARTS != part]
        held_out.update(judge(calls[part::PARTS], fit(others, start, cost=cost), cost).regrets)
    costs = fit(calls, start, cost=cost)
    names = tuple(call.name for call in calls)
    model = tuple(held_out[name] for name in names)
    return OperationFit(op, costs, len(calls), tuple(rule), model, names, judge(calls, costs, cost).error)
