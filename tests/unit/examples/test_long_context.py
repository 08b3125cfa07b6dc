"""examples/long_context: the losses of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.distributed.two_processes import in_two_processes

pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).resolve().parents[3]
CHILD = Path(__file__).with_name("long_context_child.py")
FOLDER = ROOT / "examples" / "long_context"


@pytest.mark.parametrize("size", [2, 4])
def test_losses_of_one_process(tmp_path: Path, size: int) -> None:
    said = in_two_processes(CHILD, tmp_path, str(size), "training")
    assert said.count("losses differ by 0.000") == 4
    assert f"{size} processes" in said


def run(*arguments: str, program: str = "long_context.py") -> subprocess.CompletedProcess[str]:
    """A program of the example, as a user starts it."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(FOLDER / program), *arguments], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_program(tmp_path: Path) -> None:
    out = tmp_path / "losses.json"
    done = run("--small", "--steps", "4", "--rate", "3e-3", "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 processes" in done.stdout
    assert '"tolerance": 0.02' in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("--context", "0"), "--context: expected a number from 1 on, received 0"),
     (("--out", "no/such/folder/x.json"), "--out: expected a file in an existing folder")],
)  # fmt: skip
def test_wrong_arguments(arguments: tuple[str, ...], text: str) -> None:
    done = run("--small", *arguments)
    assert done.returncode == 2
    assert text in done.stderr
