"""A GPU that is not there, as a driver: calls are planned for it, kernels compiled and launched, and none runs."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from omniattn.arrays import Tensor
from omniattn.launch.host_struct import HostStruct
from omniattn.plan import engine
from omniattn.plan.engine import Call
from omniattn.runtime.device import DeviceInfo
from omniattn.runtime.driver import set_driver
from omniattn.runtime.driver_base import LaunchAttributes, Launcher


class Launch(NamedTuple):
    """What a launch handed to the driver."""

    symbol: str
    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int
    stream: int
    arguments: bytes
    attributes: LaunchAttributes | None


class AbsentGpu:
    """The driver of a process with one such GPU, from the moment it is made.

    Attributes
    ----------
    images : list of bytes
        Binaries that were loaded.
    launches : list of Launch
    """

    name = "absent"
    has_tensor_maps = True

    def __init__(self, layout: HostStruct, cc: tuple[int, int] = (9, 0), sm_count: int = 132) -> None:
        """``layout``: of the struct that the kernels take, as large as which launches copy."""
        self.images: list[bytes] = []
        self.launches: list[Launch] = []
        self._size = layout.size
        self._info = DeviceInfo(0, "Absent GPU", cc, sm_count, 227 << 10, 50 << 20, (13, 0))
        set_driver(self)

    def device_count(self) -> int:
        return 1

    def device_info(self, ordinal: int) -> DeviceInfo:
        return self._info

    def current_device(self) -> int | None:
        return 0

    def push_primary(self, ordinal: int) -> None:
        return None

    def pop(self, token: Any) -> None:
        return None

    def read(self, address: int, num_bytes: int, stream: int) -> bytes:
        raise AssertionError("there is no memory to read")

    def encode_tensor_map(self, dtype: str, address: int, *facts: tuple[int, ...]) -> bytes:
        """The address alone, in 128 bytes: only the real driver knows the format."""
        return address.to_bytes(128, "little")

    def load(self, image: bytes, symbol: str, ordinal: int, smem_bytes: int) -> Launcher:
        self.images.append(image)

        def launch(
            grid: tuple[int, int, int], threads: int, stream: int, params: int, attributes: LaunchAttributes | None
        ) -> None:
            data = ctypes.string_at(params, self._size)
            self.launches.append(Launch(symbol, grid, threads, smem_bytes, stream, data, attributes))

        return launch


def tensors_of(call: Call) -> dict[str, Tensor]:
    """The arrays of a call, as if those of NumPy were a GPU's."""
    tensors = engine.describe(call, None)
    for t in tensors.values():
        t.device = "cuda"
    return tensors
