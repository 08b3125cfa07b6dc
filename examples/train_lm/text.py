"""Text that every machine with Python has: the sources of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

#: Folders of the standard library that are left out: installed packages are others' on every machine.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3", "test", "tests"})


def read_text(folder: Path | None = None, most: int = 64 << 20) -> npt.NDArray[np.uint8]:
    """All Python files below a folder, one behind the other, in the order of their names.

    Parameters
    ----------
    folder : Path, optional
        That of the standard library unless given.
    most : int
        Bytes, at most.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    found, size = [], 0
    for path in sorted(folder.glob("**/*.py")):
        if _LEFT_OUT.intersection(path.relative_to(folder).parts):
            continue
        found.append(path.read_bytes())
        size += len(found[-1])
        if size >= most:
            break
    text = np.frombuffer(b"\n".join(found), dtype=np.uint8)[:most]
    if not text.size:
        raise FileNotFoundError(f"no Python files below {folder}")
    return text


def batches(text: npt.NDArray[np.uint8], steps: int, batch: int, context: int, seed: int) -> npt.NDArray[np.int64]:
    """(steps, batch, context + 1) tokens from places that the seed alone decides."""
    if text.size <= context:
        raise ValueError(f"a text of {text.size} bytes is too short for a context of {context}")
    starts = np.random.default_rng(seed).integers(0, text.size - context, (steps, batch))
    return text[starts[..., None] + np.arange(context + 1)].astype(np.int64)
