"""Names of other packages against ours, by the sources of their newest releases: ``python -m build_tools.peers``.

    python -m build_tools.peers                        # all packages: what differs from the record
    python -m build_tools.peers --write torch vllm     # these two, and renew record and page
    python -m build_tools.peers --tree ComfyUI=FOLDER  # of a folder, for what is not on PyPI
    python -m build_tools.peers --page --write         # the page alone, of the record

Needs pip and a network; downloads one package after the other, and keeps none. Nothing of a package is imported or
run. The record is build_tools/peers.json, the page docs/peers.md. The exit code is 1 where something differs from the
record.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from build_tools.page_parts import table
from build_tools.peer_list import PEERS, Peer
from build_tools.peer_source import Tree
from build_tools.peer_wheels import PeerError, Release, fetch

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path("build_tools/peers.json")
PAGE = Path("docs/peers.md")
_BEGIN, _END = "<!-- peers:begin -->\n", "<!-- peers:end -->"
#: Differences of one check that the page names; the record has all.
_MOST = 6

Record = dict[str, Any]


def look(peer: Peer, release: Release, ours: Tree) -> list[dict[str, Any]]:
    """Outcomes of a package's checks."""
    theirs = Tree(*(release.root / folder for folder in peer.folders))
    try:
        outcomes = [check(theirs, ours) for check in peer.checks]
    except SyntaxError as error:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        where = f"{error.filename}, line {error.lineno}"
        raise PeerError(f"{where}: syntax that Python {python} does not have; a newer one reads it") from error
    return [{"tried": outcome.tried, "found": outcome.found} for outcome in outcomes]


def record_of(peer: Peer, release: Release, source: str) -> Record:
    """What the record keeps of a package."""
    return {
        "version": release.version,
        "source": source,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "checks": look(peer, release, Tree(ROOT / "src")),
    }


def taken(peer: Peer, tree: Path | None) -> Record:
    """The record of a package's newest release, or of a folder."""
    if tree is not None:
        return record_of(peer, Release("of a folder", tree), "folder")
    with tempfile.TemporaryDirectory() as folder:
        release = fetch(peer.name, Path(folder) / "peer", sdist=peer.sdist, **peer.options)
        return record_of(peer, release, "sdist" if peer.sdist else "wheel")


def differs(old: Record | None, new: Record) -> bool:
    """Whether a record says something else, its date aside."""
    return old is None or {**old, "date": ""} != {**new, "date": ""}


def page_part(records: Mapping[str, Record]) -> str:
    """The table of the page."""
    rows = []
    for name, peer in PEERS.items():
        if name not in records:
            rows.append((f"`{name}`", "–", "not on PyPI" if peer.elsewhere else "not tried", peer.elsewhere or "–"))
            continue
        record = records[name]
        for check in record["checks"]:
            what = check["found"]
            more = f"; {len(what) - _MOST} more" if len(what) > _MOST else ""
            cell = "the same" if not what else "; ".join(what[:_MOST]) + more
            rows.append((f"`{name}`", f"{record['version']}, {record['date']}", check["tried"],
                         cell.replace("|", "\\|")))  # fmt: skip
    return table(("package", "version, tried on", "tried", "result"), rows)


def page(text: str, records: Mapping[str, Record]) -> str:
    """A page with its table renewed."""
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise PeerError(f"{PAGE.as_posix()}: {_BEGIN.strip()} and {_END} expected")
    return f"{head}{begin}{page_part(records)}\n{end}{tail}"


def records(root: Path = ROOT) -> dict[str, Record]:
    """What is recorded, by package."""
    path = root / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def shown(name: str, record: Record) -> str:
    """A record for a reader."""
    lines = [f"{name} {record['version']}"]
    for check in record["checks"]:
        lines.append(f"  {check['tried']}: {'the same' if not check['found'] else ''}".rstrip())
        lines += [f"    {what}" for what in check["found"]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--write", action="store_true", help="renew record and page")
    parser.add_argument("--page", action="store_true", help="look at no package, only at the page")
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER", help="sources of a package")
    given = parser.parse_args(arguments)
    trees = dict(text.split("=", 1) for text in given.tree)
    names = given.names or ([] if given.page else list(trees) or [name for name in PEERS if not PEERS[name].elsewhere])
    unknown = sorted({*names, *trees} - set(PEERS))
    if unknown:
        parser.error(f"{', '.join(unknown)}: {', '.join(PEERS)} expected")
    known, code = records(), 0
    for name in names:
        try:
            record = taken(PEERS[name], Path(trees[name]) if name in trees else None)
        except PeerError as error:
            print(f"{name}: {error}", file=sys.stderr)
            code = 1
            continue
        if differs(known.get(name), record):
            print(shown(name, record), flush=True)
            code = code if given.write else 1
        known[name] = record
    if given.write:
        (ROOT / RECORD).write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
        (ROOT / PAGE).write_text(page((ROOT / PAGE).read_text(encoding="utf-8"), known), encoding="utf-8")
    elif given.page and page((ROOT / PAGE).read_text(encoding="utf-8"), known) != (ROOT / PAGE).read_text("utf-8"):
        print(f"{PAGE}: out of date (python -m build_tools.peers --page --write)")
        code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
