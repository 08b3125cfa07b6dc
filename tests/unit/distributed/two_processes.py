"""A program of two processes that talk by gloo, and what they said."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from pathlib import Path


def in_two_processes(program: Path, folder: Path, *arguments: str) -> str:
    """What ``python PROGRAM STORE ARGUMENTS`` wrote to its standard output; it has to end with 0.

    gloo runs threads of its own, in which an error of the connection ends the process by SIGABRT. That was seen once in
    hundreds of runs, on a machine with more work than cores. Such a run is repeated, once, and its report is a warning.
    """
    for store in ("store", "again"):
        command = [sys.executable, str(program), str(folder / store), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if abs(done.returncode) != signal.SIGABRT or store == "again":
            break
        warnings.warn(f"a process was aborted: {done.stderr[:6000]}", stacklevel=2)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[:4000]} [...] {done.stderr[-3000:]}"
    return done.stdout
