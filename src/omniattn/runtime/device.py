"""What the library knows about a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceInfo:
    """Facts about one GPU.

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
    clock_mhz, memory_gb_s : float
        Highest clock of the SMs, and bandwidth of the memory at its highest clock; 0: the driver does not say.
    """

    ordinal: int
    name: str
    cc: tuple[int, int]
    sm_count: int
    max_smem_optin: int
    l2_bytes: int
    driver_version: tuple[int, int]
    clock_mhz: float = 0.0
    memory_gb_s: float = 0.0


def bandwidth(clock_khz: int, bus_bits: int) -> float:
    """GB/s of a memory that transfers twice a cycle."""
    return 2.0 * clock_khz * 1e3 * bus_bits / 8 / 1e9
