"""The command line without a GPU: exit codes, error texts, info."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from omniattn.bench.timing import BenchError
from omniattn.cli import _command_line, info, main
from omniattn.errors import DriverMissingError
from omniattn.runtime import env, log
from omniattn.runtime import nvrtc as nvrtc_module
from omniattn.testing import frameworks


@pytest.fixture
def no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the extra ``cli``."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("rich", "matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, also where the tests run on one."""

    def fail() -> frameworks.Framework:
        raise frameworks.NoGpuError("no GPU can be used: torch is not installed")

    for module in ("demo", "verify"):
        monkeypatch.setattr(f"omniattn.cli.{module}.gpu_framework", fail)

    def fail_torch() -> None:
        raise BenchError("torch finds no CUDA device")

    monkeypatch.setattr("omniattn.bench.forward.require_torch", fail_torch)
    monkeypatch.setattr("omniattn.bench.host.require_torch", fail_torch)


@pytest.mark.parametrize("command", ["demo", "info", "verify --cpu", "bench", "bench host", "compile --arch sm_90a"])
def test_without_rich_the_error_says_what_to_install(
    command: str, no_rich: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"omniattn {command.split()[0]}: ")
    assert 'pip install "omniattn[cli]"' in text


def test_plot_without_matplotlib_says_what_to_install(
    no_rich: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--device", "cpu", "--json", "--plot", str(tmp_path / "x.png")]) == 2
    assert 'pip install "omniattn[cli]"' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x.bmp", "missing-folder/x.png"])
def test_plot_file_is_checked_before_the_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    assert main(["bench", "--json", "--plot", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert "'--plot'" in error
    assert name in error


@pytest.mark.parametrize("columns", [None, 100, 80])
def test_info_keeps_to_its_columns(
    columns: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= (columns or 100)
    assert not any("…" in line for line in lines), "nothing is cut off"


@pytest.mark.parametrize("columns", [100, 80])
def test_info_wraps_long_paths(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every letter of them stands there, in lines that are not longer than others."""
    monkeypatch.setenv("COLUMNS", str(columns))
    folder = tmp_path / ("a_folder_with_a_long_name/" * 8)
    monkeypatch.setenv("OMNIATTN_CACHE_DIR", str(folder))
    monkeypatch.setenv("OMNIATTN_DUMP", str(folder))
    monkeypatch.setenv("OMNIATTN_TUNING", str(folder / "tuning.json"))
    monkeypatch.setattr(info, "locate", lambda name: {"name": name, "path": f"{folder}/lib{name}.so", "found_via": "x"})
    assert main(["info"]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= columns
    values = re.sub(r"\s", "", "".join(line.split("│")[2] for line in output.splitlines() if line.count("│") >= 3))
    assert values.count(str(folder).replace(" ", "")) >= 5


def test_json_needs_neither_rich_nor_matplotlib(no_rich: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["omniattn"]["version"]


@pytest.mark.parametrize("command", ["verify", "bench", "demo --device gpu"])
def test_without_a_gpu_exit_code_2_and_a_reason(command: str, no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert "no " in captured.err
    assert "GPU" in captured.err or "CUDA device" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("command", "argument"),
    [
        ("bench --iters 0", "--iters"),
        ("bench --shapes d33", "--shapes"),
        ("bench host --shapes d64", "--shapes"),
        ("bench host --iters 3", "--iters"),
        ("bench host --anchor fa2", "--anchor"),
        ("bench append --anchor fa2", "--anchor"),
        ("demo --repeats 0", "--repeats"),
        ("demo --layers 0", "--layers"),
        ("demo --layers 5", "--layers"),
        ("compile --arch volta", "--arch"),
        ("compile --arch sm_90a --kernel no_such_kernel", "--kernel"),
        ("verify --kernel no_such_kernel", "--kernel"),
        ("info --write README.md", "--write"),
    ],
)
def test_wrong_arguments_are_named(command: str, argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert f"argument '{argument}': expected " in error
    assert ", received " in error


@pytest.mark.parametrize("command", ["", "fly", "compile", "bench --anchor omniattn", "verify --gpu"])
def test_usage_errors_exit_with_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command.split())
    assert caught.value.code == 2
    assert "usage: omniattn" in capsys.readouterr().err


def test_gpu_framework_names_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> frameworks.Framework:
        raise OSError("libsomething.so is missing\nmore lines")

    monkeypatch.setattr(frameworks, "_GPU_FRAMEWORKS", (("json", broken), ("no_such_module_anywhere", broken)))
    with pytest.raises(frameworks.NoGpuError) as caught:
        frameworks.gpu_framework()
    text = str(caught.value)
    assert "json: libsomething.so is missing;" in text
    assert "no_such_module_anywhere is not installed" in text
    assert "more lines" not in text


def test_info_reports_all_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMNIATTN_LOG", "info")
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) >= {
        "driver", "gpus", "nvrtc", "libraries", "packages", "kernels", "cache", "environment", "support"
    }  # fmt: skip
    assert {variable["name"] for variable in facts["environment"]} == {variable.name for variable in env.VARIABLES}
    values = {variable["name"]: variable["value"] for variable in facts["environment"]}
    assert values["OMNIATTN_LOG"] == "info"
    assert facts["packages"]["numpy"]
    assert {library["name"] for library in facts["libraries"]} >= {"nvrtc", "cudart"}


def test_info_shows_bad_environment_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    bad = {"OMNIATTN_DISABLE_JIT": "perhaps", "OMNIATTN_CACHE_DIR": str(file), "OMNIATTN_LOG": "loud"}
    for name, value in bad.items():
        monkeypatch.setenv(name, value)
    log.reset()  # as in a new process, whose first message would raise
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    errors = {variable["name"]: variable["error"] for variable in facts["environment"] if variable["error"]}
    assert set(errors) == set(bad)
    assert "'perhaps'" in errors["OMNIATTN_DISABLE_JIT"]
    assert "'loud'" in errors["OMNIATTN_LOG"]
    assert "which is a file" in facts["cache"]["problem"]
    log.reset()
    assert main(["info"]) == 0
    assert os.environ["OMNIATTN_LOG"] == "loud"
    log.reset()


def test_info_without_driver_and_nvrtc_still_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_driver() -> None:
        raise DriverMissingError("cuInit", "LIBRARY_NOT_FOUND", "no libcuda", "install the driver")

    monkeypatch.setattr("omniattn.cli.info.get_driver", no_driver)
    monkeypatch.setattr("omniattn.cli.info.locate", lambda name: {"name": name, "error": "not found"})
    monkeypatch.setattr(
        nvrtc_module, "_find", lambda: (_ for _ in ()).throw(nvrtc_module.CompileError("no NVRTC here"))
    )
    nvrtc_module.set_compiler(None)
    try:
        assert main(["info"]) == 0
    finally:
        nvrtc_module.set_compiler(None)
    output = " ".join(capsys.readouterr().out.split())
    assert "no libcuda" in output
    assert "no NVRTC here" in output


def test_module_can_be_run() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "omniattn.cli", "--version"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("omniattn ")


def test_help_imports_no_heavy_package() -> None:
    program = (
        "import sys, omniattn.cli\n"
        "omniattn.cli.build_parser().format_help()\n"
        "print([m for m in ('rich', 'matplotlib', 'torch', 'cupy', 'jax', 'cuda.bindings') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["--out", "/somewhere/x.json"], ["--out=/somewhere/x.json"]])
def test_reports_name_no_folder_of_this_machine(words: list[str]) -> None:
    assert _command_line(["bench", *words, "--precision", "int8"]) == "omniattn bench --precision int8"


def test_reports_name_the_kernels_that_were_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "attn_a,decode_b")
    assert _command_line(["bench"]) == "OMNIATTN_FORCE_KERNEL=attn_a,decode_b omniattn bench"


def test_the_package_is_a_command() -> None:
    """Where the folder of scripts is not on the path."""
    said = subprocess.run([sys.executable, "-m", "omniattn", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("omniattn 0")
