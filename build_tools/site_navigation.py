"""MkDocs' hook: the navigation, of the pages that `build_tools.site` gathered. MkDocs runs it by its path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

#: What stands in which tab, in order. A pattern takes the pages that no earlier entry has named.
TABS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Guide", ("docs/guide/README.md", "docs/guide/*.md", "docs/migration.md", "docs/troubleshooting.md",
               "docs/environment.md", "docs/support.md", "docs/peers.md")),
    ("Topics", ("docs/precision.md", "docs/quantization.md", "docs/backward.md", "docs/score_mods.md", "docs/torch.md",
                "docs/jax.md", "docs/serving.md", "docs/kv_formats.md", "docs/mla.md", "docs/distributed.md",
                "docs/integrations/*.md", "docs/*.md")),
    ("Reference", ("docs/api.md", "reference/*.md")),
    ("Performance", ("docs/performance/README.md", "docs/performance/*.md")),
    ("Records", ("docs/performance/results/*.md", "docs/performance/records/*.md")),
    ("Examples", ("examples/**/*.md",)),
    ("Internals", ("docs/internals/README.md", "docs/internals/*.md")),
    ("Project", ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "wheels/*.md", "**/*.md")),
)  # fmt: skip


def title(page: Path) -> str:
    """The first heading of a page, without marks."""
    heading = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    if heading is None:
        raise ValueError(f"{page}: a page of the site begins with a heading")
    return re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])


def navigation(pages: Path) -> list[Any]:
    """MkDocs' ``nav`` of the folder ``pages``: every page once."""
    left = {path.relative_to(pages).as_posix(): path for path in sorted(pages.rglob("*.md"))}
    nav: list[Any] = [{"omniattn": "README.md"}]
    del left["README.md"]
    of_tab = {name: tab for tab, patterns in TABS for name in patterns if "*" not in name}
    for tab, patterns in TABS:
        entries: list[Any] = []
        for pattern in patterns:
            for name in [path.relative_to(pages).as_posix() for path in sorted(pages.glob(pattern))]:
                # A page that is named for itself stands there, not where a pattern takes it.
                if name in left and of_tab.get(name, tab) == tab and (name == pattern or name not in patterns):
                    entries.append({title(left.pop(name)): name})
        nav.append({tab: entries})
    if left:
        raise ValueError(f"no tab of the site has these pages: {sorted(left)}")
    return nav


def on_config(config: Any) -> Any:
    """MkDocs' event: its configuration has been read."""
    config["nav"] = navigation(Path(config["docs_dir"]))
    return config
