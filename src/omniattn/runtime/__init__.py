"""From a registry row to a launched kernel: cubin store, disk cache, NVRTC, and the CUDA driver.

Importing this package imports neither CUDA bindings nor NumPy, and initializes nothing.
"""

from __future__ import annotations

from .device import DeviceInfo
from .driver import device_info, has_tensor_maps
from .kernel import LoadedKernel
from .loader import CompiledFile, Resolution, compile_to, load, load_image, resolve

__all__ = [
    "CompiledFile",
    "DeviceInfo",
    "LoadedKernel",
    "Resolution",
    "compile_to",
    "device_info",
    "has_tensor_maps",
    "load",
    "load_image",
    "resolve",
]
