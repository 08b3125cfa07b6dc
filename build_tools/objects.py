"""The incremental store of compiled objects, and the file operations that make it safe to share and to interrupt."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """One cubin, its manifest entry, the compiler's log."""

    entry: Mapping[str, Any]
    cubin: bytes
    log: str


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` so that ``path`` holds all of it or is left as it was."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(name, 0o644)  # mkstemp makes private files; these travel into wheels
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold ``path`` as a lock between processes; the system lets go of it even if the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        if sys.platform == "win32":
            import msvcrt

            locked = False
            while not locked:
                # LK_LOCK raises after ten tries, one a second; a build takes longer.
                with contextlib.suppress(OSError):
                    msvcrt.locking(stream.fileno(), msvcrt.LK_LOCK, 1)
                    locked = True
        else:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


class Store:
    """Compiled objects by content key. A half-written one is never seen: files appear by rename, the cubin first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Compiled | None:
        """Return the object, or None if it is not there or does not match its checksum."""
        try:
            record = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            cubin = (self.folder / f"{key}.cubin").read_bytes()
        except (OSError, ValueError):
            return None
        if hashlib.sha256(cubin).hexdigest() != record["entry"]["sha256"]:
            return None
        return Compiled(record["entry"], cubin, record["log"])

    def put(self, key: str, built: Compiled) -> None:
        """Keep a compiled object."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / f"{key}.cubin", built.cubin)
        write_atomic(self.folder / f"{key}.json", json.dumps({"entry": built.entry, "log": built.log}).encode())
