"""Cases of `shard` and `unshard` in several processes, for `distributed_child`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from omniattn.distributed import shard, unshard
from omniattn.errors import ArgumentError, CommunicationError


def run(say: Callable[[str], None]) -> None:
    """`shard` and `unshard`: what ranks disagree about, and any dtype."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(7.0)[:, None].repeat(1, 3)
    for dtype in (torch.int16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.float64):
        whole = x.to(dtype)
        found = unshard(shard(whole, 0), 0, seqlen=7)
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8)), dtype
    image = torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    assert shard(image, 2).is_contiguous()
    say("parts")
    if size == 1:
        return

    def refused(text: str, part: Any, **said: Any) -> None:
        with pytest.raises((ArgumentError, CommunicationError), match=re.escape(text)):
            unshard(part, 0, **said)

    refused("", shard(x, 0))  # seqlen= is forgotten, and 7 rows have no equal parts
    refused("argument 'x': expected the same", torch.ones(2, 3, dtype=(torch.float32, torch.int32)[rank % 2]))
    refused("argument 'schedule': expected the same", torch.ones(2, 3), schedule=("zigzag", "contiguous")[rank % 2])
    refused("argument 'x'" if rank == 0 else "rank 0 refused", None if rank == 0 else torch.ones(2, 3))
