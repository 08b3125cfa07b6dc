"""The C module `omniattn._native`, compiled here: on fake tensors, with a stand-in for libcuda, and against torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from build_tools import native as build_native
from omniattn.bench import host
from omniattn.plan import native
from omniattn.registry import REGISTRY
from omniattn.runtime.record import LaunchRecord, Pointer, TensorMap
from tests.unit.launch.launch_fakes import program_of

from .building import ROOT, SANITIZERS, needs_compiler, run_child, sanitizers


@needs_compiler
def test_launches(folder: Path) -> None:
    """Addresses, the workspace, attributes and moved tensor maps, as the driver gets them."""
    out, launches = run_child(folder, "native_child.py", str(folder / build_native.NAME), "0", FAKE_CUDA_TRACE="1")
    assert out.startswith("done")
    shape = "3,1,1 x 64 smem 16 stream 0x51"
    assert launches[:5] == [
        f"launch {shape} param {0x10 + 5} on 0",
        f"launchex {shape} attribute 6 = 1 param {0x20} on 0",
        f"launch {shape} param {0x100010} on 0",
        f"launchex {shape} attribute 6 = 1 attribute 4 cluster 2,1,1 param {0x101100} on 0",
        f"launchex 1,1,1 x 32 smem 0 stream 0x51 attribute 6 = 1 param {0x20 + 2} on 0",
    ]
    assert launches[5] == f"launch {shape} param {0x40 + 5} on 0"


@needs_compiler
def test_wrong_calls_neither_crash_nor_leak(folder: Path) -> None:
    count = os.environ.get("OMNIATTN_FUZZ", "20000")
    out, _ = run_child(folder, "native_child.py", str(folder / build_native.NAME), count)
    assert out.startswith("done")


@needs_compiler
def test_sanitizers(folder: Path) -> None:
    variables = sanitizers()
    if variables is None:
        pytest.skip("the compiler has no sanitizers")
    module = build_native.build(ROOT, folder / "sanitized.abi3.so", SANITIZERS)
    count = os.environ.get("OMNIATTN_FUZZ", "3000")
    out, _ = run_child(folder, "native_child.py", str(module), count, **variables)
    assert out.startswith("done")


@needs_compiler
@pytest.mark.frameworks
def test_torch_tensors_are_read(folder: Path) -> None:
    """torch's own table reads its tensors; those on the CPU are left to the engine."""
    code = f"""
import torch
from tests.native import native_child as child
from tests.native.native_fakes import Call
native = child.load({str(folder / build_native.NAME)!r})
capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
assert capsule is not None
T = torch.Tensor
assert native.setup((T,), capsule, T.is_neg, torch.is_grad_enabled, T.is_inference, lambda: False, list,
                    lambda: 0, lambda: None, child.state.level, {{}}, b"x", child.fail, child.Same)
x = torch.zeros(2, 8)
for t in (x, x.to_sparse(), x.to("meta"), x.clone().requires_grad_(), torch.nn.Parameter(x), x.to(torch.complex64)):
    assert child.run(native, Call(1, (t, t), ())) is None
    try:
        child.entry(native, (t,), ())
    except ValueError as error:
        assert "not plain" in str(error)
    else:
        raise AssertionError("an entry of an array that is not on a GPU")
print("done")
"""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no exchange table")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_program_as_the_module_takes_it() -> None:
    spec = REGISTRY[0]
    tensor_map = TensorMap("k", 2, "float16", (8, 8), (16,), (64, 1), 128)
    record = LaunchRecord(spec, (4, 2, 1), 64, bytes(256), (Pointer(8, "o", 4),), (tensor_map,), (2, 1, 1), True)
    program, (kernel,) = program_of([record], ("q", "k", "o"))
    assert native.launches_of(program) is None, "kernels without a handle are launched by Python"
    kernel.function = 0x99  # type: ignore[attr-defined]
    made = native.launches_of(program)
    assert made is not None
    ((function, grid, threads, smem, cluster, overlap, data, places, ((*place, tensor_map_bytes),), text),) = made
    assert (function, grid, threads, smem) == (0x99, (4, 2, 1), 64, spec.smem_bytes)
    assert (cluster, overlap, data, places) == ((2, 1, 1), True, bytes(256), ((8, 2, 4),))
    assert (place, len(tensor_map_bytes)) == ([128, 1, 2], 128)
    assert text == program.texts[0] == str(record)
    assert kernel.maps[0] == ("float16", 1 << 20, (8, 8), (16,), (64, 1))


def test_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> Any:
        raise AssertionError(name)

    monkeypatch.setattr(native, "_is_asked", False)
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setattr(native, "importlib", SimpleNamespace(import_module=refused))
    with monkeypatch.context() as patch:  # without torch there is nothing to repeat
        patch.delitem(sys.modules, "torch", raising=False)
        assert native.module() is None
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", SimpleNamespace()))
    monkeypatch.setenv("OMNIATTN_NATIVE", "0")
    assert native.module() is None
    monkeypatch.delenv("OMNIATTN_NATIVE")
    with monkeypatch.context() as patch:  # a Python without a global lock
        patch.setattr(native, "sysconfig", SimpleNamespace(get_config_var={"Py_GIL_DISABLED": 1}.get))
        patch.setattr(native, "_is_asked", False)
        assert native.module() is None
    monkeypatch.setattr(native, "_is_asked", False)
    with pytest.raises(AssertionError, match="_native"):
        native.module()


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="C compiler"):
        build_native.build(ROOT, tmp_path / "x.so")


def test_the_engine_asks_the_module_first(monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.ones((1, 2, 1, 8), np.float32)
    seen: list[Any] = []

    def run(call: Any, operation: Any, objects: Any, options: Any, *parts: Any) -> list[Any] | None:
        assert (call, *parts) == (None, None, None, None)
        assert (len(objects), options[0]) == (len(operation.arrays), "NHD")
        seen.append(operation)
        return None if len(seen) > 1 else ["made by the module"]

    monkeypatch.setattr(native, "run", run)
    assert oa.attention(q, q, q) == "made by the module"
    np.testing.assert_array_equal(oa.attention(q, q, q), q)
    assert [operation.name for operation in seen] == ["attention"] * 2, "asked once a call"
    native.clear()
    assert native.run is None


def test_timed_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(*given: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(native, "run", module)
    assert host.by_python(lambda: native.run)() is None
    assert native.run is module
    monkeypatch.setattr(native, "run", None)
    host.by_python(lambda: setattr(native, "run", module))()
    assert native.run is module, "what is learned meanwhile stays"


def test_options_are_learned_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module compares options with those of a call, and keeps that call's."""
    learned: list[Any] = []
    stub = SimpleNamespace(
        Entry=lambda *facts: facts, learn=lambda entry: learned.append(entry) or True, run="run", run_as="run_as"
    )
    monkeypatch.setattr(native, "module", lambda: stub)
    monkeypatch.setattr(native, "get_driver", lambda: SimpleNamespace(name="cuda"))
    monkeypatch.setattr(native, "run", None)
    monkeypatch.setattr(native, "run_as", None)
    monkeypatch.delenv("OMNIATTN_FORCE_KERNEL", raising=False)
    with monkeypatch.context() as patch:
        calls: list[Any] = []
        attention = sys.modules["omniattn.ops.attention"]
        patch.setattr(attention, "run", lambda call, **asked: calls.append(call) or [None])
        q = np.zeros((1, 4, 2, 8), np.float32)
        oa.attention(q, q, q, causal=True)
    (call,) = calls
    assert type(call.options) is not tuple
    repeat = SimpleNamespace(masks=(), makers=(), workspace_bytes=0, writes=None)
    native.learn(call, None, SimpleNamespace(records=(), kernels=(), operands=(), texts=()), repeat)  # type: ignore[arg-type]
    ((operation, options, facts, *_),) = learned
    assert operation is call.operation
    assert options is call.options
    assert facts is call.facts
    assert (native.run, native.run_as) == ("run", "run_as")
