"""Several GPUs. In one process the arrays' device decides, not the current one; processes share a sequence."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# JAX would otherwise take most of the GPUs' memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU in this machine"),
]

ROOT = Path(__file__).resolve().parents[2]


def _inputs(device: int) -> list[Any]:
    return [torch.randn(2, 300, 4, 64, device=f"cuda:{device}", dtype=torch.bfloat16) for _ in range(3)]


def _check(device: int) -> None:
    """Dense, packed, with a score modifier, and merged, on one device."""
    q, k, v = _inputs(device)
    o, lse = oa.attention(q, k, v, causal=True, return_lse=True)
    assert o.device == q.device == lse.device
    hnd = [x.float().transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*hnd, is_causal=True).transpose(1, 2).cpu().numpy()
    testing.assert_close(o.float().cpu().numpy(), want, atol=2e-2)
    cu = torch.tensor([0, 300, 600], dtype=torch.int32, device=q.device)
    sizes = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 300, "max_seqlen_k": 300}
    packed = oa.attention_varlen(*(x.reshape(600, 4, 64) for x in (q, k, v)), causal=True, **sizes)
    testing.assert_close(packed.reshape(2, 300, 4, 64).float().cpu().numpy(), want, atol=2e-2)
    capped = oa.attention(q, k, v, causal=True, softcap=1e4)
    testing.assert_close(capped.float().cpu().numpy(), want, atol=2e-2)
    merged, _ = oa.merge_states(o, lse, o, lse)
    testing.assert_close(merged.float().cpu().numpy(), want, atol=2e-2)


@pytest.mark.parametrize("current", [0, 1])
def test_current_device_does_not_matter(current: int) -> None:
    with torch.cuda.device(current):
        for device in (0, 1, 0, 1):
            _check(device)
        assert torch.cuda.current_device() == current


def test_stream_of_another_device() -> None:
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.device(1), torch.cuda.stream(stream):
        _check(1)


def test_threads_on_both() -> None:
    def work(device: int) -> None:
        for _ in range(10):
            _check(device)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, i % 2) for i in range(8)]:
            future.result()


def test_mixed_devices_are_an_error() -> None:
    q, _, v = _inputs(0)
    _, k, _ = _inputs(1)
    with pytest.raises(oa.errors.DeviceError, match="argument 'k': expected an array on cuda:0"):
        oa.attention(q, k, v)


@pytest.mark.parametrize("check_vma", [True, False])
def test_jax_on_both(check_vma: bool) -> None:
    """A program of each GPU, and one of both that divide the batch or the heads."""
    jax = pytest.importorskip("jax")
    devices = jax.devices("gpu")[:2]
    spec = jax.sharding.PartitionSpec
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, 300, heads, 64), "bfloat16") for key, heads in zip(keys, (4, 1, 1), strict=True)
    )
    attend = functools.partial(oa.attention, causal=True, deterministic=True)

    def gradients(f: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: (f(*x).astype("float32") ** 2).sum(), (0, 1, 2)))

    wants = []
    for device in (*devices, *devices):
        own = [jax.device_put(x, device) for x in (q, k, v)]
        o = jax.jit(attend)(*own)
        assert o.devices() == {device}
        wants.append([np.asarray(x.astype("float32")) for x in (o, attend(*own), *gradients(attend)(*own))])
    for want in wants:
        for a, b in zip((want[0], *want[1:]), (wants[0][0], wants[0][0], *wants[0][2:]), strict=True):
            np.testing.assert_array_equal(a, b)
    mesh = jax.sharding.Mesh(np.asarray(devices), ("x",))
    heads = spec(None, None, "x")
    for specs in ((spec("x"),) * 3, (heads, spec(), spec())):
        shared = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check_vma)
        got = [np.asarray(x.astype("float32")) for x in (jax.jit(shared)(q, k, v), *gradients(shared)(q, k, v))]
        # Of half the batch or the heads another tiling may be the fastest: the same but for a rounding.
        np.testing.assert_allclose(got[0], wants[0][0], rtol=2**-7, atol=2e-3)
        for a, b in zip(got[1:], wants[0][2:], strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


def by_torchrun(program: str, *arguments: str, seconds: int, processes: int = 2) -> str:
    """What a program of several processes says. One that hangs ends with all its processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
               str(ROOT / program), *arguments]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # torchrun ends its workers when it is asked to.
        process.terminate()
        try:
            said, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        pytest.fail(f"{program} ran for {seconds} s:\n{said[-3000:]}")
    assert process.returncode == 0, said[-3000:]
    return said


def count(said: str, lines: Sequence[str], processes: int = 2) -> None:
    """All processes said each of these lines."""
    found = said.splitlines()
    wanted = [f"rank {rank}: {line}" for rank in range(processes) for line in lines]
    missing = [line for line in wanted if line not in found]
    assert not missing, (missing, said[-2000:])


def test_context_parallel_by_nccl() -> None:
    """Both operators and rotate methods, causal and full, lengths of every remainder: output, gradients, LSE."""
    said = by_torchrun("tests/unit/frameworks/context_parallel_child.py", seconds=150)
    cases = [
        f"{operator} {rotate} causal={causal} balance={causal} 16"
        for operator in ("flash", "cudnn")
        for rotate in ("allgather", "alltoall")
        for causal in (True, False)
    ]
    lengths = [
        f"flash {rotate} causal=True balance={balance} {length}"
        for rotate in ("allgather", "alltoall")
        for balance, length in ((True, 20), (False, 18), (True, 19), (False, 17))
    ]
    count(said, [*cases, *lengths, "refused"])


@pytest.mark.parametrize("processes", [2, 4])
def test_ring_attention_by_nccl(processes: int) -> None:
    """Schedules, masks, documents, 8 bits on the wire, streams, caches, DTensors, graphs; the same bits again.

    With four GPUs also meshes of two dimensions.
    """
    if torch.cuda.device_count() < processes:
        pytest.skip(f"fewer than {processes} GPUs in this machine")
    said = by_torchrun("tests/gpu/ring_child.py", seconds=150, processes=processes)
    calls = [f"causal={causal} {rows}" for causal in (True, False) for rows in (1024, 777)]
    calls += ["window", "softcap", "int8", "int8 777", "int8 one head", "fp8", "fp8 777", "fp8 one head"]
    lines = [f"{schedule} {call}" for schedule in ("zigzag", "contiguous") for call in calls]
    parts = ["three rows", "documents", "heads", "streams", "queued", "destroyed", "caches", "dtensors", "graph"]
    count(said, [*lines, *parts, *["meshes"][: processes == 4]], processes)
