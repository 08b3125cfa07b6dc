"""``omniattn verify`` around the kernels: which rows run, forced, in what order, with numbers from where."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from omniattn.cli import main, verify
from omniattn.errors import ArgumentError, CompileError
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.runtime.device import DeviceInfo
from omniattn.runtime.loader import Resolution
from omniattn.testing import ahead as ahead_module
from omniattn.testing import rows
from omniattn.testing.ahead import Ahead, in_order
from omniattn.testing.cases import CallCase
from omniattn.testing.frameworks import NumpyFramework
from omniattn.testing.rows import FORCE, cases_of, run_row

HOPPER = (9, 0)


class _FakeLoaded:
    origin = "prebuilt sm_90a"


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy poses as the GPU, so that the logic around the kernels can be tested."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("omniattn.cli.verify.gpu_framework", NumpyFramework)
    info = DeviceInfo(0, "Test GPU", HOPPER, 132, 227 << 10, 50 << 20, (13, 0))
    monkeypatch.setattr("omniattn.runtime.device_info", lambda _: info)
    monkeypatch.setattr("omniattn.runtime.load", lambda spec, ordinal: _FakeLoaded())


class _Case:
    """Compares nothing, and says which row it was forced for."""

    name = "case"

    def __init__(self, seen: list[str], raises: Exception | None = None) -> None:
        self.seen, self.raises = seen, raises

    def prepare(self) -> int:
        assert os.environ.get(FORCE) in (None, "before")
        return 7

    def check(self, framework: object, prepared: int) -> tuple[float, str]:
        assert prepared == 7
        self.seen.append(os.environ[FORCE])
        if self.raises is not None:
            raise self.raises
        return 0.5, ""


def _with_case(monkeypatch: pytest.MonkeyPatch, case: _Case) -> None:
    for module in (rows, ahead_module):
        monkeypatch.setattr(module, "cases_of", lambda spec: (case,))


@pytest.mark.parametrize("everything", [False, True])
def test_each_kernel_is_forced_and_the_environment_restored(
    everything: bool, pretend_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FORCE, "before")
    seen: list[str] = []
    _with_case(monkeypatch, _Case(seen))
    assert main(["verify", "--jobs", "1", "--json", *(["--all"] if everything else [])]) == 0
    data = json.loads(capsys.readouterr().out)
    names = {spec.name for spec in REGISTRY if everything or "90a" in spec.prebuild}
    assert {row["kernel"] for row in data["kernels"]} == names
    assert data["left_out"] == len(REGISTRY) - len(names)
    assert (data["left_out"] == 0) == everything
    assert sorted(seen) == sorted(names)
    # Reported in the registry's order, whatever the order they ran in.
    assert [row["kernel"] for row in data["kernels"]] == [spec.name for spec in REGISTRY if spec.name in names]
    assert {row["origin"] for row in data["kernels"]} == {"prebuilt sm_90a"}
    assert os.environ[FORCE] == "before"


def test_what_is_left_out_is_said(
    pretend_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with_case(monkeypatch, _Case([]))
    assert main(["verify", "--jobs", "1"]) == 0
    assert "kernels that are not prebuilt for this GPU were left out; --all runs them too" in capsys.readouterr().out


def test_a_kernel_that_takes_no_problem_has_not_passed(
    pretend_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with_case(monkeypatch, _Case([], ArgumentError(FORCE, "a kernel that can serve this call", "another")))
    assert main(["verify", "--jobs", "1", "--kernel", REGISTRY[0].name]) == 1
    assert "no problem could be run" in capsys.readouterr().out


def test_a_kernel_that_does_not_load_fails_and_its_numbers_are_dropped(
    pretend_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(spec: KernelSpec, ordinal: int) -> _FakeLoaded:
        if spec == pair[0]:
            raise CompileError("no NVRTC here")
        return _FakeLoaded()

    monkeypatch.setattr("omniattn.runtime.load", load)
    pair = [spec for spec in REGISTRY if spec.op == "append" and spec.dtype == "float16" and spec.prebuild][:2]
    broken, fine = verify.verify_kernels(NumpyFramework(), pair, 1)
    assert (broken.status, broken.notes) == (verify.FAILED, ("no NVRTC here",))
    assert (fine.status, fine.cases) == (verify.PASSED, 3)


def test_a_gpu_that_no_kernel_runs_on_has_not_passed(
    pretend_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = DeviceInfo(0, "Old GPU", (7, 5), 40, 64 << 10, 6 << 20, (12, 0))
    monkeypatch.setattr("omniattn.runtime.device_info", lambda _: old)
    assert main(["verify"]) == 1
    assert "not for this GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("verify --cpu --all", "'--all': expected to be used without --cpu"),
        ("verify --all --kernel kv_copy_sm80", "'--all': expected to be used without --kernel"),
        ("verify --jobs 0", "'--jobs': expected an integer >= 1, received 0"),
    ],
)
def test_options_that_do_not_fit(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    assert words in capsys.readouterr().err


# Numbers made ahead


def _small_rows() -> list[KernelSpec]:
    chosen = [s for s in REGISTRY if s.op in ("merge_states", "append", "decode") and s.dtype == "float16"]
    return in_order(s for s in chosen if s.head_dim in (64, 256) and s.prebuild)


@pytest.mark.parametrize("jobs", [1, 2])
def test_numbers_made_ahead_are_those_made_here(jobs: int) -> None:
    specs = _small_rows()[:4]
    with Ahead(specs, jobs) as ahead:
        for spec in specs:
            result = run_row(NumpyFramework(), spec, ahead.prepared)
            assert result == run_row(NumpyFramework(), spec)
            assert not result.failures
        # What no row needs any more is gone.
        assert (ahead._kept, ahead._pending) == ({}, {})
    assert all("NUM_THREADS" not in name or value != "1" for name, value in os.environ.items() if name in _UNSET)


_UNSET = [name for name in ahead_module._THREADS if os.environ.get(name) != "1"]


def test_rows_share_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CallCase] = []
    prepare: Callable[[CallCase], Any] = CallCase.prepare
    monkeypatch.setattr(CallCase, "prepare", lambda self: made.append(self) or prepare(self))
    alike = [s for s in REGISTRY if s.op == "merge_states" and s.dtype == "float16"] * 2
    with Ahead(alike, 1) as ahead:
        for spec in alike:
            assert not run_row(NumpyFramework(), spec, ahead.prepared).failures
    assert len(made) == len(set(made)) == len(cases_of(alike[0]))
    # The whole registry has far fewer numbers than calls.
    cases = [case for spec in REGISTRY for case in cases_of(spec)]
    assert len(set(cases)) < 0.6 * len(cases)


def test_numbers_of_rows_that_were_dropped_do_not_hold_up_the_others() -> None:
    specs = _small_rows()
    with Ahead(specs, 2) as ahead:
        for spec in specs[:-1]:
            ahead.drop(spec)
        assert not run_row(NumpyFramework(), specs[-1], ahead.prepared).failures
        assert (ahead._kept, ahead._pending) == ({}, {})


def test_what_has_to_be_compiled_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[tuple[str, str]] = []

    class Pool:
        def submit(self, function: object, spec: KernelSpec, arch: str) -> Any:
            submitted.append((spec.name, arch))
            return type("Done", (), {"exception": lambda self: CompileError("not here")})()

    kinds = {REGISTRY[0].name: "jit", REGISTRY[1].name: "prebuilt", REGISTRY[2].name: "cache"}
    monkeypatch.setattr("omniattn.runtime.resolve", lambda spec, cc: Resolution(kinds[spec.name], "90a", ""))
    ahead = Ahead(REGISTRY[:3], 1)
    ahead.compile(REGISTRY[:3], HOPPER)
    assert submitted == []  # with one process the row compiles when it is loaded
    ahead._pool = Pool()  # type: ignore[assignment]
    ahead.compile(REGISTRY[:3], HOPPER)
    assert submitted == [(REGISTRY[0].name, "90a")]
    for spec in REGISTRY[:3]:
        ahead.wait_for(spec)  # raises nothing: loading the row says what is wrong
