"""What every implementation of the CUDA driver gives, and the errors that all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ..errors import DriverError, DriverMissingError
from .device import DeviceInfo


class LaunchAttributes(NamedTuple):
    """What a launch asks for besides grid, threads and shared memory.

    Attributes
    ----------
    cluster : (int, int, int), optional
        CTAs per cluster.
    overlap : bool
        The kernel may begin before the one ahead of it on the stream has ended (programmatic dependent launch, compute
        capability 9.0 and newer); it waits itself, by griddepcontrol.wait. CuPy launches it behind the other one.
    """

    cluster: tuple[int, int, int] | None = None
    overlap: bool = False


#: ``launch(grid, threads, stream, params_address, attributes)``: needs a context of the kernel's device to be current.
Launcher = Callable[[tuple[int, int, int], int, int, int, "LaunchAttributes | None"], None]

#: Codes that condemn one binary, not the driver: the loader goes on to the next candidate.
IMAGE_ERRORS = frozenset(
    {
        "CUDA_ERROR_INVALID_IMAGE",
        "CUDA_ERROR_NO_BINARY_FOR_GPU",
        "CUDA_ERROR_INVALID_PTX",
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
        "CUDA_ERROR_JIT_COMPILATION_DISABLED",
        "CUDA_ERROR_INVALID_SOURCE",
        "CUDA_ERROR_NOT_FOUND",
    }
)

_ADVICE = {
    "CUDA_ERROR_NOT_INITIALIZED": "if this process was forked after CUDA had been used, start it with "
    "multiprocessing.get_context('spawn') instead",
    "CUDA_ERROR_DEINITIALIZED": "do not call omniattn while the interpreter shuts down",
    "CUDA_ERROR_NO_DEVICE": "check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, that it was given the GPU",
    "CUDA_ERROR_INVALID_DEVICE": "check the device number against CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_OUT_OF_MEMORY": "free GPU memory",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "kernel module and libcuda have different versions: reboot, or in a container "
    "use the host's libcuda",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "remove the CUDA forward-compatibility libcuda from the library path",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "call the function once with the same arguments before the capture begins",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "call the function once with the same arguments before the capture begins",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "report it: the registry row asks for more than this GPU has",
    "CUDA_ERROR_INVALID_HANDLE": "give a stream that still exists and belongs to the arrays' device",
    "CUDA_ERROR_INVALID_CONTEXT": "give a stream of the arrays' device",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an earlier kernel of this process failed; rerun with CUDA_LAUNCH_BLOCKING=1, or "
    "under compute-sanitizer, to see which",
    "CUDA_ERROR_LAUNCH_FAILED": "an earlier kernel of this process failed; rerun under compute-sanitizer to see which",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "update the NVIDIA driver, or install an older NVRTC",
}


# What makes the driver refuse a launch whose numbers are right, by the CUDA driver API's documents:
# - Dynamic shared memory above the function's CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES (48 KiB unless set) is
#   INVALID_VALUE. The loader sets it for kernel and device, before the function is made; cuFuncSetAttribute by anybody
#   else on the function overrides it, whichever came first.
# - There is one allocation of local memory a context: bytes a thread, times all threads that the SMs can hold. The
#   first launch that needs more than any before it allocates, and may wait for the GPU; without memory it fails with
#   OUT_OF_MEMORY, not INVALID_VALUE (a full H100, driver 580), from about 1 KiB a thread on, which is more than any
#   row has: kernels of less, new ones too, launch with 2 MiB free. Memory for the code itself was taken by the loader,
#   which makes the function, but in a context that is not the one that it was loaded in the launch does that, too.
# - A cluster that no GPC can hold is INVALID_CLUSTER_SIZE, too many registers or threads LAUNCH_OUT_OF_RESOURCES, a
#   stream that is gone or another context's INVALID_HANDLE or INVALID_CONTEXT.
# - Errors of kernels that ran before are told by any later call.
# Grids, blocks and argument bytes are checked when a record is made. So an error names the launch, what the function
# takes and needs, and how much of the GPU's memory is free.
_LITTLE_MEMORY = (
    "free GPU memory and call again, if little is free: the first launch of a kernel takes local memory for all "
    "threads that the GPU can hold"
)
_LAUNCH_ADVICE = {
    "CUDA_ERROR_INVALID_VALUE": f"{_LITTLE_MEMORY}. Otherwise report it with this message",
    "CUDA_ERROR_OUT_OF_MEMORY": _LITTLE_MEMORY,
}


def driver_error(call: str, code: str, description: str, launch: str = "") -> DriverError:
    """The error for a failed call, with advice where there is any; launch: see `DriverError`."""
    advice = _ADVICE.get(code, "")
    if call.startswith("cuLaunchKernel"):
        advice = _LAUNCH_ADVICE.get(code, advice)
    return DriverError(call, code, description, advice, launch)


#: Of a function, by their numbers in CUfunction_attribute, as an error shows them.
FUNCTION_ATTRIBUTES = {
    4: "{} registers a thread",
    3: "{} bytes of local memory a thread",
    0: "CTAs of up to {} threads",
    1: "{} bytes of static shared memory",
    8: "up to {} bytes of dynamic shared memory",
}


def launch_facts(function: dict[int, int], memory: tuple[int, int] | None) -> str:
    """What an error says: of a kernel, by attributes of its function, and of the GPU's memory (bytes, free and all)."""
    parts = [text.format(function[a]) for a, text in FUNCTION_ATTRIBUTES.items() if a in function]
    told = [f"the kernel has {', '.join(parts)}"] if parts else []
    if memory is not None:
        told.append(f"{memory[0] >> 20} of {memory[1] >> 20} MiB of GPU memory are free")
    return "; ".join(told)


def no_library(error: BaseException) -> DriverMissingError:
    """The error for a machine without a CUDA driver library."""
    return DriverMissingError(
        "cuInit",
        "LIBRARY_NOT_FOUND",
        f"no CUDA driver library (libcuda.so.1, on Windows nvcuda.dll) could be loaded ({str(error).strip()})",
        "install the NVIDIA driver, R525 or newer (in a container: start it with --gpus all), or pass CPU arrays",
    )


class Driver(Protocol):
    """What the runtime needs of a CUDA driver. All methods raise `DriverError`."""

    #: ``"cuda"`` or ``"cupy"``.
    name: str

    #: Whether `encode_tensor_map` works.
    has_tensor_maps: bool

    def device_count(self) -> int:
        """Number of visible GPUs."""

    def device_info(self, ordinal: int) -> DeviceInfo:
        """Facts about one GPU; needs no context."""

    def current_device(self) -> int | None:
        """Device of the calling thread's current context; None without a context."""

    def push_primary(self, ordinal: int) -> Any:
        """Make the device's primary context current; returns what `pop` needs."""

    def pop(self, token: Any) -> None:
        """Undo `push_primary`."""

    def read(self, address: int, num_bytes: int, stream: int) -> bytes:
        """Bytes of device memory, once the stream has done what is queued on it. A context must be current."""

    def encode_tensor_map(
        self,
        dtype: str,
        address: int,
        dims: tuple[int, ...],
        strides_bytes: tuple[int, ...],
        box: tuple[int, ...],
    ) -> bytes:
        """The 128 bytes of a tiled tensor map: 128-byte swizzle, zeros outside the tensor, innermost dimension first.

        ``strides_bytes`` are those of all dimensions but the innermost. A context must be current.
        """

    def load(self, image: bytes, symbol: str, ordinal: int, smem_bytes: int) -> Launcher:
        """Load a cubin or PTX, find its kernel, allow it ``smem_bytes`` of dynamic shared memory.

        A context of the device must be current. The module stays loaded for the life of the process.
        """
