"""Layouts of device structs, as the compiler has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_tools.layouts import device_kinds, device_layout
from omniattn.errors import CompileError

TYPES = """#pragma once
using uint8 = unsigned char; using uint16 = unsigned short; using uint32 = unsigned int; using int32 = int;
using int64 = long long; using uint64 = unsigned long long;
constexpr float kAlso = 1.0f;
"""
HEADER = """#pragma once
#include "ptx/types.cuh"
struct Inner { int32 a; int64 b; };
struct alignas(64) Map { uint8 opaque[128]; };
struct Outer { const float* p; float x; Inner inner; uint32 list[3]; Map map; int32 last; };
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in {"ptx/types.cuh": TYPES, "params/outer.cuh": HEADER}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_layout(root: Path) -> None:
    fields = ["p", "x", "inner", "inner.a", "inner.b", "list", "map", "last"]
    size, found = device_layout("params/outer.cuh", "Outer", fields, root)
    assert size == 256
    assert found == {
        "p": (0, 8), "x": (8, 4), "inner": (16, 16), "inner.a": (16, 4), "inner.b": (24, 8), "list": (32, 12),
        "map": (64, 128), "last": (192, 4),
    }  # fmt: skip
    kinds = device_kinds("params/outer.cuh", "Outer", fields, root)
    assert list(kinds.values()) == ["P", "f", "bytes", "i", "q", "I", "bytes", "i"]


def test_fields_that_are_not_there(root: Path) -> None:
    with pytest.raises(CompileError, match="gone"):
        device_layout("params/outer.cuh", "Outer", ["p", "gone"], root)
    with pytest.raises(FileNotFoundError):
        device_layout("params/missing.cuh", "Outer", ["p"], root)
