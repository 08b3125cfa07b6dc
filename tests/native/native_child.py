"""Runs the C module on fake tensors and a fake driver; started by test_native.py with the module's path and a count."""

from __future__ import annotations

import collections
import ctypes
import importlib.util
import os
import random
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from omniattn.arrays.identity import Same
from tests.native.native_fakes import ALLOCATOR, WORKSPACES, Cache, Call, Layout, Tensor, capsule

state = SimpleNamespace(
    modes=0, transform=None, grad=True, inference=False, level=SimpleNamespace(_current_level=-1), environment={}
)
failures: list[tuple[str, int, int, str]] = []
made: list[Tensor] = []
changed: list[Any] = []
OPERATION, LAYOUT = object(), Layout()
OPTIONS = (None, True, 0.5, (-1, 8), "exact")


def fail(call: str, code: int, kernel: int, launch: str) -> None:
    failures.append((call, code, kernel, launch))
    raise OSError(call)


def maker(like: Any) -> Tensor:
    made.append(Tensor(0x100010 + 0x1000 * len(made)))
    return made[-1]


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("omniattn._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def use_device(native: Any) -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuInit(0) == 0
    context = ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    assert native.setup(
        (Tensor,), capsule(), Tensor.is_neg, lambda: state.grad, Tensor.is_inference, lambda: state.inference,
        changed.append, lambda: state.modes, lambda: state.transform, state.level, state.environment, "FORCED", fail,
        Same,
    )  # fmt: skip
    return driver


def run(native: Any, call: Any) -> Any:
    """As the engine asks the module."""
    if not isinstance(call, Call):
        return native.run(*call) if isinstance(call, tuple) else native.run(call, call, call, call, call, call, call)
    return native.run(call, call.operation, call.objects, call.options, call.stream, call.cache, call.facts)


def launch(operand: int, add: int = 0, cluster: Any = None, overlap: bool = False, maps: Any = ()) -> tuple[Any, ...]:
    return 0x99, (3, 1, 1), 64, 16, cluster, overlap, bytes(256), ((0, operand, add),), maps, "usual"


def entry(native: Any, objects: tuple[Any, ...], launches: Any, /, **changes: Any) -> Any:
    given = {
        "operation": OPERATION, "options": OPTIONS, "facts": None, "layout": None, "problem": "problem", "keep": None,
        "objects": objects, "masks": ((0, 15), (1, 1)), "makers": ((0, maker),), "workspace": 0,
        "alignment": 256, "launches": launches, "placed": None, "differentiate": None, "pairs": (),
        "writes_cache": False, **changes,
    }  # fmt: skip
    return native.Entry(*given.values())


def check_calls(native: Any) -> None:
    q, k = Tensor(0x10, (2, 8)), Tensor(0x20, (4, 8))
    a_map = ((0, 1, 2, b"\1" * 128),)
    launches = (
        launch(0, 5), launch(1, overlap=True), launch(3), launch(4, cluster=(2, 1, 1), overlap=True),
        (0x99, (1, 1, 1), 32, 0, None, True, bytes(128), (), a_map, "map"),
    )  # fmt: skip
    assert native.learn(entry(native, (q, k, None), launches, workspace=500))

    def call(objects: Any = (q, k, None), options: Any = OPTIONS, **changes: Any) -> Call:
        made = Call(OPERATION, objects, options)
        made.__dict__.update(changes)
        return made

    usual = call()
    assert run(native, usual) == [made[-1]]
    assert not WORKSPACES, "released once the kernels are queued"
    assert usual.problem == "problem"
    assert run(native, call((Tensor(0x40, (2, 8)), k, None))) is not None
    for name, value in (("code", -1), ("address", None)):
        before, ALLOCATOR[name] = ALLOCATOR[name], value
        assert run(native, call()) is None, "no memory: the engine asks torch, and says what torch says"
        assert not WORKSPACES
        ALLOCATOR[name] = before
    launched = len(made)
    others: list[Any] = [
        (q, k), (q, None, None), (k, q, None), (Tensor(0x18), k, None), (q, Tensor(0x21, (4, 8)), None), (1, k, None),
        *((Tensor(0x10, **change), k, None) for change in (
            {"bits": 32}, {"code": 0}, {"device": 1}, {"device_type": 1}, {"strides": (16, 1)}, {"error": True},
            {"negated": True}, {"requires_grad": True}, {"requires_grad": None}, {"shape": (2, 9)},
            {"offset": 8}, {"ndim": 9}, {"ndim": -1},
        )),
    ]  # fmt: skip
    for objects in others:
        assert run(native, call(objects)) is None, objects
    for options in (
        (None, 1, 0.5, (-1, 8), "exact"), (None, True, 0.5, [-1, 8], "exact"), (None, True, 0.5, (-1, 8.0), "exact"),
        (None, True, 0.5, (-1, 8)), (None, True, 0.25, (-1, 8), "exact"), (None, True, 0.5, (-1, 8), b"exact"), 7,
    ):  # fmt: skip
        assert run(native, call(options=options)) is None, options
    named = collections.namedtuple("named", "mask causal scale window precision")(*OPTIONS)
    assert run(native, call(options=named)) is not None, "whatever class of tuple holds them"
    assert native.run(None, OPERATION, (q, k, None), OPTIONS, None, None, None) is not None
    launched = len(made)
    for changes in ({"stream": 3}, {"facts": 1}, {"operation": 1}, {"objects": [q, k, None]}, {"cache": Cache(LAYOUT)}):
        assert run(native, call(**changes)) is None, changes
    for name, value in (("modes", 1), ("transform", 0), ("level", 0)):
        before = getattr(state, name)
        if name == "level":
            state.level._current_level = value
        else:
            setattr(state, name, value)
        assert run(native, call()) is None, name
        state.level._current_level = -1
        if name != "level":
            setattr(state, name, before)
    state.environment["FORCED"] = "x"
    assert run(native, call()) is None
    state.environment.clear()
    assert len(made) == launched, "nothing is made for a call that is left to the engine"
    state.grad = False
    assert run(native, call((Tensor(0x10, requires_grad=True), k, None))) is not None
    state.grad = True
    # Of two calls with other options each has its own entry; a failure of the driver is raised.
    bad = ((0x99, (0, 1, 1), 64, 16, None, False, bytes(8), (), (), "kernel that has no CTAs"),)
    assert native.learn(entry(native, (q, k, None), bad, options=(1,)))
    with pytest.raises(OSError, match="cuLaunchKernel"):
        run(native, call(options=(1,)))
    assert failures == [("cuLaunchKernel", 1, 0x99, "kernel that has no CTAs")]
    native.clear()
    assert run(native, call()) is None


def check_options_and_streams(native: Any) -> None:
    q = Tensor(0x10)
    one, other = object(), object()
    of_same = (Same(one), (True, Same(other)))
    assert native.learn(entry(native, (q,), (launch(0),), facts=of_same, masks=(), makers=()))
    for facts, stream, taken in (
        ((Same(one), (True, Same(other))), None, True), (of_same, 0x51, True), (of_same, 0x50, False),
        ((Same(other), (True, Same(other))), None, False), ((one, (True, Same(other))), None, False),
        (of_same, -1, False), (of_same, 1 << 80, False), (of_same, True, False), (of_same, "0x51", False),
    ):  # fmt: skip
        found = run(native, Call(OPERATION, (q,), OPTIONS, facts=facts, stream=stream))
        assert (found == []) is taken, (facts, stream)
    native.clear()
    # More calls than there is room for, all on the same arrays: the newest are kept. What is learned again replaces
    # itself.
    for i in range(40):
        for _ in range(2):
            assert native.learn(entry(native, (q,), (launch(0),), options=(i,), masks=(), makers=()))
    taken = [i for i in range(40) if run(native, Call(OPERATION, (q,), (i,))) is not None]
    assert taken == list(range(24, 40))
    broken = Same(one)
    del broken.of
    assert run(native, Call(OPERATION, (q,), OPTIONS, facts=(broken, (True, Same(other))))) is None
    native.clear()


def check_gradients(native: Any) -> None:
    """Calls that gradients are wanted of go to a function, which has their launches run."""
    leaf, k = Tensor(0x10, requires_grad=True), Tensor(0x20, (4, 8))
    given: list[Any] = []

    def differentiate(objects: Any) -> Any:
        given.append(objects)
        state.grad = False
        try:
            return native.run_as("forward", (), objects)
        finally:
            state.grad = True

    assert native.learn(entry(native, (leaf, k), (), masks=(), makers=(), differentiate=differentiate))
    call = Call(OPERATION, (leaf, k), OPTIONS)
    before = native.counts()
    assert run(native, call) is None, "the launches are not known"
    assert given == [(leaf, k)]
    state.grad = False
    assert native.learn(entry(native, (leaf, k), (launch(0),), operation="forward", options=()))
    assert run(native, call) is None, "no gradient is wanted"
    state.grad = True
    assert run(native, call) == [made[-1]]
    hits, misses = native.counts()
    assert (hits - before[0], misses - before[1]) == (1, 3)
    for objects in ((leaf, Tensor(0x20, (4, 8), requires_grad=True)), (Tensor(0x10), k), (leaf, leaf)):
        assert run(native, Call(OPERATION, objects, OPTIONS)) is None
    assert len(given) == 2
    assert native.run_as("forward", (), (leaf, k)) is None, "whose gradient would be lost"
    for operation, options, objects in (
        ("other", (), (leaf, k)), ("forward", (1,), (leaf, k)), ("forward", [], (leaf, k)), ("forward", (), [leaf]),
        (OPERATION, OPTIONS, (leaf, k)), ("forward", (), 3),
    ):  # fmt: skip
        state.grad = operation is OPERATION
        assert native.run_as(operation, options, objects) is None
    state.grad = True
    for bad in ((), (1, 2), (1, 2, 3, 4)):
        with pytest.raises(TypeError, match="expected 3 arguments"):
            native.run_as(*bad)
        with pytest.raises(TypeError, match="expected 7 arguments"):
            native.run(*bad)
    for objects, function in (((leaf, k), None), ((k, k), differentiate)):
        with pytest.raises(ValueError, match="gradients"):
            entry(native, objects, (), makers=(), masks=(), differentiate=function)

    def fails(objects: Any) -> Any:
        raise KeyError("of the function")

    assert native.learn(entry(native, (leaf, k), (), masks=(), makers=(), options=("bad",), differentiate=fails))
    with pytest.raises(KeyError, match="of the function"):
        run(native, Call(OPERATION, (leaf, k), ("bad",)))
    native.clear()


def check_caches_and_given(native: Any) -> None:
    q, out = Tensor(0x10), Tensor(0x60)
    assert native.learn(entry(native, (q,), (launch(2),), layout=LAYOUT, masks=()))
    assert run(native, Call(OPERATION, (q,), OPTIONS, cache=Cache(LAYOUT))) is not None
    for cache in (None, Cache(Layout()), Cache(LAYOUT, plain=False)):
        assert run(native, Call(OPERATION, (q,), OPTIONS, cache=cache)) is None
    assert not changed, "nothing of the caller's has been written"
    # Of 32 bytes each, and right where `out` begins 8 bytes behind the other.
    pairs = ((1, 0, -32, 32, -8),)
    assert native.learn(entry(native, (q, out), (launch(2),), makers=((1, None),), placed=(0, 32), pairs=pairs))
    assert run(native, Call(OPERATION, (q, out), OPTIONS)) == [out]
    assert changed == [(out,)]
    near = [Tensor(0x10 + 8), Tensor(0x10 + 32), Tensor(0x90 - 32)]
    for objects in ((q, near[0]), (q, near[1]), (Tensor(0x90), near[2])):
        assert run(native, Call(OPERATION, objects, OPTIONS)) == [objects[1]]
    frozen = Tensor(0x60, inference=True)
    changed.clear()
    for objects in (
        (q, frozen), (q, Tensor(0x10)), (Tensor(0x20), out), (Tensor(0x40), out), (q, Tensor(0)),
        (q, Tensor(0x10 + 31)), (q, Tensor(0x10 + 16)), (Tensor(0x50), Tensor(0x50 - 31)),
        (Tensor(0x50), Tensor(0x50 - 8)),
    ):  # fmt: skip
        assert run(native, Call(OPERATION, objects, OPTIONS)) is None, objects
    assert not changed
    state.inference = True
    assert run(native, Call(OPERATION, (q, frozen), OPTIONS)) == [frozen]
    state.inference = False
    # A cache that is written: its planes have changed, and lie apart from the call's arrays.
    changed.clear()
    pairs = ((1, 0, -32, 0x1000, 0),)
    assert native.learn(
        entry(native, (q,), (launch(1),), layout=LAYOUT, makers=(), masks=(), pairs=pairs, writes_cache=True)
    )
    good, cold = Cache(LAYOUT), Cache(LAYOUT)
    cold._written = (frozen, frozen)
    assert run(native, Call(OPERATION, (q,), OPTIONS, cache=good)) == []
    assert changed == [good._written]
    bad: list[Any] = [Cache(LAYOUT), Cache(LAYOUT)]
    for cache, written in zip(bad, (None, ()), strict=True):
        cache._written = written
    for objects, cache in (((q,), bad[0]), ((q,), bad[1]), ((q,), cold), ((Tensor(0x7010),), good)):
        assert run(native, Call(OPERATION, objects, OPTIONS, cache=cache)) is None
    state.inference = True
    assert run(native, Call(OPERATION, (q,), OPTIONS, cache=cold)) == []
    state.inference = False
    assert len(changed) == 2
    for changes in (
        {"masks": ((9, 1),)}, {"makers": ((7, None),)}, {"workspace": 1 << 63}, {"alignment": 3}, {"placed": (5, 16)},
        {"placed": (0, 0)}, {"objects": (1, 2)}, {"launches": (launch(64),)}, {"launches": (launch(0),) * 9},
        {"launches": ((0, (1, 1, 1), 1, 0, None, False, bytes(8), ((1, 0, 0),), (), ""),)},
        {"launches": ((0, (1, 1, 1), 1, 0, None, False, bytes(5000), (), (), ""),)},
        {"launches": ((0, (1, 1, 1), 1, 0, None, False, bytes(128), (), ((0, 0, 0, b"short"),), ""),)}, {"masks": (3,)},
        {"pairs": (3,)}, {"pairs": ((64, 0, 0, 0, 0),)}, {"pairs": ((0, 64, 0, 0, 0),)},
    ):  # fmt: skip
        try:
            entry(native, (q, out), (), **changes)
        except ValueError:
            continue
        raise AssertionError(changes)
    native.clear()


def fuzz(native: Any, count: int) -> None:
    """Calls that are wrong in every way that a caller can make them; no crash, and no memory lost."""
    rng = random.Random(7)
    q, leaf = Tensor(0x10), Tensor(0x10, requires_grad=True)
    good = Call(OPERATION, (q, q, None), OPTIONS)
    assert native.learn(entry(native, good.objects, (launch(0), launch(3, overlap=True))))
    wanting = Call(OPERATION, (leaf, q), OPTIONS)
    differentiate = partial(native.run_as, "forward", ())
    assert native.learn(entry(native, wanting.objects, (), masks=(), makers=(), differentiate=differentiate))
    odd: list[Any] = [
        None, 0, -1, 1.5, "text", b"", (), [], {}, object(), float("nan"), 1 << 80, type, (None,) * 30, ((((),),),),
    ]  # fmt: skip

    def tensor() -> Any:
        if rng.random() < 0.2:
            return rng.choice(odd)
        shape = tuple(rng.randrange(-2, 9) for _ in range(rng.randrange(9)))
        changes = {"bits": rng.randrange(256), "device": rng.randrange(-1, 3), "device_type": rng.randrange(4)}
        changes["ndim"] = rng.choice([len(shape), len(shape), -1, 9, 1 << 30])
        changes["error"], changes["negated"] = rng.random() < 0.1, rng.random() < 0.1
        return Tensor(rng.randrange(1 << 48), shape, **(changes if rng.random() < 0.5 else {"offset": 1 << 60}))

    def pages() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    before = pages()
    for i in range(count):
        if i == count // 4:
            before = pages()
        made.clear()
        objects: Any = tuple(tensor() for _ in range(rng.randrange(5))) if rng.random() < 0.9 else rng.choice(odd)
        changes = {rng.choice(["facts", "cache", "stream", "options", "operation"]): rng.choice(odd)}
        call = Call(OPERATION, objects, OPTIONS)
        call.__dict__.update(changes if rng.random() < 0.5 else {})
        what = rng.random()
        if what < 0.1:
            assert run(native, good) is not None
            assert run(native, wanting) is None
        elif what < 0.8:
            try:
                run(native, call)
            except AttributeError:
                assert call.cache is not None, "only what is no cache lacks its attributes"
        elif what < 0.9:
            try:
                run(native, rng.choice(odd))
                native.run_as(rng.choice(odd), rng.choice(odd), objects)
                native.run_as(*(rng.choice(odd) for _ in range(rng.randrange(5))))
            except (AttributeError, TypeError):
                continue
        else:
            given = [rng.choice(odd) for _ in range(rng.choice([0, 5, 16, 16, 16, 17]))]
            try:
                native.Entry(*given)
            except (TypeError, ValueError, OverflowError):
                continue
    if "LD_PRELOAD" not in os.environ:  # a sanitizer keeps what is freed for a while
        assert pages() - before < 512, "memory grows"
    native.clear()


if __name__ == "__main__":
    module = load(sys.argv[1])
    assert run(module, Call(OPERATION, (), ())) is None
    assert module.run_as(OPERATION, (), ()) is None
    use_device(module)
    check_calls(module)
    check_caches_and_given(module)
    check_options_and_streams(module)
    check_gradients(module)
    fuzz(module, int(sys.argv[2]))
    print("done", *module.counts())
