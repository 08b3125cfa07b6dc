"""LaunchRecord: one kernel launch as data, and Program: the launches of a call, ready to run.

The one seam between planning and the GPU. A record says everything about a launch but the addresses of the call's
operands; it needs no kernel loaded and no GPU. Whoever launches, launches records: `Program` through the Python driver.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .kernel import LoadedKernel

if TYPE_CHECKING:
    from ..registry import KernelSpec

#: Bytes of a tensor map.
MAP_BYTES = 128
#: Bytes of the one struct that a kernel takes by value, at most: what every driver takes.
MAX_ARGUMENT_BYTES = 4096
#: Multiple that a workspace's address is rounded up to.
WORKSPACE_ALIGNMENT = 256

# Tensor maps are kept for this many addresses of each operand; encoding one takes about a microsecond.
_MAX_MAPS = 64


class Pointer(NamedTuple):
    """Where an address goes.

    Attributes
    ----------
    offset : int
        Byte of the arguments.
    operand : str
        Whose address: an argument, an output, or ``"workspace"``.
    add : int
        Bytes behind the operand's address.
    """

    offset: int
    operand: str
    add: int = 0


class TensorMap(NamedTuple):
    """A tensor map that has to be made, and where it goes.

    Attributes
    ----------
    operand : str
    add : int
        Bytes behind the operand's address.
    dtype : str
        Element type; "uint8" for anything of one byte.
    dims : tuple of int
        Extents, the contiguous one first.
    strides_bytes : tuple of int
        Of all dimensions but the first, positive multiples of 16.
    box : tuple of int
        What one copy takes; its first extent is 128 or 64 bytes, and so is the swizzle.
    offset : int
        Byte of the arguments.
    """

    operand: str
    add: int
    dtype: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class LaunchRecord:
    """One launch.

    Attributes
    ----------
    spec : KernelSpec
        The kernel.
    grid : (int, int, int)
        CTAs in x, y, z.
    threads : int
        Of a CTA.
    arguments : bytes
        The one struct that the kernel takes by value; zeros where addresses and tensor maps go.
    pointers : tuple of Pointer
    tensor_maps : tuple of TensorMap
    cluster : (int, int, int), optional
        CTAs of a cluster.
    overlap : bool
        The kernel waits for the one before it by itself (``griddepcontrol.wait``) and may begin before that one has
        ended (programmatic dependent launch), where its binary and the driver know how.
    """

    spec: KernelSpec
    grid: tuple[int, int, int]
    threads: int
    arguments: bytes
    pointers: tuple[Pointer, ...] = ()
    tensor_maps: tuple[TensorMap, ...] = ()
    cluster: tuple[int, int, int] | None = None
    overlap: bool = False

    def __post_init__(self) -> None:
        """Refuse arguments that no driver takes."""
        if len(self.arguments) > MAX_ARGUMENT_BYTES:
            raise ValueError(
                f"{self.spec.name}: {len(self.arguments)} bytes of arguments, a kernel takes {MAX_ARGUMENT_BYTES}"
            )

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.spec.smem_bytes

    @property
    def num_ctas(self) -> int:
        """CTAs of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]


class _Buffer(threading.local):
    """The arguments of the launch that a thread is making: the driver copies them during the call."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_char * MAX_ARGUMENT_BYTES)()
        self.view = memoryview(self.memory).cast("B")
        self.address = ctypes.addressof(self.memory)


BUFFER = _Buffer()

_Launch = Callable[[int, Sequence[int]], None]


class Program:
    """The launches of a call on one GPU.

    Parameters
    ----------
    records : sequence of LaunchRecord
    operands : sequence of str
        The order in which `launch` takes addresses.
    load : callable
        LoadedKernel of a KernelSpec.
    """

    __slots__ = ("kernels", "launches", "operands", "records")

    def __init__(
        self,
        records: Sequence[LaunchRecord],
        operands: Sequence[str],
        load: Callable[[KernelSpec], LoadedKernel],
    ) -> None:
        self.records = tuple(records)
        self.operands = tuple(operands)
        self.kernels = tuple(load(record.spec) for record in self.records)
        index = {name: i for i, name in enumerate(self.operands)}
        self.launches: tuple[_Launch, ...] = tuple(
            _bind(record, kernel, index) for record, kernel in zip(self.records, self.kernels, strict=True)
        )

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        """Queue everything on ``stream``; one address for each operand, 0 for what is absent.

        Raises
        ------
        DriverError
            The driver rejected a launch.
        """
        for launch in self.launches:
            launch(stream, addresses)


def _bind(record: LaunchRecord, kernel: LoadedKernel, index: dict[str, int]) -> _Launch:
    """A function that makes one launch: the template, addresses over it, tensor maps over it."""
    template, size, buffer = record.arguments, len(record.arguments), BUFFER
    runs = _runs(record.pointers, index)
    maps = tuple((m.offset, index[m.operand], m.add, _Maps(m, kernel)) for m in record.tensor_maps)
    attributes = kernel.attributes(record.cluster, record.overlap)
    run = kernel.launch
    grid, threads = record.grid, record.threads

    def launch(stream: int, addresses: Sequence[int]) -> None:
        view = buffer.view
        view[:size] = template
        for pack_into, offset, places in runs:
            pack_into(view, offset, *[addresses[i] + add for i, add in places])
        for offset, i, add, found in maps:
            view[offset : offset + MAP_BYTES] = found.at(addresses[i] + add)
        run(grid, threads, stream, buffer.address, attributes)

    return launch


def _runs(
    pointers: tuple[Pointer, ...], index: dict[str, int]
) -> tuple[tuple[Callable[..., None], int, tuple[tuple[int, int], ...]], ...]:
    """Pointers that lie side by side are written together: (write, offset, ((operand, bytes to add), ...))."""
    groups: list[list[Pointer]] = []
    for pointer in sorted(pointers):
        if groups and groups[-1][-1].offset + 8 == pointer.offset:
            groups[-1].append(pointer)
        else:
            groups.append([pointer])
    return tuple(
        (struct.Struct(f"<{len(g)}Q").pack_into, g[0].offset, tuple((index[p.operand], p.add) for p in g))
        for g in groups
    )


class _Maps:
    """Tensor maps of one operand by its address."""

    __slots__ = ("_kernel", "_map", "_maps")

    def __init__(self, of: TensorMap, kernel: LoadedKernel) -> None:
        self._map = of
        self._kernel = kernel
        self._maps: dict[int, bytes] = {}

    def at(self, address: int) -> bytes:
        """The map for an address."""
        found = self._maps.get(address)
        if found is None:
            m = self._map
            found = self._kernel.encode_tensor_map(m.dtype, address, m.dims, m.strides_bytes, m.box)
            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            self._maps[address] = found
        return found
