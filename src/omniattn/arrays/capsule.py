"""DLPack capsules, in and out, by ctypes.

The layouts are those of DLPack 1.x (https://github.com/dmlc/dlpack, ``dlpack.h``): ``DLManagedTensor`` (before 1.0,
capsule name ``dltensor``) and ``DLManagedTensorVersioned`` (``dltensor_versioned``). Who takes a capsule's tensor
renames the capsule to ``used_...`` and owes one call of the tensor's deleter.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

from ..errors import ArgumentError, DeviceError, DtypeError, UnsupportedError
from .strides import contiguous_strides

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
#: Memory that the kernels (CUDA) or NumPy (CPU) can reach, by DLPack device type.
DEVICES = {CPU: "cpu", CUDA_HOST: "cpu", CUDA: "cuda", CUDA_MANAGED: "cuda"}
_DEVICE_NAMES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 11: "ROCm host memory", 14: "oneAPI", 15: "WebGPU"}

READ_ONLY = 1
#: What is asked of exporters: 1.1 is the first version with float8 codes.
MAX_VERSION = (1, 1)

DTYPES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}
_CODES = {name: code for code, name in DTYPES.items()}
_KINDS = ("int", "uint", "float", "handle", "bfloat", "complex", "bool")


class DLDevice(ctypes.Structure):
    """Where the memory is."""

    _fields_ = (("device_type", c_int32), ("device_id", c_int32))


class DLDataType(ctypes.Structure):
    """Element type: kind, bits, vector lanes."""

    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class DLTensor(ctypes.Structure):
    """The array; strides in elements, ``byte_offset`` in bytes."""

    _fields_ = (
        ("data", c_void_p),
        ("device", DLDevice),
        ("ndim", c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """A tensor with its deleter, before DLPack 1.0."""

    _fields_ = (("dl_tensor", DLTensor), ("manager_ctx", c_void_p), ("deleter", c_void_p))


class DLManagedTensorVersioned(ctypes.Structure):
    """A tensor with its deleter, from DLPack 1.0 on. Every later version keeps everything up to ``flags``."""

    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("dl_tensor", DLTensor),
    )


# A capsule keeps the pointer to its name, not a copy: these objects have to live as long as any capsule.
NAME, NAME_VERSIONED = c_char_p(b"dltensor"), c_char_p(b"dltensor_versioned")
_USED, _USED_VERSIONED = c_char_p(b"used_dltensor"), c_char_p(b"used_dltensor_versioned")

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (c_void_p, c_char_p), c_int
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes, _get_pointer.restype = (c_void_p, c_char_p), c_void_p
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.argtypes, _set_name.restype = (c_void_p, c_char_p), c_int

# PYFUNCTYPE keeps the interpreter lock: some exporters' deleters are Python code that assumes to hold it.
_DELETER = ctypes.PYFUNCTYPE(None, c_void_p)


class Capsule:
    """A tensor taken out of a capsule.

    Parameters
    ----------
    capsule : PyCapsule
        What ``__dlpack__`` returned.
    argument : str
        Name of the argument, for errors.

    Raises
    ------
    ArgumentError
        Not a DLPack capsule, or one that was consumed before.
    UnsupportedError
        A major version other than 1. The deleter has been called, which every version allows.
    DtypeError, DeviceError
        An element type or a device that this package cannot use. The deleter has been called.
    """

    __slots__ = ("_deleter", "_managed", "device", "dtype", "ordinal", "ptr", "readonly", "shape", "strides")

    def __init__(self, capsule: Any, argument: str) -> None:
        self._deleter = self._managed = 0
        address = id(capsule)  # CPython: the object's address, which the PyCapsule functions want
        if type(capsule).__name__ != "PyCapsule":
            raise ArgumentError(
                argument, "__dlpack__() to return a DLPack capsule", f"an object of type {type(capsule).__name__}"
            )
        if _is_valid(address, NAME_VERSIONED):
            pointer = _get_pointer(address, NAME_VERSIONED)
            _set_name(address, _USED_VERSIONED)
            versioned = DLManagedTensorVersioned.from_address(pointer)
            self._managed, self._deleter = pointer, versioned.deleter or 0
            if versioned.major != 1:
                found = f"{versioned.major}.{versioned.minor}"
                self.release()
                raise UnsupportedError(
                    f"argument {argument!r} was exported with DLPack version {found}, which this version cannot read",
                    instead="exporters of DLPack 0.x and 1.x",
                )
            self.readonly = bool(versioned.flags & READ_ONLY)
            tensor = versioned.dl_tensor
        elif _is_valid(address, NAME):
            pointer = _get_pointer(address, NAME)
            _set_name(address, _USED)
            managed = DLManagedTensor.from_address(pointer)
            self._managed, self._deleter = pointer, managed.deleter or 0
            self.readonly = False
            tensor = managed.dl_tensor
        else:
            raise ArgumentError(
                argument, "a DLPack capsule that nobody has consumed", "a capsule of another name, or a used one"
            )
        try:
            self._read(tensor, argument)
        except BaseException:
            self.release()
            raise

    def _read(self, tensor: Any, argument: str) -> None:
        dtype = tensor.dtype
        name = DTYPES.get((dtype.code, dtype.bits))
        if name is None or dtype.lanes != 1:
            kind = _KINDS[dtype.code] if dtype.code < len(_KINDS) else f"DLPack type code {dtype.code}, "
            lanes = f" in vectors of {dtype.lanes}" if dtype.lanes != 1 else ""
            raise DtypeError(argument, "one of " + ", ".join(sorted(_CODES)), f"{kind}{dtype.bits}{lanes}")
        self.dtype = name
        device = tensor.device.device_type
        if device not in DEVICES:
            raise unusable_device(argument, device)
        self.device = DEVICES[device]
        self.ordinal = tensor.device.device_id if self.device == "cuda" else 0
        ndim = tensor.ndim
        self.shape = tuple(tensor.shape[:ndim]) if ndim else ()
        # Exporters before DLPack 1.2 may leave the strides out for row-major arrays.
        self.strides = tuple(tensor.strides[:ndim]) if ndim and tensor.strides else contiguous_strides(self.shape)
        self.ptr = (tensor.data or 0) + tensor.byte_offset

    def release(self) -> None:
        """Call the deleter, once; the memory must not be used afterwards."""
        managed, deleter = self._managed, self._deleter
        self._managed = self._deleter = 0
        if managed and deleter:
            _DELETER(deleter)(managed)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter goes down the exporter may be gone already; the process returns the memory anyway. The
        # function is a default value because this module's globals are None by then.
        if not is_finalizing():
            self.release()


def unusable_device(argument: str, device_type: int) -> DeviceError:
    """The error for memory that neither CUDA nor the CPU can reach."""
    name = _DEVICE_NAMES.get(device_type, "an unknown device")
    return DeviceError(
        argument, "an array on the CPU or on an NVIDIA GPU", f"{name} (DLPack device type {device_type})"
    )


class _Memory:
    """Memory at an address as NumPy sees it, and what has to stay alive meanwhile: the base of an array."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(
        self, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, owner: object
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (ptr, False),
            "shape": shape,
            "strides": tuple(n * itemsize for n in strides),
            "typestr": f"{'<' if sys.byteorder == 'little' else '>'}u{itemsize}",
        }
        self.owner = owner


def export(
    ptr: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    device: tuple[int, int],
    owner: object,
    *,
    versioned: bool,
) -> Any:
    """Make a capsule.

    It is NumPy's, of an array of unsigned integers over the memory, which NumPy never reads; the tensor in it is then
    given its element type and its device. A deleter is called from any thread, with or without the interpreter lock,
    while an exception is on its way and after the interpreter's end: NumPy's is C and bears all of that, a callback of
    ctypes does not (it clears the exception).

    Parameters
    ----------
    ptr : int
        Address of the first element.
    shape, strides : tuple of int
        Extents and strides in elements.
    dtype : str
        Element type.
    device : (int, int)
        DLPack device type and number.
    owner : object
        Kept alive until the consumer calls the deleter, or an unconsumed capsule dies.
    versioned : bool
        ``DLManagedTensorVersioned`` instead of ``DLManagedTensor``, where NumPy makes it (from 2.1 on).

    Returns
    -------
    PyCapsule
    """
    import numpy as np

    code, bits = _CODES[dtype]
    # NumPy 1.24 takes neither NULL nor an array without dimensions: other values, which are replaced below.
    memory = _Memory(ptr or 64, shape or (1,), strides or (1,), bits // 8, owner)
    array: Any = np.asarray(memory)
    made = array.__dlpack__(max_version=(1, 0)) if versioned and _makes_versioned() else array.__dlpack__()
    address = id(made)
    if _is_valid(address, NAME_VERSIONED):
        tensor = DLManagedTensorVersioned.from_address(_get_pointer(address, NAME_VERSIONED)).dl_tensor
    else:
        tensor = DLManagedTensor.from_address(_get_pointer(address, NAME)).dl_tensor
    tensor.data, tensor.byte_offset, tensor.ndim = ptr, 0, len(shape)
    tensor.device = DLDevice(*device)
    tensor.dtype = DLDataType(code, bits, 1)
    return made


@functools.cache
def _makes_versioned() -> bool:
    import numpy as np

    return bool(np.lib.NumpyVersion(np.__version__) >= "2.1.0")
