"""The folder of the disk cache: where it is, whose it must be, how files come into it.

Its files are run on the GPU with this user's rights: nobody else may be able to put one there. Owner and mode decide on
POSIX systems only; on Windows they say nothing, and the default folder is private.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from pathlib import Path

from . import env, log

#: How names of files begin that are being written.
WRITING = ".writing-"
#: Whether files have owners and modes that say who may write.
_HAS_OWNERS = hasattr(os, "geteuid")


def default_folder() -> Path | None:
    """OMNIATTN_CACHE_DIR, else ``omniattn`` in the platform's cache folder; None if the user has no home."""
    chosen = env.get("OMNIATTN_CACHE_DIR")
    if chosen is not None:
        return Path(chosen)
    try:
        if sys.platform == "win32":
            local = os.environ.get("LOCALAPPDATA")
            return (Path(local) if local else Path.home() / "AppData" / "Local") / "omniattn" / "Cache"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "omniattn"
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification has relative paths ignored.
        return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "omniattn"
    except RuntimeError as error:
        log.warn_once(f"no home folder ({error}): kernels compiled at run time are kept in memory only")
        return None


def _foreign(status: os.stat_result) -> str:
    """Why what has this status may hold what another user put there; empty if it may not."""
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to user {os.geteuid()} of this process"
    mode = stat.S_IMODE(status.st_mode)
    return f"can be written by others (mode {mode:o})" if mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def distrust(folder: Path) -> str:
    """Why a folder must not be used; empty if it may be, or is missing."""
    if not _HAS_OWNERS:
        return ""
    try:
        reason = _foreign(folder.stat())
    except OSError:
        return ""  # nothing can be read from it either
    return f"{folder} {reason}, and is not used" if reason else ""


def read_own(path: Path, offset: int = 0, size: int = -1) -> bytes:
    """A file's content, or part of it. Raises OSError, also where another user may have written it."""
    with path.open("rb") as file:
        reason = _foreign(os.fstat(file.fileno())) if _HAS_OWNERS else ""
        if reason:
            raise PermissionError(errno.EPERM, f"it {reason}")
        file.seek(offset)
        return file.read(size)


def make_folder(folder: Path) -> str:
    """Make a folder of the cache, private; returns why it must not be used. Raises OSError where it cannot be made."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return distrust(folder)


def write_whole(target: Path, data: bytes) -> None:
    """Write a file so that a reader sees all of it or none. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(prefix=WRITING, dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError:
        remove(Path(temporary))
        # Windows refuses to replace a file that another process is reading: then it is there already.
        if not (sys.platform == "win32" and target.exists()):
            raise


def remove(path: Path) -> None:
    """Remove a file of the cache, if it is there and can be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.get().info("kernel cache: %s cannot be removed (%s)", path, error)
