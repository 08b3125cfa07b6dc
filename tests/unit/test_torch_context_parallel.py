"""torch's context_parallel on this package's kernels, in two processes on the CPU: the results of one."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

CHILD = Path(__file__).with_name("context_parallel_child.py")


def test_two_processes_give_the_results_of_one(tmp_path: Path) -> None:
    """Forward and backward, causal with load balance and full, both rotate methods, flash attention and cuDNN."""
    command = [sys.executable, str(CHILD), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = itertools.product((0, 1), ("flash", "cudnn"), ("allgather", "alltoall"), (False, True))
    said = [f"rank {rank}: {operator} {rotate} causal={causal}" for rank, operator, rotate, causal in cases]
    assert sorted(done.stdout.splitlines()) == sorted(said)
