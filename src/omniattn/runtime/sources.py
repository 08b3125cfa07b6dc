"""Kernel sources: a file with all that it includes, and the digest that says whether a binary was compiled from it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CompileError

if TYPE_CHECKING:
    from ..registry import KernelSpec

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(<[^>\n]*>|\"[^\"\n]*\")", re.MULTILINE)
_BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


class Sources:
    """Kernel sources below one folder, read once.

    Parameters
    ----------
    root : Path
        Folder that ``KernelSpec.source`` and every ``#include "..."`` are relative to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._text: dict[str, str] = {}
        self._closure: dict[str, dict[str, str]] = {}

    def text(self, name: str) -> str:
        """Text of the file ``name``, line ends as ``\\n``.

        Raises
        ------
        CompileError
            There is no such file.
        """
        if name not in self._text:
            try:
                self._text[name] = (self.root / name).read_text(encoding="utf-8")
            except OSError as error:
                raise CompileError(
                    f"kernel source {name!r} cannot be read below {self.root} ({error.strerror or error}). "
                    "What to do: reinstall omniattn"
                ) from error
        return self._text[name]

    def closure(self, name: str) -> dict[str, str]:
        """``name`` and everything that it includes, directly or not: ``{name: text}``, ``name`` first, the rest sorted.

        An include under ``#if`` counts whatever the condition.

        Raises
        ------
        CompileError
            A file is missing, or includes a system header, which no GPU user's machine need have.
        """
        if name not in self._closure:
            found = {name: self.text(name)}
            pending = [name]
            while pending:
                current = pending.pop()
                for target in _INCLUDE.findall(_BLOCK_COMMENT.sub("", found[current])):
                    if target[0] == "<":
                        raise CompileError(
                            f"{current} includes {target}: kernels include only files of the kernels folder, by quotes"
                        )
                    header = target[1:-1]
                    if header not in found:
                        found[header] = self.text(header)
                        pending.append(header)
            rest = sorted(key for key in found if key != name)
            self._closure[name] = {key: found[key] for key in (name, *rest)}
        return self._closure[name]

    def of(self, spec: KernelSpec) -> dict[str, str]:
        """The files of a kernel: `closure` of its source, and what was generated in place of some of them."""
        return self.closure(spec.source) | dict(spec.generated)


def source_digest(spec: KernelSpec, sources: Sources) -> str:
    """sha256 (hex) of everything that goes into a kernel but options: its sources, includes, defines and symbol.

    Parameters
    ----------
    spec : KernelSpec
        The kernel.
    sources : Sources
        Where its files are.
    """
    digest = hashlib.sha256()
    for name, text in sources.of(spec).items():
        digest.update(f"{name}\0{len(text)}\0{text}\0".encode())
    for key, value in spec.defines:
        digest.update(f"-D{key}={value}\0".encode())
    digest.update(spec.symbol.encode())
    return digest.hexdigest()
