"""Packs of cubins: opened once on a machine, and kept open in the disk cache.

Opening a pack takes milliseconds, the largest a third of a second. Its content is then kept under its sha256 in the
folder ``opened`` of the disk cache, and the next process reads the few kilobytes of the cubin that it wants. Without a
folder that can be written the pack is opened again by every process and kernel. What is read is checked against the
manifest by the caller.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from . import log
from .folder import WRITING, default_folder, distrust, make_folder, read_own, write_whole

#: Packs of older versions of the package would pile up. One that is still used is opened again.
_OLD_SECONDS = 90 * 24 * 3600
#: A file takes milliseconds to write: what is left of one is of a process that was killed.
_ABANDONED_SECONDS = 3600


def _folder() -> Path | None:
    root = default_folder()
    return None if root is None else root / "opened"


def part(sha256: str, offset: int, size: int) -> bytes | None:
    """Some bytes of an opened pack, fewer where it ends; None where it is not kept."""
    folder = _folder()
    if folder is None or distrust(folder.parent) or distrust(folder):
        return None
    try:
        return read_own(folder / sha256, offset, size)
    except OSError:
        return None  # missing, or written by somebody else


def open_pack(path: Path, size: int) -> bytes | str:
    """The content of a pack; text where it cannot be had, which says why.

    Parameters
    ----------
    path : Path
        The file.
    size : int
        Bytes of the content, as the manifest says: a file that expands further is not followed.
    """
    try:
        import lzma
    except ImportError as error:
        return f"{path.name} cannot be opened: this Python was built without the module lzma ({error})"
    started = time.perf_counter()
    try:
        data = path.read_bytes()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error})"
    try:
        # Our packs are written with a dictionary of at most twice their content.
        opener = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=2 * size + (1 << 20))
        content = opener.decompress(data, max_length=size)
    except (lzma.LZMAError, EOFError) as error:
        return f"damaged: {path} cannot be opened ({error})"
    if len(content) != size:
        return f"damaged: {path} ends after {len(content)} of {size} bytes"
    log.get().info("opened %s: %d bytes in %.1f ms", path.name, size, (time.perf_counter() - started) * 1e3)
    return content


def keep(sha256: str, content: bytes) -> None:
    """Keep an opened pack for later processes, if the cache's folder can be written."""
    folder = _folder()
    if folder is None:
        return
    try:
        refusal = make_folder(folder.parent) or make_folder(folder)
        if refusal:
            log.get().info("opened packs are not kept: %s", refusal)
            return
        if not (folder / sha256).exists():
            _remove_old(folder)
        write_whole(folder / sha256, content)
    except OSError as error:
        log.get().info("opened packs are not kept: %s (%s)", folder, error.strerror or error)


def _remove_old(folder: Path) -> None:
    """Remove packs that were opened long ago, and what killed processes have left."""
    now = time.time()
    for entry in os.scandir(folder):
        try:
            limit = _ABANDONED_SECONDS if entry.name.startswith(WRITING) else _OLD_SECONDS
            if entry.stat().st_mtime < now - limit:
                os.unlink(entry.path)
        except OSError as error:
            log.get().debug("%s stays: %s", entry.path, error)
