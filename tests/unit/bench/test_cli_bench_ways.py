"""``omniattn bench candidates`` of decode, append, gradients and quantizers on the CPU: what is checked and timed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import omniattn
from omniattn.bench import candidates as bench
from omniattn.bench import ways
from omniattn.bench.backward_cases import BackwardShape
from omniattn.bench.decode_report import DecodeShape
from omniattn.bench.shape_cases import ShapeCase
from omniattn.bench.way_cases import (
    OPERATIONS,
    AppendCase,
    BackwardCase,
    DecodeCase,
    QuantizeCase,
    WayCase,
    cases_of,
    way_cases,
)
from omniattn.cli import main
from omniattn.errors import UnsupportedError
from omniattn.plan.ways import QuantizedCandidate, asked_of
from omniattn.problems import AttentionProblem, BackwardProblem, QuantizeCall, Target
from tests.unit.bench.bench_fakes import DecodeTorch, WallClock

pytestmark = pytest.mark.frameworks

HOPPER = Target((9, 0), 227 << 10, 132)
SHAPE = ShapeCase(64, 4, (40,) * 2, (40,) * 2, group=2)
CASES: tuple[WayCase, ...] = (
    DecodeCase(DecodeShape(2, 4, 2, 300, 64)),
    DecodeCase(DecodeShape(3, 36, 2, 40, 64, block_size=16, ragged=True)),
    DecodeCase(DecodeShape(3, 4, 2, 48, 64, block_size=16, prefix=32), "int8"),
    DecodeCase(DecodeShape(2, 4, 2, 200, 128), "int4w128"),
    DecodeCase(DecodeShape(2, 40, 2, 200, 128), "bf16det"),
    AppendCase(DecodeShape(2, 2, 2, 40, 64), "int8", 3),
    BackwardCase(BackwardShape(4, 64, (40, 40), True, group=2)),
    BackwardCase(BackwardShape(2, 64, (40, 17), False, packed=True), ("dq",), deterministic=True),
    QuantizeCase("qk", SHAPE, {"dtype": "float8_e4m3", "granularity": "per_block", "smooth_k": False}),
    QuantizeCase("v", SHAPE),
    QuantizeCase("qkv", dataclasses.replace(SHAPE, precision="int8")),
)
#: Problems of the calls that were described, as they come.
DESCRIBED: list[Any] = []


class OnTheCpu:
    """A call whose ways are all the reference; of others than the first one refuses, and one is wrong."""

    def __init__(self, function: Callable[..., Any], arrays: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.function, self.arrays, self.options = function, arrays, options
        self.target, self.seen = HOPPER, list[Any]()
        found = omniattn.explain(function, *arrays, **options).problem
        if isinstance(found, BackwardProblem):
            forward = dataclasses.replace(found.forward, tensor_maps=True)
            found = dataclasses.replace(found, forward=forward)
        if isinstance(found, AttentionProblem):
            found = dataclasses.replace(found, tensor_maps=True)
        self.problem = found
        DESCRIBED.append(found)

    def in_way(self, way: Any) -> Callable[[], list[Any]]:
        key = way.quantizer if isinstance(way, QuantizedCandidate) else way
        self.seen += [key] if key not in self.seen else []
        number = self.seen.index(key)
        if number == 1:
            raise UnsupportedError("it is not prebuilt")
        factor = 2.0 if number == 2 else 1.0

        def run() -> list[Any]:
            if isinstance(self.problem, QuantizeCall):
                return [torch.full((3,), 7 * factor)]
            made = self.function(*self.arrays, **self.options)
            results = list(made) if isinstance(made, tuple) else [] if made is None else [made]
            return [x * factor for x in results]

        return run


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    del DESCRIBED[:]
    monkeypatch.setattr(bench, "require_torch", DecodeTorch)
    monkeypatch.setattr(bench, "TorchClock", WallClock)
    monkeypatch.setattr(ways, "describe_call", lambda function, *arrays, **options: OnTheCpu(function, arrays, options))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.long_name)
@pytest.mark.usefixtures("on_the_cpu")
def test_every_way_is_checked_before_it_is_timed(case: WayCase) -> None:
    (result,) = bench.run_candidates([case], iters=2).results
    assert result.op == case.op
    first, *others = result.ways
    assert first.chosen
    assert first.timing is not None
    assert not any(way.chosen for way in others)
    reasons = [way.reason.split(":")[0] for way in others]
    assert reasons[:2] == ["UnsupportedError", "wrong result"][: len(others)]
    assert not any(reasons[2:])
    assert [way.timing is None for way in others] == [bool(reason) for reason in reasons]
    assert result.regret is not None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.long_name)
@pytest.mark.usefixtures("on_the_cpu")
def test_cases_without_arrays_are_the_calls(case: WayCase) -> None:
    """A file's rows are read without a GPU: what a way has to do must be what it had to do there."""
    bench.run_candidates([case], iters=1)
    if isinstance(case, QuantizeCase) and case.what == "qkv":
        return  # its problem is made of the attention's, as here
    there, here = (asked_of(problem, HOPPER) for problem in (DESCRIBED[-1], case.problem(HOPPER)))
    assert [way.text for way in here.ways()] == [way.text for way in there.ways()]
    assert [here.count(way) for way in here.ways()] == [there.count(way) for way in there.ways()]
    assert here.rule(None).text == there.rule(None).text


@pytest.mark.usefixtures("on_the_cpu")
def test_a_wrong_first_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against fp64: no other way is compared with it."""

    def wrong(self: OnTheCpu, _: Any) -> Callable[[], list[Any]]:
        return lambda: [2.0 * self.function(*self.arrays, **self.options)]

    monkeypatch.setattr(OnTheCpu, "in_way", wrong)
    (result,) = bench.run_candidates(CASES[:1], iters=1).results
    assert all("wrong result: relative L1 1 against fp64" in way.reason for way in result.ways)
    assert result.regret is None


@pytest.mark.usefixtures("on_the_cpu")
def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("omniattn.bench.way_cases.way_cases", lambda: CASES)
    assert main(["bench", "candidates", "--op", "backward,append", "--json", "--iters", "1"]) == 1  # some are wrong
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["operation"] for row in rows} == {"backward", "append"}
    assert {row["case"] for row in rows} == {case.long_name for case in CASES if case.op in ("backward", "append")}
    assert main(["bench", "candidates", "--op", "decode,sideways", "--json"]) == 2
    assert "sideways" in capsys.readouterr().err
    assert main(["bench", "decode", "--op", "decode", "--json"]) == 2
    assert "'bench decode' does not have it" in capsys.readouterr().err


def test_cases_are_named_once_and_of_every_kind() -> None:
    cases = way_cases()
    names = [case.long_name for case in cases]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() for name in names), "patterns are compared in lower case"
    number = {op: sum(case.op == op for case in cases) for op in OPERATIONS}
    assert number == {"attention": 0, "backward": 58, "decode": 61, "append": 20, "quantize": 30}
    for word in ("packed", "deterministic", "int4", "int8", "fp8", "qk", "v", "qkv", "ragged", "q16", "dq", "bf16det"):
        assert sum(word in name.split() for name in names) >= 1, word
    of_all = cases_of(OPERATIONS)
    assert of_all[-len(cases) :] == cases
    assert isinstance(of_all[0], ShapeCase)
    assert cases_of(("append",)) == tuple(case for case in cases if case.op == "append")
