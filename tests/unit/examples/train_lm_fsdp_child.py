"""examples/train_lm/parallel.py --fsdp in two processes: ``python train_lm_fsdp_child.py STORE``, a new file."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import omniattn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "frameworks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "train_lm"))

import context_parallel_child as ring_child
import parallel
from model import Config, Gpt, by_omniattn

CONFIG = Config(layers=2, heads=2, head_dim=16, context=48)


def work(rank: int, store: str) -> None:
    """One process."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ring_child.SIZE)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (ring_child.SIZE,))
    runs = parallel.compare_sharded(mesh, CONFIG, steps=8, batch=4, device="cpu", highest=3e-3, seed=0)
    apart = parallel.difference(runs)
    assert apart <= 1e-4, apart
    assert runs[0].losses[-1] < runs[0].losses[0] - 0.2
    check_division(mesh, rank)
    try:
        parallel.compare_sharded(mesh, CONFIG, batch=3, device="cpu")
    except ValueError as error:
        ring_child.say(f"{error}")
    ring_child.say(parallel.summary(runs).replace("\n", "; "))
    dist.destroy_process_group()


def check_division(mesh: object, rank: int) -> None:
    """Each process has half of every weight and of its gradient, and attends to its half of the batch."""
    batches, attention = [], omniattn.attention

    def watched(q: torch.Tensor, *others: torch.Tensor, **options: object) -> object:
        assert not isinstance(q, DTensor)
        batches.append(q.shape[0])
        return attention(q, *others, **options)

    torch.manual_seed(0)
    model = Gpt(CONFIG, by_omniattn)
    whole = {name: x.detach().clone() for name, x in model.named_parameters()}
    tokens = torch.randint(256, (4, 13), generator=torch.Generator().manual_seed(1))
    step = parallel.Sharded(mesh)
    alone = parallel.learn(model, tokens)
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad(set_to_none=True)
    step.prepare(model)
    omniattn.attention = watched
    try:
        loss = step(model, tokens)
    finally:
        omniattn.attention = attention
    assert batches == [2, 2]
    assert abs(float(loss - alone)) <= 1e-5
    for name, x in model.named_parameters():
        assert isinstance(x, DTensor), name
        assert x.to_local().numel() * 2 == whole[name].numel(), name
        assert torch.equal(x.to_local().detach(), whole[name].chunk(2)[rank]), name
        if name in gradients:
            torch.testing.assert_close(x.grad.full_tensor(), gradients[name], rtol=0, atol=1e-6, msg=name)


if __name__ == "__main__":
    raise SystemExit(ring_child.main(sys.argv[1], work))
