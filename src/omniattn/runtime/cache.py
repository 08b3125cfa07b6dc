"""Kernels compiled on this machine, kept on disk.

A file is named ``<key>.nvrtc<major>.<minor>``. The key is a digest of everything that decides the binary except the
compiler's version, which the name gives: so a kernel is found again when NVRTC is no longer installed, and two versions
of NVRTC do not overwrite each other. Of several, the newest that the driver takes is used. No path goes into a key.

File: magic and the sha256 of all that follows, one line; a JSON header, one line; the binary. Files are written under a
temporary name and renamed, so a reader sees a whole file or none; any number of processes may do this at once, and the
last one wins. Beside them lies an empty file ``.lock``, see `once`. Nothing that goes wrong here stops a computation: a
damaged file is removed and rebuilt; an unwritable folder, a full disk, or a folder that another user owns or can write
to leaves the kernel in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..version import __version__
from . import log
from .arch import Arch
from .compile import CompileResult, compile_options
from .folder import WRITING, default_folder, distrust, make_folder, read_own, remove, write_whole
from .sources import Sources, source_digest

if TYPE_CHECKING:
    from ..registry import KernelSpec

_MAGIC = b"omniattn-kernel-1"
_LOCK = ".lock"
#: A file takes milliseconds to write.
_ABANDONED_SECONDS = 3600
_NAME = re.compile(r"([0-9a-f]{64})\.nvrtc(\d+)\.(\d+)")


def cache_key(spec: KernelSpec, arch: Arch, sources: Sources) -> str:
    """Digest of sources, includes, defines, options, target and package version."""
    parts = [source_digest(spec, sources), str(arch), *compile_options(spec, arch), __version__]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class CacheEntry:
    """A cached binary.

    Attributes
    ----------
    kernel : str
        Its name.
    arch : str
        Target of the binary; differs from the one it was asked for if it is PTX.
    ptx : bool
        True for PTX.
    nvrtc_version : (major, minor)
        What compiled it.
    options : tuple of str
        Compiler options.
    log : str
        Compiler log.
    image : bytes
        The binary.
    """

    kernel: str
    arch: str
    ptx: bool
    nvrtc_version: tuple[int, int]
    options: tuple[str, ...]
    log: str
    image: bytes

    @classmethod
    def of(cls, spec: KernelSpec, result: CompileResult) -> CacheEntry:
        """The entry for a fresh compilation."""
        return cls(spec.name, result.arch, result.ptx, result.nvrtc_version, result.options, result.log, result.cubin)

    def encode(self) -> bytes:
        """The file."""
        header = {
            "kernel": self.kernel,
            "arch": self.arch,
            "ptx": self.ptx,
            "nvrtc": list(self.nvrtc_version),
            "options": list(self.options),
            "log": self.log,
        }
        body = json.dumps(header).encode() + b"\n" + self.image
        return _MAGIC + b" " + hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def decode(cls, data: bytes) -> CacheEntry:
        """Read a file. Raises ValueError if it is damaged."""
        first, _, body = data.partition(b"\n")
        magic, _, digest = first.partition(b" ")
        if magic != _MAGIC:
            raise ValueError("it does not begin like a kernel")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ValueError("its checksum is wrong")
        header, _, image = body.partition(b"\n")
        values = json.loads(header)
        major, minor = values["nvrtc"]
        return cls(
            values["kernel"],
            values["arch"],
            values["ptx"],
            (major, minor),
            tuple(values["options"]),
            values["log"],
            image,
        )


def _warn_of(refusal: str) -> None:
    log.warn_once(
        f"kernel cache: {refusal}: kernels compiled at run time are kept in memory only. "
        "What to do: chmod go-w, or set OMNIATTN_CACHE_DIR to a folder that is yours alone"
    )


class KernelCache:
    """The cache: a folder, and what this process could not write there.

    Parameters
    ----------
    folder : Path or None
        Where the files are; None: memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, CacheEntry] = {}
        self._lock = threading.Lock()
        self._swept = False

    def find(self, key: str, kernel: str) -> Iterator[tuple[CacheEntry | None, str]]:
        """Entries of ``key``, by the newest NVRTC first.

        Parameters
        ----------
        key : str
            From `cache_key`.
        kernel : str
            Name that the entries must have.

        Yields
        ------
        (CacheEntry, "") or (None, reason)
            The reason says why a file cannot be used, or that there is none.
        """
        with self._lock:
            kept = self._memory.get(key)
        if kept is not None:
            yield kept, ""
        refusal = self.refusal(key)
        if refusal:
            _warn_of(refusal)
        files = [] if refusal else self._files(key)
        missing = True
        for path in files:
            try:
                entry = CacheEntry.decode(read_own(path))
                if entry.kernel != kernel:
                    raise ValueError(f"it holds kernel {entry.kernel!r}")
            except FileNotFoundError:
                continue
            except OSError as error:
                found: tuple[CacheEntry | None, str] = None, f"{path} cannot be read ({error.strerror or error})"
            except (ValueError, KeyError, TypeError) as error:
                found = None, f"{path} is damaged ({error})"
                log.get().warning("kernel cache: %s; it is removed", found[1])
                remove(path)
            else:
                found = entry, ""
            missing = False
            yield found
        if missing and kept is None:
            yield None, refusal or ("there is no cache folder" if self.folder is None else f"not in {self.folder}")

    def refusal(self, key: str = "") -> str:
        """Why the folder (and that of ``key`` in it) must not be used; empty where it may be, or does not exist yet."""
        if self.folder is None:
            return ""
        return distrust(self.folder) or (distrust(self.folder / key[:2]) if key else "")

    def put(self, key: str, entry: CacheEntry) -> Path | None:
        """Keep ``entry``: on disk, else in memory. Returns the file, or None if it could not be written."""
        if self.folder is not None:
            try:
                refusal = self._make_folders(key)
                if not refusal:
                    return self._write(key, entry)
                _warn_of(refusal)
            except OSError as error:
                log.warn_once(
                    f"kernel cache {self.folder} cannot be written ({error.strerror or error}): "
                    "kernels are kept in memory, and compiled again by the next process"
                )
        with self._lock:
            self._memory[key] = entry
        return None

    def lock_file(self, key: str) -> Path | None:
        """The file to lock while ``key`` is compiled, see `once`; None where the folder cannot or must not be used."""
        if self.folder is None:
            return None
        try:
            refusal = self._make_folders(key)
        except OSError:
            return None  # `put` says so
        return None if refusal else self.folder / key[:2] / _LOCK

    def entries(self) -> list[Path]:
        """All files of the cache."""
        if self.folder is None or not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.glob("??/*") if _NAME.fullmatch(path.name))

    def _files(self, key: str) -> list[Path]:
        """Files of ``key``, the newest NVRTC first."""
        if self.folder is None:
            return []
        try:
            names = os.listdir(self.folder / key[:2])
        except OSError:
            # Missing or unreadable alike: `find` reports that the key is not there.
            return []
        found = []
        for name in names:
            match = _NAME.fullmatch(name)
            if match and match[1] == key:
                found.append(((int(match[2]), int(match[3])), self.folder / key[:2] / name))
        return [path for _, path in sorted(found, reverse=True)]

    def _make_folders(self, key: str) -> str:
        """Make the folders that ``key`` is kept in; returns why they must not be used."""
        assert self.folder is not None
        # One after the other, because mkdir's mode does not reach parents.
        return make_folder(self.folder) or make_folder(self.folder / key[:2])

    def _write(self, key: str, entry: CacheEntry) -> Path:
        assert self.folder is not None
        parent = self.folder / key[:2]
        target = parent / f"{key}.nvrtc{entry.nvrtc_version[0]}.{entry.nvrtc_version[1]}"
        self._sweep()
        write_whole(target, entry.encode())
        return target

    def _sweep(self) -> None:
        """Remove what processes that were killed while they wrote have left; once per process."""
        if self._swept or self.folder is None:
            return
        self._swept = True
        limit = time.time() - _ABANDONED_SECONDS
        for path in self.folder.glob(f"??/{WRITING}*"):
            try:
                abandoned = path.stat().st_mtime < limit
            except OSError:
                continue  # its writer has just renamed it
            if abandoned:
                remove(path)


_caches: dict[Path | None, KernelCache] = {}


def get_cache() -> KernelCache:
    """The cache of the folder that the environment names now."""
    return _caches.setdefault(folder := default_folder(), KernelCache(folder))


def reset() -> None:
    """Forget what is in memory."""
    _caches.clear()
