"""The tuning records as data: their form, and the pages made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_tools import site, tuning_records

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = """\
[[record]]

[[record.part]]
text = '''
On 2026-01-02.
'''

[[record]]
title = "Versions"

[[record.part]]
columns = ["version", "outcome"]
rows = [
  ["v1", "1.08 × `a \\\\| b`"],
]
source = "One NVIDIA H200, 2026-01-02; medians"

[[record]]
title = "v1"
level = 3

[[record.part]]
text = '''
See [versions](#versions).
'''
"""


def test_every_file_belongs_to_a_page_that_links_it() -> None:
    assert tuning_records.files()
    for path in tuning_records.files():
        page = ROOT / "docs/performance" / tuning_records.owner(path)
        assert f"](records/{path.name})" in page.read_text(encoding="utf-8"), page.name


def test_no_page_keeps_records_of_its_own() -> None:
    for page in (ROOT / "docs/performance").glob("*.md"):
        _, found, records = page.read_text(encoding="utf-8").partition("\n## Records\n")
        assert not found or ("\n|" not in records and len(records.split()) < 40), page.name


#: Lines of a page of docs/performance: what is longer belongs to the records.
PAGE_LINES = 200
PAGES = sorted((ROOT / "docs/performance").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= PAGE_LINES


def test_a_page_is_made(tmp_path: Path) -> None:
    path = tmp_path / "decode.toml"
    path.write_text(SAMPLE, encoding="utf-8")
    text = tuning_records.page(path)
    assert text.startswith("# Records: decode\n\nWritten once")
    assert "kernel: [decode](../decode.md).\n\nOn 2026-01-02.\n\n## Versions\n\n| version | outcome |\n" in text
    assert (
        "|---|---|\n| v1 | 1.08 × `a \\| b` |\n\n<sub>One NVIDIA H200, 2026-01-02; medians.</sub>\n\n### v1\n" in text
    )
    assert text.endswith("### v1\n\nSee [versions](#versions).\n")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[[record]]\ntitle", "[[entry]]\n[[record]]\ntitle", "record.. alone"),
        ("level = 3", "level = 5", "level from 2 to 4"),
        ("level = 3", "date = 3", "received .'date'"),
        ('"outcome"]', '"outcome", "why"]', "expected 3 strings"),
        ('["v1", "1.08', '["v1", 1.08, "', "expected 2 strings"),
        ("H200, 2026-01-02", "H200", "source with device and day"),
        ("One NVIDIA H200, ", "", "source with device and day"),
        ('source = "One NVIDIA H200, 2026-01-02; medians"', "source = 2026-01-02", "source with device and day"),
        ('columns = ["version", "outcome"]\n', "", "text, or columns and rows"),
        ("text = '''\nSee", "texts = '''\nSee", "text, or columns and rows"),
    ],
)
def test_a_wrong_file_is_an_error(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in SAMPLE
    path = tmp_path / "decode.toml"
    path.write_text(SAMPLE.replace(old, new), encoding="utf-8")
    with pytest.raises(tuning_records.RecordError, match=words):
        tuning_records.page(path)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuning_records.main([]) == 0
    assert "attn_fwd_sm90\n" in capsys.readouterr().out
    assert tuning_records.main(["attn_fwd_sm90"]) == 0
    assert capsys.readouterr().out == tuning_records.page(ROOT / tuning_records.FOLDER / "attn_fwd_sm90.toml")
    assert tuning_records.main(["nothing"]) == 2
    assert "no records 'nothing'; there are attn_bwd_sm80" in capsys.readouterr().err


def test_the_site_has_them_as_pages(tmp_path: Path) -> None:
    site.gather(tmp_path)
    text = (tmp_path / "docs/performance/attn_fwd_sm90.md").read_text(encoding="utf-8")
    assert "](records/attn_fwd_sm90.md)" in text
    assert (tmp_path / "docs/performance/records/attn_fwd_sm90.md").is_file()
    assert "](../results/candidates-h100.json)" in tuning_records.page(ROOT / tuning_records.FOLDER / "selection.toml")
    assert (tmp_path / "docs/performance/results/candidates-h100.json").is_file()
    assert site.to_record_pages("[a](pyproject.toml) [b](../records/decode.toml#x) [c](decode.toml)") == (
        "[a](pyproject.toml) [b](../records/decode.md#x) [c](decode.md)"
    )
