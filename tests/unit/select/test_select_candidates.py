"""The ways to run a call: all of them can be launched, none twice, what is chosen is one of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from omniattn.bench.candidate_cases import candidate_cases
from omniattn.errors import UnsupportedError
from omniattn.plan.stages import launches_of
from omniattn.problems import AttentionProblem, Int8, Target
from omniattn.problems.split import ONE_HEAD, PackGQA, SplitKV, StreamK, TailSplit, Whole
from omniattn.registry import by_name
from omniattn.select import Candidate, MaskInput, candidates, choices, ranked
from tests.unit.select.every_call import PAIRS, WIDTHS, call, exact_calls, low_precision_calls
from tests.unit.select.shape_plans import GPUS, problem_of

HOPPER, HOPPER_ROW = GPUS["H200"], by_name("attn_fwd_sm90_bf16_d64_m64n64")
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
    assert inputs("bool") == {MaskInput.LISTED}
    assert inputs("bool", (4, 200, 200, 8, 4)) == {MaskInput.LISTED, MaskInput.PACKED}
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
    found = ways(call((1, 1000, 1000, 8, 4), width))
    of_hopper = [way.row for way in found if way.row.arch_specific]
    for op in ("attention", "attention_split"):
        columns = [row.head_dim + row.head_dim_v for row in of_hopper if row.op == op]
        if columns:  # of more than 256 channels others have rows
            assert max(columns) <= max(128, 1.5 * min(columns))
    # Of more than 256 channels there is one row, with softcap and without.
    assert not any(row.score_mods for row in of_hopper if row.family != "attn_fwd_d512_sm90")


def test_the_lse_changes_no_way() -> None:
    """O has the same bits with it and without."""

    def tile(problem: AttentionProblem) -> Any:
        way = ranked(problem, HOPPER)[0][1]
        row = way.row
        kind = row.family, row.head_dim, row.block_m, row.block_n, row.num_warps, row.ctas_per_sm
        return kind, replace(way, row=HOPPER_ROW)

    for problem in CALLS:
        made = [replace(problem, lse=lse) for lse in (False, True)]
        if all(candidates(one, HOPPER) for one in made):
            assert tile(made[0]) == tile(made[1])


def test_choices_are_the_best_of_each_kernel_and_schedule() -> None:
    problem = call((1, 16, 32768, 8, 2), (128, 0))
    found, of_all = choices(problem, HOPPER), ranked(problem, HOPPER)
    kinds = [(choice.candidate.row, type(choice.candidate.schedule)) for choice in found]
    assert len(kinds) == len(set(kinds)) == len({(way.row, type(way.schedule)) for _, way in of_all})
    assert [choice.candidate for choice in found] == [
        next(way for _, way in of_all if (way.row, type(way.schedule)) == kind) for kind in kinds
    ]
    assert "the fastest of" in "\n".join(found[0].why)
    assert "number " in "\n".join(found[1].why)


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("attn_fwd_sm80_bf16_d256", {}),  # far wider than it need be
        ("attn_fwd_sm90_bf16_d128_m192n64_softcap", {}),  # forms scores for nothing
        ("attn_fwd_sm80_bf16_d128", {}),  # not in a wheel for Hopper
        ("attn_int8_sm80_bf16_d128", {"precision": Int8(pv="fp16").precision}),
        ("attn_int8_sm89_bf16_d128", {"precision": Int8(pv="fp8", pv_accumulator="fp32").precision}),
        ("attn_fwd_sm90_bf16_d64_m256n64_split", {"head_dim": 64}),
    ],
)
def test_a_forced_row_is_taken_whether_it_is_worth_a_look_or_not(row: str, options: dict[str, Any]) -> None:
    problem = replace(call((2, 1000, 1000, 8, 8), (128, 0)), **options)
    found = choices(problem, HOPPER, row)
    assert {choice.candidate.row.name for choice in found} == {row}
    assert launches_of(found[0].candidate, problem, HOPPER, row).selection.spec.name == row
    assert all(way.row.name == row for _, way in ranked(problem, HOPPER, by_name(row)))


def test_forced_rows_have_no_tail_and_are_split_if_they_can() -> None:
    long = call((1, 20000, 20000, 1, 1), (128, 0))
    assert TailSplit in schedules(long)
    whole, split = "attn_fwd_sm90_bf16_d128_m192n64", "attn_fwd_sm90_bf16_d128_m192n64_split"
    assert {type(choice.candidate.schedule) for choice in choices(long, HOPPER, whole)} == {Whole}
    for force in (split, f"{whole},{split}"):
        ways = [choice.candidate for choice in choices(long, HOPPER, force)]
        assert {way.row.name for way in ways} == {split}
        assert all(isinstance(way.schedule, SplitKV) and way.schedule.splits > 1 for way in ways)
    (one,) = choices(call((2, 1000, 64, 8, 8), (128, 0)), HOPPER, split)
    assert one.candidate.schedule == SplitKV(1)


@pytest.mark.parametrize("mask", ["bool", "keys io"])
@pytest.mark.parametrize("gpu", GPUS)
def test_what_a_mask_hides_from_all_is_not_read(gpu: str, mask: str) -> None:
    """NaN in it would reach everybody. On Hopper and newer GPUs up to 256 keys of a batch may be."""
    for varlen, keys in itertools.product((False, True), (200, 256, 257, 5000)):
        for queries in (1, 40, 1000):
            found = ways(call((2, queries, keys, 8, 4), (64, 0), mask, varlen=varlen), GPUS[gpu])
            if varlen:
                kinds = {way.mask for way in found}
                assert kinds == {MaskInput.LISTED} if gpu == "H200" else {MaskInput.IN_PLACE}
                continue
            reads = {way for way in found if way.mask is not MaskInput.LISTED}
            # Heads that share a tile, each with a mask of its own, have no list in common.
            reads = {way for way in reads if not (way.mask is MaskInput.PACKED and way.pack_gqa.heads > 1)}
            assert not reads or (keys <= 256 and GPUS[gpu].cc >= (9, 0))
            assert gpu != "H200" or bool(reads) == (keys <= 256)
