"""House rules that a tool can check, over the whole tree."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest

from build_tools import checks, functions, host_structs, kernels, record, wgmma_header
from build_tools.table import Table
from omniattn.registry import REGISTRY

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels_cu"
MAX_LINES = 500
MAX_FUNCTION_LINES = 150
#: Numbers in constants of selection. Others belong to files of coefficients, with the measurement they come from.
MAX_SELECTION_NUMBERS = 20


def python(*arguments: str) -> str:
    """Run a module; return its output if it fails, nothing if it succeeds."""
    result = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def code_files() -> Iterable[Path]:
    for folder in ("src", "build_tools", "tests", "wheels", "examples"):
        yield from sorted((ROOT / folder).glob("**/*.py"))
    yield from kernels.kernel_sources(KERNELS)


def test_ruff_check() -> None:
    assert python("ruff", "check", "--no-cache", "--output-format=concise", ".") == ""


def test_ruff_format() -> None:
    assert python("ruff", "format", "--no-cache", "--check", ".") == ""


def test_types() -> None:
    assert python("mypy", "--no-incremental", "src", "build_tools") == ""


def test_device_code_format() -> None:
    files = [str(path) for path in kernels.kernel_sources(KERNELS)]
    assert files
    program = Path(sysconfig.get_path("scripts")) / "clang-format"
    done = subprocess.run([program, "--dry-run", "--Werror", *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"run clang-format -i on the files named:\n{done.stderr}"


def test_no_file_is_too_long() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in code_files()
    }
    assert len(lengths) > 20
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_function_is_too_long() -> None:
    lengths = {}
    for path in code_files():
        text = path.read_text(encoding="utf-8")
        found = functions.python_functions(text) if path.suffix == ".py" else functions.device_functions(text)
        for function in found:
            lengths[f"{path.relative_to(ROOT).as_posix()}:{function.line} {function.name}"] = function.lines
    assert sum("kernels_cu/" in name for name in lengths) > 1000
    assert sum(".py:" in name for name in lengths) > 1000
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def constants_of(text: str) -> list[ast.Constant]:
    """Numbers in what a module assigns, but for those within functions."""
    values = [n.value for n in ast.parse(text).body if isinstance(n, (ast.Assign, ast.AnnAssign)) and n.value]
    inside = {id(n) for value in values for f in ast.walk(value) if isinstance(f, ast.Lambda) for n in ast.walk(f)}
    found = (n for value in values for n in ast.walk(value) if isinstance(n, ast.Constant) and id(n) not in inside)
    return [n for n in found if isinstance(n.value, (int, float)) and not isinstance(n.value, bool)]


def test_numbers_of_selection_are_few() -> None:
    assert len(constants_of("A = 1\nB: tuple[float, ...] = 0.5, (2, True)\nC = lambda x: 3\ndef f(): return 4\n")) == 3
    files = sorted((ROOT / "src/omniattn/select").glob("*.py"))
    found = [f"{path.name}: {n.value}" for path in files for n in constants_of(path.read_text(encoding="utf-8"))]
    assert 0 < len(found) <= MAX_SELECTION_NUMBERS, found


def test_generated_headers_are_what_their_generator_writes() -> None:
    for path, text in wgmma_header.headers().items():
        assert path.read_text(encoding="utf-8") == text, "run: python -m build_tools.wgmma_header"
    assert {path.name for path in KERNELS.glob("ptx/wgmma_*.cuh")} == {p.name for p in wgmma_header.headers()}


def test_the_structs_of_the_host_are_those_of_the_headers() -> None:
    written = host_structs.text(host_structs.Headers())
    assert host_structs.FILE.read_text(encoding="utf-8") == written, "run: python -m build_tools.host_structs"


def test_every_source_has_a_row_and_every_row_a_source() -> None:
    assert checks.registry_complaints(REGISTRY, KERNELS) == []


def test_kernels_include_only_what_they_may() -> None:
    assert checks.include_complaints(KERNELS) == []


def test_gpu_tests_are_where_the_record_looks() -> None:
    """A GPU test elsewhere would be left out by ``pytest -m gpu tests/gpu``, which counts as a complete run."""
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").glob("**/test_*.py"))
        if path.parent.name not in ("gpu", "packaging") and "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    assert marked == []


def test_the_table_of_compiled_kernels_is_true() -> None:
    """Every row for every target: it compiles, spills what it may, serializes no wgmma. See build_tools/table.py."""
    assert kernels.check(ROOT) == []
    assert len(Table.load(ROOT)) > 0


def test_kernels_have_run_on_a_gpu(pytestconfig: pytest.Config) -> None:
    """The record of GPU results is of this code; ``tests/gpu/unverified.txt`` excuses, loudly."""
    verdict = record.check(ROOT)
    if verdict.warning:
        reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(verdict.text, red=True)
        warnings.warn(verdict.text, stacklevel=1)
    assert verdict.ok, verdict.text
