"""Host memory for the one struct that every kernel takes by value."""

from __future__ import annotations

import ctypes
import threading

_CAPACITY = 1024


class _ParamBuffer(threading.local):
    """One buffer a thread: the driver copies it during the launch call, so the next call may overwrite it.

    Attributes
    ----------
    buffer : ctypes array
        For ``struct.pack_into``, which refuses what does not fit.
    address : int
        What to launch with.
    """

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_CAPACITY)
        self.address = ctypes.addressof(self.buffer)

    def write(self, data: bytes) -> int:
        """Copy ``data`` in; return the address. For launches that pack anew; the others save it by packing in place."""
        if len(data) > _CAPACITY:
            raise ValueError(f"kernel arguments of {len(data)} bytes exceed the buffer's {_CAPACITY}")
        ctypes.memmove(self.address, data, len(data))
        return self.address


PARAMS = _ParamBuffer()

#: CTAs of a one-dimensional grid at most.
MAX_GRID_X = 2**31 - 1
