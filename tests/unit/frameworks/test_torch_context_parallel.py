"""torch's context_parallel on this package's kernels, in two processes on the CPU: the results of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.distributed.two_processes import in_two_processes

pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

CHILD = Path(__file__).with_name("context_parallel_child.py")
#: Operators, rotate methods, causal with and without load balance and full, lengths of every remainder.
SAID = 2 * 18 + 2


def test_two_processes_give_the_results_of_one(tmp_path: Path) -> None:
    """Output, gradients, LSE."""
    said = in_two_processes(CHILD, tmp_path).splitlines()
    assert len(set(said)) == len(said) == SAID
    for rank in (0, 1):
        for operator in ("flash", "cudnn"):
            for rotate in ("allgather", "alltoall"):
                for options in ("causal=True balance=True 16", "causal=False balance=False 16"):
                    assert f"rank {rank}: {operator} {rotate} {options}" in said
        assert f"rank {rank}: refused" in said
