"""Compiled JAX programs that call the native module's handler, on the CPU with a stand-in for libcuda.

Started by test_native_jax.py with the module's path and the folder of a compilation cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import struct
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.export
import numpy as np
import pytest
from jax import numpy as jnp

import omniattn as oa
import omniattn.jax
from omniattn import runtime
from omniattn.frameworks.jax import callbacks, handler, lowering
from omniattn.problems.memory import WORKSPACE_ALIGNMENT
from omniattn.runtime import DeviceInfo

STREAM = 0x51
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_recorded.restype = ctypes.c_char_p
fake.fake_argument_bytes.argtypes = [ctypes.c_void_p, ctypes.c_uint]
hits: list[str] = []
made: list[Any] = []


class Kernel:
    """A loaded kernel whose handle is its name, as the stand-in writes it."""

    def __init__(self, spec: Any) -> None:
        self._name = ctypes.create_string_buffer(spec.name.encode())
        self.function = ctypes.addressof(self._name)

    def attributes(self, cluster: Any, overlap: bool) -> Any:
        return (cluster, overlap) if cluster is not None or overlap else None

    def encode_tensor_map(self, dtype: str, address: int, *facts: Any) -> bytes:
        digest = hashlib.sha256(repr((dtype, facts)).encode()).digest()
        return struct.pack("<Q", address) + (digest * 4)[:120]

    def launch(self, *_: Any) -> None:
        raise AssertionError("launched from Python")


kernels: dict[str, Kernel] = {}


def load(spec: Any, ordinal: int) -> Kernel:
    assert ordinal == 0
    return kernels.setdefault(spec.name, Kernel(spec))


def prepare(path: str, cache: str) -> Any:
    """The module, its handler made known for the CPU, and GPU 0 as what programs of the CPU are made for."""
    spec = importlib.util.spec_from_file_location("omniattn._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["omniattn._native"] = module
    handler.get_driver = lambda: SimpleNamespace(name="cuda")  # type: ignore[attr-defined]
    assert handler.module() is module
    jax.ffi.register_ffi_target(handler.TARGET, module.jax_handler(), platform="cpu")
    runtime.has_tensor_maps = lambda: True
    callbacks.load = load
    callbacks.device_info = lambda n: DeviceInfo(n, "GPU", (9, 0), 132, 232448, 1 << 25, (13, 0))
    lowering._ordinals = lambda: [0]
    lowering.lower_cpu = lowering.lower_cuda
    number_of = handler.number_of

    def kept(launcher: Any, *counts: int) -> int | None:
        number = number_of(launcher, *counts)
        assert number is not None
        for record, kernel in zip(launcher.plans[0].program.records, launcher.plans[0].program.kernels, strict=True):
            fake.fake_argument_bytes(kernel.function, len(record.arguments))
        made.append(launcher)
        return number

    lowering.handler = SimpleNamespace(number_of=kept, lower=handler.lower)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
    fake.cuInit(0)
    return module


def recorded() -> list[str]:
    lines = fake.fake_recorded().decode().splitlines()
    fake.fake_record(1)
    return lines


def check(program: Any, line: str, known: dict[str, int]) -> None:
    """One launch of ``program`` as the driver got it; ``known``: addresses by operand, but for the workspace's."""
    name = line.split(" ", 1)[0]
    record = next(r for r in program.records if r.spec.name == name and r not in known["seen"])  # type: ignore[operator]
    known["seen"].append(record)  # type: ignore[attr-defined]
    grid, attributes = ",".join(map(str, record.grid)), ""
    if record.overlap:
        attributes += " attribute 6 = 1"
    if record.cluster is not None:
        attributes += " cluster " + ",".join(map(str, record.cluster))
    head, _, text = line.rpartition(" arguments ")
    expected = f"{name} {grid} x {record.threads},1,1 smem {record.smem_bytes} stream {STREAM:#x} on 0{attributes}"
    assert head == expected, (head, expected)
    got, want = bytes.fromhex(text), bytearray(record.arguments)
    assert len(got) == len(want)
    for p in record.pointers:
        if p.operand == "workspace" and "workspace" not in known:
            (address,) = struct.unpack_from("<Q", got, p.offset)
            known["workspace"] = address - p.add
            assert known["workspace"] % WORKSPACE_ALIGNMENT == 0
        struct.pack_into("<Q", want, p.offset, known[p.operand] + p.add)
    for m in record.tensor_maps:
        whole = Kernel.encode_tensor_map(None, m.dtype, known[m.operand] + m.add, m.dims, m.strides_bytes, m.box)  # type: ignore[arg-type]
        want[m.offset : m.offset + 128] = whole
    assert got == bytes(want), name


def run(
    what: str, function: Callable[..., Any], *arguments: Any, names: dict[str, int] | None = None, **jit: Any
) -> Any:
    """Compile and run; every launch is what the plan says, with the addresses of arguments and results."""
    made.clear()
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(arguments)]
    fake.fake_record(1)
    results = jax.block_until_ready(jax.jit(function, **jit)(*arguments))
    (launcher,) = made
    planned = launcher.plans[0]
    operands = planned.program.operands
    found = [0 if i < 0 else places[i] for i in planned.places]
    outputs = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(results)]
    if launcher.written:
        # The planes are the caller's own memory: donated.
        assert outputs == places[len(places) - planned.cache_arrays :][: launcher.written]
    else:
        found += outputs
    known: dict[str, Any] = dict(zip(operands, found, strict=False)) | {"seen": []}
    lines = recorded()
    assert len(lines) == len(planned.program.records) > 0, lines
    for line in lines:
        check(planned.program, line, known)
    print(what, len(lines))
    return results


def arrays(*shapes: tuple[int, ...], dtype: str = "bfloat16") -> list[Any]:
    return [jnp.asarray(np.random.default_rng(i).standard_normal(shape), dtype) for i, shape in enumerate(shapes)]


def calls() -> None:
    """Each kind of call."""
    q, k, v = arrays((2, 256, 4, 64), (2, 256, 2, 64), (2, 256, 2, 64))
    run("attention", lambda q, k, v: oa.attention(q, k, v, causal=True, return_lse=True), q, k, v)
    run("sinks", lambda q, k, v, s: oa.attention(q, k, v, sinks=s, softcap=20.0), q, k, v, jnp.zeros(4))
    run("int8", lambda q, k, v: oa.attention(q, k, v, precision="int8"), q, k, v)
    few = arrays((1, 1, 8, 128), (1, 16384, 2, 128), (1, 16384, 2, 128))
    run("split", oa.attention, *few)
    starts = jnp.asarray([0, 100, 256], "int32")
    run("varlen", lambda q, k, v, s, t: oa.attention_varlen(q, k, v, cu_seqlens_q=s, cu_seqlens_k=t, max_seqlen_q=156,
        max_seqlen_k=156), q[0], k[0], v[0], starts, starts + 0)  # fmt: skip
    rows, sums = arrays((9, 2, 64), (9, 2, 64)), [jnp.zeros((2, 9)), jnp.ones((2, 9))]
    run("merge", lambda a, b, la, lb: oa.merge_states(a, la, b, lb), *rows, *sums)
    o, lse = jnp.zeros_like(q), jnp.zeros((2, 4, 256))
    for options in ({}, {"deterministic": True}):
        run(f"backward {options}", lambda q, k, v, do, o, lse, options=options: oa.attention_backward(
            do, q, k, v, o, lse, causal=True, **options), q, k, v, q + 1, o, lse)  # fmt: skip
    count("quantize", lambda q, k, v: (oa.quantize_qk(q, k), oa.quantize_v(v)), q, k, v)
    count("grad", jax.grad(lambda q, k, v: oa.attention(q, k, v).astype(jnp.float32).sum(), (0, 1, 2)), q, k, v)


def count(what: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Compile and run several calls: as many launches as their plans have."""
    made.clear()
    fake.fake_record(1)
    jax.block_until_ready(jax.tree.leaves(jax.jit(function)(*arguments)))
    assert len(recorded()) == sum(len(x.plans[0].program.records) for x in made) >= len(made) == 2
    print(what, len(made))


def caches() -> None:
    """Decoding, and writing a cache in place."""
    batch, heads = 2, 2
    for kind in ("float", "int8"):
        like, options = arrays((batch, 1, heads, 64))[0], {} if kind == "float" else {"k_dtype": "int8"}
        cache = oa.KVCache(batch, 128, heads, 64, like=like, **options)
        q = arrays((batch, 1, 8, 64))[0]
        lengths = jnp.asarray([5, 7], "int32")
        run(f"decode {kind}", lambda q, s, c: oa.decode(q, c, seq_lens=s), q, lengths, cache)

        def append(k: Any, v: Any, s: Any, c: Any) -> Any:
            oa.append(c, k, v, seq_lens=s)
            return c

        run(f"append {kind}", append, like, like + 1, lengths, cache, donate_argnums=3)


def control_flow(module: Any) -> None:
    """Loops, mapped calls and threads: as many launches as calls."""
    q, k, v = arrays((1, 64, 2, 64), (1, 64, 2, 64), (1, 64, 2, 64))
    before = module.jax_runs()
    loop = jax.jit(lambda q, k, v: jax.lax.scan(lambda x, _: (oa.attention(x, k, v), None), q, None, length=5)[0])
    jax.block_until_ready(loop(q, k, v))
    assert module.jax_runs() == before + 5
    stacked = jnp.stack([q, q, q])
    jax.block_until_ready(jax.jit(jax.vmap(oa.attention, in_axes=(0, None, None)))(stacked, k, v))
    assert module.jax_runs() == before + 6
    plain = jax.jit(oa.attention)
    jax.block_until_ready(plain(q, k, v))

    def work() -> None:
        for _ in range(200):
            jax.block_until_ready(plain(q, k, v))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert module.jax_runs() == before + 807
    print("control flow")


def faults(module: Any) -> None:
    """What goes wrong says so, and queues nothing."""
    x = jnp.zeros((4,), jnp.float32)
    call = jax.ffi.ffi_call(handler.TARGET, jax.ShapeDtypeStruct((4,), jnp.float32))

    def message(plan: Any, *operands: Any) -> str:
        with pytest.raises(Exception) as caught:
            jax.block_until_ready(jax.jit(lambda *xs: call(*xs, **plan))(*operands))
        return str(caught.value)

    before = module.jax_runs()
    assert "no launches for GPU 0: it was compiled by another process" in message({"plan": np.int64(99)}, x)
    assert "a call without its plan" in message({"plan": np.uint8(99)}, x)
    assert "a call without its plan" in message({"other": np.int64(99)}, x)
    assert module.jax_plan(7, 0, 1, 1, (0, 1), -1, 256, ((0, 1 << 30, "q"),), (), None)
    said = message({"plan": np.int64(7)}, x)
    assert "argument 'q': expected an address that is a multiple of 1073741824 bytes, received 0x" in said
    assert "expected 1 arguments and 1 results, received 2 and 1" in message({"plan": np.int64(7)}, x, x)
    module.jax_failed(8, 0, "no kernel for this GPU")
    assert "no kernel for this GPU" in message({"plan": np.int64(8)}, x)
    for bad in (
        (9, 0, 99, 1, (), -1, 256, (), (), None), (9, 0, 1, 1, (2,), -1, 256, (), (), None),
        (9, 0, 1, 1, (), 5, 256, (), (), None), (9, 0, 1, 1, (), -1, 3, (), (), None),
        (9, 0, 1, 1, (), -1, 256, ((4, 16, "q"),), (), None), (9, 0, 1, 1, (), -1, 256, (), (1,), None),
        (9, 0, 1, 1, (0,) * 64, -1, 256, (), (), None),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"omniattn\._native"):
            module.jax_plan(*bad)
    with pytest.raises(TypeError):
        module.jax_plan(9)
    assert module.jax_runs() == before
    q, k, v = arrays((1, 64, 2, 64), (1, 64, 2, 64), (1, 64, 2, 64))
    with pytest.raises(ValueError, match=handler.TARGET):
        jax.export.export(jax.jit(oa.attention))(q, k, v)
    fails = jax.jit(oa.attention)
    fake.fake_fail(1, 700)
    with pytest.raises(Exception, match=r"cuLaunchKernel(Ex)? failed with code 700 on GPU 0") as caught:
        jax.block_until_ready(fails(q, k, v))
    said = str(caught.value)
    assert "on GPU 0: unknown to the driver. Launch: kernel attn_fwd_sm90_bf16_d64" in said
    assert ", of attention of q bfloat16 (1, 64, 2, 64), k " in said
    assert "What to do: free GPU memory if little is free" in said
    jax.block_until_ready(fails(q, k, v))
    print("faults")


if __name__ == "__main__":
    native = prepare(*sys.argv[1:3])
    calls()
    caches()
    control_flow(native)
    faults(native)
    print("cache hits", len(hits), "runs", native.jax_runs())
