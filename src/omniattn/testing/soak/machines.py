"""NumPy, CuPy, torch and JAX: arrays in every layout, and float64 arithmetic where they lie.

Formulas use the operators of arrays, and of a `Machine` the few functions that libraries call differently.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.testing.frameworks import CupyFramework
from omniattn.testing.soak import views
from omniattn.testing.soak.views import View

#: What guards around results are filled with.
GUARD = 0xA5
#: What lies around operands: NaN in every float type.
POISON = 0xFF
_SMALL_FLOATS = ("bfloat16", "float8_e4m3fn")


class NotHereError(Exception):
    """The array library lacks something that the problem has: a refusal, not a failure."""


@dataclass(frozen=True)
class Placed:
    """An array inside a larger one.

    Attributes
    ----------
    array : array
        What a call is given.
    base : array
        The memory that it lies in, contiguous.
    shape : tuple of int
    view : View
    """

    array: Any
    base: Any
    shape: tuple[int, ...]
    view: View


def _numpy_dtype(name: str) -> Any:
    if name not in _SMALL_FLOATS:
        return np.dtype(name)
    try:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except ImportError:
        raise NotHereError(f"NumPy has no {name} without the package ml_dtypes (pip install ml_dtypes)") from None


class Machine:
    """NumPy on the CPU; base of the others.

    Attributes
    ----------
    name, device : str
        For reports.
    library : str
        What ``--framework`` calls it.
    on_cpu : bool
    flips : bool
        Whether arrays can have negative strides.
    writable : bool
        Whether a call can write into an array of the caller.
    scores : int
        Elements of a block of scores in float64.
    """

    name, device, library = f"NumPy {np.__version__}", "CPU", "numpy"
    on_cpu, flips, writable = True, True, True
    scores = 1 << 20

    def __init__(self) -> None:
        self.xp: Any = np

    # Arrays

    def dtype(self, name: str) -> Any:
        """The library's own element type."""
        return _numpy_dtype(name)

    def _filled(self, shape: Sequence[int], dtype: str, byte: int) -> Any:
        base = self.xp.empty(tuple(shape), self.dtype(dtype))
        if dtype == "bool":
            base[...] = True
        else:
            self.bytes_of(base)[...] = byte
        return base

    def place(self, values: npt.NDArray[Any], dtype: str, view: View, shape: Sequence[int] | None = None) -> Placed:
        """An array with these values, the rest of its memory NaN."""
        shape = tuple(values.shape if shape is None else shape)
        base = self._filled(views.base_shape(shape, view), dtype, POISON)
        self._inner(base, shape, view)[...] = self._convert(values, dtype)
        return Placed(self._broadcast(self._inner(base, shape, view), shape), base, shape, view)

    def room(self, shape: Sequence[int], dtype: str, view: View) -> Placed:
        """An array to be written, all of its memory filled with guards."""
        base = self._filled(views.base_shape(shape, view), dtype, GUARD)
        return Placed(self._inner(base, shape, view), base, tuple(shape), view)

    def _convert(self, values: npt.NDArray[Any], dtype: str) -> Any:
        with np.errstate(over="ignore"):
            return np.asarray(values).astype(self.dtype(dtype))

    def _inner(self, base: Any, shape: Sequence[int], view: View) -> Any:
        if not shape:
            return base
        return base[views.slices(shape, view, self.flips)].transpose(views.inverse(view, len(shape)))

    def _broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        return array if tuple(array.shape) == shape else self.xp.broadcast_to(array, shape)

    def bytes_of(self, array: Any) -> Any:
        """The bytes of a contiguous array, in place."""
        return array.reshape(-1).view(self.xp.uint8)

    def codes(self, array: Any) -> Any:
        """The bytes of an array with elements of one byte, in place and in its shape."""
        return array.view(self.xp.uint8)

    def bits(self, array: Any) -> Any:
        """A copy of an array's bytes."""
        return self.bytes_of(self.xp.array(array, order="C", copy=True))

    def same(self, a: Any, b: Any) -> bool:
        """Whether two arrays of bytes are equal."""
        return tuple(a.shape) == tuple(b.shape) and bool((a == b).all())

    def host(self, array: Any) -> npt.NDArray[Any]:
        """On the host, as NumPy has it."""
        return np.asarray(array)

    def guarded(self, placed: Placed) -> bool:
        """Whether everything around an array still is what `room` put there."""
        base = self.host(self.bytes_of(placed.base))
        shape = views.base_shape(placed.shape, placed.view)
        marks = views.marked(placed.shape, placed.view, self.flips, shape).reshape(-1)
        if marks.size == 0:
            return True
        return bool((base.reshape(marks.size, -1)[~marks] == GUARD).all())

    def dirty(self, like: Sequence[Any]) -> None:
        """Leave NaN in memory that results of the sizes of these arrays are likely to get."""

    def dtype_name(self, array: Any) -> str:
        """Name of an array's element type."""
        return str(array.dtype)

    def synchronize(self) -> None:
        """Wait for the device."""

    # Arithmetic

    def f64(self, array: Any) -> Any:
        """In float64, where it lies."""
        return array.astype(self.xp.float64)

    def number(self, values: Any) -> Any:
        """An array in float64 of numbers on the host."""
        return self.xp.asarray(np.asarray(values, dtype=np.float64))

    def ints(self, values: Any) -> Any:
        """An array of int64 of numbers on the host."""
        return self.xp.asarray(np.asarray(values, dtype=np.int64))

    def int64(self, array: Any) -> Any:
        """As int64."""
        return array.astype(self.xp.int64)

    def zeros(self, *shape: int) -> Any:
        """Zeros in float64."""
        return self.xp.zeros(shape, self.xp.float64)

    def full(self, shape: Sequence[int], value: float) -> Any:
        """One number in float64."""
        return self.xp.full(tuple(shape), value, self.xp.float64)

    def arange(self, first: int, end: int) -> Any:
        """Numbers in float64."""
        return self.xp.arange(first, end, dtype=self.xp.float64)

    def exp(self, x: Any) -> Any:
        return self.xp.exp(x)

    def log(self, x: Any) -> Any:
        return self.xp.log(x)

    def tanh(self, x: Any) -> Any:
        return self.xp.tanh(x)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """One of them an array in float64."""
        return self.xp.where(condition, a, b)

    def top(self, x: Any) -> Any:
        """Maximum over the last dimension, which stays; -inf where it is empty."""
        return x.max(axis=-1, keepdims=True, initial=-np.inf)

    def amax(self, x: Any, *dims: int) -> Any:
        """Maximum over dimensions that are not empty, which stay."""
        return x.max(axis=dims, keepdims=True)

    def maximum(self, a: Any, b: Any) -> Any:
        return self.xp.maximum(a, b)

    def sum(self, x: Any, dim: int) -> Any:
        """Sum over a dimension, which stays."""
        return x.sum(axis=dim, keepdims=True)

    def cat(self, parts: Sequence[Any], dim: int) -> Any:
        return self.xp.concatenate(list(parts), axis=dim)

    def isnan(self, x: Any) -> Any:
        return self.xp.isnan(x)

    def isfinite(self, x: Any) -> Any:
        return self.xp.isfinite(x)

    def broadcast(self, x: Any, shape: Sequence[int]) -> Any:
        return self.xp.broadcast_to(x, tuple(shape))

    def words_to_float(self, words: Any) -> Any:
        """Bits of fp32 numbers, as int64, in float64."""
        return words.astype(self.xp.uint32).view(self.xp.float32).astype(self.xp.float64)

    def halves_to_float(self, words: Any) -> Any:
        """Bits of fp16 numbers, as int64, in float64."""
        return words.astype(self.xp.uint16).view(self.xp.float16).astype(self.xp.float64)


class CupyMachine(Machine):
    """CuPy on a GPU."""

    library, on_cpu, scores = "cupy", False, 1 << 24

    def __init__(self) -> None:
        found = CupyFramework()
        self.xp = importlib.import_module("cupy")
        self.name, self.device = found.name, found.device

    def _convert(self, values: npt.NDArray[Any], dtype: str) -> Any:
        try:
            return self.xp.asarray(super()._convert(values, dtype))
        except (TypeError, ValueError) as error:
            raise NotHereError(f"CuPy has no {dtype}: {error}".split("\n", 1)[0]) from None

    def _filled(self, shape: Sequence[int], dtype: str, byte: int) -> Any:
        try:
            return super()._filled(shape, dtype, byte)
        except (TypeError, ValueError) as error:
            raise NotHereError(f"CuPy has no {dtype}: {error}".split("\n", 1)[0]) from None

    def f64(self, array: Any) -> Any:
        if array.dtype.itemsize == 2 and array.dtype.kind not in "iu":
            array = array.astype(self.xp.float32)
        return array.astype(self.xp.float64)

    def host(self, array: Any) -> npt.NDArray[Any]:
        return np.asarray(self.xp.asnumpy(array))

    def dirty(self, like: Sequence[Any]) -> None:
        for x in like:
            self.xp.full(x.nbytes, POISON, self.xp.uint8)

    def top(self, x: Any) -> Any:
        if x.shape[-1] == 0:
            return self.full((*x.shape[:-1], 1), -np.inf)
        return x.max(axis=-1, keepdims=True)

    def number(self, values: Any) -> Any:
        return self.xp.asarray(np.asarray(values, dtype=np.float64))

    def synchronize(self) -> None:
        self.xp.cuda.Device().synchronize()


class JaxMachine(Machine):
    """JAX: contiguous arrays that no call writes; arithmetic by NumPy, since JAX has no float64 unless told so."""

    library, flips, writable = "jax", False, False

    def __init__(self, platform: str = "") -> None:
        super().__init__()
        self._jax = importlib.import_module("jax")
        self._device = self._jax.devices(platform or None)[0]
        self.on_cpu = self._device.platform == "cpu"
        self.name, self.device = f"JAX {self._jax.__version__}", str(self._device.device_kind)

    def place(self, values: npt.NDArray[Any], dtype: str, view: View, shape: Sequence[int] | None = None) -> Placed:
        """A contiguous array, whatever the view is."""
        if dtype == "float64":
            raise NotHereError("JAX has no float64 unless it is told so")
        if dtype == "float8_e4m3fn" and not self.on_cpu and values.shape[-1] % 16:
            raise NotHereError(
                "JAX has contiguous arrays only, and rows of e4m3 have to begin at multiples of 16 bytes"
            )
        shape = tuple(values.shape if shape is None else shape)
        made = np.ascontiguousarray(np.broadcast_to(self._convert(values, dtype), shape))
        array = self._jax.device_put(made.reshape(shape), self._device)
        return Placed(array, array, shape, {})

    def bits(self, array: Any) -> Any:
        return super().bits(np.asarray(array))

    def bytes_of(self, array: Any) -> Any:
        return super().bytes_of(np.ascontiguousarray(array))

    def f64(self, array: Any) -> Any:
        return np.asarray(array).astype(np.float64)

    def int64(self, array: Any) -> Any:
        return np.asarray(array).astype(np.int64)

    def synchronize(self) -> None:
        self._jax.effects_barrier()
