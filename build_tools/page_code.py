"""Code on pages, and what it prints: ``python -m build_tools.page_code [--write] [PAGE ...]``.

A page's ``python`` blocks run in order, in one process that is the page's own. What a block prints stands in the
``text`` block that follows it. Without ``--write`` nothing is changed, and the exit code is 1 where a page shows
something else.

A block below a line that is the name of a file, in backquotes and with a colon, is of that file and does not run: an
excerpt, or what a reader writes there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/internals/README.md", "docs/internals/kernel_file.md")

_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OF_FILE = re.compile(r"^`([\w./-]+\.\w+)`:\Z", re.MULTILINE)
_CHILD = """
import contextlib, io, json, sys
names, printed = {"__name__": "__main__"}, []
for number, code in enumerate(json.load(sys.stdin), 1):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, f"block {number}", "exec"), names)
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


class PageError(Exception):
    """Code of a page fails, or prints where the page shows nothing."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes
    ----------
    language : str
    text : str
    file : str
        Whose name is the line above; empty if there is none.
    start, end : int
        Where the text stands in the page.
    follows : bool
        There is nothing between this block and the one before.
    """

    language: str
    text: str
    file: str
    start: int
    end: int
    follows: bool


def blocks(page: str) -> list[Block]:
    """The blocks of a page's text, in order."""
    found, end = list[Block](), 0
    for match in _FENCED.finditer(page):
        between = page[end : match.start()].rstrip()
        file = _OF_FILE.search(between)
        follows = bool(found) and not between
        found.append(Block(match[1], match[2], file[1] if file else "", match.start(2), match.end(2), follows))
        end = match.end()
    return found


def run(code: Sequence[str]) -> list[str]:
    """What blocks print, one after the other in a new process, which has a cache of its own and compiles what it needs.

    Raises
    ------
    PageError
        One of them raises.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMNIATTN_")}
    with tempfile.TemporaryDirectory() as cache:
        own = {
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
            "OMNIATTN_CACHE_DIR": cache, "OMNIATTN_FORCE_JIT": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", _CHILD]
        done = subprocess.run(
            command, cwd=ROOT, env=kept | own, input=json.dumps(list(code)), capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise PageError(done.stderr)
    printed: list[str] = json.loads(done.stdout)
    return printed


def renewed(page: str) -> str:
    """The page with what its code prints."""
    found = blocks(page)
    code = [i for i, block in enumerate(found) if block.language == "python" and not block.file]
    parts, end = list[str](), 0
    for i, printed in zip(code, run([found[i].text for i in code]), strict=True):
        shown = found[i + 1] if i + 1 < len(found) else None
        if shown is not None and shown.language == "text" and shown.follows:
            parts += [page[end : shown.start], printed]
            end = shown.end
        elif printed:
            raise PageError(f"no text block shows what this prints:\n{found[i].text}")
    return "".join([*parts, page[end:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.page_code", description="Run the code of pages.")
    parser.add_argument("--write", action="store_true", help="put what the code prints into the pages")
    parser.add_argument("pages", nargs="*", metavar="PAGE", default=PAGES)
    given = parser.parse_args(arguments)
    stale = []
    for name in given.pages:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        try:
            after = renewed(before)
        except PageError as error:
            print(f"{name}: {error}")
            return 1
        if after != before:
            stale.append(name)
            if given.write:
                path.write_text(after, encoding="utf-8")
    for name in stale:
        print(f"{name}: {'renewed' if given.write else 'its code prints something else'}")
    return int(bool(stale) and not given.write)


if __name__ == "__main__":
    raise SystemExit(main())
