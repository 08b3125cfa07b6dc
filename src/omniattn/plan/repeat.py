"""The fast path: a call with the facts of one that has been validated, on plain CUDA tensors of torch.

What depends on shapes, strides, dtypes, devices and options was settled by the first such call. Addresses, the stream
and the writability of ``out`` are left to look at. Where one of these is not the usual, the fast path does nothing and
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
    out : int
        Place of ``out`` in the call; -1 where it was not given.
    makers : tuple of (index, callable)
        For each output but a given one: an allocator, and the place of the array that it takes.
    workspace : callable, optional
        Allocator of the workspace.
    first : int
        Place of the array that it takes.
    """

    __slots__ = ("_current_stream", "_first", "_launch", "_makers", "_masks", "_out", "_workspace")

    def __init__(
        self,
        program: Program,
        current_stream: Callable[[], int],
        masks: tuple[tuple[int, int], ...],
        out: int,
        makers: tuple[tuple[int, Callable[[Any], Any]], ...],
        workspace: Callable[[Any], Any] | None,
        first: int,
    ) -> None:
        self._launch = program.launches[0] if len(program.launches) == 1 else program.launch
        self._current_stream = current_stream
        self._masks = masks
        self._out = out
        self._makers = makers
        self._workspace = workspace
        self._first = first

    @classmethod
    def of(
        cls,
        program: Program,
        names: tuple[str, ...],
        aligned: frozenset[str],
        tensors: dict[str, Tensor],
        outputs: tuple[Output, ...],
        workspace_bytes: int,
    ) -> Repeat | None:
        """The fast path for calls with the facts of this one, if there is any."""
        first, place = next(iter(tensors.items()))
        current_stream = arrays.stream_query(place)
        if current_stream is None:
            return None
        given = "out" in tensors
        masks = tuple(
            (i, 15 if name in aligned else tensors[name].itemsize - 1)
            for i, name in enumerate(names)
            if name in tensors
        )
        makers = []
        for output in outputs:
            if output.name == "o" and given:
                continue
            like, maker = _allocator(names, tensors, output)
            if maker is None:
                return None
            makers.append((like, maker))
        workspace = None
        if workspace_bytes:
            workspace = arrays.allocator(place, (workspace_bytes + WORKSPACE_ALIGNMENT,), "uint8")
            if workspace is None:
                return None
        return cls(
            program, current_stream, tuple((i, m) for i, m in masks if m), names.index("out") if given else -1,
            tuple(makers), workspace, names.index(first),
        )  # fmt: skip

    def __call__(
        self, objects: Sequence[Any], addresses: list[int], cache: KVCache | None, stream: int | None
    ) -> list[Any] | None:
        """Run; ``addresses`` of ``objects``, ``stream`` the caller's."""
        current = self._current_stream()
        if stream is not None and stream != current:
            return None
        for i, bits in self._masks:
            if addresses[i] & bits:
                return None
        results = []
        if self._out >= 0:
            out, at_out = objects[self._out], addresses[self._out]
            if addresses.count(at_out) > 1 or out.is_inference():
                return None
            results.append(out)
        if cache is not None:
            addresses += cache.addresses
        if self._out >= 0:
            addresses.append(at_out)
        for like, make in self._makers:
            result = make(objects[like])
            address = result.data_ptr()
            if not address:  # empty, or of a mode that makes no memory
                return None
            results.append(result)
            addresses.append(address)
        if self._workspace is None:
            self._launch(current, addresses)
            return results
        # Held until the kernels are queued: another thread on this stream could be given its memory before that.
        memory = self._workspace(objects[self._first])
        address = memory.data_ptr()
        if not address:
            return None
        addresses.append(address + _SPARE & _ROUND)
        self._launch(current, addresses)
        del memory
        return results


def _allocator(
    names: tuple[str, ...], tensors: dict[str, Tensor], output: Output
) -> tuple[int, Callable[[Any], Any] | None]:
    """What makes an output, and the place of the array it takes: one with the output's own facts if there is one."""
    first = next(iter(tensors))
    for name, t in tensors.items():
        if name != "out" and t.dtype == output.dtype and tuple(t.shape) == output.shape:
            first = name
            break
    return names.index(first), arrays.allocator(tensors[first], output.shape, output.dtype)
