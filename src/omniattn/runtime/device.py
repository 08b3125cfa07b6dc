"""What the library knows about a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceInfo:
    """Facts about one GPU, asked once per process.

    Attributes
    ----------
    ordinal : int
        CUDA device number.
    name : str
        Product name.
    cc : (major, minor)
        Compute capability.
    sm_count : int
        Streaming multiprocessors.
    max_smem_optin : int
        Largest shared memory of one CTA, bytes.
    l2_bytes : int
        Size of the L2 cache, bytes.
    driver_version : (major, minor)
        Newest CUDA version that the driver supports.
    """

    ordinal: int
    name: str
    cc: tuple[int, int]
    sm_count: int
    max_smem_optin: int
    l2_bytes: int
    driver_version: tuple[int, int]


_cache: dict[int, DeviceInfo] = {}


def device_info(ordinal: int) -> DeviceInfo:
    """Facts about GPU ``ordinal``; the first call initializes CUDA.

    Raises
    ------
    DeviceError
        There is no such GPU.
    DriverMissingError, DriverError
        There is no usable driver.
    """
    info = _cache.get(ordinal)
    if info is None:
        from .driver import get_driver

        info = _cache[ordinal] = get_driver().device_info(ordinal)
    return info


def reset() -> None:
    """Forget all GPUs (tests, and the child of a fork)."""
    _cache.clear()
