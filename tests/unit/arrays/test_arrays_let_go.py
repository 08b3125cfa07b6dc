"""How arrays of this package are let go of: in expressions that fail, from other threads, at the interpreter's end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHILD = Path(__file__).with_name("capsule_child.py")


@pytest.mark.parametrize("case", ["exception", "growth", "threads", "end"])
@pytest.mark.parametrize(
    "library",
    ["none", "numpy", *(pytest.param(name, marks=pytest.mark.frameworks) for name in ("torch", "jax"))],
)
def test_arrays_are_let_go_of(library: str, case: str) -> None:
    if library != "none":
        pytest.importorskip(library)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, str(CHILD), library, case], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-5000:])
    assert done.stdout.splitlines()[-1:] == ["done"]
    assert "Exception ignored" not in done.stderr, done.stderr[-5000:]
