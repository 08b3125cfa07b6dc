"""The documentation site: gathers the pages, writes those of the reference, and has MkDocs build them strictly.

    python -m build_tools.site            # into build/site
    python -m build_tools.site --serve    # on a port of this machine
    python -m build_tools.site --gather   # the pages only, for `mike deploy`

Needs the extra ``docs``. The pages lie in build/site-pages as they lie in the repository, so that links between them
need no translation.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from build_tools import tuning_records

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "site-pages"
SOURCES = ("*.md", "docs/**/*.md", "examples/**/*.md", "wheels/*.md", "src/omniattn/data/*.md")

#: The reference: page -> (heading, names). A test compares them with the public names.
REFERENCE: dict[str, tuple[str, tuple[str, ...]]] = {
    "attention": (
        "Attention and its gradients",
        ("attention", "attention_varlen", "attention_backward", "attention_varlen_backward", "merge_states",
         "dropout_mask",
         "ScoreMod", "explain", "Explanation"),
    ),
    "precisions": (
        "Precisions and quantizers",
        ("Int8", "Int4", "Fp8", "Auto", "PRECISIONS", "quantize_qk", "quantize_v", "QuantizedQK", "QuantizedQ",
         "QuantizedK", "QuantizedV"),
    ),
    "caches": (
        "Caches and serving",
        ("KVCache", "PagedKVCache", "attention_with_kvcache", "decode", "append", "copy_blocks", "copy_recent",
         "BlockManager", "SwapSpace", "choose_shared_runs", "SharedRuns", "SharedPrefixes", "SharedLevel"),
    ),
    "sparse": (
        "Sparse attention",
        ("attention_sparse", "index_logits", "top_k", "Sparse", "sparse_blocks", "calibrate_sparse",
         "SparseCalibration"),
    ),
}  # fmt: skip

#: Modules beside the package's own names: all of their ``__all__``.
MODULES = ("omniattn.torch", "omniattn.jax", "omniattn.distributed", "omniattn.errors")


def public_names(module: str) -> tuple[str, ...]:
    """``__all__`` of a module, read without importing it: frameworks need not be there."""
    path = ROOT / "src" / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return tuple(ast.literal_eval(node.value))
    raise ValueError(f"{source}: no __all__")


def reference_pages() -> dict[str, str]:
    """Text of the generated pages by their file names."""
    pages = {}
    for page, (heading, names) in REFERENCE.items():
        body = "".join(f"\n::: omniattn.{name}\n" for name in names)
        pages[f"reference/{page}.md"] = f"# {heading}\n\nAll names are in `omniattn`.\n{body}"
    for module in MODULES:
        body = "".join(f"\n::: {module}.{name}\n" for name in public_names(module))
        pages[f"reference/{module.removeprefix('omniattn.')}.md"] = f"# {module}\n{body}"
    return pages


def linked_files(text: str) -> Iterable[str]:
    """What the links of a page name that is not on the web, without anchors."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", prose):
        if "://" not in target:
            yield target


def to_record_pages(text: str) -> str:
    """A page whose links to files of tuning records lead to the pages that the site has of them."""
    names = "|".join(path.stem for path in tuning_records.files())
    return re.sub(rf"(\]\((?:[^)\s]*/)?(?:{names}))\.toml(?=[#)])", r"\1.md", text)


def gather(pages: Path = PAGES) -> None:
    """Copy every page, and every file that a page links to, to where it lies in the repository, below ``pages``."""
    shutil.rmtree(pages, ignore_errors=True)
    records = {tuning_records.FOLDER / f"{path.stem}.md": tuning_records.page(path) for path in tuning_records.files()}
    wanted = {path.resolve() for pattern in SOURCES for path in ROOT.glob(pattern)}
    texts = {path: path.read_text(encoding="utf-8") for path in wanted}
    for path, text in {**texts, **{ROOT / place: text for place, text in records.items()}}.items():
        wanted.update((path.parent / target).resolve() for target in linked_files(text))
    for path in sorted(wanted):
        place = pages / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            place.write_text(to_record_pages(path.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copyfile(path, place)
    made = {Path(name): text for name, text in reference_pages().items()}
    made |= {place: to_record_pages(text) for place, text in records.items()}
    for name, text in made.items():
        place = pages / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.site", description="Build the documentation site.")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--serve", action="store_true", help="serve it on this machine instead")
    way.add_argument("--gather", action="store_true", help="only gather the pages")
    given = parser.parse_args(arguments)
    gather()
    if given.gather:
        return 0
    command = ["serve"] if given.serve else ["build", "--strict", "--clean"]
    return subprocess.call(
        [sys.executable, "-m", "mkdocs", *command, "--config-file", str(ROOT / "mkdocs.yml")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # an advertisement of the theme's authors
    )


if __name__ == "__main__":
    raise SystemExit(main())
