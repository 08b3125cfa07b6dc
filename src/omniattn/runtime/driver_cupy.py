"""The CUDA driver through CuPy, for processes without cuda-bindings.

CuPy's ``RawModule`` is a module handle with a function table, loaded from a file. The driver calls under it take the
binary from memory and the argument struct by address, so those are used here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy
from cupy.cuda import driver as cu
from cupy.cuda import runtime as rt

from ..errors import DeviceError, DriverError, UnsupportedError
from .device import DeviceInfo, bandwidth
from .driver_base import FUNCTION_ATTRIBUTES, LaunchAttributes, Launcher, driver_error, launch_facts, no_library

_CUDA_ERRORS = (cu.CUDADriverError, rt.CUDARuntimeError)


@contextmanager
def _errors(call: str) -> Iterator[None]:
    """Turn CuPy's exceptions, whose text is ``CODE: description``, into ours."""
    try:
        yield
    except _CUDA_ERRORS as error:
        raise _failure(call, error) from error


def _failure(call: str, error: Exception, launch: str = "") -> DriverError:
    code, _, description = str(error).partition(":")
    return driver_error(call, code.strip(), description.strip(), launch)


def _facts_of(function: int) -> str:
    """What an error says of a kernel and the GPU; as much as the driver tells after a failure."""
    found: dict[int, int] = {}
    memory = None
    with contextlib.suppress(*_CUDA_ERRORS):
        memory = rt.memGetInfo()
        for attribute in FUNCTION_ATTRIBUTES:
            found[attribute] = int(cu.funcGetAttribute(attribute, function))
    return launch_facts(found, memory)


#: ``CU_STREAM_CAPTURE_MODE_RELAXED``.
_RELAXED = 2


@functools.cache
def _exchange() -> Callable[[Any], int]:
    """The driver's exchange of the calling thread's capture mode, for which CuPy has no name."""
    try:
        # CuPy's runtime library has loaded it.
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise no_library(error) from error
    exchange: Callable[[Any], int] = library.cuThreadExchangeStreamCaptureMode
    return exchange


def _exchange_mode(mode: int) -> int:
    value = ctypes.c_int(mode)
    code = _exchange()(ctypes.byref(value))
    if code:
        raise driver_error("cuThreadExchangeStreamCaptureMode", f"CUDA error {code}", "the driver refused the call")
    return value.value


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Run the block with this thread's capture mode relaxed: it spoils no capture of any thread in the default mode."""
    previous = _exchange_mode(_RELAXED)
    try:
        yield
    finally:
        _exchange_mode(previous)


class CupyDriver:
    """`omniattn.runtime.driver_base.Driver` on CuPy, which has no launch attributes and so no thread block clusters."""

    name = "cupy"

    def __init__(self) -> None:
        try:
            # The lowest call that loads libcuda; CuPy's runtime is static and hides a missing library.
            if rt.driverGetVersion() == 0:
                cu.ctxGetCurrent()
            rt.getDeviceCount()
            cu.ctxGetCurrent()
        except _CUDA_ERRORS as error:
            raise _failure("cuInit", error) from error
        except (RuntimeError, OSError) as error:
            raise no_library(error) from error

    def device_count(self) -> int:
        """Number of visible GPUs."""
        with _errors("cudaGetDeviceCount"):
            return int(rt.getDeviceCount())

    def device_info(self, ordinal: int) -> DeviceInfo:
        """Facts about one GPU."""
        count = self.device_count()
        if not 0 <= ordinal < count:
            raise DeviceError("device", f"a CUDA device number below {count}", ordinal)
        with _errors("cudaGetDeviceProperties"):
            properties = rt.getDeviceProperties(ordinal)
            version = rt.driverGetVersion()
            attributes = cupy.cuda.Device(ordinal).attributes
        name = properties["name"]
        return DeviceInfo(
            ordinal=ordinal,
            name=name.decode() if isinstance(name, bytes) else str(name),
            cc=(int(properties["major"]), int(properties["minor"])),
            sm_count=int(properties["multiProcessorCount"]),
            max_smem_optin=int(attributes["MaxSharedMemoryPerBlockOptin"]),
            l2_bytes=int(properties["l2CacheSize"]),
            driver_version=(version // 1000, version % 1000 // 10),
            clock_mhz=attributes.get("ClockRate", 0) / 1e3,
            memory_gb_s=bandwidth(attributes.get("MemoryClockRate", 0), attributes.get("GlobalMemoryBusWidth", 0)),
        )

    def current_device(self) -> int | None:
        """Device of the current context; None without one."""
        with _errors("cuCtxGetDevice"):
            return int(cu.ctxGetDevice()) if cu.ctxGetCurrent() else None

    def push_primary(self, ordinal: int) -> int:
        """Make the device's primary context current; returns the context that was."""
        with _errors("cudaSetDevice"):
            previous = int(cu.ctxGetCurrent())
            rt.setDevice(ordinal)
        return previous

    def pop(self, token: int) -> None:
        """Undo `push_primary`."""
        with _errors("cuCtxSetCurrent"):
            cu.ctxSetCurrent(token)

    def read(self, address: int, num_bytes: int, stream: int) -> bytes:
        """Bytes of device memory; see `omniattn.runtime.driver_base.Driver.read`."""
        buffer = ctypes.create_string_buffer(num_bytes)
        with _errors("cudaMemcpy"):
            rt.streamSynchronize(stream)
            rt.memcpy(ctypes.addressof(buffer), address, num_bytes, rt.memcpyDeviceToHost)
        return buffer.raw

    has_tensor_maps = False

    def encode_tensor_map(
        self,
        dtype: str,
        address: int,
        dims: tuple[int, ...],
        strides_bytes: tuple[int, ...],
        box: tuple[int, ...],
    ) -> bytes:
        raise UnsupportedError(
            "CuPy has no call that encodes tensor maps",
            instead="the cuda driver: pip install cuda-bindings, and leave OMNIATTN_DRIVER unset",
        )

    def load(self, image: bytes, symbol: str, ordinal: int, smem_bytes: int) -> Launcher:
        """Load a binary and make its launcher; see `omniattn.runtime.driver_base.Driver.load`."""
        functions: dict[int, int] = {}
        lock = threading.Lock()

        def load_here() -> int:
            """Load into the current context, once: unlike cuda-bindings' libraries, modules belong to a context."""
            with lock:
                context = int(cu.ctxGetCurrent())
                function = functions.get(context)
                if function is None:
                    # A capture in the default mode forbids loading modules anywhere in the process; loading does not
                    # touch the stream.
                    with relaxed_capture():
                        function = functions[context] = _load(image, symbol, smem_bytes)
                return function

        load_here()
        current, launch_kernel, state = cu.ctxGetCurrent, cu.launchKernel, _state

        def launch(
            grid: tuple[int, int, int],
            threads: int,
            stream: int,
            params_address: int,
            attributes: LaunchAttributes | None = None,
        ) -> None:
            if attributes is not None and attributes.cluster is not None:
                raise UnsupportedError(
                    f"kernel {symbol} is launched in clusters {attributes.cluster}, for which CuPy has no launch "
                    "attribute",
                    instead='pip install "cuda-bindings>=12.9.4,<14" and unset OMNIATTN_DRIVER',
                )
            state.slot[0] = params_address
            function = 0
            try:
                function = functions.get(current()) or load_here()
                launch_kernel(function, grid[0], grid[1], grid[2], threads, 1, 1, smem_bytes, stream, state.address, 0)
            except _CUDA_ERRORS as error:
                raise _failure("cuLaunchKernel", error, _facts_of(function) if function else "") from error

        return launch


def _load(image: bytes, symbol: str, smem_bytes: int) -> int:
    with _errors("cuModuleLoadData"):
        module = cu.moduleLoadData(image)
    try:
        with _errors("cuModuleGetFunction"):
            function = int(cu.moduleGetFunction(module, symbol))
        if smem_bytes:
            with _errors("cuFuncSetAttribute"):
                cu.funcSetAttribute(function, cu.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes)
    except DriverError:
        cu.moduleUnload(module)
        raise
    return function


class _ThreadState(threading.local):
    """The driver's ``void* kernelParams[1]`` of this thread, read during the call only."""

    def __init__(self) -> None:
        self.slot = (ctypes.c_void_p * 1)()
        self.address = ctypes.addressof(self.slot)


_state = _ThreadState()
