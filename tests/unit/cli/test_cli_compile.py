"""``omniattn compile``: into a folder, into the cache, for targets that are not here. Needs NVRTC, no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omniattn import runtime
from omniattn.cli import compile as compile_command
from omniattn.cli import kernels, main
from omniattn.errors import CompileError
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.runtime.arch import Arch


@pytest.fixture
def spec() -> KernelSpec:
    """A registry row that compiles fast and that no wheel holds for the newest GPUs."""
    return min(REGISTRY, key=lambda row: (row.op != "append", "100" in row.prebuild, row.head_dim, row.name))


def test_into_a_folder(spec: KernelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--arch", "sm_90a", "--kernel", spec.name, "--out", str(tmp_path)]) == 0
    content = (tmp_path / "90a" / f"{spec.name}.cubin").read_bytes()
    assert content.startswith(b"\x7fELF")
    output = capsys.readouterr().out
    assert spec.name in output
    assert "sm_90a" in output


def test_into_the_cache_where_resolve_finds_it(
    spec: KernelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMNIATTN_CACHE_DIR", str(tmp_path))
    assert runtime.resolve(spec, (10, 0)).kind == "jit"
    assert main(["compile", "--arch", "sm_100a", "--kernel", spec.name, "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["compiled"]
    assert entry["kernel"] == spec.name
    assert entry["error"] == ""
    assert entry["registers"] > 0
    assert entry["size"] > 0
    assert Path(entry["file"]).is_relative_to(tmp_path)
    assert runtime.resolve(spec, (10, 0)).kind == "cache"


def test_ptx_only_into_a_folder(spec: KernelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--arch", "compute_80", "--kernel", spec.name, "--out", str(tmp_path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["compiled"]
    assert ".visible .entry" in Path(entry["file"]).read_text(encoding="utf-8")
    assert main(["compile", "--arch", "compute_80", "--kernel", spec.name]) == 2
    assert "binary target" in capsys.readouterr().err


def test_target_that_no_kernel_can_run_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--arch", "sm_75", "--all"]) == 2
    error = capsys.readouterr().err
    assert "no kernel can be compiled for sm_75" in error
    assert "8.0 or newer, sm_75 has 7.5" in error
    assert "this GPU" not in error


def test_several_kernels_are_compiled_in_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [row.name for row in REGISTRY if row.op == "merge_states"]
    assert len(names) > 1
    options = [word for name in names for word in ("--kernel", name)]
    assert main(["compile", "--arch", "sm_80", *options, "--out", str(tmp_path)]) == 0
    assert sorted(path.stem for path in (tmp_path / "80").iterdir()) == sorted(names)
    assert f"{len(names)} kernels written to {tmp_path}" in capsys.readouterr().out.replace("\n", "")


def test_failures_are_reported_and_counted(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise CompileError("ptxas is on strike")

    monkeypatch.setattr(runtime, "compile_to", fail)
    assert main(["compile", "--arch", "sm_90a", "--kernel", spec.name]) == 1
    assert f"FAILED {spec.name}: ptxas is on strike" in capsys.readouterr().out


def test_prebuilt_kernels_are_left_out_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    held = runtime.Resolution("prebuilt", "sm_90a", "the wheel holds sm_90a")
    monkeypatch.setattr(runtime, "resolve", lambda *_: held)
    target = Arch.parse("sm_90a")
    chosen, left_out = compile_command.choose(REGISTRY, target, keep_prebuilt=False)
    assert chosen == []
    assert set(left_out) == {row.name for row in REGISTRY}
    assert all("--all" in reason for reason in left_out.values())
    assert compile_command.choose(REGISTRY, target, keep_prebuilt=True) == (list(REGISTRY), {})


def test_jit_sample_and_its_compilation_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = kernels.jit_sample()
    assert (sample.op, sample.dtype, sample.head_dim) == ("attention", "bfloat16", 128)
    assert 0 < kernels.compile_uncached(sample) < 60


def test_compilation_time_is_not_that_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setattr("omniattn.runtime.compile.compile_spec", lambda *_, **options: asked.append(options))
    kernels.compile_uncached(kernels.jit_sample())
    assert asked == [{"nvrtc_cache": False}]
