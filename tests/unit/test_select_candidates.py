"""The ways to run a call: all of them can be launched, none twice, what is chosen is one of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from omniattn.bench.candidate_cases import candidate_cases
from omniattn.errors import UnsupportedError
from omniattn.plan.stages import launches_of
from omniattn.problems import AttentionProblem, Target
from omniattn.problems.split import ONE_HEAD, PackGQA, SplitKV, StreamK, TailSplit, Whole
from omniattn.select import Candidate, MaskInput, candidates, choices
from tests.unit.every_call import PAIRS, WIDTHS, call, exact_calls, low_precision_calls
from tests.unit.shape_plans import GPUS, problem_of

HOPPER = GPUS["H200"]
#: Calls that a user can make, every so many of them: all have 20,000 ways.
CALLS = [*itertools.islice(exact_calls(True), 0, None, 11), *itertools.islice(low_precision_calls(True), 0, None, 29)]


def ways(problem: AttentionProblem, target: Target = HOPPER) -> tuple[Candidate, ...]:
    found = candidates(problem, target)
    assert len(found) == len(set(found)) == len({way.text for way in found})
    assert found == candidates(problem, target)
    return found


def without_number(way: Candidate) -> Candidate:
    """Of splits of the keys: whatever their number."""
    schedule = way.schedule
    if isinstance(schedule, (SplitKV, TailSplit)):
        return replace(way, schedule=replace(schedule, splits=0))
    return way


@pytest.mark.parametrize("gpu", GPUS)
def test_all_can_be_launched_and_what_is_chosen_is_one(gpu: str) -> None:
    target, with_maps = GPUS[gpu], gpu == "H200"
    for problem in CALLS if with_maps else CALLS[::3]:
        if problem.operands is not None:
            continue  # of a GPU's own grouping
        found = ways(problem, target)
        if not found:
            with pytest.raises(UnsupportedError):
                choices(problem, target)
            continue
        for way in found:
            launches = launches_of(way, problem, target, None)
            assert launches.selection.spec is way.row
            assert [r.spec for r in launches.records].count(way.row) >= 1
        known = set(map(without_number, found))
        assert all(without_number(choice.candidate) in known for choice in choices(problem, target))


def test_measured_calls_have_several_ways_each() -> None:
    cases = candidate_cases()
    assert len(cases) >= 250
    counts = [len(ways(problem_of(case), HOPPER)) for case in cases[::9]]
    assert min(counts) >= 1
    assert sum(n > 1 for n in counts) > 0.9 * len(counts)
    assert max(counts) <= 128


def schedules(problem: AttentionProblem, target: Target = HOPPER) -> set[type]:
    return {type(way.schedule) for way in ways(problem, target)}


def test_schedules() -> None:
    width = (128, 0)
    assert schedules(call((1, 16, 32768, 8, 2), width)) == {Whole, SplitKV}
    assert TailSplit in schedules(call((1, 20000, 20000, 1, 1), width))
    # Tiles of a tail are equal, and one to an SM.
    for other in ({"right": 0}, {"softcap": 30.0}, {"mask": "bool"}):
        assert TailSplit not in schedules(call((1, 20000, 20000, 1, 1), width, **other))
    assert schedules(call((8, 16, 4096, 8, 2), width, varlen=True)) == {Whole, StreamK, SplitKV}
    assert schedules(call((8, 16, 4096, 8, 2), width, varlen=True), GPUS["A100"]) == {Whole, SplitKV}
    assert schedules(call((4, 1000, 0, 8, 8), width)) == {Whole}


def test_numbers_of_splits_make_other_rounds() -> None:
    problem = call((1, 16, 32768, 8, 2), (128, 0))
    of_row: dict[tuple[Any, ...], list[int]] = {}
    for way in ways(problem):
        if isinstance(way.schedule, SplitKV):
            of_row.setdefault((way.row.name, way.pack_gqa), []).append(way.schedule.splits)
    assert of_row
    for (name, _), numbers in of_row.items():
        assert numbers == sorted(set(numbers)), name
        assert len(numbers) <= 8


def test_masks() -> None:
    def inputs(mask: str, shape: tuple[int, int, int, int, int] = (4, 1000, 1000, 8, 4), **more: Any) -> set[MaskInput]:
        return {way.mask for way in ways(call(shape, (64, 0), mask, **more)) if way.row.family == "attn_fwd_sm90"}

    assert inputs("none") == {MaskInput.IN_PLACE}
    assert inputs("bool") == {MaskInput.LISTED, MaskInput.PACKED}
    assert inputs("io") == {MaskInput.IN_PLACE}
    assert inputs("odd io") == {MaskInput.COPIED}
    # Numbers a key, others for each head: packed, or as tiles where a tensor map can repeat them.
    few = call((1, 16, 16384, 8, 2), (64, 0), "keys io")
    assert few.strides is not None
    of_heads = replace(few, strides=replace(few.strides, mask=(0, 16384, 0, 1)), keys_map=True)
    assert {MaskInput.AS_TILES, MaskInput.LISTED} <= {way.mask for way in ways(of_heads)}
    assert all(way.told(of_heads).keys_as_tiles == (way.mask is MaskInput.AS_TILES) for way in ways(of_heads))


def test_query_heads_of_one_query_are_queries_too() -> None:
    one = call((1, 1, 4096, 8, 2), (64, 0), softcap=30.0)
    folded = [way for way in ways(one) if way.heads_as_queries]
    assert folded
    assert all((way.told(one).seqlen_q, way.told(one).num_q_heads) == (4, 2) for way in folded)
    assert not any(way.heads_as_queries for way in ways(call((1, 2, 4096, 8, 2), (64, 0), softcap=30.0)))


def test_heads_share_rows_or_not() -> None:
    found = ways(call((1, 16, 32768, 8, 2), (128, 0)))
    assert {ONE_HEAD, PackGQA(4, 4)} <= {way.pack_gqa for way in found if way.row.op == "attention_split"}


@pytest.mark.parametrize("width", [*WIDTHS, *PAIRS], ids=str)
def test_no_row_is_far_too_wide_or_has_scores_for_nothing(width: tuple[int, int]) -> None:
    found = ways(call((4, 1000, 1000, 8, 4), width))
    of_hopper = [way.row for way in found if way.row.arch_specific]
    for op in ("attention", "attention_split"):
        columns = [row.head_dim + row.head_dim_v for row in of_hopper if row.op == op]
        assert max(columns) <= max(128, 1.5 * min(columns))
    assert not any(row.score_mods for row in of_hopper)
