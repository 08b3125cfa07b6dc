"""examples/long_context in several processes on the CPU: ``python long_context_child.py STORE SIZE SUITES``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "long_context"))

import distributed_child as common
import long_context
from distributed_child import say
from model import Config

#: A length that no number of chunks divides.
CONFIG = Config(layers=2, heads=2, head_dim=16, context=51)


def training() -> None:
    """The losses of one process, with blocks that are computed again too."""
    for again in (False, True) if dist.get_world_size() == 2 else (False,):
        runs = long_context.compare(
            dist.group.WORLD, CONFIG, again=again, steps=4, batch=2, device="cpu", highest=3e-3, seed=0
        )
        apart = long_context.difference(runs)
        assert apart <= 1e-4, apart
        assert runs[0].losses[-1] < runs[0].losses[0] - 0.1
        say(f"checkpoint {again}: " + long_context.summary(runs, 1e-4).replace("\n", "; "))


SUITES: dict[str, tuple[Callable[[], None], ...]] = {"training": (training,)}

if __name__ == "__main__":
    common.SUITES.update(SUITES)
    raise SystemExit(common.main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
