"""The fast path: a call with the facts of one that has been validated, on plain CUDA tensors of torch.

What depends on shapes, strides, dtypes, devices and options was settled by the first such call. Addresses, the stream
and what may be written are left to look at. Where one of these is not the usual, the fast path does nothing and
returns None: `engine.execute` then waits, or raises, or copes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import arrays
from ..arrays import Tensor
from ..problems import Output
from ..problems.memory import WORKSPACE_ALIGNMENT
from ..runtime.record import Program
from .writes import Writes

if TYPE_CHECKING:
    from ..kv.cache import KVCache

_ROUND = -WORKSPACE_ALIGNMENT
_SPARE = WORKSPACE_ALIGNMENT - 1


class Repeat:
    """Repeats a call.

    Parameters
    ----------
    program : Program
    current_stream : callable
        From `arrays.stream_query`.
    masks : tuple of (index, bits)
        Bits that are set in the address of a misaligned array, by the array's place in the call.
    makers : tuple of (index, callable or None)
        For each output: an allocator, and the place of the array that it takes; or the place of the given one.
    workspace : callable, optional
        Allocator of the workspace.
    first : int
        Place of the array that it takes.
    workspace_bytes : int
        What of the workspace is used; 0 for none.
    writes : Writes, optional
        Where arrays of the caller are written.
    """

    __slots__ = ("_current_stream", "_first", "_launch", "_workspace", "makers", "masks", "workspace_bytes", "writes")

    def __init__(
        self,
        program: Program,
        current_stream: Callable[[], int],
        masks: tuple[tuple[int, int], ...],
        makers: tuple[tuple[int, Callable[[Any], Any] | None], ...],
        workspace: Callable[[Any], Any] | None,
        first: int,
        workspace_bytes: int,
        writes: Writes | None,
    ) -> None:
        self._launch = program.launches[0] if len(program.launches) == 1 else program.launch
        self._current_stream = current_stream
        self.masks = masks
        self.makers = makers
        self._workspace = workspace
        self._first = first
        self.workspace_bytes = workspace_bytes
        self.writes = writes

    @classmethod
    def of(
        cls,
        program: Program,
        names: tuple[str, ...],
        aligned: frozenset[str],
        tensors: dict[str, Tensor],
        outputs: tuple[Output, ...],
        workspace_bytes: int,
        given: dict[str, str],
        writes_cache: bool = False,
    ) -> Repeat | None:
        """The fast path for calls with the facts of this one, if there is any."""
        first, place = next(iter(tensors.items()))
        current_stream = arrays.stream_query(place)
        if current_stream is None:
            return None
        masks = tuple(
            (i, 15 if name in aligned else tensors[name].itemsize - 1)
            for i, name in enumerate(names)
            if name in tensors
        )
        makers: list[tuple[int, Callable[[Any], Any] | None]] = []
        for output in outputs:
            own = given.get(output.name)
            if own in tensors:
                makers.append((names.index(own), None))
                continue
            like, maker = _allocator(names, tensors, output, given)
            if maker is None:
                return None
            makers.append((like, maker))
        workspace = None
        if workspace_bytes:
            workspace = arrays.allocator(place, (workspace_bytes + WORKSPACE_ALIGNMENT,), "uint8")
            if workspace is None:
                return None
        places = tuple(i for i, maker in makers if maker is None)
        writes = Writes(names, places, writes_cache) if places or writes_cache else None
        return cls(
            program, current_stream, tuple((i, m) for i, m in masks if m), tuple(makers), workspace,
            names.index(first), workspace_bytes, writes,
        )  # fmt: skip

    def __call__(
        self, objects: Sequence[Any], addresses: list[int], cache: KVCache | None, stream: int | None
    ) -> list[Any] | None:
        """Run; ``addresses`` of ``objects``, ``stream`` the caller's."""
        current = self._current_stream()
        if stream is not None and stream != current:
            return None
        for i, bits in self.masks:
            if addresses[i] & bits:
                return None
        if cache is not None:
            addresses += cache.addresses
        writes = self.writes
        changed = None
        if writes is not None:
            changed = writes.changed(objects, addresses, cache)
            if changed is None:
                return None
        results = []
        for like, make in self.makers:
            if make is None:
                results.append(objects[like])
                addresses.append(addresses[like])
                continue
            result = make(objects[like])
            address = result.data_ptr()
            if not address:  # empty, or of a mode that makes no memory
                return None
            results.append(result)
            addresses.append(address)
        if self._workspace is None:
            if changed is not None:
                writes.increment_version(changed)  # type: ignore[union-attr]
            self._launch(current, addresses)
            return results
        # Held until the kernels are queued: another thread on this stream could be given its memory before that.
        memory = self._workspace(objects[self._first])
        address = memory.data_ptr()
        if not address:
            return None
        addresses.append(address + _SPARE & _ROUND)
        if changed is not None:
            writes.increment_version(changed)  # type: ignore[union-attr]
        self._launch(current, addresses)
        del memory
        return results


def _allocator(
    names: tuple[str, ...], tensors: dict[str, Tensor], output: Output, given: dict[str, str]
) -> tuple[int, Callable[[Any], Any] | None]:
    """What makes an output, and the place of the array it takes: one with the output's own facts if there is one."""
    first = next(iter(tensors))
    for name, t in tensors.items():
        if name not in given.values() and t.dtype == output.dtype and tuple(t.shape) == output.shape:
            first = name
            break
    return names.index(first), arrays.allocator(tensors[first], output.shape, output.dtype)
