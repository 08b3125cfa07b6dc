"""Fit the coefficients of costs to a result of ``omniattn bench candidates``, without a GPU.

``python -m build_tools.fit_selection FILE [--other FILE] [--write]``: says how much longer than the fastest way the
chosen ones take, by what the run chose and by the model, fitted to two thirds of the calls and judged on the others;
``--other``: the result of another GPU, on which the coefficients that follow from its rates are judged, unfitted.
Of operations beside attention that the file has enough calls of, their own coefficients are fitted besides, and what
they choose is compared with what rules do; a file without attention leaves its coefficients as they are.
``--write``: the coefficients go to ``src/omniattn/select/coefficients``, those of an operation where they choose better
than its rule, held out; rules no longer choose in an operation that has some there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omniattn.bench.candidate_cases import candidate_cases
from omniattn.bench.candidates import CandidateReport, CandidateResult, WayResult
from omniattn.bench.document import write
from omniattn.bench.shape_plan import problem_of
from omniattn.bench.timing import Timing
from omniattn.problems import Target
from omniattn.problems.target import Coefficients
from omniattn.select import candidates
from omniattn.select.cost import cost_us
from omniattn.select.features import Kept, features
from omniattn.select.model import NAMES, Rates, expected, expected_costs
from omniattn.tune.fit import judge
from omniattn.tune.operations import fit_operations, judged, read_rows
from omniattn.tune.run import TuneResult, fitted, measured, with_a_choice

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "src/omniattn/select/coefficients"
#: GPUs whose results there are: compute capability, SMs, shared memory of a CTA; clock in MHz and memory in GB/s as the
#: driver says them.
GPUS: dict[str, tuple[Target, float, float]] = {
    "NVIDIA H100 80GB HBM3": (Target((9, 0), 227 << 10, 132), 1980.0, 3352.0),
    "NVIDIA H200": (Target((9, 0), 227 << 10, 132), 1980.0, 4916.0),
}


#: What older files say of a schedule, and `Candidate.text` now.
_RENAMED = "even shares of", "Stream-K over"


class UnknownError(Exception):
    """A result that this code cannot read; the message says what of it."""


def read(path: Path) -> tuple[list[CandidateResult], str]:
    """Results of a file with the work of each way, and the GPU. Ways that are no candidates any more have no work."""
    data = json.loads(path.read_text(encoding="utf-8"))
    device = str(data["environment"].get("device"))
    if data.get("bench") != "candidates" or device not in GPUS:
        raise UnknownError(f"{path}: bench {data.get('bench')!r} on {device!r}; known: {', '.join(GPUS)}")
    target, by_name = GPUS[device][0], {case.long_name: case for case in candidate_cases()}
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in data["rows"]:
        if row.get("operation", "attention") == "attention":
            rows.setdefault(row["case"], []).append(row)
    results = []
    for name, of_case in rows.items():
        if name not in by_name:
            print(f"{path.name}: {name} is no case any more", file=sys.stderr)
            continue
        problem = problem_of(by_name[name])
        known = {way.text: way for way in candidates(problem, target)}
        ways: list[WayResult] = []
        kept: Kept = {}
        for row in of_case:
            text = row["way"].replace(*_RENAMED)
            way = known.get(text)
            if row["us"] is not None:
                work = None if way is None else features(way, problem, target, kept)
                ways.append(WayResult(text, Timing((row["us"],)), row["relative_l1"], row["chosen"], work))
        results.append(CandidateResult(by_name[name], tuple(ways)))
    return results, device


def unmeasured(results: Sequence[CandidateResult], target: Target, coefficients: Coefficients) -> list[str]:
    """Calls whose fastest way by the model has no time: what it chooses there nobody has measured."""
    found = []
    for result in results:
        problem = problem_of(result.case)
        kept: Kept = {}
        ways = {way.text: features(way, problem, target, kept) for way in candidates(problem, target)}
        chosen = min(ways, key=lambda text: cost_us(ways[text], coefficients))
        if all(way.way != chosen for _, way in result.timed):
            found.append(f"{result.case.long_name}: {chosen}")
    return found


def _print_unmeasured(results: Sequence[CandidateResult], target: Target, coefficients: Coefficients) -> None:
    lines = unmeasured(results, target, coefficients)
    print(f"chosen ways without a time: {len(lines)}", *lines, sep="\n  ")


def read_others(path: Path, device: str) -> list[CandidateResult]:
    """Results of a file of operations beside attention, of which older files have none."""
    return read_rows(json.loads(path.read_text(encoding="utf-8"))["rows"], _target(device))


def _target(device: str) -> Target:
    target, clock_mhz, memory_gb_s = GPUS[device]
    return dataclasses.replace(target, clock_mhz=clock_mhz, memory_gb_s=memory_gb_s)


def report(found: TuneResult, device: str) -> list[str]:
    """What a reader has to know of a fit."""
    lines = [f"{device}: {len(found.report.results)} calls, median error of a time {100 * found.error:.1f} %"]
    lines.append("class | calls | chosen in the run: mean, worst | by the model, held out: mean, worst")
    for name, gain in found.gains.items():
        before, after = (
            f"{100 * mean:.1f} %, {100 * worst:.0f} %"
            for mean, worst in ((gain.before, gain.worst_before), (gain.after, gain.worst_after))
        )
        lines.append(f"{name} | {gain.calls} | {before} | {after}")
    return lines


def _rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{x:.4g}") for name, x in numbers.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    try:
        results, device = read(options.file)
        other = None if options.other is None else read(options.other)
    except (OSError, ValueError, UnknownError) as error:
        print(error, file=sys.stderr)
        return 2
    usable = with_a_choice(results)
    target, clock, memory = GPUS[device]
    rates = Rates(target.cc, target.sm_count, clock, memory)
    path = FOLDER / "sm_{}{}.json".format(*target.cc)
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = data.get("operations", {}) if data.get("device") == device else {}
    shared = expected(rates)
    if usable:
        found = fitted(CandidateReport({}, tuple(usable)), usable, shared)
        print("\n".join(report(found, device)))
        _print_unmeasured(usable, target, found.coefficients)
        shared = found.coefficients
        data |= {
            "device": device, "source": f"{options.file.name}, {len(usable)} calls", "cc": list(target.cc),
            "sm_count": target.sm_count, "clock_mhz": clock, "memory_gb_s": memory,
            "coefficients": _rounded({name: getattr(shared, name) for name in NAMES}),
            "rows": _rounded(shared.rows),
        }  # fmt: skip
    elif data.get("device") != device:
        print(f"{options.file}: no calls of attention, and {path.name} is of {data.get('device')}", file=sys.stderr)
        return 2
    fits = fit_operations(read_others(options.file, device), shared, _target(device))
    if fits:
        print("operation | calls | by the rule: mean, worst | by the model, held out: mean, worst")
        print("\n".join(of.text for of in fits))
    kept = {op: costs for op, costs in kept.items() if op not in {of.op for of in fits}}
    data.pop("operations", None)
    if operations := kept | {of.op: _rounded(dataclasses.asdict(of.costs)) for of in fits if of.is_better}:
        data["operations"] = operations
    if other is not None:
        there, name = other
        of_other = GPUS[name]
        rates_there = Rates(of_other[0].cc, of_other[0].sm_count, of_other[1], of_other[2])
        scaled = expected(rates_there, (rates, shared))
        if calls := [measured(result) for result in with_a_choice(there)]:
            quality = judge(calls, scaled)
            worst, call = quality.worst
            print(f"{name}, not fitted: mean regret {100 * quality.mean:.1f} %, worst {100 * worst:.0f} % ({call})")
            _print_unmeasured(with_a_choice(there), of_other[0], scaled)
        others = read_others(options.other, name)
        for of in fits:
            costs = expected_costs(of.costs, rates_there, rates)
            if said := judged(dataclasses.replace(of, costs=costs), others, scaled, _target(name)):
                print(f"{name} | {said}")
    if options.write:
        write(data, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
