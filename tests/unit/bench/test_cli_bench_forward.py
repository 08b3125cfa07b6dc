"""The forward benchmark on torch tensors on the CPU: everything but the device clock."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest

import omniattn
from omniattn.bench import ForwardShape, anchors, forward, host, sustained
from omniattn.bench.ceilings import Ceilings
from omniattn.bench.timing import BenchError, require_torch
from omniattn.cli import main
from tests.unit.bench.bench_fakes import CpuTorch, WallClock

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

SHAPES = (ForwardShape(2, 3, 96, 32, False), ForwardShape(2, 3, 96, 32, True))


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "require_torch", CpuTorch)
    monkeypatch.setattr(host, "require_torch", CpuTorch)
    monkeypatch.setattr(sustained, "TorchClock", WallClock)
    monkeypatch.setattr(forward, "measure_ceilings", lambda *_: Ceilings(100.0, 1.0))
    monkeypatch.setattr("omniattn.cli.bench.filter_shapes", lambda _: SHAPES)


def test_contenders_run_are_checked_and_compared(on_the_cpu: None) -> None:
    report = forward.run_forward(SHAPES, anchor="fa2", iters=3)
    assert report.shapes == SHAPES
    for shape in SHAPES:
        ours, anchor = report.find(shape, "omniattn"), report.find(shape, "fa2")
        assert ours is not None
        assert anchor is not None
        assert ours.reason == anchor.reason == ""
        assert ours.relative_l1 is not None
        assert 0 < ours.relative_l1 < 0.01
        assert report.ratio(anchor) == 1.0
        cudnn = report.find(shape, "cudnn")
        assert cudnn is not None
        assert cudnn.timing is None
        assert cudnn.reason.startswith("RuntimeError: ")
    assert "flash-attn" in report.missing.get("flash_attn", "flash-attn")
    assert report.environment["torch"] == importlib.metadata.version("torch")


def test_only_what_was_asked_for_runs(on_the_cpu: None) -> None:
    report = forward.run_forward(SHAPES[:1], anchor="fa2", iters=1, contenders=[])
    assert report.contenders == ("omniattn", "fa2")


def test_an_anchor_that_is_not_installed_is_an_error(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors.Contender, "missing", lambda self: "x is not installed" if self.key == "fa3" else None)
    with pytest.raises(BenchError, match="'fa3' cannot run: x is not installed"):
        forward.run_forward(SHAPES, anchor="fa3", iters=1)


def test_modules_within_packages_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fa4 = next(contender for contender in anchors.CONTENDERS if contender.key == "fa4")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert fa4.missing() == "flash-attn-4 is not installed"
    for made in ("flash_attn", "flash_attn/cute"):
        (tmp_path / made).mkdir()
        (tmp_path / made / "__init__.py").touch()
        importlib.invalidate_caches()
        try:
            assert fa4.missing() == (None if made.endswith("cute") else "flash-attn-4 is not installed")
        finally:
            sys.modules.pop("flash_attn", None)  # looking for the module imports the package around it


def test_a_wrong_result_gets_no_time_and_fails_the_command(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = omniattn.attention
    monkeypatch.setattr(omniattn, "attention", lambda q, k, v, *, causal: right(q, k, v))  # the mask is left out
    code = main(["bench", "--anchor", "fa2", "--only", "fa2", "--iters", "1", "--json"])
    assert code == 1
    full, causal = (row for row in json.loads(capsys.readouterr().out)["rows"] if row["contender"] == "omniattn")
    assert full["reason"] == ""
    assert "wrong result: relative L1" in causal["reason"]
    assert causal["median_us"] is None


def test_nan_is_a_wrong_result(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omniattn, "attention", lambda q, k, v, *, causal: q * float("nan"))
    report = forward.run_forward(SHAPES[:1], anchor="fa2", iters=1, contenders=[])
    ours = report.find(SHAPES[0], "omniattn")
    assert ours is not None
    assert ours.timing is None


def test_own_errors_are_not_hidden(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise omniattn.errors.UnsupportedError("broken")

    monkeypatch.setattr(omniattn, "attention", broken)
    with pytest.raises(omniattn.errors.UnsupportedError, match="broken"):
        forward.run_forward(SHAPES, anchor="fa2", iters=1)


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_tables(form: str, on_the_cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--markdown"] if form == "markdown" else []
    assert main(["bench", "--anchor", "fa2", "--iters", "2", *options]) == 0
    output = capsys.readouterr().out
    assert "torch FA2" in output
    assert "d32 s96 causal" in output
    assert "geometric mean" in output
    assert "bf16 matrix product 8192³ 100 TFLOP/s" in output


def test_host_times_every_public_function(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CALLS_PER_BATCH", 2)
    timings = host.warm_calls()
    names = [timing.name for timing in timings]
    assert names[0] == "attention"
    operations = {re.split(",", name)[0] for name in names}
    assert operations == {
        "attention", "attention_varlen", "attention_with_kvcache", "decode", "append", "merge_states", "quantize_qk",
        "quantize_v", "torch SDPA",
    }  # fmt: skip
    assert {"attention, mask", "attention, int8", "decode, paged int8", "append, paged int8"} <= set(names)
    assert timings[-1].row(timings)["ratio_to_sdpa"] == timings[0].row(timings)["ratio_to_attention"] == 1.0


def test_import_time_is_measured_in_a_fresh_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_IMPORT_RUNS", 1)
    timing = host.import_time()
    assert 0 <= timing.numpy_ms < timing.total_ms
    monkeypatch.setattr(host, "_IMPORT_PROGRAM", "raise SystemExit('no such package')")
    with pytest.raises(BenchError, match="no such package"):
        host.import_time()


def test_torch_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchError) as caught:
        require_torch()
    assert f"torch {torch.__version__}" in str(caught.value)
    assert "finds no CUDA device" in str(caught.value)
