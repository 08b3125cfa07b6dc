"""The order of launches on arrays that outlive a call, and of what their library does with them: KV caches."""

from __future__ import annotations

from typing import Any

from . import events, from_dlpack
from .tensor import CapsuleTensor, Tensor


class LaunchOrder:
    """Keeps launches on arrays of JAX, or of another DLPack library, and the library's own reads in order.

    Torch and CuPy have a current stream: their users order streams, and nothing is done here. The other libraries queue
    on streams that nobody can ask for. Launches on their arrays wait for each other, on whichever streams they are, and
    an array is imported anew after a launch: the import makes the library's next use of it wait.

    Not under graph capture, where events of other streams must not be waited for: there the order is the caller's.
    """

    __slots__ = ("_event", "_handed", "_stream")

    def __init__(self) -> None:
        self._event: events.Event | None = None
        self._stream = 0
        self._handed: dict[str, Any] = {}

    def before(self, stream: int) -> None:
        """Before a launch on ``stream``: have it wait for the one before."""
        event = self._event
        if event is not None and stream != self._stream and not events.capturing(stream, event.ordinal):
            event.make_wait(stream)

    def after(self, tensors: list[Tensor], stream: int) -> None:
        """After a launch on ``stream`` that uses ``tensors``."""
        ordinal = next((t.ordinal for t in tensors if isinstance(t, CapsuleTensor)), None)
        if ordinal is None or events.capturing(stream, ordinal):
            return
        self._event, self._stream = events.Event(stream, ordinal), stream
        self._handed.clear()

    def array(self, name: str, tensor: Tensor) -> Any:
        """The library's array of the tensor ``name``, safe to use there after the last launch."""
        if self._event is None or not isinstance(tensor, CapsuleTensor):
            return tensor.obj
        if name not in self._handed:
            self._handed[name] = from_dlpack.hand_over(tensor, self._event)
        return self._handed[name]
