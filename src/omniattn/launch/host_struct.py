"""How the host packs a struct that it shares with device code. The structs themselves: ``structs.py``."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..runtime.record import MAP_BYTES, Pointer, TensorMap

#: Alignment of a tensor map; of every other field it is the size of an element.
MAP_ALIGNMENT = 64


def size_of(code: str) -> int:
    """Bytes of a field by its code: see `HostStruct`."""
    return MAP_BYTES if code == "M" else struct.calcsize("<" + code.replace("P", "Q"))


class At(NamedTuple):
    """The address of an operand of the call, or a place behind it.

    Attributes
    ----------
    operand : str
        An argument, an output, or ``"workspace"``.
    offset : int
        Bytes.
    """

    operand: str
    offset: int = 0


class Arguments(NamedTuple):
    """A packed struct.

    Attributes
    ----------
    data : bytes
        Zeros where addresses and tensor maps go.
    pointers, tensor_maps
        As in `LaunchRecord`.
    """

    data: bytes
    pointers: tuple[Pointer, ...]
    tensor_maps: tuple[TensorMap, ...]


class HostStruct:
    """A struct of device code as the host packs it: little-endian, and padding only at the end of one with tensor maps.

    Parameters
    ----------
    name : str
        Of the struct in device code.
    *members : tuple of (str or HostStruct, str)
        What they are, and their names, with blanks between. A code: ``P`` (pointer), ``M`` (tensor map), or one of the
        `struct` module, of an array behind the number of its elements. Or a struct, whose fields become
        ``"member.field"``.
    """

    def __init__(self, name: str, *members: tuple[str | HostStruct, str]) -> None:
        self.name = name
        fields: list[tuple[str, str]] = []
        for kind, names in members:
            for one in names.split():
                if isinstance(kind, HostStruct):
                    fields += [(f"{one}.{field}", code) for field, code in kind.fields]
                else:
                    fields.append((one, kind))
        self.fields: tuple[tuple[str, str], ...] = tuple(fields)
        self.offsets: dict[str, int] = {}
        end = 0
        for field, code in fields:
            self.offsets[field] = end
            end += size_of(code)
        self.size = end + -end % (MAP_ALIGNMENT if any(code == "M" for _, code in fields) else 1)

    def pack(self, values: dict[str, object]) -> Arguments:
        """Pack values by field name.

        Pointers take an `At`, or None for null; tensor maps a `TensorMap` without its place, or None for zeros; the
        rest numbers, or tuples of them for arrays. Every field needs a value, and every value a field.
        """
        if values.keys() != self.offsets.keys():
            odd = sorted(values.keys() ^ self.offsets.keys())
            raise ValueError(f"{self.name}: fields without a value, or values without a field: {', '.join(odd)}")
        data = bytearray(self.size)
        pointers, maps = [], []
        for name, code in self.fields:
            value, at = values[name], self.offsets[name]
            if code.endswith("P"):
                for i, one in enumerate(value if isinstance(value, list) else [value]):
                    if one is not None:
                        assert isinstance(one, At)
                        pointers.append(Pointer(at + 8 * i, one.operand, one.offset))
            elif code == "M":
                if value is not None:
                    assert isinstance(value, TensorMap)
                    maps.append(value._replace(offset=at))
            else:
                struct.pack_into("<" + code, data, at, *(value if isinstance(value, tuple) else (value,)))
        return Arguments(bytes(data), tuple(pointers), tuple(maps))


def member(prefix: str, values: dict[str, object]) -> dict[str, object]:
    """``values`` of a struct as those of a member ``prefix`` of another one."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def strides(prefix: str, three: tuple[int, int, int]) -> dict[str, object]:
    """The fields ``{prefix}_stride_b, _s, _h``."""
    return dict(zip((f"{prefix}_stride_b", f"{prefix}_stride_s", f"{prefix}_stride_h"), three, strict=True))
