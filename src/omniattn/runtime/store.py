"""The kernels that came with this installation: sources, packs of prebuilt cubins, manifest.

A wheel holds ``omniattn/_kernels/{src,packs,manifest.json}``. A checkout holds ``kernels_cu/`` and, once built,
``build/kernels/{packs,manifest.json}``. A pack is one LZMA stream of cubins that resemble each other
(``build_tools/packs.py`` writes it). The manifest says where in which pack a cubin is, and its sha256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CompileError, OmniattnError
from . import log, opened
from .arch import Arch
from .sources import Sources, source_digest

if TYPE_CHECKING:
    from ..registry import KernelSpec

MANIFEST_FORMAT = 2

#: What the manifest says of a cubin, in the order of its lists. Cubins of a pack follow each other without a gap.
MANIFEST_COLUMNS = ("name", "size", "sha256", "source_digest", "registers", "smem_static_bytes", "spill_bytes")


class CubinRejectedError(OmniattnError):
    """A prebuilt cubin that must not be used; the text is the reason. Never leaves the runtime."""


class Pack(NamedTuple):
    """A file of compressed cubins.

    Attributes
    ----------
    file : str
        Path relative to the manifest.
    arch : str
        Target of all its cubins, for example ``"90a"``.
    sha256 : str
        Of its content when opened.
    size : int
        Bytes when opened.
    """

    file: str
    arch: str
    sha256: str
    size: int


class ManifestEntry(NamedTuple):
    """One cubin, as ``manifest.json`` describes it.

    Attributes
    ----------
    name : str
        Kernel.
    pack : Pack
        Where it is.
    offset, size : int
        Its place in the opened pack, bytes.
    sha256 : str
        Of the cubin.
    source_digest : str
        How `omniattn.runtime.sources.source_digest` of what it was compiled from begins.
    registers, smem_static_bytes, spill_bytes : int
        Per thread; per CTA; per thread.
    """

    name: str
    pack: Pack
    offset: int
    size: int
    sha256: str
    source_digest: str
    registers: int = 0
    smem_static_bytes: int = 0
    spill_bytes: int = 0

    @property
    def arch(self) -> str:
        """Target, for example ``"90a"``."""
        return self.pack.arch


@dataclass(frozen=True)
class Store:
    """Where the kernels are.

    Attributes
    ----------
    kind : str
        ``"wheel"`` or ``"checkout"``.
    sources : Sources
        Their sources.
    folder : Path
        Folder of the manifest.
    entries : mapping
        Prebuilt cubins by kernel.
    compiler : str
        What built them, for example ``"NVRTC 12.9.86"``.
    problem : str
        Why there are no entries; empty if there are.
    """

    kind: str
    sources: Sources
    folder: Path
    entries: Mapping[str, tuple[ManifestEntry, ...]]
    compiler: str
    problem: str

    @classmethod
    def open(cls, kind: str, sources: Path, folder: Path) -> Store:
        """Read the manifest in ``folder``, if there is a usable one."""
        entries: dict[str, tuple[ManifestEntry, ...]] = {}
        compiler = problem = ""
        manifest = folder / "manifest.json"
        try:
            data = json.loads(manifest.read_text(encoding="utf-8"))
            if data["format"] != MANIFEST_FORMAT:
                raise ValueError(f"format {data['format']!r} instead of {MANIFEST_FORMAT}")
            for entry in manifest_entries(data):
                entries[entry.name] = (*entries.get(entry.name, ()), entry)
            compiler = str(data.get("compiler", ""))
        except FileNotFoundError:
            problem = "none are built in this checkout" if kind == "checkout" else f"{manifest} is missing"
        except (OSError, ValueError, KeyError, TypeError) as error:
            entries = {}
            problem = f"{manifest} is unusable ({type(error).__name__}: {error})"
            log.get().warning("%s", problem)
        else:
            if not entries:
                problem = f"{manifest} lists none"
        return cls(kind, Sources(sources), folder, entries, compiler, problem)

    def prebuilt(self, name: str, cc: tuple[int, int]) -> list[ManifestEntry]:
        """Cubins of the kernel that run on a compute capability, the best first."""
        ranked = [(Arch.parse(entry.arch), entry) for entry in self.entries.get(name, ())]
        fitting = [(arch, entry) for arch, entry in ranked if arch.runs_on(cc)]
        return [entry for _, entry in sorted(fitting, key=lambda pair: pair[0].preference())]

    def why_none(self, name: str, cc: tuple[int, int]) -> str:
        """Why `prebuilt` gave nothing."""
        if self.problem:
            return self.problem
        held = sorted((Arch.parse(entry.arch) for entry in self.entries.get(name, ())), key=lambda arch: arch.cc)
        archs = [str(arch) for arch in held]
        if not archs:
            return f"the {self.kind} holds none of this kernel"
        return f"the {self.kind} holds {', '.join(archs)}, none of which runs on compute capability {cc[0]}.{cc[1]}"

    def refusal(self, entry: ManifestEntry, spec: KernelSpec) -> str:
        """Why a cubin must not be used, as far as can be told without opening its pack; empty if nothing is wrong."""
        if self.kind == "checkout":
            try:
                current = source_digest(spec, self.sources)
            except CompileError as error:
                return f"stale: its sources cannot be checked ({error.message})"
            if not entry.source_digest or not current.startswith(entry.source_digest):
                return "stale: its sources have changed since it was built"
        path = self.folder / entry.pack.file
        return "" if path.is_file() else f"{path} is missing"

    def read(self, entry: ManifestEntry, spec: KernelSpec) -> bytes:
        """The cubin, after checking that it is the one of the manifest and, in a checkout, of today's sources.

        Raises
        ------
        CubinRejectedError
            It is missing, damaged or stale, or its pack cannot be opened here; the text says which.
        """
        if reason := self.refusal(entry, spec):
            raise CubinRejectedError(reason)
        pack = entry.pack
        kept = opened.part(pack.sha256, entry.offset, entry.size)
        if kept is not None and _is_of(kept, entry):
            return kept
        # What was kept is not what it says: it is written anew below.
        content = opened.open_pack(self.folder / pack.file, pack.size)
        if isinstance(content, str):
            raise CubinRejectedError(content)
        image = content[entry.offset : entry.offset + entry.size]
        if not _is_of(image, entry):
            raise CubinRejectedError(f"damaged: {entry.name} in {self.folder / pack.file} does not have the sha256 "
                                     "of the manifest")  # fmt: skip
        if hashlib.sha256(content).hexdigest() == pack.sha256:
            opened.keep(pack.sha256, content)
        return image


def _is_of(image: bytes, entry: ManifestEntry) -> bool:
    return len(image) == entry.size and hashlib.sha256(image).hexdigest() == entry.sha256


def manifest_entries(manifest: Mapping[str, Any]) -> list[ManifestEntry]:
    """All cubins that a manifest (format 2) lists.

    Raises
    ------
    ValueError, KeyError, TypeError
        It is none.
    """
    entries = []
    for item in manifest["packs"]:
        pack = Pack(*(item[key] for key in Pack._fields))
        try:
            Arch.parse(pack.arch)
        except OmniattnError as error:
            raise ValueError(str(error)) from error
        offset = 0
        for name, size, *rest in item["kernels"]:
            entries.append(ManifestEntry(name, pack, offset, size, *rest))
            offset += size
    return entries


_store: Store | None = None


def get_store() -> Store:
    """The store of this installation, read on the first call."""
    global _store
    if _store is None:
        package = Path(__file__).resolve().parent.parent
        inside = package / "_kernels"
        if inside.is_dir():
            _store = Store.open("wheel", inside / "src", inside)
        else:
            checkout = package.parent.parent
            _store = Store.open("checkout", checkout / "kernels_cu", checkout / "build" / "kernels")
    return _store


def set_store(store: Store | None) -> None:
    """Use ``store`` from now on (tests, build tools); None: find this installation's at the next use."""
    global _store
    _store = store
