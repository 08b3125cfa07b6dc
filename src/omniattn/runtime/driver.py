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

#: In place of a cluster: the kernel may begin before the one ahead of it on the stream has ended (programmatic
#: dependent launch, compute capability 9.0 and newer); it waits itself, by griddepcontrol.wait. CuPy launches it behind
#: the other one.
OVERLAP = (0, 0, 0)

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


@contextmanager
def device_context(driver: Driver, ordinal: int) -> Iterator[None]:
    """Run the block with a context of GPU ``ordinal`` current.

    A context of that device that the framework made current is used as it is, because the caller's stream belongs to
    it; otherwise the primary context is pushed, and popped at the end.
    """
    if driver.current_device() == ordinal:
        yield
        return
    token = driver.push_primary(ordinal)
    try:
        yield
    finally:
        driver.pop(token)


_lock = threading.Lock()
_driver: Driver | None = None
_forked_from: int | None = None
_reset_hooks: list[Callable[[], None]] = []


def on_reset(hook: Callable[[], None]) -> None:
    """Have ``hook`` called when everything that hangs on a driver becomes void: after a fork, and in `reset`."""
    _reset_hooks.append(hook)


def get_driver() -> Driver:
    """The driver of this process, opened on the first call.

    Raises
    ------
    DriverMissingError
        No binding can be imported, or there is no CUDA driver library.
    DriverError
        CUDA cannot be initialized, or had been before this process was forked.
    """
    driver = _driver
    return driver if driver is not None else _open()


def _open() -> Driver:
    global _driver
    if _forked_from is not None:
        raise DriverError(
            "cuInit",
            "CUDA_ERROR_NOT_INITIALIZED",
            f"process {_forked_from} had already used CUDA through omniattn when it forked this process "
            f"({os.getpid()}), and CUDA does not survive a fork",
            "start workers with multiprocessing.get_context('spawn'), or fork before the first GPU call",
        )
    with _lock:
        if _driver is None:
            _driver = _choose(env.get("OMNIATTN_DRIVER"))
            log.get().info("CUDA driver reached through %s", _driver.name)
        return _driver


def _choose(wanted: str | None) -> Driver:
    if wanted in (None, "cuda"):
        try:
            from .driver_cuda import CudaDriver
        except ImportError as error:
            if wanted == "cuda" or importlib.util.find_spec("cupy") is None:
                also = "" if wanted else ", and CuPy is not installed either"
                raise DriverMissingError(
                    "import cuda.bindings",
                    "IMPORT_ERROR",
                    f"the Python binding of the CUDA driver cannot be imported ({error}){also}",
                    'pip install "cuda-bindings>=12.9.4,<14"',
                ) from error
            log.get().info("cuda-bindings cannot be imported (%s): using CuPy", error)
        else:
            return CudaDriver()
    try:
        from .driver_cupy import CupyDriver
    except ImportError as error:
        raise DriverMissingError(
            "import cupy",
            "IMPORT_ERROR",
            f"CuPy cannot be imported ({error})",
            "pip install cupy-cuda12x or cupy-cuda13x; or unset OMNIATTN_DRIVER and "
            'pip install "cuda-bindings>=12.9.4,<14"',
        ) from error
    return CupyDriver()


def has_tensor_maps() -> bool:
    """Whether kernels that need tensor maps can run through the driver in use."""
    return get_driver().has_tensor_maps


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
