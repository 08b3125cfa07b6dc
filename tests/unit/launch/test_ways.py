"""A call in a way that was not chosen: what is launched, and what cannot be asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import arrays, runtime
from omniattn.errors import ArgumentError
from omniattn.plan.engine import PLANS
from omniattn.plan.ways import describe_call
from omniattn.runtime.device import DeviceInfo
from omniattn.select import candidates, choices

Q, KV = np.ones((2, 5, 4, 64), np.float16), np.ones((2, 700, 2, 64), np.float16)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arrays pass for a GPU's, and programs are loaded and launched by nobody; the names of their kernels."""
    names: list[str] = []
    describe = arrays.describe

    def on_gpu(value: Any, name: str, *rest: Any) -> Any:
        t = describe(value, name)
        t.device = "cuda"
        return t

    class Program:
        def __init__(self, records: Any, *_: Any) -> None:
            self.names = [record.spec.name for record in records]

        def launch(self, *_: Any) -> None:
            names.extend(self.names)

    monkeypatch.setattr(arrays, "describe", on_gpu)
    monkeypatch.setattr(arrays, "prepare", lambda *_: 0)
    monkeypatch.setattr(arrays, "release", lambda *_: None)
    monkeypatch.setattr(arrays, "finish", lambda t, _: t)
    monkeypatch.setattr(runtime, "has_tensor_maps", lambda: True)
    info = DeviceInfo(0, "Fake Hopper", (9, 0), 132, 227 << 10, 50 << 20, (13, 0))
    monkeypatch.setattr(runtime, "device_info", lambda _: info)
    monkeypatch.setattr("omniattn.plan.engine.Program", Program)
    return names


@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}, {"precision": "int8"}], ids=str)
def test_every_way_launches_its_own_kernels(options: dict[str, Any], loaded: list[str]) -> None:
    described = describe_call(oa.attention, Q, KV, KV, **options)
    assert described.target.cc == (9, 0)
    assert (described.problem.seqlen_q, described.problem.seqlen_k) == (5, 700)
    ways = candidates(described.problem, described.target)
    assert len(ways) > 1
    known = len(PLANS)
    for way in ways:
        run = described.in_way(way)
        del loaded[:]
        (o,) = run()
        assert tuple(o.shape) == Q.shape
        assert way.row.name in loaded
    assert len(PLANS) == known, "ways that are tried are no plans of calls"
    assert choices(described.problem, described.target)[0].candidate.row in {way.row for way in ways}


def test_calls_without_ways() -> None:
    with pytest.raises(ArgumentError, match="arrays on a GPU"):
        describe_call(oa.attention, Q, KV, KV)
    with pytest.raises(ArgumentError, match="arrays on a GPU"):
        describe_call(oa.quantize_v, KV)
