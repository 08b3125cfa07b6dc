"""What the rest of the package sees of a caller's array: plain numbers, and who owns the memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..problems.memory import ITEMSIZE

if TYPE_CHECKING:
    from .capsule import Capsule


class Tensor:
    """One array of a call.

    Attributes
    ----------
    obj : object
        The framework's own array.
    framework : str
        ``"torch"``, ``"cupy"``, ``"jax"``, ``"numpy"``, or ``"dlpack"`` for any other exporter.
    ptr : int
        Address of the first element (the one with index 0 everywhere, also when strides are negative).
    shape, strides : tuple of int
        Extents and strides, both in elements.
    dtype : str
        A key of `ITEMSIZE`.
    device : str
        ``"cpu"`` or ``"cuda"``.
    ordinal : int
        Number of the GPU; 0 on the CPU.
    readonly : bool
        Whether the owner forbids writing.
    argument : str
        Name of the argument it came from, for error messages.
    """

    __slots__ = ("argument", "device", "dtype", "framework", "obj", "ordinal", "ptr", "readonly", "shape", "strides")

    obj: Any
    framework: str
    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    ordinal: int
    readonly: bool
    argument: str

    @property
    def device_name(self) -> str:
        """``"cpu"`` or for example ``"cuda:0"``."""
        return "cpu" if self.device == "cpu" else f"{self.device}:{self.ordinal}"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return (
            f"Tensor({self.argument!r}, {self.framework}, {self.dtype}, shape={tuple(self.shape)}, "
            f"strides={tuple(self.strides)}, {self.device_name})"
        )


class CapsuleTensor(Tensor):
    """A tensor that reached us in a DLPack capsule.

    Attributes
    ----------
    capsule : Capsule
        Keeps the exporter's memory alive until it is released.
    synced : int or None
        Raw stream that the exporter has made wait for its own queued work; None on the CPU.
    owned : bool
        True if this package had the array made, as the result of the call.
    """

    __slots__ = ("capsule", "owned", "synced")

    capsule: Capsule
    synced: int | None
    owned: bool


def fill(
    tensor: Tensor,
    obj: Any,
    framework: str,
    ptr: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    device: str,
    ordinal: int,
    readonly: bool,
    argument: str,
) -> None:
    """Set every attribute. The torch path sets them inline instead: a call with eleven arguments costs 0.2 µs."""
    tensor.obj = obj
    tensor.framework = framework
    tensor.ptr = ptr
    tensor.shape = shape
    tensor.strides = strides
    tensor.dtype = dtype
    tensor.device = device
    tensor.ordinal = ordinal
    tensor.readonly = readonly
    tensor.argument = argument
