"""Host memory for the one struct that every kernel takes by value."""

from __future__ import annotations

import ctypes
import threading

#: Bytes; of a workspace, and of the arrays in it.
WORKSPACE_ALIGNMENT = 256

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


def quotient_factors(divisor: int) -> tuple[int, int]:
    """Multiplier m and shift s with n // divisor == n * m >> 31 + s for all n from 0 to 2**31 - 1; m is below 2**32.

    With s = ceil(log2(divisor)) and m = ceil(2**(31 + s) / divisor) the product is too large by less than n * 2**s, so
    by less than 2**(31 + s): not enough to reach the next multiple (Granlund and Montgomery 1994).
    """
    shift = (divisor - 1).bit_length()
    return -(-(1 << (31 + shift)) // divisor), shift
