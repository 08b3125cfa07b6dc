"""Host memory for the one struct that every kernel takes by value."""

from __future__ import annotations

import ctypes
import threading


class _ParamBuffer(threading.local):
    """One buffer a thread: the driver copies it during the launch call, so the next call may overwrite it."""

    _CAPACITY = 1024

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(self._CAPACITY)
        self._address = ctypes.addressof(self._buffer)

    def write(self, data: bytes) -> int:
        """Copy ``data`` in; return the address to launch with."""
        if len(data) > self._CAPACITY:
            raise ValueError(f"kernel arguments of {len(data)} bytes exceed the buffer's {self._CAPACITY}")
        ctypes.memmove(self._address, data, len(data))
        return self._address


PARAMS = _ParamBuffer()

#: CTAs of a one-dimensional grid at most.
MAX_GRID_X = 2**31 - 1
