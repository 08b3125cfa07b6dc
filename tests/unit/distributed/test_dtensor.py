"""`omniattn.attention` on DTensors, in several processes on the CPU: the results of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.distributed.two_processes import in_two_processes

pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

CHILD = Path(__file__).with_name("dtensor_child.py")
#: Lines of each process; a mesh of two dimensions takes four.
SAID = {2: 22, 4: 28}


@pytest.mark.parametrize("size", [2, 4])
def test_dtensors_give_the_results_of_one_process(tmp_path: Path, size: int) -> None:
    said = in_two_processes(CHILD, tmp_path, str(size), "dtensor").splitlines()
    assert len(set(said)) == len(said) == size * SAID[size]
