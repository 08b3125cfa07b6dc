"""The seam between omniattn and the CUDA driver.

One small protocol, two implementations: `driver_cuda` (cuda-bindings) and `driver_cupy` (CuPy). Neither is imported,
and CUDA is not initialized, before the first use: importing omniattn must work on a machine without a GPU, and in a
process that forks its workers afterwards.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..errors import DriverError, DriverMissingError
from . import env, log
from .device import DeviceInfo

#: ``launch(grid, block_x, stream, params_address, cluster)``: needs a context of the kernel's device to be current.
Launcher = Callable[[tuple[int, int, int], int, int, int, "tuple[int, int, int] | None"], None]

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


def driver_error(call: str, code: str, description: str) -> DriverError:
    """The error for a failed call, with advice where there is any."""
    return DriverError(call, code, description, _ADVICE.get(code, ""))


class Driver(Protocol):
    """What the runtime needs of a CUDA driver. All methods raise `DriverError`."""

    #: ``"cuda"`` or ``"cupy"``.
    name: str

    #: Whether `encode_tensor_map` works.
    has_tensor_maps: bool

    def no_library(error: BaseException) -> DriverMissingError:
    """The error for a machine without a CUDA driver library."""
    return DriverMissingError(
        "cuInit",
        "LIBRARY_NOT_FOUND",
        f"no CUDA driver library (libcuda.so.1, on Windows nvcuda.dll) could be loaded ({str(error).strip()})",
        "install the NVIDIA driver, R525 or newer (in a container: start it with --gpus all), or pass CPU arrays",
    )


def set_driver(driver: Driver | None) -> None:
    """Use ``driver`` from now on (tests); None: choose again at the next use. Voids everything that is loaded."""
    global _driver, _forked_from
    _driver = driver
    _forked_from = None
    for hook in _reset_hooks:
        hook()


def _after_fork_in_child() -> None:
    global _driver, _forked_from, _lock
    # Another thread of the parent may have held the lock when it forked.
    _lock = threading.Lock()
    if _driver is not None:
        _driver = None
        _forked_from = os.getppid()
    for hook in _reset_hooks:
        hook()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
