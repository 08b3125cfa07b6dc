"""NumPy, torch, CuPy and JAX behind the few operations that cases and commands need.

The library itself takes any of them through DLPack; this is only for making inputs, reading results and timing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omniattn import arrays
from omniattn.arrays import capsule
from omniattn.errors import OmniattnError


class NoGpuError(OmniattnError):
    """No framework finds a GPU; the message says why for each."""


class _SaidArray:
    """An array that says by DLPack that its elements are of another type, for a library that has no such type."""

    dtype: str

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        device, number = self.array.__dlpack_device__()
        return int(device), int(number)

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
        self.array.__dlpack__(stream=stream)  # the library keeps the order of its work, and so of its array
        t = arrays.describe(self.array, "array")
        versioned = max_version is not None and max_version[0] >= 1
        return capsule.export(
            t.ptr, t.shape, t.strides, self.dtype, self.__dlpack_device__(), self.array, versioned=versioned
        )


class E4m3Array(_SaidArray):
    """Bytes as e4m3 numbers."""

    dtype = "float8_e4m3fn"


class BFloat16Array(_SaidArray):
    """Numbers of 16 bits as bf16 ones."""

    dtype = "bfloat16"


class Framework(Protocol):
    """Arrays of one framework on one device."""

    name: str
    device: str

    def array(self, values: npt.NDArray[Any], dtype: str) -> Any:
        """A new array with ``values`` rounded to ``dtype``, for example ``"bfloat16"`` or ``"int32"``."""

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        """Copy to the host; 16-bit floats come as float32."""

    def as_dtype(self, array: Any, dtype: str) -> Any:
        """The bytes of an array of 8 bits as ``"uint8"``, ``"int8"`` or ``"float8_e4m3fn"``, in the same memory."""

    def poison(self, array: Any) -> None:
        """Set all bits of an array: NaN in every float type. What nobody writes afterwards cannot pass for a result."""

    def synchronize(self) -> None:
        """Wait for the device."""


class NumpyFramework:
    """NumPy on the CPU. It has no bfloat16: ``array`` with that dtype raises TypeError."""

    name = "NumPy"
    device = "CPU"

    def array(self, values: npt.NDArray[Any], dtype: str) -> Any:
        return np.ascontiguousarray(values, dtype=np.dtype(dtype))

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        values = np.asarray(array)
        return values.astype(np.float32) if values.dtype == np.float16 else values

    def as_dtype(self, array: Any, dtype: str) -> Any:
        return array.view(importlib.import_module("ml_dtypes").float8_e4m3fn if dtype == "float8_e4m3fn" else dtype)

    def poison(self, array: Any) -> None:
        array.view(np.uint8)[...] = 0xFF

    def synchronize(self) -> None:
        return


class TorchFramework:
    """torch on a CUDA device."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            raise NoGpuError(f"torch {self._torch.__version__} finds no CUDA device")
        self.name = f"torch {self._torch.__version__}"
        self.device = str(self._torch.cuda.get_device_name())

    def array(self, values: npt.NDArray[Any], dtype: str) -> Any:
        host = self._torch.from_numpy(np.ascontiguousarray(values))
        return host.to(device="cuda", dtype=getattr(self._torch, dtype))

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        if array.dtype in (self._torch.float16, self._torch.bfloat16):
            array = array.float()
        return np.asarray(array.cpu().numpy())

    def as_dtype(self, array: Any, dtype: str) -> Any:
        return array.view(getattr(self._torch, dtype))

    def poison(self, array: Any) -> None:
        array.view(self._torch.uint8).fill_(0xFF)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()


class CupyFramework:
    """CuPy on a CUDA device."""

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")
        if self._cupy.cuda.runtime.getDeviceCount() == 0:
            raise NoGpuError("CuPy finds no CUDA device")
        self.name = f"CuPy {self._cupy.__version__}"
        properties = self._cupy.cuda.runtime.getDeviceProperties(self._cupy.cuda.Device().id)
        self.device = properties["name"].decode()

    def array(self, values: npt.NDArray[Any], dtype: str) -> Any:
        if dtype == "bfloat16":
            # CuPy takes bfloat16 from ml_dtypes, where both are new enough.
            ml_dtypes = importlib.import_module("ml_dtypes")
            return self._cupy.asarray(np.asarray(values, dtype=np.float32).astype(ml_dtypes.bfloat16))
        return self._cupy.asarray(values).astype(dtype)

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        if array.dtype.itemsize == 2 and array.dtype.kind not in "iu":
            array = array.astype(self._cupy.float32)
        return np.asarray(self._cupy.asnumpy(array))

    def as_dtype(self, array: Any, dtype: str) -> Any:
        if dtype == "float8_e4m3fn":
            return E4m3Array(array)
        return (array.array if isinstance(array, E4m3Array) else array).view(dtype)

    def poison(self, array: Any) -> None:
        array.view(self._cupy.uint8).fill(0xFF)

    def synchronize(self) -> None:
        self._cupy.cuda.Device().synchronize()


class JaxFramework:
    """JAX (eager) on a CUDA device."""

    def __init__(self) -> None:
        self._jax = importlib.import_module("jax")
        self._device = self._jax.devices("cuda")[0]
        self.name = f"JAX {self._jax.__version__}"
        self.device = str(self._device.device_kind)

    def array(self, values: npt.NDArray[Any], dtype: str) -> Any:
        host = self._jax.numpy.asarray(values)
        return self._jax.device_put(host.astype(dtype), self._device).block_until_ready()

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        if array.dtype.itemsize == 2 and array.dtype.kind not in "iu":
            array = array.astype("float32")
        return np.asarray(array)

    def as_dtype(self, array: Any, dtype: str) -> Any:
        return self._jax.lax.bitcast_convert_type(array, dtype)

    def poison(self, array: Any) -> None:
        """Nothing: a JAX array cannot be written, and `jax.numpy.empty` gives zeros."""

    def synchronize(self) -> None:
        self._jax.effects_barrier()


_GPU_FRAMEWORKS: tuple[tuple[str, Callable[[], Framework]], ...] = (
    ("torch", TorchFramework),
    ("cupy", CupyFramework),
    ("jax", JaxFramework),
)


def gpu_framework() -> Framework:
    """The first of torch, CuPy, JAX that is installed and finds a CUDA device.

    Raises
    ------
    NoGpuError
        None does; the message says why for each.
    """
    reasons = []
    for module, build in _GPU_FRAMEWORKS:
        if importlib.util.find_spec(module) is None:
            reasons.append(f"{module} is not installed")
            continue
        try:
            return build()
        except Exception as error:  # noqa: BLE001 - a broken CUDA set-up raises anything; the reason is passed on
            reasons.append(f"{module}: {error}".split("\n", 1)[0])
    raise NoGpuError(
        "no GPU can be used: " + "; ".join(reasons) + ". It takes an NVIDIA GPU with its driver, and a CUDA build of "
        "torch, CuPy or JAX"
    )
