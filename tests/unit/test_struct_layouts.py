"""Structs that host and device share have one layout: the device compiler's against ``launch/structs.py``."""

from __future__ import annotations

import re
import struct

import pytest

from build_tools.kernels import ROOT
from build_tools.layouts import device_kinds, device_layout
from omniattn.launch.structs import STRUCTS

PARAMS = ROOT / "kernels_cu/params"


def split(code: str) -> tuple[int, str]:
    """Count and element of a field's code."""
    found = re.fullmatch(r"(\d*)([A-Za-z])", code)
    assert found is not None, code
    return int(found[1] or 1), found[2]


def size_of(code: str) -> int:
    """Bytes: of pointers (``P``), tensor maps (``M``), or what the `struct` module says."""
    count, element = split(code)
    return count * struct.calcsize({"P": "<Q", "M": "<128s"}.get(element, "<" + element))


@pytest.mark.parametrize("name", STRUCTS)
def test_layout(name: str) -> None:
    host = STRUCTS[name]
    names = [field for field, _ in host.fields]
    size, layout = device_layout(host.header, host.name, names)
    assert size == host.size
    assert {field: (host.offsets[field], size_of(code)) for field, code in host.fields} == layout
    # Nothing of the device's is left out: what lies between fields is less than the next one's alignment could take.
    spans = sorted(layout.values())
    ends = [0, *(at + extent for at, extent in spans)]
    for end, begin in zip(ends, [*(at for at, _ in spans), size], strict=True):
        assert 0 <= begin - end < (64 if begin == size else 8), f"{name}: {begin - end} bytes at {end} have no name"


@pytest.mark.parametrize("name", STRUCTS)
def test_types(name: str) -> None:
    host = STRUCTS[name]
    kinds = device_kinds(host.header, host.name, [field for field, _ in host.fields])
    assert kinds == {field: {"M": "bytes"}.get(split(code)[1], split(code)[1]) for field, code in host.fields}


def test_every_struct_of_the_kernels_is_known_to_the_host() -> None:
    """By name: what the host only makes room for is left out."""
    declared = {
        found
        for path in PARAMS.glob("*.cuh")
        for found in re.findall(r"^struct (?:alignas\(\d+\) )?(\w+) \{", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert declared - {"QuantizeItem"} == set(STRUCTS)


def test_arguments_fit_into_what_a_launch_takes() -> None:
    assert all(host.size <= 4096 for host in STRUCTS.values())
