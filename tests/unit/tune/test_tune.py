"""The model of costs, its fit, the file of ``omniattn tune`` and its use, on GPUs that are simulated."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omniattn.bench.candidate_cases import candidate_cases
from omniattn.bench.candidates import CandidateReport, CandidateResult, WayResult
from omniattn.bench.shape_cases import ShapeCase
from omniattn.bench.timing import BenchError, Timing
from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.plan import tuning
from omniattn.plan.attention import plan_attention
from omniattn.problems import AttentionProblem, Target
from omniattn.problems.target import Coefficients, Tuning
from omniattn.registry import REGISTRY
from omniattn.runtime.device import DeviceInfo
from omniattn.select import candidates, choices, ranked
from omniattn.select.cost import cost_us
from omniattn.select.features import features, tile_steps
from omniattn.select.model import NAMES, Rates, coefficients_of, expected
from omniattn.tune.fit import Measured, fit, fit_rows, judge
from omniattn.tune.run import class_of, fitted, measured
from tests.unit.select.every_call import call
from tests.unit.select.shape_plans import GPUS, problem_of

HOPPER = GPUS["H200"]
DEVICE = DeviceInfo(0, "NVIDIA H100", (9, 0), 132, 227 << 10, 50 << 20, (13, 0))
USUAL = expected(Rates((9, 0), 132))
#: Without factors of kernels.
PLAIN = dataclasses.replace(USUAL, rows={})
CASES = candidate_cases()[::9]


@pytest.fixture(autouse=True)
def no_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    tuning.forget()
    yield
    tuning.forget()


def other_gpu(seed: int) -> Coefficients:
    """One on which everything costs something else, by up to half."""
    draw = random.Random(seed)
    return Coefficients(**{name: getattr(USUAL, name) * math.exp(draw.uniform(-0.4, 0.4)) for name in NAMES})


def simulated(
    cases: tuple[ShapeCase, ...], truth: Coefficients, noise: float = 0.02, seed: int = 1
) -> list[CandidateResult]:
    """Results of a run on such a GPU, with what is chosen on one that was measured."""
    draw, results = random.Random(seed), []
    for case in cases:
        problem = problem_of(case)
        chosen = choices(problem, HOPPER)[0].candidate
        ways = []
        for way in dict.fromkeys((chosen, *candidates(problem, HOPPER))):
            work = features(way, problem, HOPPER)
            us = cost_us(work, truth) * math.exp(draw.gauss(0.0, noise))
            ways.append(WayResult(way.text, Timing((us,)), 0.0, way == chosen, work))
        results.append(CandidateResult(case, tuple(ways)))
    return results


# The model


def test_a_step_more_and_a_tile_more_take_longer() -> None:
    """Of the same way: more keys, more heads, more queries, a mask to prepare."""

    def us(shape: tuple[int, int, int, int, int], **changes: Any) -> float:
        problem = call(shape, (128, 0), **changes)
        way = choices(call((2, 1000, 1000, 8, 8), (128, 0), **changes), HOPPER)[0].candidate
        return cost_us(features(way, problem, HOPPER), USUAL)

    base = us((2, 1000, 1000, 8, 8))
    assert us((2, 1000, 4000, 8, 8)) > base
    assert us((2, 1000, 1000, 64, 64)) > base
    assert us((2, 8000, 1000, 8, 8)) > base
    assert us((2, 1000, 1000, 8, 8), right=0) < base
    assert us((2, 1000, 1000, 8, 8), mask="bool") > base


def test_times_are_those_of_results_in_docs() -> None:
    """Measured on an H200 (`candidates-h200.json`), which the coefficients are not fitted to: a check of units."""
    times = {(4, 4096, 4096, 16, 16): 688.0, (1, 1024, 1024, 8, 8): 18.2, (16, 1024, 1024, 16, 16): 205.0}
    for shape, us in times.items():
        found = ranked(call(shape, (128, 0)), HOPPER)[0][0]
        assert found == pytest.approx(us, rel=0.15)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.long_name)
def test_every_way_has_a_time(case: ShapeCase) -> None:
    problem = problem_of(case)
    ways = ranked(problem, HOPPER)
    assert all(math.isfinite(us) and us > 0 for us, _ in ways)
    assert [us for us, _ in ways] == sorted(us for us, _ in ways)
    assert ranked(problem, HOPPER) == ways


def test_steps_are_those_of_the_kernels() -> None:
    """One by one for few tiles, by a sample of many: within a percent of the pairs that are visible."""
    for right, left in ((-1, -1), (0, -1), (0, 100), (50, 300)):
        count, total, most = tile_steps(3000, 3000, 1, 64, 64, left, right)
        own = []
        for m0 in range(0, 3000, 64):
            last = min(m0 + 64, 3000) - 1
            end = 3000 if right < 0 else min(last + right + 1, 3000)
            begin = 0 if left < 0 else max(m0 - left, 0)
            own.append(-(-end // 64) - begin // 64)
        assert (count, most) == (len(own), max(own))
        assert total == pytest.approx(sum(own), rel=0.03)


def test_unmeasured_gpus_scale_by_their_rates() -> None:
    slow = expected(Rates((8, 9), 58, 2040.0, 300.0))
    assert slow.memory == pytest.approx(USUAL.memory * 300.0 / 3352.0)
    assert slow.launch == USUAL.launch
    assert slow.exp < USUAL.exp
    assert expected(Rates((8, 9), 58)).sync_product == pytest.approx(USUAL.sync_product * 2458 / 1024)
    assert expected(Rates((9, 0), 132, 1980.0, 3352.0)) == USUAL
    assert expected(Rates((7, 7), 10)).product == USUAL.product
    for newer, known in (((8, 7), (8, 6)), ((10, 3), (10, 0)), ((12, 1), (12, 0))):
        assert expected(Rates(newer, 10)) == expected(Rates(known, 10))
    # With an eleventh of the bandwidth, fewer CTAs are enough to read K and V.
    few = call((4, 1, 8192, 32, 8), (128, 0))
    tuned = (dataclasses.replace(GPUS["A100"], tuning=Tuning(c, "a GPU", "0" * 64)) for c in (USUAL, slow))
    fast, starved = (ranked(few, target)[0][0] for target in tuned)
    assert starved > 4 * fast


def test_a_gpu_has_the_rates_that_its_driver_says() -> None:
    device = dataclasses.replace(DEVICE, clock_mhz=1755.0, memory_gb_s=2039.0)
    target = tuning.target_of(device)
    assert (target.clock_mhz, target.memory_gb_s) == (1755.0, 2039.0)
    assert coefficients_of(target) == expected(Rates((9, 0), 132, 1755.0, 2039.0)) != USUAL
    assert coefficients_of(HOPPER) == USUAL
    other = other_gpu(1)
    assert coefficients_of(dataclasses.replace(target, tuning=Tuning(other, "a GPU", "0" * 64))) == other


@pytest.mark.parametrize(
    ("changes", "scaled"),
    [
        ({}, False), ({"clock_mhz": 1979.0}, False), ({"clock_mhz": 1200.0}, True), ({"sm_count": 114}, True),
        ({"memory_gb_s": 2039.0}, True), ({"cc": (8, 0)}, True),
        ({"cc": (8, 0), "tuning": Tuning(USUAL, "a GPU", "0" * 64)}, False),
    ],
    ids=str,
)  # fmt: skip
def test_explain_says_whose_coefficients_were_scaled(changes: dict[str, Any], scaled: bool) -> None:
    target = dataclasses.replace(HOPPER, **changes)
    why = "\n".join(choices(call((2, 1000, 1000, 8, 8), (128, 0)), target)[0].why)
    assert ("not measured on this GPU: scaled from NVIDIA H" in why) == scaled
    assert ("tuned on this GPU" in why) == ("tuning" in changes)


# The fit


def test_fit_finds_what_made_the_times() -> None:
    truth = other_gpu(3)
    calls = [measured(result) for result in simulated(CASES, truth)]
    found = fit(calls, PLAIN)
    before, after = judge(calls, PLAIN), judge(calls, found)
    assert found.apart == PLAIN.apart, "it comes from measurements of orders alone"
    assert after.error < 0.03 < before.error
    assert after.mean < 0.01
    assert after.mean <= before.mean + 0.001
    assert after.worst[0] <= 0.1
    assert judge(calls, truth).mean < 0.01


def with_factors(factors: dict[str, float], seed: int = 1) -> list[Measured]:
    """Calls on a GPU on which few kernels take longer or shorter than the model says."""
    truth = dataclasses.replace(USUAL, rows=factors)
    return [measured(result) for result in simulated(CASES, truth, noise=0.005, seed=seed)]


#: Of the times' noise: what holds of them holds of every draw.
SEEDS = (1, 2, 3, 9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "factors",
    [
        {"attn_fwd_sm90_d128_m192n64": 1.13},
        {"attn_fwd_sm80_d128_split": 0.8},
        {"attn_fwd_sm90_d128_m128n128": 1.18, "attn_fwd_sm90_d64_m64n64": 0.85},
    ],
    ids=str,
)
def test_factors_of_kernels_are_found(factors: dict[str, float], seed: int) -> None:
    """Not only as far as choices need them: the factors are those of the kernels' times."""
    calls = with_factors(factors, seed)
    found = fit_rows(calls, PLAIN)
    assert found.rows == pytest.approx(factors)
    # What is left is what noise makes of ways that are as fast as each other.
    assert judge(calls, found).mean < 0.2 * judge(calls, PLAIN).mean
    assert dataclasses.replace(found, rows={}) == PLAIN, "nothing else is fitted"


@pytest.mark.parametrize("seed", SEEDS)
def test_no_factors_where_the_model_is_right(seed: int) -> None:
    assert fit_rows(with_factors({}, seed), PLAIN).rows == {}
    assert fit_rows([], PLAIN).rows == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_factor_that_helps_one_call_alone_is_not_kept(seed: int) -> None:
    calls = with_factors({"attn_fwd_sm90_d128_m192n64": 1.25}, seed)
    helped = [call for call in calls if judge([call], PLAIN).mean > 0.02]
    assert len(helped) >= 2
    others = [call for call in calls if call not in helped]
    assert fit_rows([helped[0], *others], PLAIN).rows == {}
    assert list(fit_rows([*helped[:2], *others], PLAIN).rows) == ["attn_fwd_sm90_d128_m192n64"]


def test_a_factor_that_harms_as_many_calls_is_not_kept() -> None:
    """Of the same calls on two GPUs: on one the kernel takes longer than the model says, on the other less."""
    slow, fast = (with_factors({"attn_fwd_sm90_d128_m192n64": factor}) for factor in (1.25, 0.8))
    assert fit_rows(slow, PLAIN).rows
    assert fit_rows([*slow, *fast], PLAIN).rows == {}


def test_factors_multiply_a_kernels_times_of_both_dtypes() -> None:
    for dtype in ("bfloat16", "float16"):
        problem = dataclasses.replace(call((2, 1000, 1000, 8, 8), (128, 0)), dtype=dtype)
        for way in candidates(problem, HOPPER):
            work = features(way, problem, HOPPER)
            other = dataclasses.replace(PLAIN, rows={way.row.twin: 1.5})
            assert work.row == way.row.twin
            assert cost_us(work, other) == pytest.approx(1.5 * cost_us(work, PLAIN))
            assert cost_us(work, dataclasses.replace(PLAIN, rows={"another": 1.5})) == cost_us(work, PLAIN)


def test_rows_of_both_dtypes_are_twins() -> None:
    rows: dict[str, list[str]] = {}
    for row in REGISTRY:
        if row.op in ("attention", "attention_split"):
            assert not set(row.twin.split("_")) & {"fp16", "bf16"}
            rows.setdefault(row.twin, []).append(row.dtype)
    assert all(sorted(dtypes) == ["bfloat16", "float16"] for dtypes in rows.values())
    # Factors of kernels that there are no more would do nothing.
    assert set(USUAL.rows) <= set(rows)


def test_gains_are_of_calls_that_were_not_fitted() -> None:
    results = simulated(CASES, other_gpu(7))
    found = fitted(CandidateReport({"date": "2026-11-26"}, tuple(results)), results, USUAL)
    of_all = found.gains["all"]
    assert of_all.calls == len(results)
    assert of_all.after <= of_all.before
    assert sum(gain.calls for name, gain in found.gains.items() if name != "all") == of_all.calls
    assert {"long sequences", "few queries", "packed sequences"} <= set(found.gains)


def test_too_few_calls_are_refused() -> None:
    results = simulated(CASES[:3], other_gpu(5))
    with pytest.raises(BenchError, match="3 calls have times"):
        fitted(CandidateReport({}, tuple(results)), results, USUAL)


def test_every_call_has_a_class() -> None:
    classes = {class_of(case) for case in candidate_cases()}
    assert len(classes) == 7


# The file


def numbers(**changes: Any) -> dict[str, Any]:
    return {name: getattr(USUAL, name) for name in NAMES} | changes


def content(**changes: Any) -> dict[str, Any]:
    data = {
        "format": tuning.FORMAT, "device": "NVIDIA H100", "cc": [9, 0], "sm_count": 132,
        "coefficients": numbers(), "rows": dict(USUAL.rows),
    }  # fmt: skip
    return {**data, **changes}


def write(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_a_file_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = content(coefficients=numbers(merge=1e6))
    monkeypatch.setenv(tuning.VARIABLE, str(write(tmp_path / "t.json", slow)))
    target = tuning.target_of(DEVICE)
    assert target.tuning is not None
    few = call((1, 16, 32768, 32, 8), (128, 0))
    monkeypatch.setattr("omniattn.plan.attention.without_binary", lambda *_: None)
    # A second kernel takes a second: one is enough.
    plan = plan_attention(few, target, None)
    assert len(plan.records) == 1
    assert len(plan_attention(few, HOPPER, None).records) == 2
    why = "\n".join(plan.selection.why)
    assert "ways by the model" in why
    assert f"tuned on this GPU: NVIDIA H100, digest {target.tuning.digest[:12]}" in why
    # A kernel that is named is taken.
    name = "attn_fwd_sm90_bf16_d128_m128n128_split"
    assert plan_attention(few, target, name).selection.spec.name == name
    with pytest.raises(ArgumentError, match="OMNIATTN_FORCE_KERNEL"):
        plan_attention(few, target, "no_such_kernel")


def test_a_factor_in_a_file_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = call((2, 1000, 1000, 8, 8), (128, 0))
    usual = choices(problem, HOPPER)[0].candidate.row
    path = tmp_path / "t.json"
    monkeypatch.setenv(tuning.VARIABLE, str(write(path, content(rows={}))))
    without = tuning.target_of(DEVICE).tuning
    monkeypatch.setenv(tuning.VARIABLE, str(write(path, content(rows={usual.twin: 10.0}))))
    tuning.forget()
    target = tuning.target_of(DEVICE)
    assert choices(problem, target)[0].candidate.row != usual
    assert target.tuning is not None
    assert without is not None
    assert (target.tuning.digest, target.tuning.coefficients) != (without.digest, without.coefficients)


def test_a_fit_is_what_its_file_says() -> None:
    results = simulated(CASES, dataclasses.replace(other_gpu(3), rows={"attn_fwd_sm80_d128_split": 0.7}))
    found = fitted(CandidateReport({"date": "2026-11-26"}, tuple(results)), results, USUAL)
    assert "attn_fwd_sm80_d128_split" in found.coefficients.rows
    data = json.loads(json.dumps(found.to_dict(DEVICE)))
    gpu, coefficients, operations = tuning.parse(data, "t.json")
    assert gpu == (DEVICE.name, DEVICE.cc, DEVICE.sm_count)
    assert coefficients == found.coefficients
    assert operations == ()


def test_a_kernel_that_cannot_be_had_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    target = dataclasses.replace(HOPPER, tuning=Tuning(USUAL, "a GPU", "0" * 64))
    problem = call((2, 1000, 1000, 8, 8), (128, 0))
    first, second = choices(problem, target)[:2]

    def lacking(launches: Any, _: Any) -> Any:
        spec = launches.selection.spec
        return spec if spec == first.candidate.row else None

    monkeypatch.setattr("omniattn.plan.attention.without_binary", lacking)
    found = plan_attention(problem, target, None)
    assert found.selection.spec != first.candidate.row
    assert f"not the fastest way: {first.candidate.row.name}" in found.selection.why[-1]
    assert second is not None


def test_what_no_kernel_serves_is_refused_as_ever() -> None:
    target = dataclasses.replace(GPUS["A100"], tuning=Tuning(USUAL, "a GPU", "0" * 64))
    with pytest.raises(UnsupportedError):
        choices(call((1, 64, 64, 2, 2), (520, 0)), target)


def test_every_call_of_the_measured_ones_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniattn.plan.attention.without_binary", lambda *_: None)
    for gpu, target in GPUS.items():
        tuned = dataclasses.replace(target, tuning=Tuning(expected(Rates(target.cc, target.sm_count)), gpu, "0" * 64))
        for case in CASES:
            problem: AttentionProblem = problem_of(case)
            served = case.precision != "fp8" or gpu != "A100"
            if served and not case.operands:
                assert plan_attention(problem, tuned, None).records


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "no JSON object"),
        (content(format=0), "format 0, not 1"),
        (content(cc="9.0"), "cc '9.0'"),
        (content(coefficients={}), "coefficients of other names"),
        (content(sm_count="132"), "sm_count '132'"),
        (content(coefficients=numbers(launch=float("nan"))), "coefficient launch is nan"),
        (content(coefficients=numbers(launch=-1.0)), "coefficient launch is -1.0"),
        (content(coefficients=numbers(l2=True)), "coefficient l2 is True"),
        (content(coefficients=numbers(l2="fast")), "coefficient l2 is 'fast'"),
        (content(coefficients=numbers(rows={})), "coefficients of other names"),
        ({name: value for name, value in content().items() if name != "rows"}, "rows None"),
        (content(rows=[]), "rows []"),
        (content(rows="attn_fwd_sm80_d64"), "rows 'attn_fwd_sm80_d64'"),
        (content(rows={"attn_fwd_sm80_d64": float("nan")}), "coefficient attn_fwd_sm80_d64 is nan"),
        (content(rows={"attn_fwd_sm80_d64": 0.0}), "coefficient attn_fwd_sm80_d64 is 0.0"),
        (content(rows={"attn_fwd_sm80_d64": -1.0}), "coefficient attn_fwd_sm80_d64 is -1.0"),
        (content(rows={"attn_fwd_sm80_d64": True}), "coefficient attn_fwd_sm80_d64 is True"),
        (content(rows={"attn_fwd_sm80_d64": None}), "coefficient attn_fwd_sm80_d64 is None"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_files_are_refused(data: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(write(tmp_path / "t.json", data)))
    with pytest.raises(ArgumentError, match="OMNIATTN_TUNING") as caught:
        tuning.tuning_for(DEVICE)
    assert said in str(caught.value)


def test_no_file_and_no_json_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "missing.json"))
    with pytest.raises(ArgumentError, match="a file that exists"):
        tuning.tuning_for(DEVICE)
    (tmp_path / "t.json").write_text("{")
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "t.json"))
    with pytest.raises(ArgumentError, match=r"t\.json"):
        tuning.tuning_for(DEVICE)


@pytest.mark.parametrize("other", [{"cc": [8, 6]}, {"device": "NVIDIA H200"}, {"sm_count": 114}], ids=str)
def test_a_file_of_another_gpu_is_not_used_and_that_is_said(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(write(tmp_path / "t.json", content(**other))))
    said: list[str] = []
    monkeypatch.setattr("omniattn.plan.tuning.log.warn_once", said.append)
    assert tuning.tuning_for(DEVICE) is None
    assert "is not used on NVIDIA H100 (compute capability 9.0, 132 SMs)" in said[0]


def test_without_the_variable_nothing_changes() -> None:
    assert tuning.tuning_for(DEVICE) is None
    assert Target((9, 0), 227 << 10, 132).tuning is None
