"""What is wrong with a compiled kernel, or with the source tree: pure functions that return complaints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from build_tools import sass

#: Folders of ``kernels_cu`` from bottom to top. A file may include its own layer and those below.
LAYERS: tuple[str, ...] = ("ptx", "params", "tile", "pipeline", "scheduler", "attention", "quantize", "decode", "entry")

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(<[^>]*>|"[^"]*")', re.MULTILINE)
_BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)

# ptxas goes on after these, and the kernel is right but slow, so only the log tells.
_SILENT_SLOWDOWNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"\(C75(?:10|11|12|13|14|15|16|17)\)|wgmma\.mma_async instructions are serialized", re.IGNORECASE),
        "wgmma instructions are serialized",
    ),
    (re.compile(r"\(C7508\)|setmaxnreg.{0,40}ignored", re.IGNORECASE), "setmaxnreg is ignored"),
)
_WARNING = re.compile(r"\bwarning\b", re.IGNORECASE)


class Row(Protocol):
    """The part of a registry row that the checks read."""

    @property
    def name(self) -> str:
        """Name of the kernel."""

    @property
    def source(self) -> str:
        """Path of its source below the kernels root."""


def log_complaints(row: Row, arch: str, log: str) -> list[str]:
    """Return why the build of ``row`` for ``arch`` must fail, judging by the compiler log; empty if it must not."""
    complaints = []
    for line in log.splitlines():
        for pattern, meaning in _SILENT_SLOWDOWNS:
            if pattern.search(line):
                complaints.append(f"{row.name} (sm_{arch}): {meaning}: {line.strip()}")
                break
    return complaints


def code_complaints(row: Row, arch: str, cubin: bytes) -> list[str]:
    """Return why the machine code of ``row`` would not run.

    All copies of decode_sm80 have an L2 policy. ptxas encodes such a copy as an illegal instruction where it takes a
    part of an address from a uniform register (kernels_cu/decode/kv_copy.cuh keeps it from that).
    """
    if row.source != "entry/decode_sm80.cu" or not arch.startswith("9"):
        return []
    copies = sass.uniform_copies(cubin)
    return [f"{row.name} (sm_{arch}): {copies} copies with a policy and a uniform address"] if copies else []


def warnings(log: str) -> list[str]:
    """Return the compiler's warning lines."""
    return [line.strip() for line in log.splitlines() if _WARNING.search(line)]


def registry_complaints(rows: Iterable[Row], kernels_root: Path) -> list[str]:
    """Return what does not match between registry and ``entry/``: duplicate names, missing sources, orphans."""
    rows = list(rows)
    complaints = []
    seen: set[str] = set()
    for row in rows:
        if row.name in seen:
            complaints.append(f"{row.name}: two registry rows have this name; names are file stems and must be unique")
        seen.add(row.name)
        if not (kernels_root / row.source).is_file():
            complaints.append(f"{row.name}: its source {row.source} does not exist below {kernels_root.name}/")
    used = {row.source for row in rows}
    for path in sorted((kernels_root / "entry").glob("**/*.cu")):
        inside = path.relative_to(kernels_root).as_posix()
        if inside not in used:
            complaints.append(f"{inside}: orphan source, no registry row builds it; add a row or remove the file")
    return complaints


def include_complaints(kernels_root: Path) -> list[str]:
    """Return includes that the run-time compiler cannot follow, or that point upwards in the layers."""
    complaints = []
    for path in sorted([*kernels_root.glob("**/*.cu"), *kernels_root.glob("**/*.cuh")]):
        inside = path.relative_to(kernels_root).as_posix()
        text = _BLOCK_COMMENT.sub("", path.read_text(encoding="utf-8"))
        for match in _INCLUDE.finditer(text):
            token, target = match.group(1), match.group(1)[1:-1]
            if token.startswith("<"):
                complaints.append(
                    f"{inside}: includes {token}; kernels include no system or CUDA header, NVRTC has none"
                )
            elif not (kernels_root / target).is_file():
                complaints.append(f'{inside}: includes "{target}", which does not exist below the kernels root')
            elif _layer(target) > _layer(inside):
                complaints.append(f'{inside}: includes "{target}", a layer above its own ({" < ".join(LAYERS)})')
    return complaints


def _layer(path: str) -> int:
    folder = path.split("/", 1)[0]
    # A folder outside the layers (or a file at the root) is below all of them.
    return LAYERS.index(folder) if folder in LAYERS else -1
