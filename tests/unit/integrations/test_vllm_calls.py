"""What the backend of vLLM calls, without vLLM, on the CPU; tests/gpu/test_vllm_calls_gpu.py does it on a GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from omniattn.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError  # noqa: E402
from omniattn.integrations import vllm as integration  # noqa: E402
from omniattn.integrations.vllm import calls  # noqa: E402
from tests.vllm_steps import LAYOUTS, Steps, layer_of  # noqa: E402

pytestmark = pytest.mark.frameworks

FP16 = torch.float16
SCALES = (torch.tensor([0.5, 0.25]), torch.tensor([2.0, 1.0]))


def steps(layer: Any, **options: Any) -> Steps:
    return Steps(layer, "cpu", FP16, rows=60, **options)


@pytest.mark.parametrize("order", LAYOUTS)
def test_layouts(order: str) -> None:
    run = steps(layer_of(dim=32), order=order)
    for news in ((("a", 20), ("b", 5)), (("a", 1), ("b", 1), ("c", 33)), (("a", 1), ("b", 3))):
        run.prepare(*news)
        run.run(run.exact())
        run.check(2e-3)


@pytest.mark.parametrize("name", ["fp8", "fp8_per_token_head", "int8_per_token_head"])
def test_formats(name: str) -> None:
    run = steps(layer_of(name, dim=32), scales=SCALES)
    for news in ((("a", 20), ("b", 5)), (("a", 1), ("b", 9))):
        run.prepare(*news)
        run.run(run.exact())
        run.check(4e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_windows_softcap_sinks_and_padding(causal: bool) -> None:
    sinks = torch.arange(8).sub(4).to(FP16)
    run = steps(layer_of(dim=32, window=11, softcap=8.0), sinks=sinks, order="LHBNC")
    for news in ((("a", 40), ("b", 5)), (("c", 17), ("a", 1), ("b", 9))):
        run.prepare(*news)
        run.run(run.whole(causal=causal))  # requests without new tokens, slots of -1, rows of nobody
        run.check(2e-3, causal=causal)
        run.check_padding()


def test_steps_of_nothing() -> None:
    run = steps(layer_of(dim=32))
    run.prepare(("a", 20))
    run.run(run.exact())
    run.prepare()
    for many in (0, 6):
        step = calls.Step(0, 1, 0, run.starts[: many + 1], run.lens[:many], run.table[:many], run.slots[:0], True)
        run.run(step)
        calls.attend_encoder(run.q[:0], run.k[:0], run.v[:0], run.layer, step, False, None, run.out[:0])


def test_another_layouts_pool() -> None:
    run = steps(layer_of(dim=32))
    run.prepare(("a", 3))
    run.pool = run.pool.transpose(1, 2)
    with pytest.raises(ShapeError, match=r"kv_cache.*\(blocks, 2 kv heads, tokens, 64\)"):
        run.run(run.exact())


@pytest.mark.parametrize("name", ["fp8", "fp8_per_token_head", "int8_per_token_head"])
def test_wider_elements_are_no_rows_of_bytes(name: str) -> None:
    run = steps(layer_of(name, dim=32), scales=SCALES)
    run.prepare(("a", 3))
    for dtype in (FP16, torch.int32):
        run.pool = torch.zeros(run.pool.shape, dtype=dtype)
        with pytest.raises(DtypeError, match=rf"'kv_cache'.*one byte with kv_cache_dtype '{name}'"):
            run.run(run.exact())


@pytest.mark.parametrize("name", ["foo", None, "fp8_e5m2", "int4_per_token_head"])
def test_unknown_formats_are_not_16_bits(name: Any) -> None:
    run = steps(layer_of(dim=32))
    run.prepare(("a", 3))
    run.layer = dataclasses.replace(run.layer, kv_cache_dtype=name)
    with pytest.raises(ArgumentError, match=r"'kv_cache_dtype': expected one of auto"):
        run.run(run.exact())


def test_a_pool_that_is_no_tensor() -> None:
    run = steps(layer_of(dim=32))
    run.prepare(("a", 3))
    run.pool = None
    with pytest.raises(ArgumentError, match="'kv_cache': expected a tensor"):
        run.run(run.exact())


def test_formats_that_are_not_served() -> None:
    assert calls.why_not(128, torch.bfloat16, "auto") is None
    assert calls.why_not(256, FP16, "fp8_per_token_head") is None
    assert "int4_per_token_head" in str(calls.why_not(128, FP16, "int4_per_token_head"))
    assert "head_size 520" in str(calls.why_not(520, FP16, "auto"))
    assert "multiples of 16" in str(calls.why_not(88, FP16, "fp8"))
    assert "torch.float32" in str(calls.why_not(128, torch.float32, "auto"))


def test_without_vllm_or_with_an_old_one(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    with pytest.raises(UnsupportedError, match=r"registry.*What works: vllm 0\.31\.0, 0\.32\.0, 0\.33\.0"):
        integration.register()
    integration.plugin()  # vLLM, which others use, goes on
    assert "omniattn is not registered as an attention backend: vLLM without" in caplog.text


def test_nothing_of_vllm_is_imported() -> None:
    code = "import sys, omniattn.integrations.vllm, omniattn.integrations.vllm.calls; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
