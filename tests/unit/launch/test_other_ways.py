"""Ways to run decode, gradients, quantizers and append: which there are, which one is taken, and what it launches."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from omniattn.bench.backward_cases import BackwardShape
from omniattn.bench.decode_report import DecodeShape
from omniattn.bench.way_cases import BackwardCase, DecodeCase, WayCase, way_cases
from omniattn.errors import ArgumentError
from omniattn.launch.structs import DECODE, QUANTIZE
from omniattn.plan.ahead import ModCalls, rows_of_calls
from omniattn.plan.attention import plan_attention
from omniattn.plan.backward import plan_backward
from omniattn.plan.others import plan_append, plan_decode, plan_quantize
from omniattn.plan.stages import quantizations
from omniattn.plan.ways import QuantizedCandidate, asked_of, launches_in
from omniattn.problems import AppendProblem, DecodeProblem, Fp8, Int8, QuantizeCall, Target
from omniattn.problems.backward import BackwardProblem
from omniattn.problems.costs import COSTS, OperationCosts
from omniattn.problems.decode import MAX_WORKERS
from omniattn.problems.score_mod import ScoreModProblem
from omniattn.problems.target import Tuning
from omniattn.registry.targets import is_carried
from omniattn.runtime.record import LaunchRecord
from omniattn.select import choices
from omniattn.select.backward import select_backward
from omniattn.select.decode_ways import decode_ways
from omniattn.select.model import Rates, coefficients_of, costs_of, expected, expected_costs
from omniattn.select.quantize_ways import asked_of_quantizer
from omniattn.select.ways import chosen_ways, possible_ways
from omniattn.tune.operations import MODELS
from tests.unit.launch.launch_fakes import fields_of_record
from tests.unit.select import every_call

GPUS = {
    "A100": Target((8, 0), 163 << 10, 108), "RTX 3090": Target((8, 6), 99 << 10, 82),
    "L40S": Target((8, 9), 99 << 10, 142), "H200": Target((9, 0), 227 << 10, 132),
    "B200": Target((10, 0), 227 << 10, 148), "RTX 5090": Target((12, 0), 99 << 10, 170),
}  # fmt: skip
HOPPER = GPUS["H200"]
PLANS: dict[type, Any] = {
    DecodeProblem: plan_decode, AppendProblem: plan_append, BackwardProblem: plan_backward, QuantizeCall: plan_quantize,
}  # fmt: skip
CASES = way_cases()
#: Ways of a call, at most.
MOST = 80


def named(text: str) -> WayCase:
    return next(case for case in CASES if text in case.long_name)


def with_costs(op: str, target: Target = HOPPER, **changes: float) -> Target:
    """A GPU whose user has measured an operation."""
    costs = dataclasses.replace(MODELS[op][0], **changes)
    coefficients = expected(Rates(target.cc, target.sm_count))
    return dataclasses.replace(target, tuning=Tuning(coefficients, "a GPU", "0" * 64, ((op, costs),)))


def launched(launches: Any) -> list[tuple[Any, ...]]:
    facts = [field.name for field in dataclasses.fields(LaunchRecord) if field.name != "spec"]
    return [(r.spec.name, *(getattr(r, name) for name in facts)) for r in launches.records]


def problems() -> list[Any]:
    """Calls of every kind: those of the bench, and what a user can ask for besides."""
    found = [case.problem(HOPPER) for case in CASES[::3]]
    others = [*every_call.backward_calls(), *every_call.quantizer_calls(), *every_call.cache_calls()]
    return found + [problem for problem in others[::3] if type(problem) in PLANS]


PROBLEMS = problems()


@pytest.mark.parametrize("target", GPUS.values(), ids=list(GPUS))
def test_what_is_taken_is_one_of_few_ways_and_every_way_can_be_launched(target: Target) -> None:
    several = 0
    for problem in PROBLEMS:
        if isinstance(problem, QuantizeCall) and problem.problem.qk and problem.problem.v:
            continue  # inside a call of attention
        asked = asked_of(problem, target)
        ways = asked.ways()
        assert 1 <= len({way.text for way in ways}) == len(ways) <= MOST
        assert ways == asked.ways()
        several += len(ways) > 1
        by_rule = asked.rule(None)
        assert by_rule in ways
        chosen = [one.way for one in chosen_ways(asked, target)]
        if costs_of(asked.op, target) is None:
            assert chosen == [by_rule]
            assert possible_ways(asked, target) == (by_rule,)
        else:
            assert len(chosen) == len(ways)
            assert set(chosen) == set(ways) == set(possible_ways(asked, target))
        taken = chosen[0]
        plan = PLANS[type(problem)](problem, target, None)
        assert launched(plan) == launched(launches_in(taken, problem, target))
        different = {tuple(launched(launches_in(way, problem, target))) for way in ways}
        assert len(different) == len(ways), "ways that launch the same are one"
    assert several > len(PROBLEMS) / 3


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.long_name)
def test_every_way_has_a_time(case: WayCase) -> None:
    asked = asked_of(case.problem(HOPPER), HOPPER)
    if case.op not in COSTS:
        assert len(asked.ways()) == 1
        return
    start = MODELS[case.op][0]
    for way in asked.ways():
        us = asked.cost(asked.count(way), start, coefficients_of(HOPPER))
        assert math.isfinite(us)
        assert us > coefficients_of(HOPPER).launch


@pytest.mark.parametrize("op", COSTS)
def test_work_that_costs_more_takes_longer(op: str) -> None:
    """Every coefficient counts in some way of some call, and no time falls where one grows."""
    start, cost = MODELS[op]
    shared = coefficients_of(HOPPER)
    work = []
    for case in (case for case in CASES if case.op == op):
        asked = asked_of(case.problem(HOPPER), HOPPER)
        work += [asked.count(way) for way in asked.ways()]
    for field in dataclasses.fields(start):
        more = dataclasses.replace(start, **{field.name: 2 * getattr(start, field.name)})
        changes = [cost(one, more, shared) - cost(one, start, shared) for one in work]
        assert any(change != 0 for change in changes), field.name
        assert all(change >= 0 for change in changes) or field.name == "cache"  # a larger L2


def test_times_are_those_of_results_in_docs() -> None:
    """Where a fit begins: medians of an H200, cold L2, to a half."""
    target = dataclasses.replace(HOPPER, clock_mhz=1980.0, memory_gb_s=4916.0)
    measured: dict[WayCase, float] = {
        DecodeCase(DecodeShape(1, 8, 1, 8192)): 13.0, DecodeCase(DecodeShape(512, 8, 1, 8192)): 483.2,
        DecodeCase(DecodeShape(512, 8, 1, 8192), "int8"): 263.5, DecodeCase(DecodeShape(16, 64, 8, 8192)): 135.0,
        BackwardCase(BackwardShape(16, 128, (4096,) * 4, False)): 2161.5,
        BackwardCase(BackwardShape(32, 64, (1024,) * 16, True)): 587.4,
        BackwardCase(BackwardShape(8, 256, (4096,) * 4, True)): 1436.0,
    }  # fmt: skip
    for case, us in measured.items():
        asked = asked_of(case.problem(target), target)
        found = asked.cost(asked.count(asked.rule(None)), MODELS[case.op][0], coefficients_of(target))
        assert found == pytest.approx(us, rel=0.5)


# What a file of coefficients changes


def test_operations_that_rules_choose_in() -> None:
    """Where a model chose no better than the rule: docs/performance/selection.md has to say the same."""
    for target in GPUS.values():
        ruled = {op for op in COSTS if costs_of(op, target) is None}
        assert ruled == ({"decode", "backward"} if target.cc == (9, 0) else set(COSTS))


def test_costs_of_the_file_are_of_its_compute_capability() -> None:
    """Of the ways that GPUs without Hopper's kernels have, those costs would take the slower ones.

    With bf16 of 64 heads of 4096 on an H100 (docs/performance/results/candidates-h100.json) 153.6 µs by two quantizers,
    the way of the rule, and 178.8 to 247.6 by the one that rotates.
    """
    case = next(case for case in CASES if case.long_name == "quantize qkv d128 b4 h16 s4096 full fp8")
    for target in (GPUS["L40S"], GPUS["B200"], GPUS["RTX 5090"]):
        (chosen,) = chosen_ways(asked_of(case.problem(target), target), target)
        assert chosen.way.text.startswith("quantize_fp8_sm80_bf16_d128 and quantize_sm80_bf16_d128, ")
    assert costs_of("quantize", dataclasses.replace(HOPPER, clock_mhz=1200.0, sm_count=78)) is not None


def test_gradients_by_a_kernel_of_their_own_where_additions_are_dear() -> None:
    problem = named("backward d128 b2 h16 s2048 causal").problem(HOPPER)
    assert len(plan_backward(problem, HOPPER, None).records) == 3
    dear, cheap = with_costs("backward", sums=1e3), with_costs("backward", sums=1e-3)
    names = [record.spec.family for record in plan_backward(problem, dear, None).records]
    assert names == ["attn_bwd_prepare_sm80", "attn_bwd_sm90", "attn_bwd_dq_sm90"]
    found = plan_backward(problem, cheap, None)
    assert launched(found) == launched(plan_backward(problem, HOPPER, None))
    assert "number 1 of" in found.selection.why[-1]
    # A kernel that is named is taken, and the rule decides about the rest.
    forced = plan_backward(problem, dear, "attn_bwd_sm80_bf16_d128")
    assert [r.spec.family for r in forced.records][1:] == ["attn_bwd_sm80", "attn_bwd_finish_sm80"]
    # Kernels of other operations do not matter.
    other = plan_backward(problem, dear, "attn_fwd_sm80_bf16_d64")
    assert [record.spec.family for record in other.records] == names


def test_an_order_only_where_it_is_asked_for() -> None:
    for case in (case for case in CASES if isinstance(case, BackwardCase)):
        problem = case.problem(HOPPER)
        for way in asked_of(problem, HOPPER).ways():
            ordered = way.main is not None and way.main.spec.ordered_dq
            # Or where the rule finds it faster.
            assert not ordered or case.deterministic or select_backward(problem, HOPPER).spec.ordered_dq
            has_sums = way.main is not None and way.dq is None and "dq" in case.wanted
            assert ordered or not (case.deterministic and has_sums), "dq would come in no fixed order"


def test_splits_of_decode() -> None:
    problem = DecodeCase(DecodeShape(3, 32, 8, 20000)).problem(HOPPER)
    usual = fields_of_record(plan_decode(problem, HOPPER, None).records[0], DECODE)
    assert isinstance(problem, DecodeProblem)
    for way in decode_ways(problem, HOPPER):
        launches = launches_in(way, problem, HOPPER)
        main, combine = launches.records
        fields, split = fields_of_record(main, DECODE), way.passes[0].split
        assert main.grid == (split.workers, 1, 1)
        assert (fields["num_workers"], fields["combine_split"]) == (split.workers, split.combine_warps)
        assert 1 <= split.workers <= MAX_WORKERS
        assert combine.grid[1] == -(-4 * split.combine_warps // 8)
        assert launches.workspace_bytes >= 2 * split.workers * 8 * (4 * 128 + 8)
    # Splits that cost a lot are few.
    few = plan_decode(problem, with_costs("decode", begin=1e4, latency=1e-6), None)
    assert fields_of_record(few.records[0], DECODE)["num_workers"] < usual["num_workers"]


def test_a_fixed_order_of_decode_has_the_rules_kernel_and_merge() -> None:
    """Neither may depend on the batch: the bits would."""
    for batch in (1, 16, 300):
        shape = DecodeShape(batch, 64, 2, 4096)
        found = decode_ways(DecodeCase(shape, "bf16det").problem(HOPPER), HOPPER)  # type: ignore[arg-type]
        assert {(way.passes[0].tiles, way.passes[0].split.combine_warps) for way in found} == {((2, 2), 4)}
        free = decode_ways(DecodeCase(shape).problem(HOPPER), HOPPER)
        assert {way.passes[0].tiles for way in free} == {(2, 1), (2, 2), (2, 4), (3, 3)}


def test_two_passes_are_chosen_together() -> None:
    case = named("decode b16 h8/1 t8448 d128 p64 shared8192")
    problem = case.problem(HOPPER)
    ways = asked_of(problem, HOPPER).ways()
    assert {len(way.passes) for way in ways} == {2}
    assert len(ways) == 4
    assert len(plan_decode(problem, with_costs("decode"), None).records) == 5


def test_heads_of_a_quantizer_go_together_where_that_pays() -> None:
    problem = named("quantize v d64 b64 h16 s200").problem(HOPPER)

    def groups(target: Target) -> int:
        return int(fields_of_record(plan_quantize(problem, target, None).records[1], QUANTIZE)["num_groups"])

    # One group: 47.2 µs, two as by the rule 49.4 (docs/performance/results/candidates-h100.json).
    assert groups(HOPPER) == 1
    ruled = asked_of(problem, HOPPER).rule(None)
    assert fields_of_record(launches_in(ruled, problem, HOPPER).records[1], QUANTIZE)["num_groups"] == 2
    assert groups(with_costs("quantize", group=1e3)) == 1
    assert groups(with_costs("quantize", group=1e-6, cache=1e6)) == 2


def test_quantizers_inside_attention() -> None:
    forward = every_call.call((4, 4096, 4096, 16, 16), (128, 0), precision=Fp8().precision)

    def ops(target: Target) -> list[str]:
        return [r.spec.op for r in plan_attention(forward, target, None).records if r.spec.op.startswith("quantize")]

    assert ops(HOPPER) == ["quantize_fp8_sums", "quantize_values"]
    assert ops(with_costs("quantize", rows=1e3)) == ["quantize", "quantize"]
    candidate = choices(forward, HOPPER)[0].candidate
    (whole,) = quantizations(candidate, forward)
    found = asked_of_quantizer(whole, HOPPER).ways()
    assert len(found) == 1 + 4 + 4  # values; rows, and V by the kernel for any knobs; that one alone
    for way in found:
        alone = launches_in(QuantizedCandidate(candidate, way, alone=True), forward, HOPPER)
        whole_call = launches_in(QuantizedCandidate(candidate, way), forward, HOPPER)
        assert launched(alone) == launched(whole_call)[: len(alone.records)]
        assert alone.records
        assert whole_call.records[len(alone.records)].spec is candidate.row


def test_a_specialized_quantizer_is_one_of_the_ways() -> None:
    forward = every_call.call((2, 4000, 4000, 8, 8), (128, 0), precision=Int8().precision)
    (whole,) = quantizations(choices(forward, HOPPER)[0].candidate, forward)
    kinds = {way.general.kernel.spec.specialization for way in asked_of_quantizer(whole, HOPPER).ways() if way.general}
    assert kinds == {("sm90", "float8_e4m3"), None}


def test_kernels_that_cannot_be_had_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = named("backward d128 b2 h16 s2048 causal").problem(HOPPER)
    target = with_costs("backward", sums=1e3)

    def lacking(launches: Any, _: Any) -> Any:
        return next((r.spec for r in launches.records if r.spec.family == "attn_bwd_dq_sm90"), None)

    monkeypatch.setattr("omniattn.plan.available.without_binary", lacking)
    found = plan_backward(problem, target, None)
    assert "attn_bwd_dq_sm90" not in [record.spec.family for record in found.records]
    assert "not the fastest way: attn_bwd_dq_sm90_bf16_d128" in found.selection.why[-1]
    # Where none can be had, loading the best one says why.
    monkeypatch.setattr("omniattn.plan.available.without_binary", lambda launches, _: launches.records[0].spec)
    best = plan_backward(problem, target, None)
    assert "attn_bwd_dq_sm90" in [record.spec.family for record in best.records]


@pytest.mark.parametrize("target", GPUS.values(), ids=list(GPUS))
def test_ways_are_of_kernels_that_the_wheel_carries(target: Target) -> None:
    for problem in PROBLEMS:
        if isinstance(problem, BackwardProblem):
            for way in asked_of(problem, target).ways():
                rows = [one.spec for one in (way.main, way.dq) if one is not None]
                assert all(is_carried(row, target.cc) for row in rows)


def test_rows_ahead_of_calls_are_those_of_every_way() -> None:
    calls = ModCalls(ScoreModProblem("score", None, (), grad="1.0f"), "bfloat16", 128)
    by_rule = {row.name for row in rows_of_calls(calls, HOPPER, backward=True)}
    by_model = {row.name for row in rows_of_calls(calls, with_costs("backward"), backward=True)}
    assert by_rule <= by_model


def test_costs_of_other_gpus_go_with_the_clock() -> None:
    rates, measured = Rates((9, 0), 132, 1000.0, 3000.0), Rates((9, 0), 132, 2000.0, 3000.0)
    for start, _ in MODELS.values():
        found = expected_costs(start, rates, measured)
        for field in dataclasses.fields(start):
            factor = 2.0 if field.name in start.of_clock else 1.0
            assert getattr(found, field.name) == factor * getattr(start, field.name)
        assert expected_costs(start, Rates((9, 0), 132), measured) == start


def test_a_users_costs_come_before_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    start: OperationCosts = MODELS["decode"][0]
    own = with_costs("decode", begin=7.0)
    assert costs_of("decode", own) == dataclasses.replace(start, begin=7.0)  # type: ignore[arg-type]
    assert costs_of("backward", own) is None
    assert costs_of("append", own) is None


def test_names_of_kernels_that_cannot_serve_raise_whoever_chooses() -> None:
    problem = named("decode b1 h32/8 t8192 d128 bf16").problem(HOPPER)
    # Another format, one that the registry does not list, none at all.
    for name in ("decode_sm80_bf16_d128_kvint8", "decode_sm80_bf16_d128_kint8_vint4", "nobody"):
        for target in (HOPPER, with_costs("decode")):
            with pytest.raises(ArgumentError, match="OMNIATTN_FORCE_KERNEL"):
                plan_decode(problem, target, name)
