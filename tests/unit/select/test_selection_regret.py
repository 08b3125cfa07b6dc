"""How much longer the chosen ways take than the fastest ones: choices are made anew for calls whose ways were measured.

Results are those of ``omniattn bench candidates`` on an H100, whose times the coefficients and the factors of kernels
are fitted to, and on an H200, of which they know nothing but its rates. Of a call whose chosen way was not measured,
the first one by the model that was counts, and there may be few of these.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from build_tools.fit_selection import GPUS, read
from omniattn.bench.shape_plan import problem_of
from omniattn.plan.attention import plan_attention
from omniattn.problems import Target
from omniattn.registry import REGISTRY
from omniattn.select import ranked
from omniattn.tune.run import class_of

RESULTS = Path(__file__).parents[3] / "docs/performance/results"
FILES = ("candidates-h100.json", "candidates-h200.json")
T = TypeVar("T")
#: By class of calls (`tune.run.class_of`), of the H100 and of the H200: the mean of (time of what is chosen / time of
#: the fastest way - 1), and the largest one of a call.
BOUNDS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "8 bits": ((0.003, 0.05), (0.003, 0.05)),
    "few queries": ((0.02, 0.12), (0.018, 0.12)),
    "long sequences": ((0.003, 0.09), (0.002, 0.04)),
    "masks and softcap": ((0.007, 0.07), (0.012, 0.18)),
    "packed sequences": ((0.008, 0.09), (0.008, 0.09)),
    "short sequences": ((0.004, 0.09), (0.006, 0.1)),
    "windows": ((0.004, 0.025), (0.004, 0.025)),
    "all": ((0.0075, 0.12), (0.008, 0.18)),
}
#: The same of all calls, were there only the kernels of every GPU: how good choices are where a GPU has no others.
OF_EVERY_GPU = (0.011, 0.37), (0.011, 0.32)
#: Of all calls, those whose chosen way was not measured, at most; without kernels that are newer than the results.
UNMEASURED = 0.0, 0.03


class Regret(NamedTuple):
    """Of a call: its class, what is chosen, and how much longer it and the slowest way take than the fastest."""

    name: str
    of_class: str
    way: str
    of_chosen: float
    of_slowest: float
    was_measured: bool
    is_newer: bool


@functools.cache
def newer_kernels(file: str) -> frozenset[str]:
    """Kernels that quantize Q, unless the file has times of one: a run of the benchmark measures them all."""
    names = frozenset(row.name for row in REGISTRY if row.quantizes_q)
    text = (RESULTS / file).read_text(encoding="utf-8")
    return frozenset() if any(name in text for name in names) else names


@functools.cache
def regrets(file: str, of_every_gpu: bool = False) -> tuple[Regret, ...]:
    """Of all calls that have several ways; of_every_gpu: the kernels of Hopper alone do not count."""
    results, device = read(RESULTS / file)
    newer = newer_kernels(file)
    target, clock_mhz, memory_gb_s = GPUS[device]
    target = replace(target, clock_mhz=clock_mhz, memory_gb_s=memory_gb_s)
    found = []
    for result in results:
        in_order = [way for _, way in ranked(problem_of(result.case), target)]
        in_order = [way for way in in_order if not (of_every_gpu and way.row.arch_specific)]
        ways = [way.text for way in in_order]
        times = {way.way: way.timing.median_us for way in result.ways if way.timing is not None}
        us = {way: time for way, time in times.items() if way in ways}
        if not us:
            continue
        chosen = next(way for way in ways if way in us)
        fastest = min((us if of_every_gpu else times).values())
        of_chosen, of_slowest = (time / fastest - 1 for time in (us[chosen], max(us.values())))
        name = result.case.long_name
        is_newer = in_order[0].row.name in newer
        found.append(Regret(name, class_of(result.case), chosen, of_chosen, of_slowest, chosen == ways[0], is_newer))
    return tuple(found)


def of(file: str, name: str) -> list[Regret]:
    """The calls of a class, or all."""
    return [regret for regret in regrets(file) if name in (regret.of_class, "all")]


def of_gpu(bounds: tuple[T, T], file: str) -> T:
    """What holds on the GPU of a file."""
    return bounds[FILES.index(file)]


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("file", FILES)
def test_regrets_are_small(file: str, name: str) -> None:
    calls, (mean, most) = of(file, name), of_gpu(BOUNDS[name], file)
    worst = max(calls, key=lambda regret: regret.of_chosen)
    assert sum(regret.of_chosen for regret in calls) / len(calls) <= mean
    assert worst.of_chosen <= most, worst


@pytest.mark.parametrize("file", FILES)
def test_regrets_are_small_among_the_kernels_of_every_gpu(file: str) -> None:
    calls, (mean, most) = regrets(file, of_every_gpu=True), of_gpu(OF_EVERY_GPU, file)
    worst = max(calls, key=lambda regret: regret.of_chosen)
    assert len(calls) > 250
    assert sum(regret.of_chosen for regret in calls) / len(calls) <= mean
    assert worst.of_chosen <= most, worst
    assert not any("sm90" in regret.way for regret in calls)


@pytest.mark.parametrize("file", FILES)
def test_it_matters_which_way_is_chosen(file: str) -> None:
    """Were the slowest way chosen everywhere, no class would keep its bound."""
    for name, bounds in BOUNDS.items():
        calls, (mean, most) = of(file, name), of_gpu(bounds, file)
        assert sum(regret.of_slowest for regret in calls) / len(calls) > 20 * mean
        assert max(regret.of_slowest for regret in calls) > 2 * most


@pytest.mark.parametrize("file", FILES)
def test_classes_and_ways_are_known(file: str) -> None:
    calls = regrets(file)
    assert len(calls) >= 300
    assert {regret.of_class for regret in calls} | {"all"} == set(BOUNDS)
    unknown = [regret.name for regret in calls if not regret.was_measured and not regret.is_newer]
    assert len(unknown) <= of_gpu(UNMEASURED, file) * len(calls), unknown


def test_what_is_ranked_first_is_what_a_call_launches() -> None:
    results, device = read(RESULTS / FILES[0])
    target: Target = GPUS[device][0]
    for result in results[::20]:
        problem = problem_of(result.case)
        launched = [record.spec.name for record in plan_attention(problem, target, None).records]
        assert ranked(problem, target)[0][1].row.name in launched
