"""The CUDA driver through cuda-bindings (12.9 or 13)."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from cuda.bindings import driver as cu

from ..errors import DeviceError, DriverError
from ..problems.memory import ITEMSIZE
from .device import DeviceInfo, bandwidth
from .driver_base import FUNCTION_ATTRIBUTES, LaunchAttributes, Launcher, driver_error, launch_facts, no_library

_INVALID_CONTEXT = int(cu.CUresult.CUDA_ERROR_INVALID_CONTEXT)


def _text(raw: Any) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def _failure(call: str, code: Any, launch: str = "") -> DriverError:
    name_status, name = cu.cuGetErrorName(code)
    text_status, text = cu.cuGetErrorString(code)
    # Both fail for a code that is newer than the driver.
    return driver_error(
        call,
        _text(name) if not name_status else f"CUDA error {int(code)}",
        _text(text) if not text_status else "unknown to this driver",
        launch,
    )


def _facts_of(kernel: int) -> str:
    """What an error says of a kernel and the GPU; as much as the driver tells after a failure."""
    found: dict[int, int] = {}
    status, function = cu.cuKernelGetFunction(cu.CUkernel(kernel))
    for attribute in () if status else FUNCTION_ATTRIBUTES:
        status, value = cu.cuFuncGetAttribute(cu.CUfunction_attribute(attribute), function)
        if not status:
            found[attribute] = int(value)
    status, *memory = cu.cuMemGetInfo()
    return launch_facts(found, None if status else (int(memory[0]), int(memory[1])))


def raise_failure(call: str, code: int, kernel: int = 0, launch: str = "") -> None:
    """Raise the `DriverError` of a call that somebody else has made; of a launch: of this kernel."""
    try:
        known: Any = cu.CUresult(code)
    except ValueError:  # newer than the bindings
        error = driver_error(call, f"CUDA error {code}", "unknown to the bindings")
    else:
        error = _failure(call, known, _facts_of(kernel) if kernel else "")
    raise error.at(launch) if launch else error


def _checked(call: str, result: tuple[Any, ...]) -> Any:
    """Unpack ``(code, value)``; raise unless the code is CUDA_SUCCESS."""
    if result[0]:
        raise _failure(call, result[0])
    return result[1] if len(result) == 2 else result[1:]


class CudaDriver:
    """`omniattn.runtime.driver_base.Driver` on cuda-bindings.

    Kernels are context independent (``cuLibraryLoadData``): one handle serves the primary context and any context that
    a framework made, also one that is destroyed and made again.
    """

    name = "cuda"

    def __init__(self) -> None:
        try:
            status = cu.cuInit(0)
        except (RuntimeError, OSError) as error:
            # cuda-bindings looks for libcuda at the first call, and raises when there is none.
            raise no_library(error) from error
        _checked("cuInit", status)
        self._primary: dict[int, Any] = {}
        self._lock = threading.Lock()

    def device_count(self) -> int:
        """Number of visible GPUs."""
        return int(_checked("cuDeviceGetCount", cu.cuDeviceGetCount()))

    def device_info(self, ordinal: int) -> DeviceInfo:
        """Facts about one GPU."""
        count = self.device_count()
        if not 0 <= ordinal < count:
            raise DeviceError("device", f"a CUDA device number below {count}", ordinal)
        device = _checked("cuDeviceGet", cu.cuDeviceGet(ordinal))
        attribute = cu.CUdevice_attribute

        def query(which: Any) -> int:
            return int(_checked("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(which, device)))

        version = int(_checked("cuDriverGetVersion", cu.cuDriverGetVersion()))
        return DeviceInfo(
            ordinal=ordinal,
            # The binding hands back the whole buffer that the driver wrote the name into.
            name=_text(_checked("cuDeviceGetName", cu.cuDeviceGetName(256, device))).partition("\0")[0],
            cc=(
                query(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                query(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            sm_count=query(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            max_smem_optin=query(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            l2_bytes=query(attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
            driver_version=(version // 1000, version % 1000 // 10),
            clock_mhz=query(attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE) / 1e3,
            memory_gb_s=bandwidth(
                query(attribute.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
                query(attribute.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH),
            ),
        )

    def current_device(self) -> int | None:
        """Device of the current context; None without one."""
        code, device = cu.cuCtxGetDevice()
        if not code:
            return int(device)
        if int(code) == _INVALID_CONTEXT:
            return None
        raise _failure("cuCtxGetDevice", code)

    def push_primary(self, ordinal: int) -> None:
        """Make the device's primary context current. It is retained once, for the life of the process."""
        context = self._primary.get(ordinal)
        if context is None:
            with self._lock:
                context = self._primary.get(ordinal)
                if context is None:
                    device = _checked("cuDeviceGet", cu.cuDeviceGet(ordinal))
                    context = _checked("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(device))
                    self._primary[ordinal] = context
        _checked("cuCtxPushCurrent", cu.cuCtxPushCurrent(context))

    def pop(self, token: None) -> None:
        """Undo `push_primary`."""
        _checked("cuCtxPopCurrent", cu.cuCtxPopCurrent())

    def read(self, address: int, num_bytes: int, stream: int) -> bytes:
        """Bytes of device memory; see `omniattn.runtime.driver_base.Driver.read`."""
        buffer = ctypes.create_string_buffer(num_bytes)
        _checked("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
        _checked("cuMemcpyDtoH", cu.cuMemcpyDtoH(ctypes.addressof(buffer), address, num_bytes))
        return buffer.raw

    has_tensor_maps = True

    def encode_tensor_map(
        self,
        dtype: str,
        address: int,
        dims: tuple[int, ...],
        strides_bytes: tuple[int, ...],
        box: tuple[int, ...],
    ) -> bytes:
        tensor_map = _checked(
            "cuTensorMapEncodeTiled",
            cu.cuTensorMapEncodeTiled(
                _tensor_map_type(dtype),
                len(dims),
                address,
                [cu.cuuint64_t(n) for n in dims],
                [cu.cuuint64_t(n) for n in strides_bytes],
                [cu.cuuint32_t(n) for n in box],
                [cu.cuuint32_t(1)] * len(dims),
                cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                _swizzle(dtype, box[0]),
                cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ),
        )
        return ctypes.string_at(int(tensor_map.getPtr()), 128)

    def load(self, image: bytes, symbol: str, ordinal: int, smem_bytes: int) -> Launcher:
        """Load a binary and make its launcher; see `omniattn.runtime.driver_base.Driver.load`."""
        relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        # A capture in the default mode forbids loading modules anywhere in the process; loading does not touch the
        # stream.
        previous = _checked("cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            kernel = self._load(image, symbol, ordinal, smem_bytes)
        finally:
            _checked("cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(previous))
        return _launcher(kernel, smem_bytes)

    def _load(self, image: bytes, symbol: str, ordinal: int, smem_bytes: int) -> Any:
        # PTX is text: the driver reads up to a NUL, which the end of a Python bytes object has, but say so.
        code = image if image[:4] == b"\x7fELF" else image.rstrip(b"\0") + b"\0"
        library = _checked("cuLibraryLoadData", cu.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        try:
            kernel = _checked("cuLibraryGetKernel", cu.cuLibraryGetKernel(library, symbol.encode()))
            if smem_bytes:
                device = _checked("cuDeviceGet", cu.cuDeviceGet(ordinal))
                attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _checked("cuKernelSetAttribute", cu.cuKernelSetAttribute(attribute, smem_bytes, kernel, device))
            # Loading is lazy: this puts the code on the device now, so that a binary of a wrong architecture fails here
            # and no launch (which may be under stream capture) has to load anything.
            _checked("cuKernelGetFunction", cu.cuKernelGetFunction(kernel))
        except DriverError:
            # The first failure is the one to report; an unload that fails too leaks a few KiB.
            cu.cuLibraryUnload(library)
            raise
        return kernel


def _tensor_map_type(dtype: str) -> Any:
    types = cu.CUtensorMapDataType
    return {
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float32": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        "uint8": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[dtype]


def _swizzle(dtype: str, box_columns: int) -> Any:
    """The swizzle as wide as the box's rows: what the kernels' products expect."""
    kinds = cu.CUtensorMapSwizzle
    return {128: kinds.CU_TENSOR_MAP_SWIZZLE_128B, 64: kinds.CU_TENSOR_MAP_SWIZZLE_64B}[box_columns * ITEMSIZE[dtype]]


class _ThreadState(threading.local):
    """What a launch needs in memory, made once per thread.

    ``slot`` is the driver's ``void* kernelParams[1]``; the driver reads it during the call only.
    """

    def __init__(self) -> None:
        self.slot = (ctypes.c_void_p * 1)()
        self.address = ctypes.addressof(self.slot)
        self.configs: dict[tuple[Any, ...], Any] = {}


_state = _ThreadState()


_MAX_STREAMS = 64
_MAX_CONFIGS = 1024
#: Handles in the binding's own type, which it would make from an integer at every launch (0.14 µs).
_streams: dict[int, Any] = {}


def _stream_object(handle: int) -> Any:
    if len(_streams) >= _MAX_STREAMS:
        _streams.clear()
    found = _streams[handle] = cu.CUstream(handle)
    return found


def _config(wanted: LaunchAttributes, grid: tuple[int, int, int], threads: int, smem_bytes: int) -> Any:
    """This thread's configuration of such launches, all but the stream; made in some 10 µs, reused in under 1."""
    key = (wanted, grid, threads, smem_bytes)
    config = _state.configs.get(key)
    if config is None:
        attributes = []
        if wanted.overlap:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if wanted.cluster is not None:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = wanted.cluster
            attributes.append(attribute)
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX = threads
        config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = smem_bytes
        config.attrs = attributes
        config.numAttrs = len(attributes)
        if len(_state.configs) >= _MAX_CONFIGS:
            _state.configs.clear()
        _state.configs[key] = config
    return config


def _launcher(kernel: Any, smem_bytes: int) -> Launcher:
    # The driver takes a CUkernel where it takes a CUfunction, and finds the current context's function itself.
    # Converted once, because the binding would convert it at every launch.
    function = cu.CUfunction(int(kernel))
    launch_kernel, launch_kernel_ex, state, streams = cu.cuLaunchKernel, cu.cuLaunchKernelEx, _state, _streams

    def launch(
        grid: tuple[int, int, int],
        threads: int,
        stream: int,
        params_address: int,
        attributes: LaunchAttributes | None = None,
    ) -> None:
        state.slot[0] = params_address
        if attributes is None:
            x, y, z = grid
            handle = streams.get(stream)
            if handle is None:
                handle = _stream_object(stream)
            code = launch_kernel(function, x, y, z, threads, 1, 1, smem_bytes, handle, state.address, 0)[0]
            if code:
                raise _failure("cuLaunchKernel", code, _facts_of(int(kernel)))
            return
        config = _config(attributes, grid, threads, smem_bytes)
        config.hStream = stream
        code = launch_kernel_ex(config, function, state.address, 0)[0]
        if code:
            raise _failure("cuLaunchKernelEx", code, _facts_of(int(kernel)))

    launch.function = int(kernel)  # type: ignore[attr-defined]
    return launch
