"""Tensor maps of a kernel's operands, kept by address."""

from __future__ import annotations

from ..runtime import LoadedKernel

#: Tensor maps are kept for this many addresses of each operand; encoding one takes about a microsecond.
_MAX_MAPS = 64


class MappedOperand:
    """Everything about the tensor map of one operand but its address.

    Parameters
    ----------
    dtype : str
        Element type; "uint8" for anything of one byte.
    dims : tuple of int
        Extents, the contiguous one first.
    strides_bytes : tuple of int
        Of all but the first; 0 for an extent of 1, which has none of its own.
    box : tuple of int
        What one copy takes; its first extent is 128 or 64 bytes, and so is the swizzle.
    """

    __slots__ = ("_box", "_dims", "_dtype", "_maps", "_strides")

    def __init__(self, dtype: str, dims: tuple[int, ...], strides_bytes: tuple[int, ...], box: tuple[int, ...]) -> None:
        self._dtype = dtype
        self._dims = dims
        # The map wants a positive multiple of 16 bytes even where it is never used.
        self._strides = tuple(s or 16 for s in strides_bytes)
        self._box = box
        self._maps: dict[int, bytes] = {}

    def at(self, address: int, kernel: LoadedKernel) -> bytes:
        """The map for an address."""
        found = self._maps.get(address)
        if found is None:
            found = kernel.encode_tensor_map(self._dtype, address, self._dims, self._strides, self._box)
            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            self._maps[address] = found
        return found
