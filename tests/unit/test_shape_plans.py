"""What is planned for the cases of ``omniattn bench few`` and its kin on GPUs that are not there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from omniattn.bench.shape_cases import SHAPE_CASES, ShapeCase
from omniattn.plan.attention import plan_attention
from omniattn.problems.split import SplitKV
from omniattn.registry import by_name
from omniattn.select import select_attention, select_split
from tests.unit.shape_plans import GPUS, problem_of

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


def test_few_queries_are_split_on_an_h200() -> None:
    split = {
        case.long_name: "_split" in plan_attention(problem_of(case), GPUS["H200"], None).selection.spec.name
        for case in SHAPE_CASES["few"]
    }
    whole = [name for name, is_split in split.items() if not is_split]
    # Key padding has a batch of 4, whose 128 tiles keep the SMs busy.
    assert all({*name.split()} & {"packed", "key-padding"} for name in whole)


def few(gpu: str, batch: int, heads: int, queries: int, keys: int, group: int = 1, **changes: Any) -> int:
    """Splits of a call; 1 for none."""
    case = ShapeCase(128, heads, (queries,) * batch, (keys,) * batch, group=group)
    problem = problem_of(case, **changes)
    split = select_split(problem, GPUS[gpu], select_attention(problem, GPUS[gpu]))
    if split is None:
        return 1
    assert isinstance(split.schedule, SplitKV)
    return split.schedule.splits


def test_a_query_more_does_not_end_the_split() -> None:
    """On mma.sync one split of all keys is none, so that it must not be the best that is found."""
    assert few("A100", 4, 16, 128, 32768) == 3
    assert few("A100", 4, 16, 129, 32768) == 2
    # Measured on an H200: 436 us beside 844, 644 beside 845, then 846 both ways.
    found = [few("H200", 4, 16, queries, 32768, tensor_maps=False) for queries in (128, 129, 256)]
    assert found == [2, 4, 1]


def test_ctas_that_just_do_not_fit_are_split() -> None:
    """224 items on 216 places of an A100: two rounds, of which the second one is nearly empty; 448 take three."""
    assert few("A100", 4, 56, 64, 8192, group=7) == 2
    assert few("A100", 4, 32, 64, 8192, group=4) == 3
    # Of those that were measured on an H200 none has more than two rounds of CTAs.
    measured = {(1, 32, 16, 32768, 4): 14, (1, 32, 64, 32768, 4): 8, (1, 32, 512, 32768, 4): 1, (8, 32, 32, 8192, 4): 2}
    assert {call: few("H200", *call) for call in measured} == measured


#: (batch, queries, keys, kv heads, group, head_dim): the kernel that was the fastest of those measured on an H200, us;
#: the others', cuDNN's.
READING = {
    (64, 1, 1024, 8, 4, 128): "sm80_bf16_d128_split",  # 75.7; m64 77.1, m128 80.5; 76.2
    (64, 1, 2048, 8, 4, 128): "sm80_bf16_d128_split",  # 133; 140, 143; 133
    (32, 4, 4096, 8, 4, 128): "sm80_bf16_d128_split",  # 132; 142, 143; 397
    (32, 8, 8192, 8, 8, 128): "sm80_bf16_d128_split",  # 250; 271, 275; 1520
    (256, 1, 256, 8, 4, 128): "sm90_bf16_d128_m64n64_split",  # 78.8; sm80 81.6, m128 82.3; 77.6
    (512, 1, 128, 8, 4, 128): "sm90_bf16_d128_m64n64_split",  # 82.3; 89.4, 103; 96.7
    (1, 1, 32768, 8, 4, 128): "sm90_bf16_d128_m64n64_split",  # 47.6; 52.4, 50.5; 49.2
    (64, 1, 1024, 8, 4, 64): "sm90_bf16_d64_m64n64_split",  # 47.3; 52.1, 49.6; 44.6
    (158, 1, 16384, 8, 5, 72): "sm80_bf16_d96_split",  # 1763; tiles of 128 on wgmma 2354 to 3615; 1951
    (39, 16, 8192, 2, 1, 72): "sm80_bf16_d96_split",  # 71; 83 to 104; 103
    (3, 40, 16384, 8, 5, 72): "sm90_bf16_d128_m192n64_split",  # 106; m128 144, m64 206, sm80 224; 200
    (64, 4, 2048, 8, 4, 80): "sm80_bf16_d96_split",  # 102; 105 to 116; 404
    (1, 16, 32768, 8, 4, 96): "sm80_bf16_d96_split",  # 44.6; 45.9 to 48.4; 379
    (64, 4, 2048, 8, 4, 40): "sm80_bf16_d64_split",  # 74; 88, 90; 299
}


@pytest.mark.parametrize("call", READING, ids=str)
def test_what_reads_fastest(call: tuple[int, ...]) -> None:
    batch, queries, keys, heads, group, head_dim = call
    problem = problem_of(ShapeCase(head_dim, heads * group, (queries,) * batch, (keys,) * batch, group=group))
    found = select_split(problem, GPUS["H200"], select_attention(problem, GPUS["H200"]))
    assert found is not None
    assert found.main.spec.name == f"attn_fwd_{READING[call]}"


@pytest.mark.parametrize("call", [(32, 32, 4096, 4, 2), (64, 2, 2048, 2, 2), (8, 16, 1024, 1, 4)], ids=str)
def test_what_mma_sync_does_not_split_wgmma_may(call: tuple[int, ...]) -> None:
    """At head_dim 96 mma.sync goes first, but has to gain a fifth; the other gains a tenth or more by the model."""
    batch, queries, keys, heads, group = call
    problem = problem_of(ShapeCase(96, heads * group, (queries,) * batch, (keys,) * batch, group=group))
    found = select_split(problem, GPUS["H200"], select_attention(problem, GPUS["H200"]))
    assert found is not None


def test_one_split_is_for_heads_that_share_tiles() -> None:
    """Measured: 300 queries on 256 keys, a head each, 20 us beside 17 of cuDNN, as one split of large tiles."""
    for batch, queries, keys, heads, group in ((38, 300, 256, 2, 1), (2, 400, 400, 2, 7), (1, 1024, 1024, 4, 3)):
        problem = problem_of(ShapeCase(128, heads * group, (queries,) * batch, (keys,) * batch, group=group))
        assert select_split(problem, GPUS["H200"], select_attention(problem, GPUS["H200"])) is None


def test_a_forced_row_may_have_one_split() -> None:
    problem = problem_of(ShapeCase(128, 16, (100,), (40,)))
    unsplit = select_attention(problem, GPUS["A100"])
    split = select_split(problem, GPUS["A100"], unsplit, "attn_fwd_sm80_bf16_d128_split")
    assert split is not None
    assert split.schedule == SplitKV(1)


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
