"""Every operation of the package by Python and by the C module, on torch's tensors and a stand-in for libcuda.

Started by test_native_calls.py with the folder of the stand-in and the modules, and the name of a check.
"""

from __future__ import annotations

import os
import random
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import omniattn as oa
from omniattn.errors import ArgumentError, DriverError, UnsupportedError
from omniattn.plan import native
from omniattn.plan.engine import PLANS
from tests.native.cpu_as_gpu import Arena, Machine, driver
from tests.repeated_calls import gradient_calls, plain_calls

Calls = dict[str, Callable[[], Any]]

#: What is left to Python, and why: (calls by the module, calls left to Python) each time.
STAYS = {
    "out is q": (0, 1),  # whether results may overlap arguments is the engine's to say
    "operands": (1, 1),  # first a call on objects that are no arrays, then one on what they hold
}
#: Operations of one call.
TWO = ("append", "gradients")


def flat(made: Any) -> list[Any]:
    """Tensors of a result."""
    if isinstance(made, (tuple, list)):
        return [x for part in made for x in flat(part)]
    return [made]


def facts(made: Any) -> list[Any]:
    """What of a result can be compared."""
    return [
        (x.__class__, x.shape, x.dtype, x.stride(), x.data_ptr(), x.requires_grad, x.is_inference()) for x in flat(made)
    ]


def by_python(machine: Machine, call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """As `Machine.record`, without the module."""
    kept, native.run, native.run_as = (native.run, native.run_as), None, None
    try:
        return machine.record(call)
    finally:
        native.run, native.run_as = kept


def compare(machine: Machine, calls: Calls, *, refused: tuple[str, ...] = ()) -> None:
    """The same launches and results, and from the third call on without Python."""
    count = 0
    for name, call in calls.items():
        try:
            call()
        except (ArgumentError, UnsupportedError):
            assert name in refused, name
            continue
        assert name not in refused, name
        for _ in range(2):
            call()
        expected, launches = by_python(machine, call)
        assert launches, name
        each = STAYS.get(name, (2 if name.startswith(TWO) else 1, 0))
        for _ in range(3):
            before = machine.native.counts()
            results, own = machine.record(call)
            after = machine.native.counts()
            assert own == launches, f"{name}\n{own}\n{launches}"
            assert facts(results) == facts(expected), name
            assert (after[0] - before[0], after[1] - before[1]) == each, name
            assert machine.num_workspaces == 0, name
        count += 1
    print(count, "calls")


def check_calls(machine: Machine) -> None:
    """All of them, on a GPU that has every kernel and on one that has the generic ones."""
    compare(machine, plain_calls("cpu", machine.stream))
    compare(machine, gradient_calls("cpu"))
    machine.place(1)
    machine.enter(1)
    compare(machine, plain_calls("cpu", machine.stream), refused=("fp8", "e4m3", "operands", "fp8 varlen"))
    compare(machine, gradient_calls("cpu"))


def _inputs(**more: Any) -> list[Any]:
    return [torch.randn(1, 64, 2, 64, **more).bfloat16() for _ in range(3)]


def _learned(call: Callable[[], Any]) -> Callable[[], Any]:
    for _ in range(3):
        call()
    return call


def check_conditions(machine: Machine) -> None:
    """Streams, several GPUs, errors of the driver, forgotten plans."""
    counts = machine.native.counts
    q, k, v = _inputs()
    call = _learned(lambda: oa.attention(q, k, v, precision="int8"))
    machine.stream = 0x77
    expected, taken = by_python(machine, call)[1], counts()[0]
    assert machine.record(call)[1] == expected
    assert counts()[0] == taken + 1
    assert all("stream 0x77 on 0" in line for line in expected)
    # Tensors on another GPU than the current one, whose context is made current for the launches, and only for them.
    machine.place(1)
    _learned(call)
    taken, (_, launches) = counts()[0], machine.record(call)
    assert counts()[0] == taken + 1
    assert launches
    assert all(" on 1 " in line for line in launches)
    assert by_python(machine, call)[1] == launches
    assert machine.current() == 0
    machine.enter(1)
    assert machine.record(call)[1] == launches
    machine.place(0)
    assert machine.record(call)[1] == expected
    assert counts()[0] == taken + 3
    assert machine.current() == 1
    machine.enter(0)
    # A launch that fails, the second of three.
    messages = []
    for run in (lambda: by_python(machine, call), call):
        driver.fake_fail(2, 1)
        with pytest.raises(DriverError) as error:
            run()
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "CUDA_ERROR_INVALID_VALUE: invalid argument. Launch: kernel " in messages[0]
    assert re.search(
        r", of \w+ of q bfloat16 \(.*; the kernel has .* 31 of 81559 MiB of GPU memory are free", messages[0]
    )
    taken = counts()[0]
    call()
    assert counts()[0] == taken + 1
    assert machine.num_workspaces == 0
    # Memory that the table does not give: the engine asks torch, and says what torch says.
    taken = counts()[0]
    machine.refuse_memory(1)
    assert len(machine.record(call)[1]) == 3
    assert counts()[0] == taken
    assert len(machine.record(call)[1]) == 3
    assert counts()[0] == taken + 1
    # A kernel that the environment forces, which the module has not run.
    os.environ["OMNIATTN_FORCE_KERNEL"] = "attn_fwd_sm80_bf16_d64"
    plain = lambda: oa.attention(q, k, v)  # noqa: E731
    _learned(plain)
    taken, (_, launches) = counts()[0], machine.record(plain)
    assert (counts()[0], len(launches)) == (taken, 1)
    assert "attn_fwd_sm80_bf16_d64" in launches[0]
    del os.environ["OMNIATTN_FORCE_KERNEL"]
    # The module has read the table once: a class may lose its capsule.
    del torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    call()
    assert counts()[0] == taken + 1
    assert machine.num_workspaces == 0
    PLANS.clear()
    assert native.run is None
    assert native.run_as is None
    print("done")


def check_gradients(machine: Machine) -> None:
    """What autograd does with a call that the module runs."""
    counts = machine.native.counts
    leaves = [x.requires_grad_() for x in _inputs()]
    q, k, v = leaves
    do = torch.ones_like(q)

    def grad(o: Any, do: Any = do, **more: Any) -> Any:
        return torch.autograd.grad(o, leaves, do, **more)

    for _ in range(3):
        grad(oa.attention(q, k, v))
    taken = counts()[0]
    o = oa.attention(q, k, v)
    assert o.grad_fn is not None
    assert counts()[0] == taken + 1
    grad(o, retain_graph=True)
    grad(o)
    assert counts()[0] == taken + 3
    with pytest.raises(RuntimeError, match="second time"):
        grad(o)
    # Forward by the module, backward by Python, and the other way round.
    for first in (True, False):
        kept = native.run, native.run_as
        o = oa.attention(q, k, v) if first else by_python(machine, lambda: oa.attention(q, k, v))[0]
        expected = machine.record(lambda o=o: grad(o, retain_graph=True))[1]
        assert by_python(machine, lambda o=o: grad(o))[1] == expected
        assert (native.run, native.run_as) == kept
    # Plans that are forgotten between forward and backward.
    o = oa.attention(q, k, v)
    PLANS.clear()
    assert len(machine.record(lambda: grad(o))[1]) == 3
    for _ in range(3):
        grad(oa.attention(q, k, v))
    # Other gradients than those that were learned.
    taken = counts()[0]
    o = oa.attention(q, k, v)
    grad(o, torch.ones(1, 1, 1, 1, dtype=do.dtype).expand(do.shape))
    o = oa.attention(q, k, v)
    with pytest.raises(UnsupportedError, match="second derivatives"):
        grad(o, create_graph=True)[0].float().sum().backward()
    o = oa.attention(q, k, v)
    with torch.no_grad():
        q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(o)
    assert counts()[0] >= taken + 3
    # Without gradients the call is another one.
    for _ in range(2):
        with torch.no_grad():
            for _ in range(3):
                assert not oa.attention(q, k, v).requires_grad
        with torch.inference_mode():
            assert oa.attention(q, k, v).is_inference()
        assert oa.attention(q, k, v).requires_grad
    frozen = [x.detach() for x in leaves]
    assert not oa.attention(*frozen).requires_grad
    for wanted in ([0], [1, 2], [2]):
        some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(leaves)]
        needing = [some[i] for i in wanted]
        for _ in range(4):
            made, own = machine.record(lambda: torch.autograd.grad(oa.attention(*some), needing, do))  # noqa: B023
        assert [x.shape for x in made] == [some[i].shape for i in wanted]
        assert own == by_python(machine, lambda: torch.autograd.grad(oa.attention(*some), needing, do))[1]  # noqa: B023
    with pytest.raises(ArgumentError, match="'out'"):
        oa.attention(q, k, v, out=torch.empty_like(q))
    # A failure of the backward is raised through autograd.
    for _ in range(3):
        grad(oa.attention(q, k, v))
    o = oa.attention(q, k, v)
    driver.fake_fail(2, 1)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        grad(o)
    print("done")


def _versions(*tensors: torch.Tensor) -> list[int]:
    return [x._version for x in tensors]


def check_writes(machine: Machine) -> None:
    """What a call writes counts as changed, by every way; what overlaps is refused at every call."""
    (q, k, v), counts = _inputs(), machine.native.counts

    def every_way(call: Callable[[], Any], *written: torch.Tensor) -> None:
        for taken in (0, 0, 1, 1):  # the engine, the fast path, the module
            before, hits = _versions(*written), counts()[0]
            call()
            assert _versions(*written) == [n + 1 for n in before]
            assert counts()[0] == hits + taken

    def refused(*calls: Callable[[], Any]) -> None:
        for call in calls:
            for way in (machine.record, lambda call: by_python(machine, call)):
                before = _versions(q, k, v, packed, out)
                with pytest.raises(ArgumentError, match="shares memory"):
                    way(call)
                assert _versions(q, k, v, packed, out) == before

    out, wide = torch.empty_like(q), torch.zeros(1, 128, 2, 64).bfloat16()
    packed = torch.zeros(1, 64, 3, 2, 64).bfloat16()
    every_way(lambda: oa.attention(q, k, v, out=out), out)
    assert _versions(q, k, v) == [0, 0, 0]
    wide_q = wide[:, :64]
    refused(
        lambda: oa.attention(q, k, v, out=k), lambda: oa.attention(q, k, v, out=v),
        *(lambda at=at: oa.attention(wide_q, k, v, out=wide[:, at : at + 64]) for at in (1, 32, 63)),
        lambda: oa.attention(k, wide_q, v, out=wide[:, 63:127]),
    )  # fmt: skip
    oa.attention(wide_q, k, v, out=wide[:, 64:])
    for _ in range(2):
        oa.attention(q, k, v, out=q)
    assert _versions(q) == [2]
    # Parts of one buffer: what is apart runs by the module, too.
    three = packed.unbind(2)
    every_way(lambda: oa.attention(q, three[1], three[2], out=three[0]), packed)
    refused(lambda: oa.attention(q, three[1], three[2], out=three[1]))
    do, lse = torch.randn_like(q), torch.zeros(1, 2, 64)

    def backward(*into: torch.Tensor) -> Any:
        dq, dk, dv = into
        return oa.attention_backward(do, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)

    for _ in range(2):
        backward(*three)
    for taken in (1, 1):
        hits, before = counts()[0], packed._version
        backward(*three)
        assert (counts()[0], packed._version) == (hits + taken, before + 3)
    rows = [torch.zeros(1, 96, 3, 2, 64).bfloat16() for _ in range(2)]
    refused(
        lambda: backward(three[0], three[1], three[1]), lambda: backward(three[0], three[0], three[2]),
        lambda: backward(rows[0][:, :64, 0], rows[0][:, 32:, 0], rows[1][:, :64, 0]),
    )  # fmt: skip
    # Inference tensors, where they may be written.
    with torch.inference_mode():
        frozen, cold = torch.empty_like(out), oa.KVCache(1, 64, 2, 64, like=q)
    lens = torch.tensor([64], dtype=torch.int32)
    into_frozen = lambda: oa.attention(q, k, v, out=frozen)  # noqa: E731
    into_cold = lambda: oa.append(cold, k, v, seq_lens=lens)  # noqa: E731
    for call in (into_frozen, into_cold):
        for _ in range(2):
            with pytest.raises(ArgumentError, match="an inference tensor outside inference mode"):
                call()
    for call in (into_frozen, into_cold):
        with torch.inference_mode():
            for _ in range(3):
                call()
            hits = counts()[0]
            call()
            assert counts()[0] == hits + 1
        with pytest.raises(ArgumentError, match="an inference tensor outside inference mode"):
            call()
    # Planes of a cache.
    cache = oa.KVCache(1, 64, 2, 64, like=q, k_dtype="int8", recent_window=8, recent_dtype="bf16")
    planes = [t.obj for t in cache.planes.values()]
    every_way(lambda: oa.append(cache, k, v, seq_lens=lens), *planes)
    plain = oa.KVCache(1, 64, 2, 64, like=q)
    for _ in range(3):
        oa.append(plain, k, v, seq_lens=lens)
        oa.decode(q[:, :1], plain, seq_lens=lens, out=out[:, :1])
    refused(
        lambda: oa.append(plain, plain.k.transpose(1, 2), v, seq_lens=lens),
        lambda: oa.append(plain, k, plain.v.transpose(1, 2), seq_lens=lens),
        lambda: oa.decode(q[:, :1], plain, seq_lens=lens, out=plain.k.transpose(1, 2)[:, 9:10]),
        lambda: oa.decode(out[:, :1], plain, seq_lens=lens, out=out[:, :1]),
    )  # fmt: skip
    # A cache of the same layout, whose planes are one.
    one = plain.on([plain.k, plain.k], [])
    with pytest.raises(ArgumentError, match=r"'cache\.k'.*shares memory with 'cache\.v'"):
        oa.append(one, k, v, seq_lens=lens)
    print("done")


def check_threads(machine: Machine) -> None:
    """Each thread's calls are its own."""

    def call(index: int) -> None:
        oa.attention(*inputs[index], out=outs[index], causal=index % 2 == 0)

    def work(index: int) -> None:
        machine.enter(0)
        for _ in range(200):
            call(index)

    inputs, outs = [_inputs() for _ in range(4)], [torch.empty(1, 64, 2, 64).bfloat16() for _ in range(4)]
    expected = []
    for index in range(4):
        for _ in range(3):
            call(index)
        expected += machine.record(lambda index=index: call(index))[1]
    assert len(set(expected)) == 4
    taken = machine.native.counts()

    def all_threads() -> None:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    launches = machine.record(all_threads)[1]
    assert sorted(launches) == sorted(expected * 200)
    hits, misses = machine.native.counts()
    assert (hits - taken[0], misses - taken[1]) == (800, 0)
    # A thread without a context, as one of torch's autograd may be, has one for the launches.
    seen: list[Any] = []

    def without_context() -> None:
        call(0)
        driver.fake_fail(1, 1)
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            call(0)
        seen.append(machine.current())

    def in_a_thread() -> None:
        thread = threading.Thread(target=without_context)
        thread.start()
        thread.join()

    assert machine.record(in_a_thread)[1] == [expected[0]] * 2
    assert seen == [None]
    assert machine.native.counts() == (hits + 1, misses + 1)
    print("done")


def check_fork(machine: Machine) -> None:
    """A child of this process gets the error that it gets without the module."""
    q, k, v = _inputs()
    _learned(lambda: oa.attention(q, k, v))
    assert native.run is not None
    child = os.fork()
    if not child:
        try:
            assert native.run is None
            with pytest.raises(DriverError, match="does not survive a fork"):
                oa.attention(q, k, v)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    taken = machine.native.counts()[0]
    oa.attention(q, k, v)
    assert machine.native.counts()[0] == taken + 1
    print("done")


def _outcome(machine: Machine, record: Callable[..., Any], call: Callable[[], Any]) -> Any:
    """What a call gives, or how it fails."""
    try:
        results, launches = record(call)
    except Exception as error:  # noqa: BLE001 - whatever it is, it has to be the same
        return type(error), str(error)
    return facts(results) if isinstance(flat(results)[0], torch.Tensor) else None, launches


def check_differences(machine: Machine, count: int) -> None:
    """Calls that are right, or wrong in some way: the same launches, or the same error, as by Python."""
    rng = random.Random(11)
    machine.take_everything()
    good = [torch.randn(1, 8, 2, 64).bfloat16() for _ in range(4)]
    large = torch.randn(2, 16, 4, 128).bfloat16()
    with torch.inference_mode():
        frozen = torch.zeros(1, 8, 2, 64).bfloat16()
    odd: list[Any] = [
        None, 3, "q", b"", (), [[1.0]], object(), frozen, good[0].half(), good[0].float(), good[0].to(torch.int8),
        good[0].transpose(1, 2), good[0][:, ::2], good[0].flip(1), good[0][..., ::2], good[0][..., :60], good[0][:, :0],
        good[0].expand(2, 8, 2, 64), good[0][:, :, :1], large[:1, :8, :2, :64], large[:1, :8, :2, 1:65], large[:1],
        large[0], torch.nn.Parameter(good[0]), torch.nn.Parameter(good[0], requires_grad=False), good[1].to_sparse(),
        good[0].clone().requires_grad_(), torch._neg_view(good[0]), good[0].view(1, 8, 2, 1, 64), good[0].numpy,
    ]  # fmt: skip
    choices: dict[str, list[Any]] = {
        "causal": [True, False, 1, 0, None, "yes"], "window": [(4, 0), (-1, -1), [4, 0], (4.0, 0), (True, 0), 4, (4,)],
        "softmax_scale": [0.5, 1, 1.0, True, None, float("nan"), "1"], "softcap": [0.0, 5.0, 5, -1.0, False, None],
        "layout": ["NHD", "HND", "nhd", None, 1], "return_lse": [True, False, 1, None], "deterministic": [True, 0, 1],
        "precision": ["exact", "int8", "int4", "fp8", "fp4", None, oa.Int8(), oa.Int8(smooth_k=False), oa.Fp8()],
        "stream": [None, machine.stream, True, -1, 1 << 70, "0x51", 0.0], "out": [good[3], frozen, good[0], *odd],
        "mask": [
            torch.ones(8, 8, dtype=torch.bool), torch.zeros(1, 1, 8, 8), torch.zeros(8, 9)[:, :8], torch.zeros(8), *odd,
        ],
        "sinks": [torch.zeros(2), torch.zeros(3), torch.zeros(2).bfloat16(), torch.zeros(2).requires_grad_(), None, 1],
    }  # fmt: skip
    seen: set[Any] = set()
    kinds = {"launched": 0, "failed": 0}
    for _ in range(count):
        inputs = [x if rng.random() < 0.92 else rng.choice(odd) for x in good[:3]]
        names = rng.sample(sorted(choices), rng.choice([0, 1, 1, 2]))
        options = {name: rng.choice(choices[name]) for name in names}

        def call(inputs: Any = inputs, options: Any = options) -> Any:
            return oa.attention(*inputs, **options)

        for _ in range(3):
            _outcome(machine, machine.record, call)
        expected = _outcome(machine, lambda call: by_python(machine, call), call)
        for _ in range(3):
            found = _outcome(machine, machine.record, call)
            assert found == expected, (inputs, options, found, expected)
        failed = isinstance(expected[0], type)
        kinds["failed" if failed else "launched"] += 1
        seen.add(expected[1] if failed else tuple(expected[1]))
        assert machine.num_workspaces == 0
    assert machine.native.counts()[0] > kinds["launched"], (machine.native.counts(), kinds)
    print(kinds["launched"], "launched,", kinds["failed"], "failed,", len(seen), "in all")


CHECKS = {
    "calls": check_calls, "conditions": check_conditions, "gradients": check_gradients, "threads": check_threads,
    "fork": check_fork, "writes": check_writes,
}  # fmt: skip

if __name__ == "__main__":
    native.RUNS_GRADIENTS = True
    made = Machine(Path(sys.argv[1]), Arena())
    if sys.argv[2] == "differences":
        check_differences(made, int(sys.argv[3]))
    else:
        CHECKS[sys.argv[2]](made)
