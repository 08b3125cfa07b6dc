"""``omniattn bench candidates`` on the CPU: what is checked, timed and said of each way."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from omniattn.bench import candidates as bench
from omniattn.bench.candidate_cases import candidate_cases
from omniattn.bench.shape_cases import ShapeCase
from omniattn.cli import main
from omniattn.errors import UnsupportedError
from omniattn.select import Candidate, candidates, choices
from tests.unit.bench.bench_fakes import CpuTorch, WallClock
from tests.unit.select.shape_plans import GPUS, problem_of

pytestmark = pytest.mark.frameworks

CASES = (ShapeCase(64, 2, (40,) * 2, (40,) * 2), ShapeCase(64, 4, (1, 30, 7), (50, 30, 9), packed="three", group=2))
SLOWEST: dict[str, float] = {}


class OnTheCpu:
    """A call whose ways are all the reference; one refuses, one is wrong, and one gives NaN."""

    def __init__(self, function: Callable[..., Any], arrays: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.function, self.arrays, self.options = function, arrays, options
        case = CASES["cu_seqlens_q" in options]
        self.problem, self.target = problem_of(case), GPUS["H200"]

    def in_way(self, way: Candidate) -> Callable[[], list[Any]]:
        number = candidates(self.problem, self.target).index(way)
        chosen = choices(self.problem, self.target)[0].candidate
        if way != chosen and number == 0:
            raise UnsupportedError("it is not prebuilt")
        factor = 1.0 if way == chosen else {1: 2.0, 2: float("nan")}.get(number, 1.0)
        return lambda: [self.function(*self.arrays, **self.options) * factor]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "require_torch", CpuTorch)
    monkeypatch.setattr(bench, "TorchClock", WallClock)
    monkeypatch.setattr(
        bench, "describe_call", lambda function, *arrays, **options: OnTheCpu(function, arrays, options)
    )
    monkeypatch.setattr("omniattn.bench.way_cases.candidate_cases", lambda: CASES)
    monkeypatch.setattr("omniattn.bench.way_cases.way_cases", lambda: ())


def test_every_way_is_checked_before_it_is_timed(on_the_cpu: None) -> None:
    report = bench.run_candidates(CASES, iters=2)
    assert [result.case for result in report.results] == list(CASES)
    for result in report.results:
        wrong = [way for way in result.ways if way.timing is None]
        assert {way.reason.split(":")[0] for way in wrong} <= {"UnsupportedError", "wrong result"}
        assert len(wrong) >= 2
        assert all(way.reason for way in wrong)
        assert sum(way.chosen for way in result.ways) == 1
        assert len(result.ways) > len(wrong)
        assert result.regret is not None
        assert result.regret >= 0
        assert result.timed[0][0] <= result.timed[-1][0]
    text = "\n".join(report.summary())
    assert "slower than the fastest way in the mean" in text
    assert "wrong result: relative L1 nan" in text
    assert "not prebuilt" in text


def test_command(on_the_cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "candidates", "--json", "--iters", "1", "--case", "packed"]) == 1  # some are wrong
    data = json.loads(capsys.readouterr().out)
    assert data["bench"] == "candidates"
    assert {row["case"] for row in data["rows"]} == {CASES[1].long_name}
    assert all((row["us"] is None) == bool(row["reason"]) for row in data["rows"])
    assert main(["bench", "candidates", "--markdown", "--iters", "1"]) == 1
    assert "| d64 b2 h2 s40 full |" in capsys.readouterr().out
    assert main(["bench", "candidates", "--precision", "int8"]) == 2
    assert "each call has its own" in capsys.readouterr().err


def test_cases_are_named_once_and_of_every_kind() -> None:
    cases = candidate_cases()
    names = [case.long_name for case in cases]
    assert len(set(names)) == len(names)
    for word in ("causal", "packed", "softcap30", "bool-mask", "key-padding", "bf16-bias", "int8", "fp8", "operands"):
        assert sum(word in name.split() for name in names) >= 4, word
    assert {case.head_dim for case in cases} >= {40, 64, 72, 80, 96, 112, 128, 160, 192, 256}
