"""Makes a process take torch's CPU tensors for CUDA tensors, with a stand-in for libcuda: host code runs as on a GPU.

Nothing is computed. In a process of its own, whose ``LD_LIBRARY_PATH`` has the stand-in: torch is changed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from omniattn import arrays, runtime
from omniattn.arrays import contiguous_strides, from_torch
from omniattn.plan import engine, native
from omniattn.registry import KernelSpec
from omniattn.runtime.driver import device_context, device_info, get_driver
from omniattn.runtime.kernel import LoadedKernel
from omniattn.runtime.record import Program

from .native_fakes import new_capsule

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_recorded.restype = ctypes.c_char_p
driver.fake_argument_bytes.argtypes = [ctypes.c_void_p, ctypes.c_uint]


class Arena:
    """The same memory for the results and workspaces of one call and the next, so that launches can be compared."""

    def __init__(self) -> None:
        self._used = 0
        self._memory: list[torch.Tensor] = []
        self.workspace = torch.empty(1 << 24, dtype=torch.uint8)

    def reset(self) -> None:
        """A call begins."""
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of its own on the next memory; workspaces, which come one at a time, are all on the same."""
        if dtype is torch.uint8 and len(shape) == 1:
            return self.workspace[: shape[0]]
        if self._used == len(self._memory):
            self._memory.append(torch.empty(1 << 22, dtype=torch.uint8))
        storage = self._memory[self._used].untyped_storage()
        self._used += 1
        strides = contiguous_strides(shape)
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)  # type: ignore[arg-type]


class Machine:
    """What the tests turn.

    Attributes
    ----------
    native : module
        `omniattn._native`.
    arena : Arena or None
        None: results are torch's own.
    """

    def __init__(self, folder: Path, arena: Arena | None = None) -> None:
        self.arena = arena
        self._table = ctypes.CDLL(str(folder / "cpu_as_gpu.so"))
        self._table.fake_exchange.argtypes = [ctypes.c_void_p]
        self._table.fake_exchange.restype = ctypes.c_void_p
        self._ordinal = ctypes.c_int.in_dll(self._table, "fake_ordinal")
        self._stream = ctypes.c_void_p.in_dll(self._table, "fake_stream")
        self._live = ctypes.c_int.in_dll(self._table, "fake_live")
        self._refused = ctypes.c_int.in_dll(self._table, "fake_refused")
        if arena is not None:
            ctypes.c_void_p.in_dll(self._table, "fake_workspace").value = arena.workspace.data_ptr()
        self._loaded: dict[tuple[str, int], LoadedKernel] = {}
        assert driver.cuInit(0) == 0
        self.enter(0)
        self._change_torch()
        self._change_engine()
        self.native = self._load_module(folder / "_native.abi3.so")

    def enter(self, ordinal: int) -> None:
        """Make a GPU's context current in this thread."""
        context = ctypes.c_void_p()
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal) == 0
        assert driver.cuCtxPushCurrent_v2(context) == 0

    def current(self) -> int | None:
        """The GPU of this thread's context; None without one."""
        device = ctypes.c_int()
        return None if driver.cuCtxGetDevice(ctypes.byref(device)) else device.value

    def place(self, ordinal: int) -> None:
        """Tensors are on this GPU from now on."""
        self._ordinal.value = ordinal

    def refuse_memory(self, times: int) -> None:
        """The table's allocator has none for the next workspaces."""
        self._refused.value = times

    @property
    def num_workspaces(self) -> int:
        """Of the table's allocator, not released."""
        return self._live.value

    @property
    def stream(self) -> int:
        """Torch's current stream."""
        return self._stream.value or 0

    @stream.setter
    def stream(self, value: int) -> None:
        self._stream.value = value

    def record(self, call: Callable[[], Any]) -> tuple[Any, list[str]]:
        """Results of a call, and its launches: function, grid, block, memory, stream, attributes, arguments."""
        if self.arena is not None:
            self.arena.reset()
        driver.fake_record(1)
        try:
            results = call()
            return results, driver.fake_recorded().decode().splitlines()
        finally:
            driver.fake_record(0)

    def take_everything(self) -> None:
        """From the arena, also in calls that are not repeated: not where caches are made."""
        assert self.arena is not None
        arena, changes = self.arena, from_torch  # type: Arena, Any
        changes._empty = lambda shape, strides, dtype, device: arena.take(shape, dtype)

    def _change_torch(self) -> None:
        tensor: Any = torch.Tensor
        found = ctypes.pythonapi.PyCapsule_GetPointer
        found.argtypes, found.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
        real = found(tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
        tensor.__dlpack_c_exchange_api__ = new_capsule(self._table.fake_exchange(real), b"dlpack_exchange_api", None)
        tensor.is_cuda, tensor.is_cpu = True, False
        tensor.get_device = lambda of: self._ordinal.value
        changes: Any = from_torch
        changes._device = lambda kind, ordinal: torch.device("cpu")
        changes._raw_stream = lambda ordinal: self.stream
        changes.current_stream = from_torch._current_stream_raw
        if self.arena is not None:
            arena = self.arena
            changes.allocator = lambda ref, shape, dtype: lambda like: arena.take(shape, from_torch._BY_NAME[dtype])

    def _change_engine(self) -> None:
        def load(spec: KernelSpec, ordinal: int) -> LoadedKernel:
            key = spec.name, ordinal
            if key not in self._loaded:
                cuda, info = get_driver(), device_info(ordinal)
                with device_context(cuda, ordinal):
                    launch = cuda.load(f"any {spec.name} {ordinal}\0".encode(), spec.symbol, ordinal, spec.smem_bytes)
                arch = "sm_{}{}".format(*info.cc)
                self._loaded[key] = LoadedKernel(spec, ordinal, "jit", arch, (), cuda, launch, info.driver_version)
            return self._loaded[key]

        class Noted(Program):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                for record, kernel in zip(self.records, self.kernels, strict=True):
                    driver.fake_argument_bytes(kernel.function, len(record.arguments))

        runtime.load = load  # type: ignore[assignment]
        engine.Program = Noted  # type: ignore[misc]

    def _load_module(self, path: Path) -> Any:
        spec = importlib.util.spec_from_file_location("omniattn._native", path)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules["omniattn._native"] = found
        spec.loader.exec_module(found)
        arrays.describe(torch.zeros(1), "x")  # the first tensor puts torch's functions in
        assert native.module() is found
        return found
