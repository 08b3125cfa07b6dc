"""Problems that ``omniattn verify --soak`` draws for GPUs are legal calls: checked and planned with arrays that pose as
a GPU's, and not run."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

import omniattn
from omniattn import arrays, runtime
from omniattn.errors import UnsupportedError
from omniattn.runtime.device import DeviceInfo
from omniattn.testing.soak import attention, cache_runs
from omniattn.testing.soak.machines import Machine
from omniattn.testing.soak.operations import OPERATIONS, check, problem

pytest.importorskip("ml_dtypes")

#: Functions that end a problem when they have been planned, and those that it goes on after.
LAST = ("attention", "attention_varlen", "attention_backward", "attention_varlen_backward", "merge_states",
        "quantize_qk", "quantize_v", "decode", "attention_with_kvcache", "attention_sparse", "index_logits",
        "top_k", "sparse_blocks")  # fmt: skip
MIDDLE = ("append", "copy_blocks", "copy_recent")


class _PlannedError(Exception):
    """A call has been checked and planned."""


class _PosingMachine(Machine):
    on_cpu = False


@pytest.fixture(params=[(9, 0), (8, 9), (8, 0)], ids=["9.0", "8.9", "8.0"])
def pretend_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    info = DeviceInfo(0, "Test GPU", request.param, 132, 227 << 10, 50 << 20, (13, 0))
    monkeypatch.setattr(runtime, "device_info", lambda ordinal: info)
    monkeypatch.setattr(runtime, "has_tensor_maps", lambda: True)
    describe = arrays.describe

    def on_gpu(value: Any, name: str, *rest: Any) -> Any:
        t = describe(value, name)
        t.device = "cuda"
        return t

    monkeypatch.setattr(arrays, "describe", on_gpu)
    # Of torch and CuPy arrays with any strides a gradient gets a copy; NumPy's would be refused.
    monkeypatch.setattr(arrays, "with_plain_rows", lambda x, *rest: None if x is None else np.ascontiguousarray(x))
    # The planes of a cache are the library's own, and say what they are.
    monkeypatch.setattr(arrays, "require_same_device", lambda tensors: None)
    monkeypatch.setattr(attention, "expected", lambda *a: None)
    for name in ("_compare_tokens", "_compare_untouched"):
        monkeypatch.setattr(cache_runs.Run, name, lambda self: None)
    monkeypatch.setattr(cache_runs.Run, "_copied", _copied)
    for name in (*LAST, *MIDDLE):
        monkeypatch.setattr(omniattn, name, _planned(name, getattr(omniattn, name)))
    return request.param  # type: ignore[no-any-return]


def _copied(self: Any, function: str, planes: tuple[str, ...], pairs: list[tuple[int, int]]) -> None:
    if pairs:  # explain has nothing to say of none
        getattr(omniattn, function)(self.cache, pairs)


def _planned(name: str, function: Any) -> Any:
    def run(*given: Any, **options: Any) -> Any:
        if name.startswith("attention") and options.pop("_forward", False):
            q, v = given[0], given[2]
            o = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
            rows, heads = (-3, -2) if options.get("layout", "NHD") == "NHD" else (-2, -3)
            return o, np.zeros((*q.shape[:-3], q.shape[heads], q.shape[rows]), np.float32)
        omniattn.explain(function, *given, **options)
        if name in LAST:
            raise _PlannedError
        return None

    return run


def test_every_problem_is_a_legal_call(pretend_gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    planned: Counter[str] = Counter()
    refused = 0
    for number in range(400):
        one = problem(9, number, cpu=False)
        shapes = [recipe["shape"] for recipe in one.facts["arrays"].values()]
        if sum(map(math.prod, shapes)) > 1 << 20 or max(one.facts.get("lengths", [0])) > 600:
            continue
        with monkeypatch.context() as patched:
            if one.operation.endswith("backward"):
                name = one.operation.removesuffix("_backward")
                forward = getattr(omniattn, name)
                patched.setattr(omniattn, name, lambda *a, f=forward, **o: f(*a, _forward=True, **o))
            try:
                check(_PosingMachine(), one)
            except UnsupportedError:
                refused += 1
            except _PlannedError:
                planned[one.operation] += 1
            else:
                pytest.fail(f"problem {number} has called nothing")
    assert set(planned) >= set(OPERATIONS) - {"e4m3 arrays"}
    assert sum(planned.values()) > 3 * refused
