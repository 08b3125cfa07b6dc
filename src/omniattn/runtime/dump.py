"""OMNIATTN_DUMP: what a loaded kernel was made of, as files to look at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CompileError
from . import env, log
from .store import get_store

if TYPE_CHECKING:
    from ..registry import KernelSpec


def dump(spec: KernelSpec, arch: str, origin: str, image: bytes, options: tuple[str, ...], text: str) -> Path | None:
    """Write sources, options, binary and compiler log below OMNIATTN_DUMP, if that is set.

    They go to ``<name>-<arch>-<origin>/``. A failure to write is logged: it must not stop the computation.

    Parameters
    ----------
    spec : KernelSpec
        The kernel.
    arch : str
        Target of the binary.
    origin : str
        Where it came from, or ``"failed"``.
    image : bytes
        The binary; empty if there is none.
    options : tuple of str
        Compiler options.
    text : str
        Compiler log.
    """
    root = env.get("OMNIATTN_DUMP")
    if root is None:
        return None
    folder = Path(root) / re.sub(r"[^\w.-]+", "_", f"{spec.name}-{arch}-{origin}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "options.txt").write_text("\n".join(options) + "\n", encoding="utf-8")
        (folder / "log.txt").write_text(text, encoding="utf-8")
        if image:
            suffix = "cubin" if image[:4] == b"\x7fELF" else "ptx"
            (folder / f"{spec.name}.{suffix}").write_bytes(image)
        for name, source in get_store().sources.of(spec).items():
            path = folder / "src" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
    except (OSError, CompileError) as error:
        log.get().warning("OMNIATTN_DUMP: %s: %s", folder, error)
        return None
    log.get().info("wrote %s", folder)
    return folder
