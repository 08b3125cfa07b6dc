"""torch's context_parallel on this package's kernels, in two processes on the CPU: the results of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

CHILD = Path(__file__).with_name("context_parallel_child.py")
#: Operators, rotate methods, causal with and without load balance and full, lengths of every remainder.
SAID = 2 * 18 + 2


def test_two_processes_give_the_results_of_one(tmp_path: Path) -> None:
    """Output, gradients, LSE."""
    command = [sys.executable, str(CHILD), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert len(set(said)) == len(said) == SAID
    for rank in (0, 1):
        for operator in ("flash", "cudnn"):
            for rotate in ("allgather", "alltoall"):
                for options in ("causal=True balance=True 16", "causal=False balance=False 16"):
                    assert f"rank {rank}: {operator} {rotate} {options}" in said
        assert f"rank {rank}: refused" in said
