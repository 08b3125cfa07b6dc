"""torch's context_parallel in two processes: ``python context_parallel_child.py STORE``, a new file, or by torchrun.

Of its own accord it runs on the CPU, with gloo; by torchrun on GPUs, with NCCL. SDPA on CPU tensors has an operator of
its own, which context_parallel does not know. There it calls the operators of GPUs, flash attention's and cuDNN's,
whose kernels for the CPU are this package's, put into the dispatcher in the way of those for GPUs. All else is torch's
own: sharding, the ring of both rotate methods, the merge of LSEs, autograd.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

from omniattn.torch import context_parallel, operators
from omniattn.torch.flash import Active

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "context_parallel"))

import ring

SIZE = 2
MATH = F.scaled_dot_product_attention
OPERATORS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
#: Operator, rotate method, causal, balanced, length: divisible by twice the number of processes, by that number alone
#: (which torch does not balance), and not at all (padded, if causal).
CASES = [
    *((operator, rotate, causal, causal, 16) for operator in OPERATORS for rotate in ring.ROTATE
      for causal in (True, False)),
    *(("flash", rotate, True, balance, length) for rotate in ring.ROTATE
      for balance, length in ((True, 20), (False, 18), (True, 19), (False, 17))),
    *(("cudnn", rotate, False, False, 18) for rotate in ring.ROTATE),
]  # fmt: skip
#: This package's functions in the steps of a ring.
WATCHED = ((operators, "attention"), (operators, "attention_backward"), (context_parallel, "merge_states"))
#: On GPUs lengths are so much longer, plus what is left of them by 8, so that tiles are filled in part.
SCALE = {"cpu": 1, "cuda": 100}


def name_of(operator: str, rotate: str, causal: bool, balance: bool, length: int) -> str:
    """A case, as the process says that it is right."""
    return f"{operator} {rotate} causal={causal} balance={balance} {length}"


def sdpa_by(operator: str) -> Any:
    """SDPA as torch has it on a GPU where flash attention or cuDNN is chosen."""

    def scaled_dot_product_attention(query: Any, key: Any, value: Any, is_causal: bool = False) -> Any:
        return _operator(operator, query, key, value, is_causal)[0]

    return scaled_dot_product_attention


def _operator(operator: str, query: Any, key: Any, value: Any, is_causal: bool) -> Any:
    if operator == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, is_causal)


def expected(inputs: list[Any], causal: bool) -> tuple[list[Any], Any]:
    """Output, gradients and LSE in double precision."""
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1) > 0, -torch.inf)
    out = scores.softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].double())], scores.logsumexp(-1).detach()


def check(name: str, found: Any, alone: Any, exact: Any, least: float) -> None:
    """An array of all processes is as near to the exact one as one process's: twice its error, and rounding."""
    error, bound = (float((x.double() - exact).abs().max()) for x in (found, alone))
    allowed = 2 * bound + least * float(exact.abs().max())
    assert exact.abs().max() > 0
    assert error <= allowed, f"{name}: error {error:.3e}, of one process {bound:.3e}, allowed {allowed:.3e}"


def run(mesh: Any, operator: str, rotate: str, causal: bool, balance: bool, length: int) -> None:
    """Output, gradients and LSE of the example's shards, against those of one process and of double precision."""
    torch.manual_seed(3)
    device = mesh.device_type
    on_gpu = device == "cuda"
    rows = length * SCALE[device] + length % 8 * on_gpu
    shape, dtype = ((2, 4, rows, 128), torch.bfloat16) if on_gpu else ((2, 2, rows, 8), torch.float32)
    least = 2.0**-8 if on_gpu else 1e-5
    inputs = [torch.randn(shape, dtype=dtype).to(device) for _ in range(4)]
    exact, exact_lse = expected(inputs, causal)
    if not on_gpu:
        F.scaled_dot_product_attention = sdpa_by(operator)
    with sdpa_kernel(OPERATORS[operator]) if on_gpu else nullcontext():
        alone = ring.attend(inputs, causal)
        found = ring.attend_on_all(mesh, inputs, causal, rotate, balance)
        with ring.sharded(mesh, inputs, causal, rotate, balance) as buffers, torch.no_grad():
            shards = [DTensor.from_local(x, mesh, [Shard(ring.SEQ)], run_check=False) for x in buffers[:3]]
            lse = _operator(operator, *shards, causal)[1].to_local()
            lse = lse.squeeze(-1) if lse.dim() == 4 else lse
            (lse,) = ring.cp.context_parallel_unshard(mesh, [lse], [ring.SEQ])
        alone_lse = _operator(operator, *inputs[:3], causal)[1]
    names = ("o", "dq", "dk", "dv", "lse")
    found, alone = [*found, lse[..., :rows]], [*alone, alone_lse.reshape(exact_lse.shape)]
    for name, *arrays in zip(names, found, alone, [*exact, exact_lse], strict=True):
        check(name, *arrays, 1e-5 if name == "lse" else least)
    # One write, which lines of the other process do not break.
    say(name_of(operator, rotate, causal, balance, length))


def refused(mesh: Any) -> None:
    """Full attention over a length that cannot be shared equally, by an error on every process."""
    inputs = [torch.randn(1, 2, 17, 8).to(mesh.device_type) for _ in range(4)]
    try:
        ring.attend_on_all(mesh, inputs, False, "allgather")
    except ValueError as error:
        if "expected a length divisible by 2, received 17" in str(error):
            say("refused")


def watch(module: Any, name: str) -> list[None]:
    """One item for each call of a function from now on."""
    calls: list[None] = []
    function = getattr(module, name)

    def watched(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return function(*args, **options)

    setattr(module, name, watched)
    return calls


def say(text: str) -> None:
    """A line of this process."""
    sys.stdout.write(f"rank {dist.get_rank()}: {text}\n")
    sys.stdout.flush()


def work(rank: int, store: str) -> None:
    """One process of the CPU: all cases."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    torch.set_num_threads(1)
    active = Active("CPU")
    cases("cpu")
    active.remove()
    dist.destroy_process_group()


def work_by_torchrun() -> None:
    """One process of a GPU: all cases. A ring that hangs ends by NCCL's own limit."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=30))
    activate_flash_attention_impl("omniattn")
    cases("cuda")
    restore_flash_attention_impl()
    dist.destroy_process_group()


def cases(device: str) -> None:
    """All cases, on a device of each process; all steps and merges are this package's."""
    mesh = init_device_mesh(device, (SIZE,))
    calls = {name: watch(module, name) for module, name in WATCHED}
    for case in CASES:
        run(mesh, *case)
    # Of each case a ring of forwards and backwards, and one of forwards, beside those of one process.
    skipped = sum(causal and not balance for _, _, causal, balance, _ in CASES) if dist.get_rank() == 0 else 0
    expected_calls = (6 * len(CASES) - 2 * skipped, 3 * len(CASES) - skipped, 2 * len(CASES) - 2 * skipped)
    found = tuple(map(len, calls.values()))
    assert found == expected_calls, (found, expected_calls)
    refused(mesh)
    dist.barrier()


def main(store: str, work: Callable[[int, str], None] = work) -> int:
    """The exit status: 0 if both processes found the results of one, a signal's number if one ended by that."""
    faulthandler.enable()  # Where a process stood that a library aborts.
    # A fork has what this process has imported.
    start = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    processes = [start.Process(target=work, args=(rank, store)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        work_by_torchrun()
    else:
        raise SystemExit(main(sys.argv[1]))
