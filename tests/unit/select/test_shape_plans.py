"""What is planned for the cases of ``omniattn bench few`` and its kin on GPUs that are not there."""

from __future__ import annotations

import dataclasses

import pytest

from omniattn.bench.shape_cases import SHAPE_CASES, ShapeCase
from omniattn.plan.attention import plan_attention
from omniattn.problems.split import SplitKV
from omniattn.registry import by_name
from omniattn.select import choices
from tests.unit.select.shape_plans import GPUS, problem_of

ALL = [(bench, case) for bench, cases in SHAPE_CASES.items() for case in cases]
NAMES = [f"{bench}, {case.long_name}" for bench, case in ALL]


@pytest.mark.parametrize("case", [case for _, case in ALL], ids=NAMES)
def test_every_case_has_a_plan_on_every_gpu(case: ShapeCase) -> None:
    problem = problem_of(case)
    assert problem.varlen == bool(case.packed)
    if not case.packed:
        assert (problem.flops == case.flops) == (case.mask != "padding")
    # Operands are in Hopper's grouping.
    for target in [GPUS["H200"]] if case.operands else GPUS.values():
        launches = plan_attention(problem, target, None)
        spec = launches.selection.spec
        assert by_name(spec.name) is spec
        assert spec.unfit(target.cc, target.max_smem) in (None, "")
        assert spec.name in [record.spec.name for record in launches.records]


def test_a_forced_row_may_have_one_split() -> None:
    problem = problem_of(ShapeCase(128, 16, (100,), (40,)))
    row = "attn_fwd_sm80_bf16_d128_split"
    assert {choice.candidate.schedule for choice in choices(problem, GPUS["A100"], row)} == {SplitKV(1)}
    # With keys for more it is split, though one part may be the fastest.
    longer = problem_of(ShapeCase(128, 16, (100,), (400,)))
    (choice,) = choices(longer, GPUS["A100"], row)
    assert isinstance(choice.candidate.schedule, SplitKV)
    assert choice.candidate.schedule.splits > 1


@pytest.mark.parametrize(
    ("sizes", "causal", "window", "found"),
    [
        ((40, 50), False, (49, 39), (-1, -1)),
        ((40, 50), False, (48, 38), (48, 38)),
        ((40, 50), True, (49, 7), (-1, 0)),
        ((1, 50), True, (48, -1), (48, -1)),
        ((50, 40), False, (39, 49), (-1, -1)),
        ((50, 40), False, (38, 48), (38, 48)),
    ],
)
def test_windows_that_hide_nothing_are_none(
    sizes: tuple[int, int], causal: bool, window: tuple[int, int], found: tuple[int, int]
) -> None:
    queries, keys = sizes
    case = ShapeCase(64, 2, (queries,), (keys,), causal=causal, window=window)
    problem = problem_of(case)
    assert (problem.window_left, problem.window_right) == found
    seen = [
        [(window[0] < 0 or j >= own - window[0]) and j <= own + (0 if causal else window[1]) for j in range(keys)]
        for own in range(keys - queries, keys)
    ]
    assert problem.visible_pairs == sum(map(sum, seen))
    packed = problem_of(dataclasses.replace(case, packed="x", lengths_q=(queries,) * 2, lengths_k=(keys,) * 2))
    assert (packed.window_left, packed.window_right) == (window[0], 0 if causal else window[1])
