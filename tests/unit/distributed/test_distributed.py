"""`omniattn.distributed` in several processes on the CPU: the results of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.distributed.two_processes import in_two_processes

pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

CHILD = Path(__file__).with_name("distributed_child.py")
#: Lines of each of 2 and of 4 processes.
SAID = {"ring": {2: 41, 4: 41}, "varlen": {2: 15, 4: 15}, "ulysses": {2: 9, 4: 13}, "eight_bits": {2: 12, 4: 12}}


@pytest.mark.parametrize("size", [2, 4])
def test_processes_give_the_results_of_one(tmp_path: Path, size: int) -> None:
    said = in_two_processes(CHILD, tmp_path, str(size), ",".join(SAID)).splitlines()
    assert len(set(said)) == len(said) == size * sum(lines[size] for lines in SAID.values())


def test_a_group_of_one(tmp_path: Path) -> None:
    assert len(in_two_processes(CHILD, tmp_path, "1", "ring").splitlines()) == SAID["ring"][2] - 1


def test_a_rank_that_raises_does_not_leave_the_other_hanging(tmp_path: Path) -> None:
    said = in_two_processes(CHILD, tmp_path, "2", "lost").splitlines()
    assert sorted(said) == ["rank 0: lost", "rank 1: lost"]
