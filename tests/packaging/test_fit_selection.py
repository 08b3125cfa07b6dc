"""``build_tools.fit_selection``: from a result file to coefficients, and what is said of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from build_tools import fit_selection
from omniattn.bench.candidates import CandidateReport
from omniattn.bench.document import write
from omniattn.bench.way_cases import way_cases
from omniattn.plan.tuning import parse
from omniattn.tune.operations import OperationFit
from tests.unit.tune.test_tune import CASES, USUAL, other_gpu, simulated
from tests.unit.tune.way_fakes import other_costs, simulated_ways


def result_file(path: Path, device: str, seed: int, attention: bool = True, others: bool = False) -> Path:
    results = simulated(CASES, other_gpu(seed)) if attention else []
    if others:
        target = fit_selection.GPUS[device][0]
        results += simulated_ways(way_cases(), other_costs(seed), USUAL, target)
    report = CandidateReport({"device": device, "date": "2026-11-26"}, tuple(results))
    write(report.to_dict(), path)
    return path


def test_fits_judges_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit_selection, "FOLDER", tmp_path)
    here = result_file(tmp_path / "here.json", "NVIDIA H100 80GB HBM3", 6)
    there = result_file(tmp_path / "there.json", "NVIDIA H200", 6)
    assert fit_selection.main([str(here), "--other", str(there), "--write"]) == 0
    said = capsys.readouterr().out
    assert f"NVIDIA H100 80GB HBM3: {len(CASES)} calls" in said
    assert "NVIDIA H200, not fitted: mean regret" in said
    assert said.count("chosen ways without a time: ") == 2
    data = json.loads((tmp_path / "sm_90.json").read_text())
    gpu, coefficients, operations = parse({**data, "format": 1}, "sm_90.json")
    assert gpu == ("NVIDIA H100 80GB HBM3", (9, 0), 132)
    assert coefficients.launch == pytest.approx(other_gpu(6).launch, rel=0.1)
    assert operations == ()


def test_operations_are_fitted_beside_attention_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file without calls of attention: its coefficients stay, those of the operations come to them."""
    path = tmp_path / "sm_90.json"
    before = json.loads((fit_selection.FOLDER / "sm_90.json").read_text())
    del before["operations"]
    write(before, path)
    monkeypatch.setattr(fit_selection, "FOLDER", tmp_path)
    h100, h200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    here, there = (
        result_file(tmp_path / f"{device}.json", device, 7, attention=False, others=True) for device in (h100, h200)
    )
    assert fit_selection.main([str(here), "--other", str(there), "--write"]) == 0
    said = capsys.readouterr().out
    for op in ("decode", "backward", "quantize"):
        assert f"\n{op} | " in said
        assert f"{h200} | {op} | " in said
    data = json.loads(path.read_text())
    assert {name: value for name, value in data.items() if name != "operations"} == before
    truth, _, found = other_costs(7), *parse({**data, "format": 1}, "sm_90.json")[1:]
    assert dict(found)["decode"].begin == pytest.approx(truth["decode"].begin, rel=0.15)
    # Where a model chooses no better than the rule, what is in the file of the operation goes.
    for better in ({"quantize"}, set[str]()):
        monkeypatch.setattr(OperationFit, "is_better", property(lambda of, better=better: of.op in better))
        assert fit_selection.main([str(here), "--write"]) == 0
        assert set(json.loads(path.read_text()).get("operations", {})) == better
    write(data, path)
    # What was found of operations stays where attention is fitted anew on that GPU, and goes with another one.
    assert fit_selection.main([str(result_file(tmp_path / "again.json", h100, 6)), "--write"]) == 0
    again = json.loads(path.read_text())
    # So does what no fit finds.
    assert {name: again[name] for name in ("operations", "pages", "rules")} == {
        name: data[name] for name in ("operations", "pages", "rules")
    }
    assert fit_selection.main([str(there)]) == 2
    assert "no calls of attention, and sm_90.json is of NVIDIA H100" in capsys.readouterr().err


def test_chosen_ways_without_a_time_are_counted() -> None:
    """Of a call whose fastest way was not measured a regret says nothing."""
    target, case = fit_selection.GPUS["NVIDIA H200"][0], CASES[0]
    (result,) = simulated((case,), USUAL, 0.0)
    assert fit_selection.unmeasured([result], target, USUAL) == []
    without = dataclasses.replace(result, ways=tuple(way for way in result.ways if not way.chosen))
    chosen = next(way.way for way in result.ways if way.chosen)
    assert fit_selection.unmeasured([without], target, USUAL) == [f"{case.long_name}: {chosen}"]


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{")
    assert fit_selection.main([str(tmp_path / "x.json")]) == 2
    assert fit_selection.main([str(result_file(tmp_path / "y.json", "a GPU", 1))]) == 2
    assert "known: NVIDIA H100" in capsys.readouterr().err
    assert fit_selection.main([str(tmp_path / "missing.json")]) == 2
