"""Arrays that go out by DLPack: results on their way into their library, and those that no library has memory for."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

from ..errors import DriverError, UnsupportedError
from ..runtime.driver import get_driver
from . import capsule as dlpack
from . import events
from .strides import contiguous_strides
from .tensor import ITEMSIZE, Tensor, fill


class Exporter:
    """A result on its way into its owner's library.

    The library's own ``from_dlpack`` asks for the capsule and names the stream on which it will read; that stream is
    made to wait for our kernel.

    Parameters
    ----------
    tensor : Tensor
        The result; kept alive as long as the library holds what it imported.
    event : Event or None
        Recorded behind the kernel; None on the CPU.
    """

    __slots__ = ("_event", "_tensor")

    def __init__(self, tensor: Tensor, event: events.Event | None) -> None:
        self._tensor = tensor
        self._event = event

    def __dlpack_device__(self) -> tuple[int, int]:
        """Device type and number."""
        return (dlpack.CPU, 0) if self._tensor.device == "cpu" else (dlpack.CUDA, self._tensor.ordinal)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Make the capsule; ``stream``: None and 1 are the legacy default stream, -1 asks for no waiting."""
        device = self.__dlpack_device__()
        if copy:
            raise BufferError("omniattn exports its results without copies")
        if dl_device is not None and (int(dl_device[0]), int(dl_device[1])) != device:
            raise BufferError(f"omniattn exports this result on DLPack device {device}, not {tuple(dl_device)}")
        if self._event is None:
            if stream is not None and stream != -1:
                raise BufferError(f"an array on the CPU takes no stream, received {stream}")
        elif stream != -1:
            self._event.make_wait(_raw(stream))
        t = self._tensor
        versioned = max_version is not None and max_version[0] >= 1
        return dlpack.export(t.ptr, t.shape, t.strides, t.dtype, device, t, versioned=versioned)


def _raw(stream: int | None) -> int:
    """The handle of a stream that an importer names."""
    if stream is None:
        return 0
    if stream == 0 or stream < -1:
        raise BufferError(f"stream must be -1, 1, 2 or a CUDA stream handle, received {stream}")
    return 0 if stream in (1, -1) else stream


class DeviceMemory:
    """Memory of a GPU from the driver's pool, in the order of streams: the host never waits for it.

    It goes back when the last array and the last import of it are gone, behind what is queued by then on the streams
    that it was imported for (`streams`). Launches of this package do not have to be waited for: `arrays.release` keeps
    their arrays until they are through.

    Parameters
    ----------
    num_bytes : int
    stream : int
        On which it can be used at once.
    ordinal : int
        The GPU.

    Raises
    ------
    UnsupportedError
        The stream captures a graph.
    DriverError
        There is no memory.
    """

    __slots__ = ("_backend", "_era", "_ordinal", "ptr", "streams")

    def __init__(self, num_bytes: int, stream: int, ordinal: int) -> None:
        self.ptr = 0
        self.streams: set[int] = set()
        self._ordinal = ordinal
        self._backend, self._era = events.backend(), events.era()
        if not num_bytes:
            return
        with self._backend.context(ordinal), self._backend.relaxed():
            if self._backend.capturing(stream):
                # It would be the graph's own: taken again whenever that is launched, and gone with it.
                raise UnsupportedError(
                    "new memory for arrays that are known by DLPack alone, while a CUDA graph is captured",
                    instead="out=, in calls that need no scratch memory; arrays of torch or CuPy",
                )
            self.ptr = self._backend.allocate(num_bytes, stream)

    # A default value, because this module's globals are None while the interpreter goes down.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self.ptr or is_finalizing() or events.era() != self._era:
            return
        with self._backend.context(self._ordinal), self._backend.relaxed():
            last = events.side_stream(self._ordinal)
            for stream in self.streams:
                # A stream that is gone cannot be asked. What a graph reads that is captured is its owner's to keep.
                with contextlib.suppress(DriverError):
                    if not self._backend.capturing(stream):
                        events.Event(stream, self._ordinal).make_wait(last)
            self._backend.free(self.ptr, last)


class OwnArray(Exporter):
    """An array with memory of this package, for libraries that give none: the result of a call on their arrays.

    Parameters
    ----------
    shape, dtype
        Of the array, which is row-major.
    device : str
        ``"cuda"`` or ``"cpu"``.
    stream, ordinal : int
        On a GPU: which one, and the stream on which the array can be used at once.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, shape: tuple[int, ...], dtype: str, device: str, stream: int = 0, ordinal: int = 0) -> None:
        size = math.prod(shape) * ITEMSIZE[dtype]
        memory: Any
        event = None
        if device == "cuda":
            memory = DeviceMemory(size, stream, ordinal)
            address, event = memory.ptr, events.Event(stream, ordinal)
        else:
            import numpy as np

            memory = np.empty(size, np.uint8)
            address = memory.ctypes.data
        t = Tensor()
        fill(t, memory, "dlpack", address, shape, contiguous_strides(shape), dtype, device, ordinal, False, "out")
        super().__init__(t, event)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return self._tensor.shape

    @property
    def dtype(self) -> str:
        """Name of the element type, ``"bfloat16"`` say."""
        return self._tensor.dtype

    def __repr__(self) -> str:
        t = self._tensor
        return f"<array of omniattn for DLPack: {t.dtype}, shape {t.shape}, {t.device_name}>"

    @property
    def _num_bytes(self) -> int:
        return self._tensor.size * self._tensor.itemsize

    def written_before(self, event: events.Event) -> None:
        """Have importers wait for this event from now on, recorded behind a kernel that writes the array."""
        self._event = event

    def clear(self, stream: int) -> None:
        """Fill an array on a GPU with zeros, on a stream on which it can be used."""
        t, backend = self._tensor, events.backend()
        with backend.context(t.ordinal):
            if t.size:
                backend.clear(t.ptr, self._num_bytes, stream)
        self._event = events.Event(stream, t.ordinal)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Make the capsule.

        Parameters
        ----------
        stream : int, optional
            On which it will be used; None and 1 are the legacy default stream, -1 asks for no waiting.
        max_version : (int, int), optional
            Newest DLPack that is understood: a capsule of version 1.0, or from before it.
        dl_device : (int, int), optional
            The array's own, or (1, 0): a copy on the CPU, for which the host waits.
        copy : bool, optional
            Whether to copy; None: where there is no other way.

        Raises
        ------
        BufferError
            What cannot be had.
        """
        on_gpu = self._event is not None
        if on_gpu and dl_device is not None and tuple(map(int, dl_device)) == (dlpack.CPU, 0):
            if copy is False:
                raise BufferError("from a GPU to the CPU it takes a copy, which copy=False forbids")
            return self._copied("cpu", 0).__dlpack__(max_version=max_version)
        if copy:
            made = self._copied(self._tensor.device, _raw(stream))
            return made.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device)
        taken = super().__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device)
        if on_gpu and stream != -1:
            self._tensor.obj.streams.add(_raw(stream))
        return taken

    def __deepcopy__(self, memo: Any) -> OwnArray:
        """An array with memory of its own."""
        t = self._tensor
        return self._copied(t.device, events.side_stream(t.ordinal) if t.device == "cuda" else 0)

    def __reduce__(self) -> Any:
        """Refuse: another process has not this memory."""
        raise TypeError("an array of omniattn is not pickled: import it into a library by from_dlpack, and pickle that")

    def _copied(self, device: str, stream: int) -> OwnArray:
        t = self._tensor
        made = OwnArray(t.shape, t.dtype, device, stream, t.ordinal)
        to = made._tensor
        if t.device == "cpu":
            to.obj[...] = t.obj
        elif t.size:
            assert self._event is not None
            stream = events.side_stream(t.ordinal) if device == "cpu" else stream
            self._event.make_wait(stream)
            backend = events.backend()
            with backend.context(t.ordinal):
                if device == "cpu":
                    to.obj[...] = bytearray(get_driver().read(t.ptr, self._num_bytes, stream))
                else:
                    backend.copy(to.ptr, t.ptr, self._num_bytes, stream)
                    made._event = events.Event(stream, t.ordinal)
        return made
