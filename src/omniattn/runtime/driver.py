"""The seam between omniattn and the CUDA driver.

One small protocol (`driver_base.Driver`), two implementations: `driver_cuda` (cuda-bindings) and `driver_cupy` (CuPy).
Neither is imported, and CUDA is not initialized, before the first use: importing omniattn must work on a machine
without a GPU, and in a process that forks its workers afterwards.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import DriverError, DriverMissingError
from . import env, log
from .device import DeviceInfo
from .driver_base import Driver


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
_infos: dict[int, DeviceInfo] = {}


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


def device_info(ordinal: int) -> DeviceInfo:
    """Facts about GPU ``ordinal``, asked once per process; the first call initializes CUDA.

    Raises
    ------
    DeviceError
        There is no such GPU.
    DriverMissingError, DriverError
        There is no usable driver.
    """
    info = _infos.get(ordinal)
    if info is None:
        info = _infos[ordinal] = get_driver().device_info(ordinal)
    return info


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


def set_driver(driver: Driver | None) -> None:
    """Use ``driver`` from now on (tests); None: choose again at the next use. Voids everything that is loaded."""
    global _driver, _forked_from
    _driver = driver
    _forked_from = None
    _infos.clear()
    for hook in _reset_hooks:
        hook()


def _after_fork_in_child() -> None:
    global _driver, _forked_from, _lock
    # Another thread of the parent may have held the lock when it forked.
    _lock = threading.Lock()
    if _driver is not None:
        _driver = None
        _forked_from = os.getppid()
    _infos.clear()
    for hook in _reset_hooks:
        hook()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
