"""``omniattn tune`` on a GPU that is simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omniattn.bench.candidates import CandidateReport
from omniattn.bench.shape_cases import ShapeCase
from omniattn.bench.timing import BenchError
from omniattn.cli import main
from omniattn.plan import tuning
from omniattn.runtime.device import DeviceInfo
from tests.unit.bench.bench_fakes import CpuTorch
from tests.unit.tune.test_tune import USUAL, other_gpu, simulated
from tests.unit.tune.way_fakes import other_costs, simulated_ways

DEVICE = DeviceInfo(0, "Simulated GPU", (9, 0), 132, 227 << 10, 50 << 20, (13, 0), 1980.0, 3352.0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of calls that were measured."""
    measured: list[int] = []

    def run(cases: tuple[Any, ...], **_: Any) -> CandidateReport:
        attention = tuple(case for case in cases if isinstance(case, ShapeCase))
        others = [case for case in cases if not isinstance(case, ShapeCase)]
        measured.append(len(attention))
        ways = simulated_ways(others, other_costs(4), USUAL, tuning.target_of(DEVICE))
        return CandidateReport({"date": "2026-11-26"}, (*simulated(attention, other_gpu(4)), *ways))

    monkeypatch.setattr("omniattn.tune.run.run_candidates", run)
    monkeypatch.setattr("omniattn.cli.tune.require_torch", CpuTorch)
    monkeypatch.setattr("omniattn.runtime.device_info", lambda _: DEVICE)
    return measured


def test_writes_a_file_that_is_used(
    gpu: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    out = tmp_path / "tuning.json"
    assert main(["tune", "--quick", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert 50 <= gpu[0] <= 80
    for word in ("few queries", "packed sequences", "all", "decode", "OMNIATTN_TUNING"):
        assert word in said
    data = json.loads(out.read_text())
    assert data["device"] == "Simulated GPU"
    assert {gain["class"] for gain in data["gains"]} >= {"all", "8 bits", "long sequences"}
    # A fifth of the quantizers' calls are too few. On this GPU, whose numbers are made up, the rule of gradients is not
    # the best: which short calls add to dq in an order was measured on another one.
    assert set(data["operations"]) == {"backward", "decode"}
    gains = {gain["class"]: gain for gain in data["gains"]}
    assert gains["decode"]["after"] < gains["decode"]["before"]
    assert gains["backward"]["after"] < gains["backward"]["before"]
    assert "quantize" not in gains
    monkeypatch.setenv(tuning.VARIABLE, str(out))
    tuning.forget()
    try:
        found = tuning.target_of(DEVICE).tuning
        assert found is not None
        assert {op for op, _ in found.operations} == {"backward", "decode"}
        assert found.coefficients.rows == data["rows"]
        assert main(["info", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tuning"]["digest"] == found.digest
    finally:
        tuning.forget()


def test_words_choose_calls(gpu: list[int], tmp_path: Path) -> None:
    pytest.importorskip("rich")
    assert main(["tune", "--shapes", "d72", "--shapes", "d256", "--out", str(tmp_path / "t.json")]) == 0
    assert 12 <= gpu[0] < 60


@pytest.mark.parametrize(
    "options",
    [["--iters", "0"], ["--out", "/nowhere/at/all.json"], ["--shapes", "d71"], ["--shapes", "d72"], ["--out", "."]],
)
def test_bad_options(options: list[str], gpu: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert main(["tune", *options]) == 2
    assert options[0] in capsys.readouterr().err
    assert gpu == []


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")

    def refuse() -> None:
        raise BenchError("torch is not installed")

    monkeypatch.setattr("omniattn.cli.tune.require_torch", refuse)
    assert main(["tune"]) == 2
    assert "torch is not installed" in capsys.readouterr().err
