"""How the documents are written: prose wrapped at 100 columns, the field's words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "wheels/*.md", "src/**/*.md")
    for path in ROOT.glob(pattern)
)
COLUMNS = 100

#: Words of our own making, and what the field says instead.
WORDS = {
    r"granules?": "group, tile",
    r"pieces?": "split, work item, chunk, tile",
    r"(?:take|takes|taking|took) turns": "alternate, interleave",
    r"(?:a|its|the|his|her|these|those|without|no|by) turns?": "ping-pong order, pass",
    r"eights": "8 rows",
    r"retires?|retired": "release",
    r"short way|long way|shortest way": "fast path, slow path",
    r"once more": "again, a second time",
    r"lift(?:s|ed)?": "raise, add",
    r"even work": "balanced work",
    r"looked at|looks at": "read, checked, depends on",
}


def is_prose(page: Path) -> list[tuple[int, str]]:
    """Lines of a page with their numbers, without headings, code blocks, tables and generated parts."""
    kept, fenced, generated = [], False, False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif re.match(r"<!-- (table: |[\w-]+:begin)", line):
            generated = True
        elif re.match(r"<!-- (end|[\w-]+:end) -->", line):
            generated = False
        elif not (fenced or generated or line.startswith(("|", "#"))):
            kept.append((number, re.sub(r"<!--.*?-->", "", line)))
    return kept


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_prose_is_wrapped(page: Path) -> None:
    # A line that is one word, such as a long link, cannot be broken.
    assert [number for number, line in is_prose(page) if len(line) > COLUMNS and len(line.split()) > 1] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_words_are_the_fields(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.DOTALL)
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", text)
    found = {
        f"{match.group()!r}: say {better}"
        for word, better in WORDS.items()
        for match in re.finditer(rf"\b(?:{word})\b", text, re.IGNORECASE)
    }
    assert sorted(found) == []


def test_the_rules_find_what_they_forbid(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    long = "word " * 21
    page.write_text(
        f"{long}\n\n| {long} |\n|---|\n\n```\n{long}\n```\n<!-- table: x -->\n{long}\n<!-- end -->\n{long}\n"
    )
    assert [number for number, line in is_prose(page) if len(line) > COLUMNS] == [1, 12]
    assert any(re.search(rf"\b(?:{word})\b", "Heads take turns") for word in WORDS)
