"""The comparison of two builds: what it calls the same, and what it must not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from build_tools import compare_cubins, kernels
from build_tools.compare_cubins import DIFFERS, ONLY_NEW, ONLY_OLD, SAME, SAME_CODE
from omniattn.registry import REGISTRY


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
    folder.mkdir()
    entries = []
    for name, data in cubins.items():
        (folder / f"{name}.cubin").write_bytes(data)
        entry = {"name": name, "arch": "80", "file": f"{name}.cubin", "registers": 32, "spill_bytes": 0}
        entries.append(entry)
    (folder / "manifest.json").write_text(json.dumps({"kernels": entries}), encoding="utf-8")
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
    found = compare_cubins.compare(compare_cubins.read(old), compare_cubins.read(new), {"ring": "barrier"})
    outcomes = {c.name: c.outcome for c in found}
    assert outcomes == {"a": SAME, "b_barrier_1": SAME_CODE, "c": DIFFERS, "gone": ONLY_OLD, "added": ONLY_NEW}
    (differs,) = (c for c in found if c.outcome == DIFFERS)
    assert differs.detail == "registers 32, spilled bytes 0, instructions 2 -> 3"
    assert compare_cubins.main([str(old), str(new), "--renamed", "ring=barrier"]) == 1
    assert "instructions 2 -> 3" in capsys.readouterr().out
    assert compare_cubins.main([str(old), str(old)]) == 0


def test_every_row_is_compiled_for_some_target() -> None:
    rows = compare_cubins.every_row(REGISTRY)
    assert [row.name for row in rows] == [row.name for row in REGISTRY]
    jobs = kernels.plan(rows, None, None, "NVRTC", kernels.ROOT / "kernels_cu")
    assert {job.spec.name for job in jobs} == {row.name for row in REGISTRY}
