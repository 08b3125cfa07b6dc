"""The comparison of two builds: what it calls the same, and what it must not."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

from build_tools import compare_cubins, kernels, packs
from build_tools.compare_cubins import DIFFERS, ONLY_NEW, ONLY_OLD, SAME, SAME_CODE
from build_tools.jobs import Job
from build_tools.objects import Compiled
from omniattn.registry import REGISTRY
from omniattn.runtime.sources import Sources


def elf(code: bytes, symbol: str = "k") -> bytes:
    """A 64-bit ELF file with one kernel."""
    names = f"\0.text.{symbol}\0.names\0".encode()
    sections = [(1, 64, len(code)), (len(names) - 7, 64 + len(code), len(names))]
    table = b"".join(
        name.to_bytes(4, "little") + bytes(20) + at.to_bytes(8, "little") + size.to_bytes(8, "little") + bytes(24)
        for name, at, size in sections
    )
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    header[0x28:0x30] = (64 + len(code) + len(names)).to_bytes(8, "little")
    header[0x3C:0x40] = len(sections).to_bytes(2, "little") + (len(sections) - 1).to_bytes(2, "little")
    return bytes(header) + code + names + table


def build(folder: Path, cubins: dict[str, bytes]) -> Path:
    built = []
    for name, data in cubins.items():
        entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "registers": 32,
                 "smem_static_bytes": 0, "spill_bytes": 0}  # fmt: skip
        row = dataclasses.replace(REGISTRY[0], name=name)
        built.append((Job(row, "80", ""), Compiled(entry, data, "")))
    kernels.publish(folder, *packs.make(built, "0", "NVRTC 12.9.86", Sources(kernels.ROOT / "kernels_cu")))
    return folder


MOV, EXIT = (0x02 | 7 << 12).to_bytes(16, "little"), (0x14D | 7 << 12).to_bytes(16, "little")


def test_outcomes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = build(
        tmp_path / "old",
        {"a": elf(EXIT), "b_ring_1": elf(EXIT), "c": elf(MOV + EXIT), "gone": elf(EXIT)},
    )
    new = build(
        tmp_path / "new",
        {"a": elf(EXIT), "b_barrier_1": elf(EXIT, "other"), "c": elf(MOV + MOV + EXIT), "added": elf(EXIT)},
    )
    found = compare_cubins.compare(packs.read(old), packs.read(new), {"ring": "barrier"})
    outcomes = {c.name: c.outcome for c in found}
    assert outcomes == {"a": SAME, "b_barrier_1": SAME_CODE, "c": DIFFERS, "gone": ONLY_OLD, "added": ONLY_NEW}
    (differs,) = (c for c in found if c.outcome == DIFFERS)
    assert differs.detail == "registers 32, spilled bytes 0, instructions 2 -> 3"
    assert compare_cubins.main([str(old), str(new), "--renamed", "ring=barrier"]) == 1
    assert "instructions 2 -> 3" in capsys.readouterr().out
    assert compare_cubins.main([str(old), str(old)]) == 0
