"""Fakes for the array tests: exporters of every kind of capsule, and CUDA events that only write a log."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from omniattn.arrays import capsule
from omniattn.runtime.driver_base import driver_error

_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


#: Whether NumPy, whose capsules ours are, makes versioned ones.
MAKES_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


def exports() -> int:
    """How many of our capsules' tensors somebody holds."""
    return sum(type(x) is capsule._Memory for x in gc.get_objects())


class FakeExporter:
    """Any library's array, with memory of ctypes and every field of the capsule open to lies.

    ``made`` and ``deleted`` count capsules; ``requests`` holds the keyword arguments of each export.
    """

    def __init__(
        self,
        shape: tuple[int, ...] = (2, 8),
        *,
        versioned: bool = True,
        version: tuple[int, int] = (1, 0),
        flags: int = 0,
        code: int = 2,
        bits: int = 32,
        lanes: int = 1,
        device: tuple[int, int] = (1, 0),
        strides: tuple[int, ...] | None = None,
        byte_offset: int = 0,
        has_deleter: bool = True,
        knows_max_version: bool = True,
        error: Exception | None = None,
    ) -> None:
        self.shape = shape
        self.memory = ctypes.create_string_buffer(4096)
        self.address = ctypes.addressof(self.memory)
        self.versioned, self.version, self.flags = versioned, version, flags
        self.code, self.bits, self.lanes = code, bits, lanes
        self.device_pair, self.byte_offset = device, byte_offset
        self.shape_array = (ctypes.c_int64 * len(shape))(*shape)
        self.strides_array = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self.knows_max_version, self.error, self.has_deleter = knows_max_version, error, has_deleter
        self.made = self.deleted = 0
        self.requests: list[dict[str, Any]] = []
        self._alive: list[Any] = []

        def delete(pointer: int) -> None:
            self.deleted += 1

        self._delete = _DELETER(delete)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_pair

    def __dlpack__(self, **options: Any) -> Any:
        if not self.knows_max_version and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.requests.append(options)
        if self.error is not None:
            raise self.error
        deleter = ctypes.cast(self._delete, ctypes.c_void_p).value if self.has_deleter else None
        if self.versioned:
            managed: Any = capsule.DLManagedTensorVersioned(
                major=self.version[0], minor=self.version[1], flags=self.flags, deleter=deleter
            )
        else:
            managed = capsule.DLManagedTensor(deleter=deleter)
        tensor = managed.dl_tensor
        tensor.data = self.address
        tensor.device = capsule.DLDevice(*self.device_pair)
        tensor.ndim = len(self.shape)
        tensor.dtype = capsule.DLDataType(self.code, self.bits, self.lanes)
        tensor.shape = ctypes.cast(self.shape_array, ctypes.POINTER(ctypes.c_int64))
        if self.strides_array is not None:
            tensor.strides = ctypes.cast(self.strides_array, ctypes.POINTER(ctypes.c_int64))
        tensor.byte_offset = self.byte_offset
        self._alive.append(managed)
        self.made += 1
        name = capsule.NAME_VERSIONED if self.versioned else capsule.NAME
        return _new(ctypes.addressof(managed), name, None)


class FakeEvents:
    """An `EventBackend` that writes down what it was asked, and whose events pass when they are told to."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.passed: set[int] = set()
        self.capture_streams: set[int] = set()
        self.captured_elsewhere = False
        self.failing: set[int] = set()
        self.depth = self.relaxations = 0
        self.memory: dict[int, Any] = {}
        self._next = 100

    @contextmanager
    def context(self, ordinal: int) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def create(self) -> int:
        assert self.depth
        self._next += 1
        return self._next

    def destroy(self, event: int) -> None:
        self.log.append(("destroy", event))

    def record(self, event: int, stream: int) -> None:
        assert self.depth
        self.log.append(("record", event, stream))

    def wait(self, stream: int, event: int) -> None:
        assert self.depth
        self.log.append(("wait", stream, event))

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        self.relaxations += 1
        try:
            yield
        finally:
            self.relaxations -= 1

    def done(self, event: int) -> bool:
        """As CUDA has it: while another thread captures, only a thread in relaxed mode may query."""
        if self.captured_elsewhere and not self.relaxations:
            raise driver_error("cuEventQuery", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "the capture is invalid now")
        if event in self.failing:
            raise driver_error("cuEventQuery", "CUDA_ERROR_LAUNCH_FAILED", "an earlier kernel failed")
        return event in self.passed

    def capturing(self, stream: int) -> bool:
        return stream in self.capture_streams

    def new_stream(self) -> int:
        assert self.depth
        self._next += 1
        return self._next

    def allocate(self, num_bytes: int, stream: int) -> int:
        """Host memory, which takes the place of the GPU's."""
        assert self.depth
        assert self.relaxations
        memory = ctypes.create_string_buffer(num_bytes)
        self.memory[ctypes.addressof(memory)] = memory
        self.log.append(("allocate", num_bytes, stream))
        return ctypes.addressof(memory)

    def free(self, address: int, stream: int) -> None:
        assert self.depth
        del self.memory[address]
        self.log.append(("free", stream))

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        assert self.depth
        ctypes.memset(address, 0, num_bytes)
        self.log.append(("clear", num_bytes, stream))

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        assert self.depth
        ctypes.memmove(to, source, num_bytes)
        self.log.append(("copy", num_bytes, stream))

    def synchronize(self, event: int) -> None:
        assert self.depth
        assert self.relaxations
        self.log.append(("synchronize", event))

    def host_allocate(self, num_bytes: int) -> int:
        assert self.depth
        assert self.relaxations
        memory = ctypes.create_string_buffer(num_bytes)
        self.memory[ctypes.addressof(memory)] = memory
        self.log.append(("host allocate", num_bytes))
        return ctypes.addressof(memory)

    def host_free(self, address: int) -> None:
        assert self.depth
        del self.memory[address]
        self.log.append(("host free",))

    def copy_rows(
        self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        assert self.depth
        for i in range(height):
            ctypes.memmove(to + i * to_pitch, source + i * source_pitch, width)
        self.log.append(("rows", width, height, stream))
