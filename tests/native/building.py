"""Compiles what tests of the C module run: the module, a stand-in for libcuda, a table that puts tensors on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import native as build_native

ROOT = Path(__file__).resolve().parents[2]
COMPILER = build_native.compiler()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs Linux, a C compiler and Python's headers")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g")
_SOURCES = {
    "libcuda.so.1": "tests/unit/runtime/test_runtime_fake_libcuda.c",
    "cpu_as_gpu.so": "tests/native/cpu_as_gpu.c",
}


def build(folder: Path) -> None:
    """Compile everything into a folder."""
    assert COMPILER is not None
    for name, source in _SOURCES.items():
        command = [*COMPILER, "-shared", "-fPIC", "-O1", "-o", str(folder / name), str(ROOT / source), "-ldl"]
        subprocess.run(command, check=True, timeout=600)
    build_native.build(ROOT, folder / build_native.NAME)


def sanitizers() -> dict[str, str] | None:
    """What a process with a module compiled with SANITIZERS has in its environment; None if there are none here."""
    assert COMPILER is not None
    runtime = [
        subprocess.run([*COMPILER, f"-print-file-name=lib{x}.so"], capture_output=True, text=True).stdout.strip()
        for x in ("asan", "ubsan")
    ]
    if not all(Path(x).is_absolute() and Path(x).exists() for x in runtime):
        return None
    return {"LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}


def run_child(folder: Path, program: str, *arguments: str, **variables: str) -> tuple[str, list[str]]:
    """Standard output of a program in this folder, and its launches."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMNIATTN_")}
    environment |= {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **variables}
    command = [sys.executable, str(ROOT / "tests/native" / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout, [line for line in done.stderr.splitlines() if line.startswith("launch")]
