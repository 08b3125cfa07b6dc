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
    source = "One NVIDIA H200, driver 580, 2026-11-27; medians of 15"  # may be left out

A table with a source may stand on a page, as one of its results (`build_tools.pages`). The site shows every
file as a page (`build_tools.site`).
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("docs/performance/records")
#: What a source names: the device, and the day of the measurement.
SOURCE = re.compile(r"NVIDIA \w+.*\b20\d\d-\d\d-\d\d\b")
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
        that has not as many cells as there are columns, a source without device or day.
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
            if set(part) - {"source"} != {"columns", "rows"} and set(part) != {"text"}:
                raise RecordError(f"{place}: a part is text, or columns and rows; received {sorted(part)}")
            if "source" in part and not SOURCE.search(str(part["source"])):
                raise RecordError(f"{place}: expected a source with device and day, received {part['source']!r}")
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
                yield table(part)


def table(part: dict[str, Any]) -> str:
    """A part with columns and rows in Markdown, its source below it."""
    rule = "|" + "---|" * len(part["columns"])
    rows = [f"| {' | '.join(row)} |" for row in [part["columns"], *part["rows"]]]
    text = "\n".join([rows[0], rule, *rows[1:]])
    if "source" not in part:
        return text
    source = f"<sub>{part['source'].removesuffix('.')}.</sub>"
    return f"{text}\n\n{textwrap.fill(source, 100, break_long_words=False, break_on_hyphens=False)}"


def result(name: str, title: str, number: int, root: Path = ROOT) -> str:
    """The ``number``-th table, from 1, of the records ``title`` of a file, for a page of docs/performance.

    Raises
    ------
    RecordError
        There is no such file, record or table; the table has no source; or it has links, which are relative to the
        folder of the records.
    """
    path = root / FOLDER / f"{name}.toml"
    if not path.exists():
        raise RecordError(f"no records {name!r}")
    parts = [part for record in load(path) if record.get("title") == title for part in record.get("part", [])]
    tables = [part for part in parts if "rows" in part]
    if not 1 <= number <= len(tables):
        raise RecordError(f"{path.name}, {title!r}: no table {number} of {len(tables)}")
    part = tables[number - 1]
    if "source" not in part:
        raise RecordError(f"{path.name}, {title!r}, table {number}: expected a source")
    text = table(part)
    if "](" in text:
        raise RecordError(f"{path.name}, {title!r}, table {number}: expected no links")
    return text


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
