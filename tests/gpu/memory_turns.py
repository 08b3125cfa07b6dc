"""Whose turn it is to fill the GPU's memory: tests run beside each other, but for those that need most of it.

The processes of pytest-xdist share the machine's GPUs; each uses the first one that it sees. A test marked ``alone``
has that GPU for itself: it waits until no other test runs there, and no other begins before it ends. What runs between
tests, such as processes that a module's fixture started, is waited for as well (`in_background`).

Three empty files of this user are locked by ``flock``, which the system lets go of when a process ends:

=================  ==========================  =======================================================================
file               locked for itself by        shared by
=================  ==========================  =======================================================================
``background``     tests that run alone        fixtures, as long as what they started runs
``gate``           tests that run alone        others, for the moment in which they enter: a stream of them would keep
                                               one that wants to be alone waiting for ever
``gpu``            tests that run alone        others, until they end
=================  ==========================  =======================================================================

They are taken in this order and nobody waits for one that comes before one that he has, so nobody waits for ever.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


def default_folder() -> Path:
    """One for all processes of this user, of whatever run, that use the same GPU."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    return Path(tempfile.gettempdir()) / f"omniattn-gpu-tests-{os.getuid()}-{gpu}"


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may still have a copy of the file


#: As many as run in this process.
_background: list[None] = []


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Run the block while nothing else uses the GPU."""
    assert not _background, "in_background() of this process, which would wait for itself"
    with ExitStack() as stack:
        for name in ("background", "gate", "gpu"):
            stack.enter_context(_locked(folder / name, fcntl.LOCK_EX))
        yield


@contextmanager
def beside_others(folder: Path) -> Iterator[None]:
    """Run the block while nobody runs alone."""
    with ExitStack() as stack:
        with _locked(folder / "gate", fcntl.LOCK_SH):
            stack.enter_context(_locked(folder / "gpu", fcntl.LOCK_SH))
        yield


@contextmanager
def in_background(folder: Path | None = None) -> Iterator[None]:
    """Run the block, in a fixture of a module, while nobody runs alone; tests may run in it."""
    with _locked((folder or default_folder()) / "background", fcntl.LOCK_SH):
        _background.append(None)
        try:
            yield
        finally:
            _background.pop()


class Turn:
    """The turn of this process.

    Parameters
    ----------
    folder : Path, optional
        Where the files are; else that of the GPU in use, asked for with each turn: the process may yet be given one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._stack: ExitStack | None = None
        self.is_alone = False

    def take(self, *, by_itself: bool) -> None:
        """Wait for the turn of a test that runs by itself, or of another; one that is there already is kept."""
        if self._stack is not None and self.is_alone == by_itself:
            return
        self.end()
        stack = ExitStack()
        stack.enter_context((alone if by_itself else beside_others)(self._folder or default_folder()))
        self._stack, self.is_alone = stack, by_itself

    def end(self) -> None:
        """Let others have it."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()
