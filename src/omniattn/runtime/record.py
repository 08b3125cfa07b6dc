"""LaunchRecord: one kernel launch as data, and Program: the launches of a call, ready to run.

The one seam between planning and the GPU. A record says everything about a launch but the addresses of the call's
operands; it needs no kernel loaded and no GPU. Whoever launches, launches records: `Program` through the Python driver.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import DriverError
from .kernel import LoadedKernel

if TYPE_CHECKING:
    from ..registry import KernelSpec

#: Bytes of a tensor map.
MAP_BYTES = 128
#: Bytes of the one struct that a kernel takes by value, at most: what every driver takes.
MAX_ARGUMENT_BYTES = 4096
#: CTAs of a grid in x, y and z at most, and threads of a CTA: the same for all GPUs from compute capability 3.0 on.
MAX_GRID, MAX_THREADS = (2**31 - 1, 65535, 65535), 1024

# Packed arguments are kept for this many sets of addresses, and tensor maps for as many addresses: encoding one takes
# about a microsecond.
_MAX_ARGUMENTS = 256
#: Sets that all launches of the process keep together, about 40 MB; beyond them a launch keeps no more than _FEW.
_MAX_KEPT, _FEW = 1 << 14, 8
#: How many they keep. Threads that count at the same moment may lose one: it is about the order of magnitude.
_kept = [0]
_POINTER = struct.Struct("<Q")


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
        """Refuse what no driver takes: it would only say "invalid argument", and that at the launch."""
        fits = len(self.arguments) <= MAX_ARGUMENT_BYTES and 1 <= self.threads <= MAX_THREADS
        fits = fits and all(1 <= n <= most for n, most in zip(self.grid, MAX_GRID, strict=True))
        if not fits or any(n % size for n, size in zip(self.grid, self.cluster or (1, 1, 1), strict=True)):
            raise ValueError(
                f"{self}: a kernel takes {MAX_ARGUMENT_BYTES} bytes of arguments, CTAs of 1 to {MAX_THREADS} threads, "
                f"grids of 1 to {MAX_GRID} CTAs, and whole clusters"
            )

    def __str__(self) -> str:
        cluster = "" if self.cluster is None else f", cluster {self.cluster}"
        overlap = ", overlapping the kernel before it" if self.overlap else ""
        return (
            f"kernel {self.spec.name}, grid {self.grid}, block ({self.threads}, 1, 1){cluster}, {self.smem_bytes} "
            f"bytes of dynamic shared memory, {len(self.arguments)} bytes of arguments{overlap}"
        )

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.spec.smem_bytes

    @property
    def num_ctas(self) -> int:
        """CTAs of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]


class Program:
    """The launches of a call on one GPU.

    Parameters
    ----------
    records : sequence of LaunchRecord
    operands : sequence of str
        The order in which `launch` takes addresses.
    load : callable
        LoadedKernel of a KernelSpec; all on one GPU.
    call : str
        Whose launches these are, for errors.

    Attributes
    ----------
    texts : tuple of str
        What an error says of each launch.
    """

    __slots__ = ("kernels", "launches", "operands", "records", "texts")

    def __init__(
        self,
        records: Sequence[LaunchRecord],
        operands: Sequence[str],
        load: Callable[[KernelSpec], LoadedKernel],
        call: str = "",
    ) -> None:
        self.records = tuple(records)
        self.operands = tuple(operands)
        self.kernels = tuple(load(record.spec) for record in self.records)
        self.texts = tuple(f"{record}, of {call}" if call else str(record) for record in self.records)
        index = {name: i for i, name in enumerate(self.operands)}
        #: The launches one by one: ``launch(stream, addresses)``.
        self.launches: tuple[_Launch, ...] = tuple(
            _BoundLaunch(record, kernel, index, text).launch
            for record, kernel, text in zip(self.records, self.kernels, self.texts, strict=True)
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


_Launch = Callable[[int, Sequence[int]], None]


class _BoundLaunch:
    """One launch of a program, and the arguments that it has been made with.

    A call with addresses that were seen before launches the struct that was packed then: frameworks' allocators give
    out the same addresses again and again.
    """

    __slots__ = ("_by_addresses", "_key", "_maps", "_places", "_run", "_template", "_text", "_what")

    def __init__(self, record: LaunchRecord, kernel: LoadedKernel, index: dict[str, int], text: str) -> None:
        self._text = text
        self._by_addresses: dict[tuple[int, ...], tuple[ctypes.Array[ctypes.c_char], int]] = {}
        names = {p.operand for p in record.pointers} | {m.operand for m in record.tensor_maps}
        used = sorted(index[name] for name in names)
        # Two at least, so that the getter gives a tuple.
        used = (used * 2 or [0, 0])[: max(len(used), 2)]
        self._key = operator.itemgetter(*used)
        self._template = record.arguments
        self._places = tuple((p.offset, used.index(index[p.operand]), p.add) for p in record.pointers)
        self._maps = tuple(
            (m.offset, used.index(index[m.operand]), m.add, _Maps(m, kernel)) for m in record.tensor_maps
        )
        self._run = kernel.launch
        self._what = (record.grid, record.threads, kernel.attributes(record.cluster, record.overlap))

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        """Queue the kernel."""
        key = self._key(addresses)
        packed = self._by_addresses.get(key)
        grid, threads, attributes = self._what
        try:
            if packed is None:
                packed = self._pack(key)
            self._run(grid, threads, stream, packed[1], attributes)
        except DriverError as error:
            raise error.at(self._text) from error.__cause__

    def _pack(self, key: tuple[int, ...]) -> tuple[ctypes.Array[ctypes.c_char], int]:
        data = bytearray(self._template)
        for offset, i, add in self._places:
            _POINTER.pack_into(data, offset, key[i] + add)
        for offset, i, add, maps in self._maps:
            data[offset : offset + MAP_BYTES] = maps.at(key[i] + add)
        memory = (ctypes.c_char * len(data)).from_buffer_copy(data)
        if len(self._by_addresses) >= (_MAX_ARGUMENTS if _kept[0] < _MAX_KEPT else _FEW):
            # Another thread may be looking up or inserting meanwhile: a new dictionary, not one that shrinks under it.
            items = list(self._by_addresses.copy().items())
            self._by_addresses = dict(items[len(items) // 2 :])
            _kept[0] -= len(items) // 2
        found = self._by_addresses[key] = memory, ctypes.addressof(memory)
        _kept[0] += 1
        return found

    # A default value, because this module's globals are None while the interpreter goes down.
    def __del__(self, kept: list[int] = _kept) -> None:
        kept[0] -= len(self._by_addresses)


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
            if len(self._maps) >= _MAX_ARGUMENTS:
                self._maps.clear()
            self._maps[address] = found
        return found
