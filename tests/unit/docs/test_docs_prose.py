"""How the documents are written: prose wrapped at 100 columns, the field's words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from build_tools import tuning_records

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "wheels/*.md", "src/**/*.md")
    for path in ROOT.glob(pattern)
)
RECORDS = tuning_records.files()
COLUMNS = 100


def written(page: Path) -> str:
    """Text of a page, or of the page that a file of records makes."""
    return tuning_records.page(page) if page in RECORDS else page.read_text(encoding="utf-8")


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


def long_lines(page: Path) -> list[int]:
    """Numbers of the lines that are too long: headings, markers and generated text as well, all but code and tables."""
    found, fenced = [], False
    for number, line in enumerate(written(page).splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        # One word, such as a long link, cannot be broken.
        if len(line) > COLUMNS and not (fenced or line.startswith("|") or len(line.split()) == 1):
            found.append(number)
    return found


@pytest.mark.parametrize("page", PAGES + RECORDS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_prose_is_wrapped(page: Path) -> None:
    assert long_lines(page) == []


@pytest.mark.parametrize("page", PAGES + RECORDS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_words_are_the_fields(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", written(page), flags=re.M | re.DOTALL)
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
    assert long_lines(page) == [1, 10, 12]
    assert any(re.search(rf"\b(?:{word})\b", "Heads take turns") for word in WORDS)
