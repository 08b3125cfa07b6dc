"""Work that several processes need is done by one of them, while the others wait for its result.

The lock only spares work: whoever cannot have it does the work too. Nothing here raises, and nobody waits forever.

It is ``flock`` on an empty file, which the system lets go of when its holder dies, however it dies. The cache has one
in each of its folders, at most 256 in all, and none is ever removed: removing a lock file opens a gap between those
that have opened the old one and those that make a new one. Two kernels share a lock if their keys begin with the same
two digits, once in 256 pairs; whoever then wants the second waits for the first, and compiles it for itself. Windows
has no ``flock``: there nobody waits.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from . import log

T = TypeVar("T")

#: For how long others may have the lock: many times what the slowest kernel takes to compile.
MAX_SECONDS = 120.0
#: Between two attempts. Waiting in the system would have no limit of time.
_PAUSE_SECONDS = 0.02


class _Lock:
    """An open lock file; its descriptor is -1 once it is closed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.waited = False
        _open.add(self)

    def acquire(self, seconds: float, what: str) -> bool:
        """Lock the file; False if others have it for too long. Raises OSError where files cannot be locked."""
        if sys.platform == "win32":
            return False
        import fcntl

        limit = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= limit:
                    if self.waited:
                        log.get().warning("%s: others are at it for more than %g s", what, seconds)
                    return False
                if not self.waited:
                    self.waited = True
                    log.get().info("%s: another process is at it; waiting for up to %g s", what, seconds)
                time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Let go of the lock, if it is held, and of the file."""
        _open.discard(self)
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0 or sys.platform == "win32":
            return
        import fcntl

        # Said, and not left to closing: a child that was forked a moment ago still has a copy of the descriptor.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(descriptor)


_open: set[_Lock] = set()


def _open_lock(path: Path | None, what: str) -> _Lock | None:
    if path is None or sys.platform == "win32":
        return None
    try:
        # For writing, because NFS locks nothing else.
        return _Lock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        log.get().debug("%s: no lock (%s)", what, error)
        return None


def once(
    path: Path | None,
    find: Callable[[], T | None],
    make: Callable[[], T],
    what: str,
    seconds: float | None = None,
) -> T:
    """What ``find`` finds, else what ``make`` makes, where others who do the same for the same file wait for it.

    Parameters
    ----------
    path : Path or None
        The lock file, made if it is missing; None: there can be none.
    find : callable
        Looks for what another process may have made; None if it is not there. Called with the lock.
    make : callable
        Does the work, and puts the result where ``find`` finds it.
    what : str
        The work, for the log.
    seconds : float, optional
        For how long to wait for others; default: `MAX_SECONDS`.
    """
    lock = _open_lock(path, what)
    try:
        if lock is not None:
            try:
                lock.acquire(MAX_SECONDS if seconds is None else seconds, what)
            except OSError as error:
                log.get().debug("%s: %s cannot be locked (%s)", what, path, error)
        found = find()
        if found is not None:
            return found
        # Whoever had the lock has failed, or cannot write: those who wait too shall not do the work one by one.
        if lock is not None and lock.waited:
            lock.close()
        return make()
    finally:
        if lock is not None:
            lock.close()


def _after_fork_in_child() -> None:
    # A child with these open would keep the lock of a parent that dies, and could let go of that of one that lives.
    for lock in _open:
        with suppress(OSError):
            os.close(lock.descriptor)
        lock.descriptor = -1
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
