"""What is planned for the cases of ``omniattn bench few`` and its kin on GPUs that are not there."""

from __future__ import annotations

import pytest

from omniattn.bench.shape_cases import SHAPE_CASES, ShapeCase
from omniattn.plan.attention import plan_attention
from omniattn.registry import by_name
from tests.unit.shape_plans import GPUS, problem_of

ALL = [(bench, case) for bench, cases in SHAPE_CASES.items() for case in cases]
NAMES = [f"{bench}, {case.long_name}" for bench, case in ALL]


@pytest.mark.parametrize("case", [case for _, case in ALL], ids=NAMES)
def test_every_case_has_a_plan_on_every_gpu(case: ShapeCase) -> None:
    problem = problem_of(case)
    assert problem.varlen == bool(case.packed)
    if not case.packed:
        assert (problem.flops == case.flops) == (case.mask != "padding")
    for target in GPUS.values():
        launches = plan_attention(problem, target, None)
        spec = launches.selection.spec
        assert by_name(spec.name) is spec
        assert spec.unfit(target.cc, target.max_smem) in (None, "")
        assert spec.name in [record.spec.name for record in launches.records]


def test_few_queries_are_split_on_an_h200() -> None:
    split = {
        case.long_name: "_split" in plan_attention(problem_of(case), GPUS["H200"], None).selection.spec.name
        for case in SHAPE_CASES["few"]
    }
    whole = [name for name, is_split in split.items() if not is_split]
    # Key padding has a batch of 4, whose 128 tiles keep the SMs busy.
    assert all({*name.split()} & {"packed", "int8", "key-padding"} for name in whole)
