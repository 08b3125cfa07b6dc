"""A small checkout with kernels of its own, to try the build tools on for real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TINY_KERNEL = """// y = SCALE * x
#include "ptx/math.cuh"
extern "C" __global__ void tiny(float* x) { x[threadIdx.x] = scaled(x[threadIdx.x], SCALE); }
"""
TINY_HEADER = """#pragma once
__device__ inline float scaled(float x, float scale) { return scale * x; }
"""


@dataclass
class Checkout:
    """A copy of package and build tools around two tiny kernels, ``tiny2`` and ``tiny3``, for sm_80 and sm_90a."""

    root: Path
    rows: list[str] = field(default_factory=lambda: [tiny_row("tiny2", 2), tiny_row("tiny3", 3)])

    def write_registry(self) -> None:
        """Put ``rows`` into the copy's registry."""
        text = (ROOT / "src/omniattn/registry/__init__.py").read_text(encoding="utf-8")
        text += f"\n\nREGISTRY = ({', '.join(self.rows)},)\n"
        (self.root / "src/omniattn/registry/__init__.py").write_text(text, encoding="utf-8")

    def build(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``python -m build_tools.kernels`` in the copy, by one compiler process: starting two takes longer."""
        return self.python("-m", "build_tools.kernels", "--jobs", "1", *arguments, **environment)

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run this interpreter in the copy, with nothing of the real checkout on its path."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMNIATTN_", "PYTHONPATH"))}
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.root, env={**kept, **environment}, capture_output=True, text=True
        )

    @property
    def out(self) -> Path:
        """Where the build puts its results."""
        return self.root / "build/kernels"


def inner_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a small suite in ``folder``.

    Plugins that the suite does not name stay out: importing hypothesis takes four times as long as all the rest.
    """
    plugins = ("-p", "no:cacheprovider", *(("-p", "xdist.plugin") if "-n" in arguments else ()))
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *arguments], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip


def tiny_row(name: str, scale: int, **changes: str) -> str:
    """Return the text of a registry row."""
    fields = {
        "name": repr(name),
        "family": "'tiny'",
        "op": "'attention'",
        "source": "'entry/tiny.cu'",
        "symbol": "'tiny'",
        "defines": f"(('SCALE', '{scale}.0f'),)",
        "dtype": "'float16'",
        "head_dim": "64",
        "block_m": "64",
        "block_n": "64",
        "num_warps": "4",
        "smem_bytes": "0",
        "prebuild": "('80', '90a')",
        **changes,
    }
    return f"KernelSpec({', '.join(f'{key}={value}' for key, value in fields.items())})"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A fresh small checkout."""
    root = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "*.npz", "build")
    for name in ("src", "build_tools"):
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    for name, text in {"entry/tiny.cu": TINY_KERNEL, "ptx/math.cuh": TINY_HEADER}.items():
        (root / "kernels_cu" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "kernels_cu" / name).write_text(text, encoding="utf-8")
    made = Checkout(root)
    made.write_registry()
    return made
