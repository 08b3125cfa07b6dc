"""From a registry row to a launched kernel: cubin store, disk cache, NVRTC; the CUDA driver through cuda-bindings or CuPy.

Importing this package imports neither CUDA bindings nor NumPy, and initializes nothing.
"""

from __future__ import annotations

from .device import DeviceInfo, device_info
from .kernel import LoadedKernel

__all__ = ["DeviceInfo", "LoadedKernel", "device_info"]
