"""Fits of what work costs in decode, gradients and quantizers, and the file that has it, on simulated GPUs."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from omniattn.bench.candidates import CandidateReport, CandidateResult
from omniattn.bench.way_cases import way_cases
from omniattn.errors import ArgumentError
from omniattn.plan import tuning
from omniattn.problems import Target
from omniattn.problems.costs import COSTS
from omniattn.runtime.device import DeviceInfo
from omniattn.select import model
from omniattn.select.model import Rates, costs_of, expected
from omniattn.tune.operations import FEWEST, MODELS, OperationFit, fit_operations, judged, read_rows
from omniattn.tune.run import TuneResult
from tests.unit.tune.way_fakes import other_costs, simulated_ways

HOPPER = Target((9, 0), 227 << 10, 132)
USUAL = expected(Rates((9, 0), 132))
CASES = way_cases()


@functools.cache
def results(seed: int) -> tuple[CandidateResult, ...]:
    return tuple(simulated_ways(CASES, other_costs(seed), USUAL, HOPPER))


@functools.cache
def fits(seed: int) -> tuple[OperationFit, ...]:
    return fit_operations(results(seed), USUAL, HOPPER)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_fit_finds_what_made_the_times(seed: int) -> None:
    truth = other_costs(seed)
    found = {of.op: of for of in fits(seed)}
    assert list(found) == list(COSTS)
    for op, of in found.items():
        assert of.error < 0.03
        for field in dataclasses.fields(truth[op]):
            made, sought = (getattr(costs, field.name) for costs in (of.costs, truth[op]))
            assert made == pytest.approx(sought, rel=0.35), field.name
    assert found["decode"].calls > 50
    assert found["backward"].calls > 50
    assert found["quantize"].calls > 25


def test_what_is_fitted_chooses_better_than_rules_on_calls_that_it_has_not_seen() -> None:
    found = {of.op: of for of in fits(1)}
    decode = found["decode"]
    assert sum(decode.model) < 0.3 * sum(decode.rule)
    for of in found.values():
        assert len(of.model) == len(of.rule) == len(of.names) == of.calls
        assert all(regret >= 0 for regret in (*of.model, *of.rule))
        assert sum(of.model) <= sum(of.rule) + 0.01 * of.calls
        assert of.text.startswith(f"{of.op} | {of.calls} | ")


def test_only_what_chooses_better_than_its_rule_goes_to_a_file() -> None:
    """Of an operation whose model does no better, held out, the rule stays."""
    decode, backward, quantize = fits(1)
    equal = dataclasses.replace(backward, model=backward.rule)
    worse = dataclasses.replace(quantize, model=tuple(2 * regret + 0.01 for regret in quantize.rule))
    assert [of.is_better for of in (decode, equal, worse)] == [True, False, False]
    found = TuneResult(CandidateReport({}, ()), USUAL, {}, 0.0, (decode, equal, worse))
    data = json.loads(json.dumps(found.to_dict(DeviceInfo(0, "a GPU", (9, 0), 132, 227 << 10, 50 << 20, (13, 0)))))
    assert tuning.parse(data, "t.json")[1:] == (USUAL, (("decode", decode.costs),))
    # What a user reads has all that were measured, with what the file leaves to a rule by the rule.
    gains = {gain["class"]: (gain["before"], gain["after"]) for gain in data["gains"]}
    assert list(gains) == ["decode", "backward", "quantize"]
    assert gains["decode"][1] < gains["decode"][0]
    assert all(before == after for before, after in (gains["backward"], gains["quantize"]))


def test_few_calls_are_not_fitted_and_a_way_without_a_rule_is_no_call() -> None:
    few = [result for result in results(1) if result.op == "decode"][: FEWEST - 1]
    assert fit_operations(few, USUAL, HOPPER) == ()
    # Times of all ways but the one that the rule takes compare it with nothing.
    without = [
        dataclasses.replace(result, ways=tuple(way for way in result.ways if not way.chosen)) for result in results(1)
    ]
    assert fit_operations(without, USUAL, HOPPER) == ()


def test_a_file_of_a_run_is_read_again() -> None:
    made = results(3)
    rows = CandidateReport({}, made).to_dict()["rows"]
    assert {row["operation"] for row in rows} == {"decode", "backward", "append", "quantize"}
    again = read_rows(json.loads(json.dumps(rows)), HOPPER)
    assert [result.case for result in again] == [result.case for result in made]
    for one, other in zip(again, made, strict=True):
        assert [way.features for way in one.ways] == [way.features for way in other.ways]
    # Calls and ways that are none any more do not matter; older files have rows of attention without a field for that.
    odd = [dict(row) for row in rows[:3]]
    odd[0]["case"], odd[1]["way"] = "no such call", "no such way"
    old = {name: value for name, value in rows[0].items() if name != "operation"}
    (found,) = read_rows([*odd, old], HOPPER)
    assert [way.features is None for way in found.ways] == [True, False]


def test_another_gpus_results_judge_what_was_not_fitted_to_them() -> None:
    (decode, *_) = fits(1)
    said = judged(decode, results(1), USUAL, HOPPER)
    assert said.startswith(f"decode | {decode.calls} | ")
    assert said.endswith("not fitted")
    assert judged(decode, [], USUAL, HOPPER) == ""


# The files


def content(**operations: Any) -> dict[str, Any]:
    return {
        "format": tuning.FORMAT, "device": "NVIDIA H100", "cc": [9, 0], "sm_count": 132,
        "coefficients": {name: getattr(USUAL, name) for name in model.NAMES}, "rows": {}, "operations": operations,
    }  # fmt: skip


def test_a_users_file_has_costs_of_operations_or_not() -> None:
    truth = other_costs(4)
    data = content(**{op: dataclasses.asdict(costs) for op, costs in truth.items()})
    _, _, found = tuning.parse(json.loads(json.dumps(data)), "t.json")
    assert dict(found) == truth
    _, _, some = tuning.parse(content(decode=dataclasses.asdict(truth["decode"])), "t.json")
    assert dict(some) == {"decode": truth["decode"]}
    older = content()
    del older["operations"]
    assert tuning.parse(older, "t.json")[2] == ()


@pytest.mark.parametrize(
    ("operations", "said"),
    [
        ({"append": {}}, "operations other than decode, backward, quantize"),
        ({"decode": {"begin": 1.0}}, "coefficients of other names"),
        ({"decode": dataclasses.asdict(MODELS["decode"][0]) | {"begin": -1.0}}, "coefficient begin is -1.0"),
        ({"decode": []}, "coefficients of other names"),
    ],
    ids=str,
)
def test_bad_costs_are_refused(operations: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match="OMNIATTN_TUNING") as caught:
        tuning.parse(content(**operations), "t.json")
    assert said in str(caught.value)


def test_a_data_file_with_costs_switches_an_operation_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = other_costs(5)
    path = tmp_path / "sm_90.json"
    data = json.loads(model._FILE.read_text())
    path.write_text(json.dumps(data | {"operations": {"decode": dataclasses.asdict(truth["decode"])}}))
    caches = (model._file, model._measured, model._expected, model._expected_costs)
    monkeypatch.setattr(model, "_FILE", path)
    try:
        for cache in caches:
            cache.cache_clear()
        assert costs_of("decode", HOPPER) == truth["decode"]
        assert costs_of("backward", HOPPER) is None
        slower = dataclasses.replace(HOPPER, clock_mhz=990.0)
        found = costs_of("decode", slower)
        assert found is not None
        assert found.begin == pytest.approx(2 * truth["decode"].begin)  # type: ignore[union-attr]
    finally:
        monkeypatch.undo()
        for cache in caches:
            cache.cache_clear()
