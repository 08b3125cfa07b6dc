"""Generated parts of documents: made from the registry and the table of environment variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from omniattn.bench.report import markdown_table
from omniattn.cli import support
from omniattn.errors import ArgumentError
from omniattn.runtime import env


def tables() -> dict[str, str]:
    """Name of the marker to Markdown text."""
    return {"support-table": support.readme_table(), "environment-table": environment_table()}


def environment_table() -> str:
    """All environment variables, in Markdown."""
    rows = [[f"`{v.name}`", v.meaning, v.values] for v in env.VARIABLES]
    return markdown_table(["variable", "meaning", "values"], rows)


def filled(text: str, *, source: str = "README.md") -> str:
    """``text`` with every generated table put between its markers ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``.

    Raises
    ------
    ArgumentError
        No marker is there, or one without its other half, or one twice.
    """
    known = tables()
    begun = [name for name in known if f"<!-- {name}:begin -->" in text or f"<!-- {name}:end -->" in text]
    if not begun:
        pairs = " or ".join(f"<!-- {name}:begin --> and <!-- {name}:end -->" for name in known)
        raise ArgumentError("--write", f"a file with {pairs}", source)
    for name in begun:
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if (text.count(begin), text.count(end), len(pattern.findall(text))) != (1, 1, 1):
            raise ArgumentError("--write", f"a file with {begin} and {end} once each", source)
        replacement = f"{begin}\n{known[name]}\n{end}"
        text = pattern.sub(lambda _, new=replacement: new, text)  # type: ignore[misc]
    return text


def write(paths: Sequence[Path]) -> None:
    """Renew the tables of the files; ArgumentError if one cannot be read or has no markers: then none is written."""
    made = {}
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ArgumentError("--write", "a file that can be read", f"{path} ({error.strerror})") from error
        made[path] = filled(text, source=str(path))
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
