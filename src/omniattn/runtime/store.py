"""The kernels that came with this installation: sources, prebuilt cubins, manifest.

A wheel holds ``omniattn/_kernels/{src,cubins,manifest.json}``. A checkout holds ``kernels_cu/`` and, once built,
``build/kernels/{<arch>/*.cubin,manifest.json}``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CompileError, OmniattnError
from . import log
from .arch import Arch
from .sources import Sources, source_digest

if TYPE_CHECKING:
    from ..registry import KernelSpec

MANIFEST_FORMAT = 1


class CubinRejectedError(OmniattnError):
    """A prebuilt cubin that must not be used; the text is the reason. Never leaves the runtime."""


@dataclass(frozen=True)
class ManifestEntry:
    """One cubin, as ``manifest.json`` describes it.

    Attributes
    ----------
    name : str
        Kernel.
    arch : str
        Target, for example ``"90a"``.
    file : str
        Path of the cubin, relative to the manifest.
    sha256, source_digest : str
        Of the cubin; of what it was compiled from (`omniattn.runtime.sources.source_digest`).
    options : tuple of str
        Compiler options.
    registers, smem_static_bytes, smem_dynamic_bytes, spill_bytes, size : int
        Per thread; per CTA; per CTA; per thread; of the file, bytes.
    """

    name: str
    arch: str
    file: str
    sha256: str
    source_digest: str
    options: tuple[str, ...] = ()
    registers: int = 0
    smem_static_bytes: int = 0
    smem_dynamic_bytes: int = 0
    spill_bytes: int = 0
    size: int = 0


@dataclass(frozen=True)
class Store:
    """Where the kernels are.

    Attributes
    ----------
    kind : str
        ``"wheel"`` or ``"checkout"``.
    sources : Sources
        Their sources.
    cubins : Path
        Folder of the manifest.
    entries : tuple of ManifestEntry
        Prebuilt cubins.
    compiler : str
        What built them, for example ``"NVRTC 12.9.86"``.
    problem : str
        Why there are no entries; empty if there are.
    """

    kind: str
    sources: Sources
    cubins: Path
    entries: tuple[ManifestEntry, ...]
    compiler: str
    problem: str

    @classmethod
    def open(cls, kind: str, sources: Path, cubins: Path) -> Store:
        """Read the manifest in ``cubins``, if there is a usable one."""
        entries: tuple[ManifestEntry, ...] = ()
        compiler = problem = ""
        manifest = cubins / "manifest.json"
        try:
            data = json.loads(manifest.read_text(encoding="utf-8"))
            if data["format"] != MANIFEST_FORMAT:
                raise ValueError(f"format {data['format']!r} instead of {MANIFEST_FORMAT}")
            entries = tuple(_entry(item) for item in data["kernels"])
            compiler = str(data.get("compiler", ""))
        except FileNotFoundError:
            problem = "none are built in this checkout" if kind == "checkout" else f"{manifest} is missing"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"{manifest} is unusable ({type(error).__name__}: {error})"
            log.get().warning("%s", problem)
        else:
            if not entries:
                problem = f"{manifest} lists none"
        return cls(kind, Sources(sources), cubins, entries, compiler, problem)

    def prebuilt(self, name: str, cc: tuple[int, int]) -> list[ManifestEntry]:
        """Cubins of the kernel that run on a compute capability, the best first."""
        ranked = [(Arch.parse(entry.arch), entry) for entry in self.entries if entry.name == name]
        fitting = [(arch, entry) for arch, entry in ranked if arch.runs_on(cc)]
        return [entry for _, entry in sorted(fitting, key=lambda pair: pair[0].preference())]

    def why_none(self, name: str, cc: tuple[int, int]) -> str:
        """Why `prebuilt` gave nothing."""
        if self.problem:
            return self.problem
        archs = [f"sm_{entry.arch}" for entry in self.entries if entry.name == name]
        if not archs:
            return f"the {self.kind} holds none of this kernel"
        return f"the {self.kind} holds {', '.join(archs)}, none of which runs on compute capability {cc[0]}.{cc[1]}"

    def read(self, entry: ManifestEntry, spec: KernelSpec) -> bytes:
        """The cubin, after checking that it is the one of the manifest and, in a checkout, of today's sources.

        Raises
        ------
        CubinRejectedError
            It is missing, damaged or stale; the text says which.
        """
        if self.kind == "checkout":
            try:
                current = source_digest(spec, self.sources)
            except CompileError as error:
                raise CubinRejectedError(f"stale: its sources cannot be checked ({error.message})") from error
            if current != entry.source_digest:
                raise CubinRejectedError("stale: its sources have changed since it was built")
        path = self.cubins / entry.file
        try:
            image = path.read_bytes()
        except OSError as error:
            raise CubinRejectedError(f"{path} cannot be read ({error.strerror or error})") from error
        if hashlib.sha256(image).hexdigest() != entry.sha256:
            raise CubinRejectedError(f"damaged: {path} does not have the sha256 of the manifest")
        return image


def _entry(item: dict[str, Any]) -> ManifestEntry:
    known = {field.name for field in fields(ManifestEntry)}
    values = {key: value for key, value in item.items() if key in known}
    values["options"] = tuple(values.get("options", ()))
    entry = ManifestEntry(**values)
    try:
        Arch.parse(entry.arch)
    except OmniattnError as error:
        raise ValueError(str(error)) from error
    return entry


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
