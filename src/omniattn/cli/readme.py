"""The generated parts of the README: made from the registry and the table of environment variables."""

from __future__ import annotations

import re
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
        A pair of markers is missing.
    """
    for name, table in tables().items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ArgumentError("--write", f"a file with {begin} and {end} once each", source)
        replacement = f"{begin}\n{table}\n{end}"
        text = pattern.sub(lambda _, new=replacement: new, text)  # type: ignore[misc]
    return text


def write(path: Path) -> None:
    """Renew the tables of the file at ``path``; ArgumentError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError("--write", "a file that can be read", f"{path} ({error.strerror})") from error
    path.write_text(filled(text, source=str(path)), encoding="utf-8")
