"""``SwapSpace``: memory of the host for blocks of paged caches, and the copies to it and back."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from .. import arguments, arrays
from ..arrays import Tensor, events
from ..errors import ArgumentError, DeviceError, OmniattnError, UnsupportedError, telling
from .cache import PagedKVCache

#: (block, slot) numbers.
Pair = tuple[int, int]
#: Planes of a cache that have a block of memory for each block.
_PLANES = ("k", "v", "k_params", "v_params", "k_scale", "v_scale")


class SwapEvent:
    """The end of the copies of a swap, on their own stream; on the CPU they have ended before it is made."""

    __slots__ = ("_event", "_place")

    def __init__(self, place: Tensor, event: events.Event | None) -> None:
        self._place = place
        self._event = event

    def wait(self, stream: Any = None) -> None:
        """Let later work on a stream wait for the copies; the host does not.

        Parameters
        ----------
        stream : optional
            As in `attention`; None is the current stream of the caches' library.
        """
        if self._event is None:
            telling("SwapEvent.wait", arrays.prepare, [self._place], stream)  # refuses a stream
            return
        raw = telling("SwapEvent.wait", arrays.resolve_stream, stream)
        self._event.make_wait(arrays.current_stream(self._place) if raw is None else raw)

    def done(self) -> bool:
        """Whether the copies have ended; never waits."""
        return self._event is None or self._event.done()

    def synchronize(self) -> None:
        """Have the host wait for the copies."""
        if self._event is not None:
            self._event.synchronize()


class SwapSpace:
    """Memory of the host that a `BlockManager` moves blocks to when sequences have to leave a cache for a while.

    Parameters
    ----------
    caches : PagedKVCache, or sequence of them
        All caches that the manager's blocks are of, a layer each: of equal num_blocks and block_size, on one device.
        They may lie on arrays of the caller (`PagedKVCache.from_arrays`), of any strides.
    num_blocks : int
        Blocks that there is room for, in all caches alike; at most 2^31 - 1.

    Attributes
    ----------
    nbytes : int
        Bytes of it. Beside a GPU they are page-locked, and taken from the system at once.

    Raises
    ------
    ArgumentError
        Caches that are none or do not match, a bad count.
    DriverError
        The system has not so much page-locked memory.

    Notes
    -----
    The copies run on a stream of their own, behind what the caches' libraries have queued when they are asked for.
    Blocks of a cache that lie as one are copied together where they and their slots follow each other. What a recent
    window has (`PagedKVCache.recent_k`) stays where it is. A space belongs to one manager.
    """

    def __init__(self, caches: Any, num_blocks: int) -> None:
        self.num_blocks = arguments.check_int(num_blocks, "num_blocks", "SwapSpace", least=1, most=2**31 - 1)
        self.caches = _checked(caches)
        first = self.caches[0]
        self._place = first.planes["k"]
        self._planes = [t for cache in self.caches for name, t in cache.planes.items() if name in _PLANES]
        self._manager: Callable[[], Any] = lambda: None
        self._memory: list[Any]
        if self._place.device == "cpu":
            import numpy as np

            views = [arrays.raw_view(t) for t in self._planes]
            self._memory = [np.empty((self.num_blocks, *x.shape[1:]), x.dtype) for x in views]
            self.nbytes = sum(x.nbytes for x in self._memory)
        else:
            self._shapes = [_BlockShape(t) for t in self._planes]
            sizes = [self.num_blocks * shape.num_bytes for shape in self._shapes]
            self.nbytes = sum(sizes)
            self._memory = [_PinnedMemory(size, self._place.ordinal) for size in sizes]

    def __repr__(self) -> str:
        return f"<SwapSpace of {self.num_blocks} blocks, {self.nbytes} bytes, for {len(self.caches)} caches>"

    def claim(self, manager: Any) -> None:
        """Belong to a manager for as long as it lives."""
        owner, cache = self._manager(), self.caches[0]
        if owner is not None and owner is not manager:
            raise ArgumentError("swap_space", "one that no other manager has", repr(self), function="BlockManager")
        there, here = (cache.num_blocks, cache.block_size), (manager.num_blocks, manager.block_size)
        if there != here:
            expected = f"one of caches with {here[0]} blocks of {here[1]} tokens"
            raise ArgumentError("swap_space", expected, f"{there[0]} of {there[1]}", function="BlockManager")
        self._manager = weakref.ref(manager)

    def copy_out(self, pairs: Sequence[Pair], stream: Any = None) -> SwapEvent:
        """Copy blocks to slots: (block, slot). Whatever is raised, no copy is under way any more."""
        return self._copy(pairs, stream, to_host=True)

    def copy_in(self, pairs: Sequence[Pair], stream: Any = None) -> SwapEvent:
        """Copy blocks back: (block, slot). Whatever is raised, no copy is under way any more."""
        return self._copy(pairs, stream, to_host=False)

    def _copy(self, pairs: Sequence[Pair], stream: Any, *, to_host: bool) -> SwapEvent:
        if self._place.device == "cpu":
            arrays.prepare([self._place], stream)  # refuses a stream
            for i in range(len(self._planes)):
                self.copy_plane(i, pairs, 0, to_host)
            self._mark_written(to_host)
            return SwapEvent(self._place, None)
        ordinal = self._place.ordinal
        side = self._begin(stream)
        try:
            self._mark_written(to_host)
            for i in range(len(self._planes)):
                self.copy_plane(i, pairs, side, to_host)
            for cache in self.caches:
                cache.order.after(cache.tensors, side)
                arrays.release(cache.tensors, side)
            event = events.Event(side, ordinal)
        except BaseException:
            # Blocks and slots go back to others at once, whose work does not wait for this stream.
            with contextlib.suppress(OmniattnError):
                events.Event(side, ordinal).synchronize()
            raise
        for memory in self._memory:
            memory.last = event
        return SwapEvent(self._place, event)

    def _begin(self, stream: Any) -> int:
        """The stream of the copies, behind all that is queued for the caches."""
        ordinal = self._place.ordinal
        raw = arrays.resolve_stream(stream)
        raw = arrays.current_stream(self._place) if raw is None else raw
        if events.capturing(raw, ordinal):
            raise UnsupportedError(
                "swap_out() and swap_in() while a CUDA graph is captured", instead="a swap between two launches of it"
            )
        side = events.side_stream(ordinal, "swap")
        events.Event(raw, ordinal).make_wait(side)
        for cache in self.caches:
            arrays.prepare(cache.tensors, side)
            cache.order.before(side)
        return side

    def _mark_written(self, to_host: bool) -> None:
        if not to_host:
            arrays.mark_written(self._planes)

    def copy_plane(self, index: int, pairs: Sequence[Pair], side: int, to_host: bool) -> None:
        """The copies of one plane of one cache."""
        plane, memory = self._planes[index], self._memory[index]
        if plane.device == "cpu":
            view, (blocks, slots) = arrays.raw_view(plane), ([pair[i] for pair in pairs] for i in range(2))
            if to_host:
                memory[slots] = view[blocks]
            else:
                view[blocks] = memory[slots]
            return
        backend = events.backend()
        with backend.context(plane.ordinal):
            for here, there, width, height in self._shapes[index].copies(pairs, plane.ptr, memory.address):
                if to_host:
                    backend.copy_rows(*there, *here, width, height, side)
                else:
                    backend.copy_rows(*here, *there, width, height, side)


def _checked(caches: Any) -> tuple[PagedKVCache, ...]:
    given = [caches] if isinstance(caches, PagedKVCache) else caches
    found = tuple(given) if isinstance(given, (list, tuple)) else ()
    if not found or not all(isinstance(cache, PagedKVCache) for cache in found):
        raise ArgumentError("caches", "a PagedKVCache, or a list of them", repr(caches), function="SwapSpace")
    if any(cache.traced for cache in found):
        raise UnsupportedError(
            "SwapSpace(): a KV cache in a function that JAX traces", instead="the cache outside of it"
        )
    first = found[0]
    for i, cache in enumerate(found):
        here, there = (first.num_blocks, first.block_size), (cache.num_blocks, cache.block_size)
        if here != there:
            expected = f"{here[0]} blocks of {here[1]} tokens, like the first one"
            raise ArgumentError(f"caches[{i}]", expected, f"{there[0]} of {there[1]}", function="SwapSpace")
        if any(t.readonly for t in cache.planes.values()):
            expected = "a cache of arrays that can be written, which swap_in() does"
            raise ArgumentError(f"caches[{i}]", expected, "read-only arrays", function="SwapSpace")
        place, other = first.planes["k"].device_name, cache.planes["k"].device_name
        if place != other:
            raise DeviceError(f"caches[{i}]", f"{place}, like the first one", other, function="SwapSpace")
    return found


class _BlockShape:
    """A block of a plane as rows of bytes, and the copies that move some of them.

    On the host a block lies as one. On the GPU its dimensions are sorted by their strides and joined where one goes on
    where the other ends; what is left is rows of ``width`` bytes, ``height`` of them, ``outer`` times.
    """

    def __init__(self, plane: Tensor) -> None:
        size = plane.itemsize
        self.step = plane.strides[0] * size
        dims = sorted(
            ((stride * size, n) for stride, n in zip(plane.strides[1:], plane.shape[1:], strict=True) if n > 1)
        )
        joined: list[tuple[int, int]] = [(size, 1)]
        for stride, n in dims:
            last, count = joined[-1]
            if stride == last * count:
                joined[-1] = last, count * n
            else:
                joined.append((stride, n))
        rows = [*joined[1:], (0, 1), (0, 1)]
        self.width = size * joined[0][1]
        (self.pitch, self.height), (self.outer_step, self.outer) = rows[:2]
        assert all(n == 1 for _, n in rows[2:]), "heads and tokens are two dimensions"
        self.num_bytes = self.width * self.height * self.outer

    def copies(
        self, pairs: Sequence[Pair], device: int, host: int
    ) -> list[tuple[tuple[int, int], tuple[int, int], int, int]]:
        """Of blocks at ``device`` and slots at ``host``: (address, pitch) of both, bytes of a row, rows."""
        if self.height == self.outer == 1:
            return [
                ((device + block * self.step, self.step), (host + slot * self.width, self.width), self.width, count)
                for block, slot, count in _runs(pairs)
            ]
        part = self.width * self.height
        return [
            (
                (device + block * self.step + i * self.outer_step, self.pitch),
                (host + slot * self.num_bytes + i * part, self.width), self.width, self.height,
            )
            for block, slot in pairs
            for i in range(self.outer)
        ]  # fmt: skip


def _runs(pairs: Sequence[Pair]) -> list[tuple[int, int, int]]:
    """(block, slot, count) of pairs that follow each other in both."""
    found: list[tuple[int, int, int]] = []
    for block, slot in pairs:
        if found:
            begin, other, count = found[-1]
            if (block, slot) == (begin + count, other + count):
                found[-1] = begin, other, count + 1
                continue
        found.append((block, slot, 1))
    return found


class _PinnedMemory:
    """Page-locked memory of the host; it goes when its last copy has ended."""

    __slots__ = ("_backend", "_era", "_ordinal", "address", "last")

    def __init__(self, num_bytes: int, ordinal: int) -> None:
        self.address = 0
        self.last: events.Event | None = None
        self._ordinal, self._backend, self._era = ordinal, events.backend(), events.era()
        with self._backend.context(ordinal), self._backend.relaxed():
            self.address = self._backend.host_allocate(num_bytes)

    # A default value, because this module's globals are None while the interpreter goes down.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self.address or is_finalizing() or events.era() != self._era:
            return
        with self._backend.context(self._ordinal), self._backend.relaxed():
            if self.last is not None:
                self.last.synchronize()
            self._backend.host_free(self.address)
