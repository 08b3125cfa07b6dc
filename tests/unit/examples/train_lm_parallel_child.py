"""examples/train_lm/parallel.py in two processes on the CPU: ``python train_lm_parallel_child.py STORE``, a new file.

The operators are those of `context_parallel_child`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from omniattn.torch.flash import Active

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "frameworks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "train_lm"))

import context_parallel_child as ring_child
import parallel
from model import Config

#: Twice the context of the example on one CPU; 12 rows of a sequence are a chunk.
CONFIG = Config(layers=2, heads=2, head_dim=16, context=48)


def work(rank: int, store: str) -> None:
    """One process."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ring_child.SIZE)
    torch.set_num_threads(1)
    active = Active("CPU")
    F.scaled_dot_product_attention = ring_child.sdpa_by("flash")
    mesh = init_device_mesh("cpu", (ring_child.SIZE,))
    runs = parallel.compare(mesh, CONFIG, steps=8, batch=2, device="cpu", highest=3e-3, seed=0)
    apart = parallel.difference(runs)
    assert apart <= 1e-4, apart
    assert runs[0].losses[-1] < runs[0].losses[0] - 0.2
    try:
        parallel.compare(mesh, Config(context=50), device="cpu")
    except ValueError as error:
        ring_child.say(f"{error}")
    ring_child.say(parallel.summary(runs).replace("\n", "; "))
    active.remove()
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(ring_child.main(sys.argv[1], work))
