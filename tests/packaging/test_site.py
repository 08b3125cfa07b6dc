"""The documentation site: what it gathers and how it is arranged. `.ci/run` builds it strictly."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import omniattn
from build_tools import site, site_navigation

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    site.gather(folder)
    return folder


def names(nav: list[Any]) -> list[str]:
    """Files of a navigation, in order."""
    found = []
    for entry in nav:
        (value,) = entry.values()
        found += names(value) if isinstance(value, list) else [value]
    return found


def test_every_page_is_in_the_navigation_once(pages: Path) -> None:
    found = names(site_navigation.navigation(pages))
    assert sorted(found) == sorted(path.relative_to(pages).as_posix() for path in pages.rglob("*.md"))
    assert len(found) == len(set(found))
    assert found[0] == "README.md"


def test_every_link_of_a_page_leads_to_a_page_of_the_site(pages: Path) -> None:
    broken = [
        f"{page.relative_to(pages)}: {target}"
        for page in pages.rglob("*.md")
        for target in site.linked_files(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_reference_has_every_public_name(pages: Path) -> None:
    written = [name for _, of_page in site.REFERENCE.values() for name in of_page]
    assert sorted(written) == sorted(set(omniattn.__all__) - {"__version__", "errors"})
    text = (pages / "reference/attention.md").read_text(encoding="utf-8")
    assert "\n::: omniattn.attention_backward\n" in text
    errors = importlib.import_module("omniattn.errors")
    assert site.public_names("omniattn.errors") == tuple(errors.__all__)
    assert "::: omniattn.torch.sdpa\n" in (pages / "reference/torch.md").read_text(encoding="utf-8")


def test_a_page_that_no_tab_takes_and_one_without_a_heading_are_told(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Home\n")
    (tmp_path / "page.md").write_text("no heading\n")
    with pytest.raises(ValueError, match="begins with a heading"):
        site_navigation.navigation(tmp_path)


def test_ci_builds_it() -> None:
    assert re.search(r"^\.venv/bin/python -m build_tools\.site$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    workflow = (ROOT / ".github/workflows/site.yml").read_text(encoding="utf-8")
    assert "run: python -m build_tools.site\n" in workflow
    assert "strict: true" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
