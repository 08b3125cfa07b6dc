"""The tuning records of docs/performance, kept as data: what was measured once, on a day that the record names.

    python -m build_tools.tuning_records                  # the names
    python -m build_tools.tuning_records attn_bwd_sm90    # one, as a page of Markdown

``docs/performance/records/NAME.toml`` belongs to the page ``docs/performance/NAME.md``. It holds entries

    [[record]]
    title = "Versions"             # a heading; a record without one continues the one before
    level = 3                      # of the heading; 2 where it is not given

    [[record.part]]
    text = '''
    Markdown, wrapped at 100 columns; links are relative to the folder of the file.
    '''

    [[record.part]]
    columns = ["version", "prediction", "outcome"]
    rows = [
      ["v1", "1.10x", "1.08x"],
    ]

The site shows every file as a page (`build_tools.site`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("docs/performance/records")
INTRODUCTION = """\
Written once, on the day that each record names, and not renewed: versions with prediction and
outcome, measurements, counters, what did not pay. What holds today stands on the page of the
kernel: [{name}](../{page}).
"""


class RecordError(ValueError):
    """A file that does not have the form above."""


def files(root: Path = ROOT) -> list[Path]:
    """Every file of records."""
    return sorted((root / FOLDER).glob("*.toml"))


def owner(path: Path) -> str:
    """File name of the page that the records belong to."""
    return "README.md" if path.stem == "overall" else f"{path.stem}.md"


def load(path: Path) -> list[dict[str, Any]]:
    """The records of a file.

    Raises
    ------
    RecordError
        Names file, record and what is wrong: a key that is not known, a part that is neither text nor table, a row
        that has not as many cells as there are columns.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # hatchling itself depends on tomli there
        import tomli as tomllib
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    if set(document) != {"record"}:
        raise RecordError(f"{path.name}: expected [[record]] alone, received {sorted(document)}")
    records: list[dict[str, Any]] = document["record"]
    for record in records:
        place = f"{path.name}, {record.get('title', 'a record without a title')!r}"
        if not set(record) <= {"title", "level", "part"} or not 2 <= record.get("level", 2) <= 4:
            raise RecordError(f"{place}: expected title, level from 2 to 4, part; received {sorted(record)}")
        for part in record.get("part", []):
            if set(part) not in ({"text"}, {"columns", "rows"}):
                raise RecordError(f"{place}: a part is text, or columns and rows; received {sorted(part)}")
            for row in part.get("rows", []):
                if len(row) != len(part["columns"]) or not all(isinstance(cell, str) for cell in row):
                    raise RecordError(f"{place}: expected {len(part['columns'])} strings, received {row}")
    return records


def blocks(records: list[dict[str, Any]]) -> Iterator[str]:
    """Headings, texts and tables in Markdown."""
    for record in records:
        if "title" in record:
            yield f"{'#' * record.get('level', 2)} {record['title']}"
        for part in record.get("part", []):
            if "text" in part:
                yield part["text"].strip("\n")
            else:
                rule = "|" + "---|" * len(part["columns"])
                rows = [f"| {' | '.join(row)} |" for row in [part["columns"], *part["rows"]]]
                yield "\n".join([rows[0], rule, *rows[1:]])


def page(path: Path) -> str:
    """A file of records as a page of Markdown, which may stand beside the file."""
    name = owner(path)
    head = [f"# Records: {path.stem}", INTRODUCTION.format(name=name.removesuffix(".md"), page=name).strip()]
    return "\n\n".join([*head, *blocks(load(path))]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    names = sys.argv[1:] if arguments is None else arguments
    known = {path.stem: path for path in files()}
    if not names:
        print("\n".join(known))
        return 0
    for name in names:
        if name not in known:
            print(f"no records {name!r}; there are {', '.join(known)}", file=sys.stderr)
            return 2
        print(page(known[name]), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
