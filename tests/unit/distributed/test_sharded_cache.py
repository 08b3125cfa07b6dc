"""Caches whose tokens are divided among processes on the CPU: the results of one cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.distributed.two_processes import in_two_processes

pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

CHILD = Path(__file__).with_name("sharded_cache_child.py")
#: Lines of each process.
SAID = 19


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_results_of_one_cache(tmp_path: Path, size: int) -> None:
    said = in_two_processes(CHILD, tmp_path, str(size), "caches").splitlines()
    assert len(set(said)) == len(said) == size * SAID
