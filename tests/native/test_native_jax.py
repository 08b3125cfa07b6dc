"""The C module's handler of XLA's FFI: programs of JAX on the CPU, whose launches a stand-in for libcuda gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import native as build_native

pytest.importorskip("jax")
pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).resolve().parents[2]
COMPILER = build_native.compiler()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs Linux, a C compiler and Python's headers")
#: What `jax_child` prints: a call, and its launches.
CALLS = ("attention", "sinks", "int8", "split", "varlen", "merge", "quantize", "grad", "decode", "append")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libcuda's stand-in and the module lie."""
    assert COMPILER is not None
    made = tmp_path_factory.mktemp("native_jax")
    source = ROOT / "tests/unit/runtime/test_runtime_fake_libcuda.c"
    command = [*COMPILER, "-shared", "-fPIC", "-O1", "-o", str(made / "libcuda.so.1"), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=600)
    build_native.build(ROOT, made / build_native.NAME, ("-DOMNIATTN_TEST_STREAM=0x51",))
    return made


def run_child(folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMNIATTN_", "JAX_"))}
    environment |= {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, str(ROOT / "tests/native/jax_child.py"), str(folder / build_native.NAME)]
    done = subprocess.run(
        [*command, str(folder / "cache")], capture_output=True, text=True, timeout=300,
        env=environment | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


@needs_compiler
def test_programs_launch_what_their_plans_say(folder: Path) -> None:
    """Addresses, tensor maps, shapes and attributes; the second process has its programs from JAX's cache."""
    first, second = run_child(folder), run_child(folder)
    for out in (first, second):
        lines = out.splitlines()
        for name in CALLS:
            assert any(line.startswith(name) for line in lines), (name, out)
        assert {"control flow", "faults"} <= set(lines)
    assert int(second.split("cache hits ")[1].split()[0]) > int(first.split("cache hits ")[1].split()[0])
    assert first.split("runs ")[1] == second.split("runs ")[1]
