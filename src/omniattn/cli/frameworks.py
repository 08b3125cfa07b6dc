"""NumPy, torch, CuPy and JAX behind the few operations that the commands need.

The library itself takes any of them through DLPack; this is only for making inputs, reading results and timing.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omniattn.cli.console import CannotRunError

FloatArray = npt.NDArray[np.floating[Any]]


class Framework(Protocol):
    """Arrays of one framework on one device."""

    name: str
    device: str

    def array(self, values: npt.NDArray[Any], dtype: str) -> Any:
        """A new array with ``values`` rounded to ``dtype``, for example ``"bfloat16"`` or ``"int32"``."""

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        """Copy to the host; 16-bit floats come as float32."""

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

    def synchronize(self) -> None:
        return


class TorchFramework:
    """torch on a CUDA device."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            raise CannotRunError(f"torch {self._torch.__version__} finds no CUDA device")
        self.name = f"torch {self._torch.__version__}"
        self.device = str(self._torch.cuda.get_device_name())

    def array(self, values: npt.NDArray[Any], dtype: str) -> Any:
        host = self._torch.from_numpy(np.ascontiguousarray(values))
        return host.to(device="cuda", dtype=getattr(self._torch, dtype))

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        if array.dtype in (self._torch.float16, self._torch.bfloat16):
            array = array.float()
        return np.asarray(array.cpu().numpy())

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()


class CupyFramework:
    """CuPy on a CUDA device."""

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")
        if self._cupy.cuda.runtime.getDeviceCount() == 0:
            raise CannotRunError("CuPy finds no CUDA device")
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
    CannotRunError
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
    raise CannotRunError(
        "no GPU can be used: " + "; ".join(reasons) + ". It takes an NVIDIA GPU with its driver, and a CUDA build of "
        "torch, CuPy or JAX"
    )


def time_call(framework: Framework, call: Callable[[], Any], *, repeats: int) -> tuple[Any, float]:
    """Run ``call`` once to warm up, then ``repeats`` times; return its result and the best wall time in milliseconds.

    The best of several, host included: what a single call costs a user. ``omniattn bench`` times kernels.
    """
    result = call()
    framework.synchronize()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        if hasattr(result, "block_until_ready"):
            result.block_until_ready()
        framework.synchronize()
        best = min(best, time.perf_counter() - start)
    return result, best * 1e3
