"""``omniattn demo`` and ``omniattn verify --cpu`` on the CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import omniattn
from omniattn.cli import main, verify
from omniattn.cli.frameworks import NumpyFramework
from omniattn.data import load_activations
from omniattn.errors import ArgumentError
from omniattn.registry import REGISTRY
from omniattn.runtime.device import DeviceInfo


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel workers of pytest have 80 columns, in which a table's words break."""
    monkeypatch.setenv("COLUMNS", "160")


def test_demo_json_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "demo.png"
    assert main(["demo", "--device", "cpu", "--repeats", "1", "--json", "--plot", str(plot)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["device"] == "CPU"
    layers = {sample.name for sample in load_activations()}
    assert {row["layer"] for row in data["rows"]} == layers
    assert {row["precision"] for row in data["rows"]} >= {"exact"}
    for row in data["rows"]:
        limit = 1e-5 if row["dtype"] == "float32" else 2e-3
        assert 0 < row["relative_l1"] < limit
        assert row["cosine"] > 1 - 1e-5
        assert row["milliseconds"] > 0
        assert row["kernel"]
    content = plot.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_demo_table_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu", "--repeats", "1"]) == 0
    output = capsys.readouterr().out
    assert "relative L1" in output
    assert "SmolLM2 layer" in output


def test_verify_cpu_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    assert [row["kernel"] for row in data["kernels"]] == [
        f"{op}, NumPy {dtype}" for op in ("attention", "merge_states") for dtype in ("float16", "float32")
    ]
    assert all(row["status"] == "passed" and row["worst"] <= 1 for row in data["kernels"])


@pytest.mark.parametrize("wrong", ["nan", "mask", "lse"])
def test_verify_finds_wrong_results(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = omniattn.attention

    def attention(*arrays: object, **options: object) -> tuple[np.ndarray, np.ndarray]:
        if wrong == "mask":
            options = {**options, "mask": None, "causal": False}
        o, lse = right(*arrays, **options)
        if wrong == "nan":
            o[0, 0, 0, 0] = np.nan
        if wrong == "lse":
            lse = lse * np.float32(np.log2(np.e))
        return o, lse

    monkeypatch.setattr(omniattn, "attention", attention)
    assert main(["verify", "--cpu"]) == 1
    output = capsys.readouterr().out
    assert "FAILED" in output
    assert {"nan": "NaN at different places", "mask": "causal", "lse": "lse: max abs"}[wrong] in output


class _FakeLoaded:
    origin = "prebuilt sm_90a"


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy poses as the GPU, so that the logic around the kernels can be tested."""
    monkeypatch.setattr("omniattn.cli.verify.gpu_framework", NumpyFramework)
    info = DeviceInfo(0, "Test GPU", (9, 0), 132, 227 << 10, 50 << 20, (13, 0))
    monkeypatch.setattr("omniattn.runtime.device_info", lambda _: info)
    monkeypatch.setattr("omniattn.runtime.load", lambda spec, ordinal: _FakeLoaded())


def test_verify_forces_each_kernel_and_restores_the_environment(
    pretend_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "before")
    # The numbers are not looked at here, and computing them for every row takes long.
    monkeypatch.setattr(verify, "problem", lambda *_: None)
    seen = []

    def check(framework: object, case: object, numbers: object, dtype: str) -> tuple[float, str]:
        seen.append(os.environ["OMNIATTN_FORCE_KERNEL"])
        return 0.5, ""

    monkeypatch.setattr(verify, "check", check)
    assert main(["verify", "--json"]) == 0
    assert set(seen) == {spec.name for spec in REGISTRY}
    data = json.loads(capsys.readouterr().out)
    assert {row["origin"] for row in data["kernels"]} == {"prebuilt sm_90a"}
    assert os.environ["OMNIATTN_FORCE_KERNEL"] == "before"


def test_verify_kernel_that_takes_no_problem_has_not_passed(
    pretend_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(*_: object) -> tuple[float, str]:
        raise ArgumentError("OMNIATTN_FORCE_KERNEL", "a kernel that can serve this call", "another")

    monkeypatch.setattr(verify, "check", check)
    assert main(["verify", "--kernel", REGISTRY[0].name]) == 1
    assert "no problem could be run" in capsys.readouterr().out


def test_verify_gpu_that_no_kernel_runs_on_has_not_passed(
    pretend_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = DeviceInfo(0, "Old GPU", (7, 5), 40, 64 << 10, 6 << 20, (12, 0))
    monkeypatch.setattr("omniattn.runtime.device_info", lambda _: old)
    assert main(["verify"]) == 1
    assert "not for this GPU" in capsys.readouterr().out
