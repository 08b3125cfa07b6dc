"""The package with the C module, as on a GPU: torch's own tensors and autograd, a stand-in for libcuda.

What the two ways launch is compared as the driver gets it: kernel, grid, block, shared memory, stream, attributes, and
every byte of the arguments, addresses and tensor maps with them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from build_tools import native as build_native

from .building import ROOT, SANITIZERS, needs_compiler, run_child, sanitizers

pytestmark = [needs_compiler, pytest.mark.frameworks]


@pytest.fixture(autouse=True)
def _has_table() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no exchange table")


def test_every_call(folder: Path) -> None:
    out, _ = run_child(folder, "calls_child.py", str(folder), "calls")
    assert out.split("\n") == ["53 calls", "9 calls", "49 calls", "9 calls", ""]


@pytest.mark.parametrize("check", ["conditions", "gradients", "threads", "fork", "writes"])
def test_what_may_happen(check: str, folder: Path) -> None:
    out, _ = run_child(folder, "calls_child.py", str(folder), check)
    assert out == "done\n"


@pytest.mark.parametrize(
    "check", [("calls",), ("gradients",), ("threads",), ("writes",), ("differences", "1000")], ids=" ".join
)
def test_sanitizers(check: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    variables = sanitizers()
    if variables is None:
        pytest.skip("the compiler has no sanitizers")
    for name in ("libcuda.so.1", "cpu_as_gpu.so"):
        shutil.copy(folder / name, tmp_path)
    shutil.copy(_sanitized(folder), tmp_path / build_native.NAME)
    out, _ = run_child(tmp_path, "calls_child.py", str(tmp_path), *check, **variables)
    assert out


def _sanitized(folder: Path) -> Path:
    """The module, compiled once with sanitizers."""
    made = folder / "sanitized.abi3.so"
    return made if made.exists() else build_native.build(ROOT, made, SANITIZERS)


def test_right_and_wrong_calls(folder: Path) -> None:
    out, _ = run_child(folder, "calls_child.py", str(folder), "differences", os.environ.get("OMNIATTN_FUZZ", "1500"))
    launched, failed, in_all = (int(word) for word in out.split() if word.isdigit())
    assert min(launched, failed) > 300
    assert in_all > 100


def test_host_times(folder: Path) -> None:
    out, _ = run_child(folder, "host_times.py", str(folder), "3")
    rows = [line[34:].split() for line in out.splitlines()]
    assert [len(row) for row in rows] == [2] * 17 + [1] * 2
    assert all(float(number) > 0 for row in rows[1:] for number in row)
