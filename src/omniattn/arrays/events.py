"""CUDA events on raw stream handles, for frameworks whose own events are out of reach (JAX, plain DLPack exporters).

Also the list of memory that queued kernels still read: an exporter that knows nothing of our stream may hand memory
out again as soon as the capsule is released, so capsules are kept until an event behind the kernel has passed.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from ..runtime import driver as _driver
from ..runtime.driver_base import driver_error


class EventBackend(Protocol):
    """The driver calls needed here; handles are integers."""

    def context(self, ordinal: int) -> AbstractContextManager[None]:
        """Run the block with a context of GPU ``ordinal`` current."""

    def create(self) -> int:
        """Make an event without timing."""

    def destroy(self, event: int) -> None:
        """Give an event back; pending waits on it stay valid."""

    def record(self, event: int, stream: int) -> None:
        """Record on a stream."""

    def wait(self, stream: int, event: int) -> None:
        """Make a stream wait."""

    def relaxed(self) -> AbstractContextManager[None]:
        """Run the block with this thread's capture mode relaxed.

        While any thread captures a graph in the default mode, a query anywhere in the process fails and invalidates
        that capture, unless the querying thread is in this mode.
        """

    def done(self, event: int) -> bool:
        """Whether everything before the record has run."""

    def capturing(self, stream: int) -> bool:
        """Whether the stream is recording a CUDA graph."""

    def new_stream(self) -> int:
        """Make a stream that waits for no other one."""

    def allocate(self, num_bytes: int, stream: int) -> int:
        """Memory of the driver's pool, to be used on ``stream``."""

    def free(self, address: int, stream: int) -> None:
        """Give it back, behind what is queued on ``stream``."""

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        """Queue zeros."""

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy on the GPU."""

    def synchronize(self, event: int) -> None:
        """Have the host wait for an event."""

    def host_allocate(self, num_bytes: int) -> int:
        """Page-locked memory of the host, at the same address for every GPU."""

    def host_free(self, address: int) -> None:
        """Give it back; nothing may use it any more."""

    def copy_rows(
        self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Queue a copy of ``height`` rows of ``width`` bytes that begin ``pitch`` bytes apart, from or to the host."""


class _CudaBindings:
    """Events through cuda-bindings."""

    def __init__(self) -> None:
        from cuda.bindings import driver as cu

        self._cu = cu

    def _check(self, call: str, result: Any) -> Any:
        code, *values = result
        if code:
            _, name = self._cu.cuGetErrorName(code)
            _, text = self._cu.cuGetErrorString(code)
            raise driver_error(call, (name or b"unknown").decode(), (text or b"").decode())
        return values[0] if values else None

    def context(self, ordinal: int) -> AbstractContextManager[None]:
        return _driver.device_context(_driver.get_driver(), ordinal)

    def create(self) -> int:
        flags = self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return int(self._check("cuEventCreate", self._cu.cuEventCreate(flags)))

    def destroy(self, event: int) -> None:
        self._check("cuEventDestroy", self._cu.cuEventDestroy(event))

    def record(self, event: int, stream: int) -> None:
        self._check("cuEventRecord", self._cu.cuEventRecord(event, stream))

    def wait(self, stream: int, event: int) -> None:
        self._check("cuStreamWaitEvent", self._cu.cuStreamWaitEvent(stream, event, 0))

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        call, mode = "cuThreadExchangeStreamCaptureMode", self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        previous = self._check(call, self._cu.cuThreadExchangeStreamCaptureMode(mode))
        try:
            yield
        finally:
            self._check(call, self._cu.cuThreadExchangeStreamCaptureMode(previous))

    def done(self, event: int) -> bool:
        (code,) = self._cu.cuEventQuery(event)
        if code == self._cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check("cuEventQuery", (code,))
        return True

    def capturing(self, stream: int) -> bool:
        status = self._check("cuStreamIsCapturing", self._cu.cuStreamIsCapturing(stream))
        return bool(status != self._cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def new_stream(self) -> int:
        flags = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._check("cuStreamCreate", self._cu.cuStreamCreate(flags)))

    def allocate(self, num_bytes: int, stream: int) -> int:
        return int(self._check("cuMemAllocAsync", self._cu.cuMemAllocAsync(num_bytes, stream)))

    def free(self, address: int, stream: int) -> None:
        self._check("cuMemFreeAsync", self._cu.cuMemFreeAsync(address, stream))

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        self._check("cuMemsetD8Async", self._cu.cuMemsetD8Async(address, 0, num_bytes, stream))

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self._check("cuMemcpyDtoDAsync", self._cu.cuMemcpyDtoDAsync(to, source, num_bytes, stream))

    def synchronize(self, event: int) -> None:
        self._check("cuEventSynchronize", self._cu.cuEventSynchronize(event))

    def host_allocate(self, num_bytes: int) -> int:
        return int(self._check("cuMemHostAlloc", self._cu.cuMemHostAlloc(num_bytes, _PORTABLE)))

    def host_free(self, address: int) -> None:
        self._check("cuMemFreeHost", self._cu.cuMemFreeHost(address))

    def copy_rows(
        self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        plain = _plain_copies(to, to_pitch, source, source_pitch, width, height)
        for place, origin, count in plain:
            self._check("cuMemcpyAsync", self._cu.cuMemcpyAsync(place, origin, count, stream))
        if not plain:
            rows = self._cu.CUDA_MEMCPY2D()
            # Unified: which side is the host follows from the addresses.
            rows.srcMemoryType = rows.dstMemoryType = self._cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
            rows.srcDevice, rows.srcPitch = source, source_pitch
            rows.dstDevice, rows.dstPitch = to, to_pitch
            rows.WidthInBytes, rows.Height = width, height
            self._check("cuMemcpy2DAsync", self._cu.cuMemcpy2DAsync(rows, stream))


#: ``CU_MEMHOSTALLOC_PORTABLE`` and ``cudaHostAllocPortable``.
_PORTABLE = 1
#: ``cudaMemcpyDefault``: the direction follows from the addresses.
_BY_ADDRESS = 4
#: CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far: rows of one copy begin at most so far apart.
_MAX_PITCH = 2**31 - 1


def _plain_copies(
    to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int
) -> list[tuple[int, int, int]]:
    """Rows as copies of bytes (to, source, count): one where they lie as one, each where they are too far apart.

    Nothing for those that one copy of rows takes.
    """
    if height == 1 or to_pitch == source_pitch == width:
        return [(to, source, width * height)]
    if max(to_pitch, source_pitch) <= _MAX_PITCH:
        return []
    return [(to + i * to_pitch, source + i * source_pitch, width) for i in range(height)]


class _Cupy:
    """Events through CuPy's binding of the CUDA runtime."""

    def __init__(self) -> None:
        from cupy.cuda import runtime

        from ..runtime.driver_cupy import relaxed_capture

        self._rt = runtime
        self._relaxed = relaxed_capture

    def context(self, ordinal: int) -> AbstractContextManager[None]:
        return _driver.device_context(_driver.get_driver(), ordinal)

    def _call(self, name: str, *args: int) -> Any:
        try:
            return getattr(self._rt, name)(*args)
        except self._rt.CUDARuntimeError as error:
            code, _, text = str(error).partition(":")
            raise driver_error("cuda" + name[0].upper() + name[1:], code, text.strip()) from error

    def create(self) -> int:
        return int(self._call("eventCreateWithFlags", self._rt.eventDisableTiming))

    def destroy(self, event: int) -> None:
        self._call("eventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self._call("eventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        self._call("streamWaitEvent", stream, event)

    def relaxed(self) -> AbstractContextManager[None]:
        return self._relaxed()

    def done(self, event: int) -> bool:
        # CuPy returns cudaErrorNotReady here instead of raising it.
        return int(self._call("eventQuery", event)) == 0

    def capturing(self, stream: int) -> bool:
        return bool(self._call("streamIsCapturing", stream))

    def new_stream(self) -> int:
        return int(self._call("streamCreateWithFlags", self._rt.streamNonBlocking))

    def allocate(self, num_bytes: int, stream: int) -> int:
        return int(self._call("mallocAsync", num_bytes, stream))

    def free(self, address: int, stream: int) -> None:
        self._call("freeAsync", address, stream)

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        self._call("memsetAsync", address, 0, num_bytes, stream)

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self._call("memcpyAsync", to, source, num_bytes, self._rt.memcpyDeviceToDevice, stream)

    def synchronize(self, event: int) -> None:
        self._call("eventSynchronize", event)

    def host_allocate(self, num_bytes: int) -> int:
        return int(self._call("hostAlloc", num_bytes, _PORTABLE))

    def host_free(self, address: int) -> None:
        self._call("freeHost", address)

    def copy_rows(
        self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        plain = _plain_copies(to, to_pitch, source, source_pitch, width, height)
        for place, origin, count in plain:
            self._call("memcpyAsync", place, origin, count, _BY_ADDRESS, stream)
        if not plain:
            self._call("memcpy2DAsync", to, to_pitch, source, source_pitch, width, height, _BY_ADDRESS, stream)


_backend: EventBackend | None = None
#: Streams of our own, by GPU and purpose.
_side_streams: dict[tuple[int, str], int] = {}


def era() -> int:
    """A number: what was made under another one means nothing to the driver of now."""
    return _era


def side_stream(ordinal: int, purpose: str = "") -> int:
    """A stream of this package alone, which waits for no other one and lives as long as the process."""
    found = _side_streams.get((ordinal, purpose))
    if found is None:
        # No lock: this runs in finalizers too. Two threads at once make one stream too many.
        with backend().context(ordinal), backend().relaxed():
            found = _side_streams.setdefault((ordinal, purpose), backend().new_stream())
    return found


def set_backend(other: EventBackend | None) -> None:
    """Use another one from now on (tests); None: choose again at the next use."""
    global _backend, _era
    _backend = other
    _era += 1
    _pending.clear()
    _side_streams.clear()


def backend() -> EventBackend:
    """The driver's calls."""
    global _backend
    if _backend is None:
        # The same binding as the kernels' loader, so that OMNIATTN_DRIVER rules both.
        _backend = _Cupy() if _driver.get_driver().name == "cupy" else _CudaBindings()
    return _backend


class Event:
    """An event recorded on a raw stream.

    Parameters
    ----------
    stream : int
        Raw handle.
    ordinal : int
        The stream's GPU.
    """

    __slots__ = ("_backend", "_era", "_handle", "ordinal")

    def __init__(self, stream: int, ordinal: int) -> None:
        self._handle = 0
        self._era = _era
        self.ordinal = ordinal
        self._backend = backend()
        with self._backend.context(ordinal):
            self._handle = self._backend.create()
            self._backend.record(self._handle, stream)

    def make_wait(self, stream: int) -> None:
        """Let later work on ``stream`` wait for the event; the host does not."""
        if self._era != _era:  # of a context that this process does not have
            return
        with self._backend.context(self.ordinal):
            self._backend.wait(stream, self._handle)

    def done(self) -> bool:
        """Whether everything before the record has run; never waits, and spoils no other thread's graph capture."""
        with self._backend.context(self.ordinal), self._backend.relaxed():
            return self._backend.done(self._handle)

    def synchronize(self) -> None:
        """Have the host wait for the event; spoils no other thread's graph capture."""
        if self._era != _era:
            return
        with self._backend.context(self.ordinal), self._backend.relaxed():
            self._backend.synchronize(self._handle)

    # A default value, because this module's globals are None while the interpreter goes down.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._handle and self._era == _era and not is_finalizing():
            with self._backend.context(self.ordinal):
                self._backend.destroy(self._handle)


def capturing(stream: int, ordinal: int) -> bool:
    """Whether a stream of GPU ``ordinal`` is recording a CUDA graph."""
    with backend().context(ordinal):
        return backend().capturing(stream)


#: Counts resets: the handles of events from before one mean nothing (in a forked child, under another driver).
_era = 0
_pending: deque[tuple[Event, list[Any]]] = deque()
_lock = threading.Lock()


def keep_until_done(stream: int, ordinal: int, owners: list[Any]) -> None:
    """Keep ``owners`` alive until what is queued on ``stream`` now has run; looked after at the next such call.

    During graph capture nothing is kept: the graph reads the arrays at every replay, so they are the caller's to keep
    alive.
    """
    if capturing(stream, ordinal):
        return
    event = Event(stream, ordinal)
    with _lock:
        _pending.append((event, owners))
    collect()


def collect() -> int:
    """Let go of everything whose event has passed; returns how many calls are still pending.

    Not only from the left: calls on different streams finish in any order. Where a query fails, everything is kept:
    a kernel may still work on it.

    Raises
    ------
    DriverError
        A query failed.
    """
    with _lock:
        passed = [event.done() for event, _ in _pending]
        finished = [entry for entry, done in zip(_pending, passed, strict=True) if done]
        waiting = [entry for entry, done in zip(_pending, passed, strict=True) if not done]
        _pending.clear()
        _pending.extend(waiting)
        pending = len(waiting)
    # Deleters run outside the lock: they may be foreign code that comes back here.
    finished.clear()
    return pending


def _forget() -> None:
    global _backend, _lock, _era
    # The memory of what is pending belongs to the parent of a forked child.
    _era += 1
    _pending.clear()
    _side_streams.clear()
    _backend = None
    _lock = threading.Lock()


_driver.on_reset(_forget)
