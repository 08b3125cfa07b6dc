"""A class of tensors with a table of C functions, for tests of the C module without a GPU."""

from __future__ import annotations

import ctypes
from typing import Any


class Facts(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Tensor:
    """What the table says of it is open to change."""

    requires_grad = False

    def __init__(self, address: int = 0x1000, shape: tuple[int, ...] = (2, 8), **changes: Any) -> None:
        self.address, self.shape = address, shape
        self.strides: tuple[int, ...] = tuple(range(len(shape), 0, -1))
        self.ndim, self.bits, self.code, self.device, self.device_type = len(shape), 16, 2, 0, 2
        self.offset = 0
        self.error = self.negated = self.inference = False
        self.__dict__.update(changes)

    def is_neg(self) -> bool:
        return self.negated

    def is_inference(self) -> bool:
        return self.inference


class Owned(ctypes.Structure):
    """DLManagedTensorVersioned."""


RELEASE = ctypes.PYFUNCTYPE(None, ctypes.POINTER(Owned))
Owned._fields_ = [
    ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("release", RELEASE),
    ("flags", ctypes.c_uint64), ("facts", Facts),
]  # fmt: skip
ALLOCATE = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Facts), ctypes.POINTER(ctypes.POINTER(Owned)), ctypes.c_void_p, ctypes.c_void_p
)
READ = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Facts))
STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Exchange(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p),
        ("allocate", ALLOCATE), ("unused", ctypes.c_void_p * 2), ("read", READ), ("current_stream", STREAM),
    ]  # fmt: skip


_raise = ctypes.pythonapi.PyErr_SetString
_raise.argtypes, _raise.restype = [ctypes.py_object, ctypes.c_char_p], None


def _read(obj: Any, out: Any) -> int:
    t = out.contents
    if obj.error:
        return -1
    obj.memory = [(ctypes.c_int64 * max(1, len(x)))(*x) for x in (obj.shape, obj.strides)]
    t.data, t.device_type, t.device, t.ndim = obj.address or None, obj.device_type, obj.device, obj.ndim
    t.code, t.bits, t.lanes, t.byte_offset = obj.code, obj.bits, 1, obj.offset
    t.shape, t.strides = (ctypes.cast(x, ctypes.POINTER(ctypes.c_int64)) for x in obj.memory)
    return 0


#: Bytes of the workspaces that are not released yet, by number, and what `allocate` shall do.
WORKSPACES: dict[int, Owned] = {}
ALLOCATOR: dict[str, Any] = {"address": 0x101010, "code": 0}


def _allocate(like: Any, out: Any, context: Any, fail: Any) -> int:
    t = like.contents
    assert (t.device_type, t.ndim, t.code, t.bits, t.lanes, t.strides[0]) == (2, 1, 1, 8, 1, 1)
    if ALLOCATOR["code"]:
        return ALLOCATOR["code"]
    made = Owned(1, 0, len(WORKSPACES), RELEASE(_release), 0, Facts(ALLOCATOR["address"], 2, t.device, 1))
    made.memory = (ctypes.c_int64 * 1)(t.shape[0])
    WORKSPACES[ctypes.addressof(made)] = made
    out[0] = ctypes.pointer(made)
    return 0


def _release(made: Any) -> None:
    del WORKSPACES[ctypes.addressof(made.contents)]


def _stream(kind: int, device: int, out: Any) -> int:
    out[0] = 0x51
    return 0


TABLE = Exchange(1, 3, None, ALLOCATE(_allocate), (ctypes.c_void_p * 2)(), READ(_read), STREAM(_stream))
new_capsule: Any = ctypes.pythonapi.PyCapsule_New
new_capsule.argtypes, new_capsule.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object


def capsule(table: Exchange = TABLE, name: bytes = b"dlpack_exchange_api") -> Any:
    """The capsule that a class has."""
    return new_capsule(ctypes.addressof(table), name, None)


class Layout:
    """Of a cache."""


class Cache:
    """What a call's cache is asked."""

    def __init__(self, facts: Layout, plain: bool = True) -> None:
        self._facts, self._plain_torch = facts, plain
        self._addresses: Any = (0x7000, 0x8000)
        self._written: Any = (Tensor(0x7000), Tensor(0x8000))


class Call:
    """What a call is asked."""

    def __init__(self, operation: Any, objects: Any, options: Any, **changes: Any) -> None:
        self.operation, self.objects, self.options = operation, objects, options
        self.stream = self.cache = self.facts = self.problem = None
        self.__dict__.update(changes)
