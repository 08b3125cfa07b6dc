"""The problems of ``omniattn verify`` for KV caches, on the CPU: each row finds itself, and a fault is found."""

from __future__ import annotations

import numpy as np
import pytest

import omniattn
from omniattn.cli import verify_decode
from omniattn.cli.frameworks import NumpyFramework
from omniattn.registry import REGISTRY, KernelSpec

ROWS = [s for s in REGISTRY if s.op in verify_decode.DECODE_OPS and s.dtype == "float16"]


@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.name)
def test_each_row_passes_on_the_reference(spec: KernelSpec) -> None:
    ran, worst, notes = verify_decode.verify_row(NumpyFramework(), spec)
    assert notes == []
    assert ran == 3
    assert worst <= 0.5


@pytest.mark.parametrize("op", ["decode", "append"])
def test_a_wrong_result_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = next(s for s in ROWS if s.op == op)
    right = omniattn.append

    def wrong(cache: omniattn.KVCache, k: np.ndarray, v: np.ndarray, **more: object) -> None:
        right(cache, k, v * np.float16(1.02), **more)

    monkeypatch.setattr(omniattn, "append", wrong)
    _, _, notes = verify_decode.verify_row(NumpyFramework(), spec)
    assert notes


def test_every_operation_of_caches_has_rows() -> None:
    assert {s.op for s in REGISTRY if s.op in verify_decode.DECODE_OPS} == set(verify_decode.DECODE_OPS)
