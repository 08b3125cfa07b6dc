"""CPU tensors as NumPy arrays, and back with correct rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, DeviceError, DtypeError, ShapeError
from .tensor import Tensor

if TYPE_CHECKING:
    import numpy as np

# bfloat16 is no NumPy type: its bits are seen as uint16.
_TYPESTR = {
    "float16": "<f2",
    "bfloat16": "<u2",
    "float32": "<f4",
    "float64": "<f8",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "|b1",
}
#: NumPy has no such numbers: their bytes.
_BYTES = {"float8_e4m3fn": "|u1", "float8_e5m2": "|u1"}
_SEEN_AS = _TYPESTR | _BYTES


class Memory:
    """A tensor's memory under NumPy's array interface; NumPy keeps it, and so the tensor, alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, tensor: Tensor, *, writable: bool = False) -> None:
        self.owner = tensor
        itemsize = tensor.itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(step * itemsize for step in tensor.strides),
            "typestr": _SEEN_AS[tensor.dtype],
            "data": (tensor.ptr, not writable),
        }


def _view(tensor: Tensor, *, writable: bool) -> np.ndarray[Any, Any]:
    import numpy as np

    if tensor.device != "cpu":
        raise DeviceError(tensor.argument, "an array on the CPU", tensor.device_name)
    if 0 in tensor.shape:
        # Such arrays may have no address, which the array interface does not allow.
        return np.empty(tuple(tensor.shape), dtype=_SEEN_AS[tensor.dtype])
    return np.asarray(Memory(tensor, writable=writable))


def raw_view(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor's memory, to be written in place; bfloat16 as its bits, uint16, and 8-bit floats as bytes.

    Raises
    ------
    DeviceError
        The tensor is not on the CPU.
    """
    return _view(tensor, writable=True)


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor's values.

    Parameters
    ----------
    tensor : Tensor
        On the CPU, with any strides.

    Returns
    -------
    numpy.ndarray
        A read-only view of the same memory, that keeps it alive; bfloat16 comes as a float32 copy, exactly.

    Raises
    ------
    DeviceError
        The tensor is not on the CPU.
    DtypeError
        An element type that NumPy does not have (float8).
    """
    if tensor.device == "cpu" and tensor.dtype not in _TYPESTR:
        raise DtypeError(tensor.argument, "one of " + ", ".join(sorted(_TYPESTR)), tensor.dtype)
    view = _view(tensor, writable=False)
    if tensor.dtype != "bfloat16":
        return view
    import numpy as np

    bits = view.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def e4m3_bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor's 8-bit floats as the bytes that they are stored in; a read-only view."""
    return _view(tensor, writable=False)


def bfloat16_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bits of the nearest bfloat16 numbers, ties to even, as uint16; NaN gives a quiet NaN of the same sign.

    Float64 is rounded once, not by way of float32: see `_to_odd_float32`.
    """
    import numpy as np

    source = np.asarray(values)
    single = _to_odd_float32(source) if source.dtype == np.float64 else source.astype(np.float32, copy=False)
    bits = np.ascontiguousarray(single).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )
    quiet = ((bits >> np.uint32(16)) | np.uint32(0x7FC0)).astype(np.uint16) & np.uint16(0xFFC0)
    return np.where(np.isnan(single), quiet, rounded).reshape(source.shape)


def _to_odd_float32(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Float64 to float32, rounded towards zero with a one put in the last bit where anything was lost.

    A later rounding to fewer bits then sees that the number was not a tie, and gives the same as rounding float64
    directly.
    """
    import numpy as np

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = np.atleast_1d(values).astype(np.float32)
        back = nearest.astype(np.float64)
        too_far = np.abs(back) > np.abs(values)
        bits = nearest.view(np.uint32)
        # The magnitude's predecessor; a magnitude of zero is never too far.
        bits = np.where(too_far, bits - np.uint32(1), bits)
        inexact = (back != values) & ~np.isnan(values)
        bits = np.where(inexact, bits | np.uint32(1), bits)
    return bits.astype(np.uint32).view(np.float32)


def store(tensor: Tensor, values: np.ndarray[Any, Any]) -> None:
    """Write values into a CPU tensor, rounded to its element type (nearest, ties to even), whatever its strides.

    Parameters
    ----------
    tensor : Tensor
        On the CPU, of type float16, bfloat16, float32, float64, int32 or bool.
    values : numpy.ndarray
        Of the same shape, float; for int32 integers, for bool booleans.

    Raises
    ------
    ArgumentError
        The tensor is read-only.
    ShapeError, DtypeError, DeviceError
        As the names say.
    """
    import numpy as np

    if tensor.readonly:
        raise ArgumentError(tensor.argument, "a writable array", "a read-only one")
    if tensor.dtype not in ("float16", "bfloat16", "float32", "float64", "int32", "bool"):
        raise DtypeError(tensor.argument, "float16, bfloat16, float32, float64, int32 or bool", tensor.dtype)
    if tuple(values.shape) != tuple(tensor.shape):
        raise ShapeError(tensor.argument, f"shape {tuple(values.shape)}", str(tuple(tensor.shape)))
    view = _view(tensor, writable=True)
    if tensor.dtype == "bfloat16":
        view[...] = bfloat16_bits(values)
        return
    # Beyond the type's range is infinity, as every framework has it: that, or a signalling NaN, is no reason for a
    # warning.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        view[...] = values
