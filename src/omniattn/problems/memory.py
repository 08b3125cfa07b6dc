"""Bytes of elements and of workspaces: what everyone who lays out memory has to agree on."""

from __future__ import annotations

#: Bytes per element of every element type that `arrays.describe` accepts.
ITEMSIZE = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
}

#: Multiple of bytes at which a workspace begins, and every array in it.
WORKSPACE_ALIGNMENT = 256


def aligned(num_bytes: int) -> int:
    """The next such multiple."""
    return -(-num_bytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
