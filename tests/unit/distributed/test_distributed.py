"""`omniattn.distributed` in several processes on the CPU: the results of one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.distributed.two_processes import in_two_processes

pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

CHILD = Path(__file__).with_name("distributed_child.py")
#: Lines of each of 2 and of 4 processes.
SAID = {"ring": {2: 33, 4: 33}, "varlen": {2: 15, 4: 15}, "ulysses": {2: 9, 4: 13}, "eight_bits": {2: 12, 4: 12}}


@pytest.mark.parametrize("size", [2, 4])
def test_processes_give_the_results_of_one(tmp_path: Path, size: int) -> None:
    said = in_two_processes(CHILD, tmp_path, str(size), ",".join(SAID)).splitlines()
    assert len(set(said)) == len(said) == size * sum(lines[size] for lines in SAID.values())


def test_a_group_of_one(tmp_path: Path) -> None:
    assert len(in_two_processes(CHILD, tmp_path, "1", "ring").splitlines()) == SAID["ring"][2] - 1


def test_a_rank_that_raises_does_not_leave_the_other_hanging(tmp_path: Path) -> None:
    said = in_two_processes(CHILD, tmp_path, "2", "lost").splitlines()
    assert sorted(said) == ["rank 0: lost", "rank 1: lost"]


@pytest.mark.parametrize(
    ("seqlen", "heads", "expected"),
    [(8192, (16, 16), 32), (32768, (16, 16), 32), (32768, (4, 4), 32), (32768, (16, 4), 0), (131072, (16, 16), 0)],
)
def test_sms_left_to_a_transfer(
    monkeypatch: pytest.MonkeyPatch, seqlen: int, heads: tuple[int, int], expected: int
) -> None:
    """What was faster of two on two H100: all SMs for the kernels, or none of those that NCCL takes."""
    import torch

    from omniattn.distributed.exchange import Transfer
    from omniattn.distributed.schedule import ring_of
    from omniattn.distributed.steps import spare_sms

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    step = ring_of(seqlen, seqlen, 2, "zigzag", (-1, 0)).step(0, 0)
    q, k = (torch.empty(1, seqlen // 2, n, 128, dtype=torch.bfloat16, device="meta") for n in heads)
    assert spare_sms(Transfer((), [k, k], [k, k], "", 32), step, q, 128) == expected
    assert spare_sms(Transfer((), [k, k], [k, k], "", 0), step, q, 128) == 0
    assert spare_sms(None, step, q, 128) == 0
