"""Launches without a GPU: kernels that write down what they are launched with, and records read field by field."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from omniattn import runtime
from omniattn.launch.host_struct import At, HostStruct
from omniattn.launch.structs import ATTN_COMBINE_USED
from omniattn.plan import engine
from omniattn.registry import KernelSpec
from omniattn.runtime.device import DeviceInfo
from omniattn.runtime.driver_base import LaunchAttributes
from omniattn.runtime.record import LaunchRecord, Program

KERNELS = Path(__file__).parents[3] / "kernels_cu"


class Kernel:
    """Stands for a `LoadedKernel`: makes "maps" that can be read again, and keeps its launches.

    ``size``: bytes of its arguments. ``log`` has (kernel, grid, threads, stream, arguments, attributes) of each launch.
    """

    def __init__(self, size: int, spec: KernelSpec | None = None, log: list[Any] | None = None) -> None:
        self.size = size
        self.spec = spec
        self.maps: list[tuple[Any, ...]] = []
        self.log: list[Any] = [] if log is None else log

    def encode_tensor_map(self, *facts: Any) -> bytes:
        self.maps.append(facts)
        return len(self.maps).to_bytes(128, "little")

    def attributes(self, cluster: tuple[int, int, int] | None, overlap: bool) -> LaunchAttributes | None:
        return LaunchAttributes(cluster, overlap) if cluster is not None or overlap else None

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        stream: int,
        params_address: int,
        attributes: LaunchAttributes | None = None,
    ) -> None:
        data = ctypes.string_at(params_address, self.size)
        self.log.append((self, grid, threads, stream, data, attributes))


def program_of(
    records: Sequence[LaunchRecord], operands: Sequence[str], log: list[Any] | None = None
) -> tuple[Program, list[Kernel]]:
    """A program with such kernels, one a record; with ``log`` all write into one."""
    sizes, kernels = iter([len(record.arguments) for record in records]), []

    def load(spec: KernelSpec) -> Any:
        kernels.append(Kernel(next(sizes), spec, log))
        return kernels[-1]

    return Program(records, operands, load), kernels


def unpacked(data: bytes, layout: HostStruct) -> dict[str, Any]:
    """A packed struct by field name: addresses and numbers; of tensor maps their bytes."""
    found: dict[str, Any] = {}
    for name, code in layout.fields:
        at = layout.offsets[name]
        if code == "M":
            found[name] = data[at : at + 128]
        else:
            values = struct.unpack_from("<" + code.replace("P", "Q"), data, at)
            found[name] = values[0] if len(values) == 1 else values
    return found


def fields_of_record(record: LaunchRecord, layout: HostStruct) -> dict[str, Any]:
    """What a record says of its struct: numbers, `At` for pointers, None for null, tensor maps without offsets."""
    assert len(record.arguments) == layout.size
    found = unpacked(record.arguments, layout)
    pointers = {p.offset: At(p.operand, p.add) for p in record.pointers}
    maps = {m.offset: m._replace(offset=0) for m in record.tensor_maps}
    for name, code in layout.fields:
        at = layout.offsets[name]
        if code == "P":
            assert found[name] == 0, "a template has no addresses"
            found[name] = pointers.pop(at, None)
        elif code.endswith("P"):
            found[name] = [pointers.pop(at + 8 * i, None) for i in range(int(code[:-1]))]
        elif code == "M":
            found[name] = maps.pop(at)
    assert not pointers, "pointers that no field has"
    assert not maps, "tensor maps that no field has"
    return found


def fields_of_merge(record: LaunchRecord) -> dict[str, Any]:
    """The same of attn_combine_sm80."""
    found = fields_of_record(record, ATTN_COMBINE_USED)
    return {name.removeprefix("combine."): value for name, value in found.items()}


def read(source: str) -> str:
    """Device code without comments."""
    return re.sub(r"//[^\n]*", "", (KERNELS / source).read_text(encoding="utf-8"))


def explain_as_on_gpu(monkeypatch: pytest.MonkeyPatch, cc: tuple[int, int]) -> None:
    """Arrays and caches of NumPy are taken for those of a GPU, whose calls `explain` plans; none can run."""
    describe = engine.describe

    def on_gpu(call: Any, raw: Any) -> dict[str, Any]:
        tensors = describe(call, raw)
        for i, t in enumerate([*tensors.values(), *call.cache.tensors]):
            t.device, t.framework, t.ptr = "cuda", "torch", 0x100000 * (i + 1)
        return tensors

    monkeypatch.setattr(engine, "describe", on_gpu)
    monkeypatch.setattr(runtime, "has_tensor_maps", lambda: cc == (9, 0))
    info = DeviceInfo(0, "Test GPU", cc, 132, 227 << 10, 50 << 20, (13, 0))
    monkeypatch.setattr(runtime, "device_info", lambda ordinal: info)
