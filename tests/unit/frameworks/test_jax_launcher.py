"""What a compiled program calls on a GPU, without one: plans of each GPU, addresses in their order."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import runtime
from omniattn.errors import KernelNotFoundError
from omniattn.runtime import DeviceInfo

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
pytestmark = pytest.mark.frameworks

KINDS = {0: ((9, 0), 132), 1: ((8, 0), 108), 2: ((9, 0), 132)}


class Buffer:
    """A buffer as XLA gives it to a callback."""

    def __init__(self, address: int, ordinal: int = 0) -> None:
        self._address, self._ordinal = address, ordinal

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._ordinal

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self._address, False)}


class Context:
    stream = 77


class FakeProgram:
    """Takes the place of `Program`: keeps what is launched."""

    launched: list[tuple[int, dict[str, int]]]

    def __init__(self, records: Sequence[Any], operands: Sequence[str], load: Any, call: str) -> None:
        self.records, self.operands, self.call = records, tuple(operands), call
        for record in records:
            load(record.spec)

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        self.launched.append((stream, dict(zip(self.operands, addresses, strict=True))))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, int]]]:
    from omniattn.frameworks.jax import callbacks, signature

    def load(spec: Any, ordinal: int) -> None:
        if ordinal == 2:
            raise KernelNotFoundError(spec.name, "sm_90", (), "another GPU")

    monkeypatch.setattr(runtime, "has_tensor_maps", lambda: True)
    monkeypatch.setattr(
        callbacks, "device_info",
        lambda n: DeviceInfo(n, "GPU", KINDS[n][0], KINDS[n][1], 232448 if n != 1 else 166912, 1 << 25, (13, 0)),
    )  # fmt: skip
    monkeypatch.setattr(callbacks, "load", load)
    monkeypatch.setattr(callbacks, "Program", FakeProgram)
    monkeypatch.setattr(FakeProgram, "launched", [], raising=False)
    signature.problem_of.cache_clear()
    yield FakeProgram.launched
    signature.problem_of.cache_clear()


def _launcher(call: Any, *arrays: Any, ordinals: Sequence[int] = (0,)) -> tuple[Any, Any]:
    """The launcher of the one primitive of a traced function, and its signature."""
    from omniattn.frameworks.jax.callbacks import Launcher
    from omniattn.frameworks.jax.signature import facts_of

    def equations(jaxpr: Any) -> Any:
        for equation in jaxpr.eqns:
            yield equation
            for value in equation.params.values():
                if hasattr(value, "jaxpr"):
                    yield from equations(value.jaxpr)

    with jax.default_device(jax.devices("cpu")[0]):
        found = [x for x in equations(jax.make_jaxpr(call)(*arrays).jaxpr) if x.primitive.name.startswith("omniattn_")]
    (equation,) = found
    signature = equation.params["signature"]
    return Launcher(signature, tuple(facts_of(x.aval) for x in equation.invars), ordinals), signature


def _qkv(rows: int, keys: int) -> list[Any]:
    return [jnp.zeros((1, n, 4, 64), "bfloat16") for n in (rows, keys, keys)]


def test_addresses_of_attention(launched: list[Any]) -> None:
    launcher, signature = _launcher(lambda q, k, v, s: oa.attention(q, k, v, sinks=s, return_lse=True),
                                    *_qkv(64, 64), jnp.zeros(4))  # fmt: skip
    assert signature.arrays == ("q", "k", "v", "sinks")
    assert launcher.workspace_bytes == 0
    shapes = ", ".join(f"{name} bfloat16 (1, 64, 4, 64)" for name in "qkv")
    assert launcher.plans[0].program.call == f"attention of {shapes}, sinks float32 (4,) under JAX"
    launcher(Context(), [Buffer(0x5000), Buffer(0x6000)], *(Buffer(0x1000 * i) for i in (1, 2, 3, 4)))
    ((stream, found),) = launched
    assert stream == 77
    given = {"q": 0x1000, "k": 0x2000, "v": 0x3000, "sinks": 0x4000, "o": 0x5000, "lse": 0x6000}
    assert found == dict.fromkeys(found, 0) | given


def test_workspaces_of_different_gpus(launched: list[Any]) -> None:
    """Keys are split, on each GPU into parts of its own, which take scratch memory; the program is one."""
    launcher, _ = _launcher(oa.attention, *_qkv(1, 32768), ordinals=(0, 1))
    sizes = [launcher.plans[n].workspace_bytes for n in (0, 1)]
    assert 0 < min(sizes) < max(sizes)
    assert launcher.workspace_bytes == max(sizes)
    for ordinal in (0, 1):
        buffers = [Buffer(0x5000, ordinal), Buffer(0x6010, ordinal)]
        launcher(Context(), buffers, *(Buffer(0x1000 * i, ordinal) for i in (1, 2, 3)))
    (_, on_hopper), (_, on_ampere) = launched
    assert on_hopper["workspace"] == 0x6100  # the next multiple of 256
    assert on_ampere["workspace"] == 0x6100
    assert on_hopper["o"] == on_ampere["o"] == 0x5000


def test_the_kernel_that_the_environment_asks_for(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def family() -> str:
        # A function of its own each time: JAX keeps the traces of one.
        launcher, _ = _launcher(lambda q, k, v: oa.attention(q, k, v), *_qkv(64, 64))
        return str(launcher.plans[0].launches.selection.spec.family)

    assert family() == "attn_fwd_sm90"
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "attn_fwd_sm80_bf16_d64")
    assert family() == "attn_fwd_sm80"


def test_planes_that_are_written_are_those_of_the_results(launched: list[Any]) -> None:
    import omniattn.jax  # noqa: F401 - makes pytrees of caches

    def call(cache: Any, k: Any, v: Any, lengths: Any) -> Any:
        oa.append(cache, k, v, seq_lens=lengths)
        return cache

    with jax.default_device(jax.devices("cpu")[0]):
        k = jnp.zeros((2, 1, 2, 64), "bfloat16")
        cache = oa.KVCache(2, 64, 2, 64, like=k, k_dtype="int8", k_mean=jnp.zeros((2, 64)))
        launcher, signature = _launcher(call, cache, k, k, jnp.ones(2, jnp.int32))
    names = ("k", "v", "seq_lens", "cache.k", "cache.k_params", "cache.v", "cache.v_params", "cache.k_mean")
    assert signature.arrays == names
    planes = [Buffer(0x10000 * (i + 1)) for i in range(4)]
    launcher(Context(), planes, *(Buffer(0x100 * (i + 1)) for i in range(len(names))))
    ((_, found),) = launched
    given = dict(zip(names, (0x100 * (i + 1) for i in range(len(names))), strict=True))
    given |= {name: 0x10000 * (i + 1) for i, name in enumerate(names[3:7])}
    assert found == dict.fromkeys(found, 0) | given


def test_a_gpu_without_a_kernel(launched: list[Any]) -> None:
    launcher, _ = _launcher(oa.attention, *_qkv(64, 64), ordinals=(0, 2))
    operands = [Buffer(0x1000 * i, 2) for i in (1, 2, 3)]
    with pytest.raises(KernelNotFoundError):
        launcher(Context(), [Buffer(0x5000, 2)], *operands)
    with pytest.raises(KernelNotFoundError):
        _launcher(oa.attention, *_qkv(64, 64), ordinals=(2,))
    assert not launched


def test_addresses_that_kernels_cannot_read(launched: list[Any]) -> None:
    launcher, _ = _launcher(oa.attention, *_qkv(64, 64))
    with pytest.raises(oa.errors.AlignmentError, match="argument 'k'"):
        launcher(Context(), [Buffer(0x5000)], Buffer(0x1000), Buffer(0x2008), Buffer(0x3000))
    assert not launched


def test_addresses_by_dlpack() -> None:
    """Buffers of types that have no ``__cuda_array_interface__``."""
    from omniattn.frameworks.jax import callbacks

    class Other:
        def __init__(self, values: Any) -> None:
            self._values = values

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise AttributeError("no typestr")

        def __dlpack__(self) -> Any:
            return self._values.__dlpack__()

    values = np.zeros(4, np.float32)
    assert callbacks.address(Other(values)) == ctypes.addressof(ctypes.c_char.from_buffer(values))
