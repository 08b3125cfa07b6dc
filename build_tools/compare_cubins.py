"""Compare two builds of the kernels: ``python -m build_tools.compare_cubins OLD NEW``.

OLD and NEW are folders with a ``manifest.json``, such as ``build/kernels``. ``--compile FOLDER`` makes one of every
registry row. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from build_tools import jobs, kernels, packs, sass
from omniattn.registry import REGISTRY
from omniattn.runtime.store import ManifestEntry

#: (name, target): manifest entry and binary.
Build = Mapping[tuple[str, str], tuple[ManifestEntry, bytes]]
SAME, SAME_CODE, DIFFERS, ONLY_OLD, ONLY_NEW = "same", "same code", "differs", "only in OLD", "only in NEW"


@dataclass(frozen=True)
class Comparison:
    """One cubin of either build: what is so of it, and registers, spills and instructions before and after."""

    name: str
    arch: str
    outcome: str
    detail: str = ""


def _facts(entry: ManifestEntry, cubin: bytes) -> tuple[int, int, int]:
    return entry.registers, entry.spill_bytes, sum(sass.count(sass.instructions(cubin, entry.arch)).values())


def compare(old: Build, new: Build, renamed: Mapping[str, str]) -> list[Comparison]:
    """All cubins of both builds, sorted by name and target.

    Parameters
    ----------
    old, new : Build
    renamed : mapping
        Parts of old names that are others in the new build. Such a cubin names its kernel differently, so its machine
        code alone is compared (``same code``).
    """

    def new_name(name: str) -> str:
        for before, after in renamed.items():
            name = name.replace(before, after)
        return name

    found = []
    expected = {(new_name(name), arch): (name, arch) for name, arch in old}
    for key in sorted(expected.keys() | new.keys()):
        if key not in expected:
            found.append(Comparison(*key, ONLY_NEW))
            continue
        if key not in new:
            found.append(Comparison(*key, ONLY_OLD))
            continue
        (old_entry, old_cubin), (new_entry, new_cubin) = old[expected[key]], new[key]
        if old_cubin == new_cubin:
            found.append(Comparison(*key, SAME))
        elif _facts(old_entry, old_cubin) == _facts(new_entry, new_cubin) and sass.code(old_cubin) == sass.code(
            new_cubin
        ):
            # Symbols have other names: of the kernel, of a function, of constants.
            found.append(Comparison(*key, SAME_CODE))
        else:
            before, after = _facts(old_entry, old_cubin), _facts(new_entry, new_cubin)
            names = ("registers", "spilled bytes", "instructions")
            parts = [
                f"{what} {a} -> {b}" if a != b else f"{what} {a}"
                for what, a, b in zip(names, before, after, strict=True)
            ]
            found.append(Comparison(*key, DIFFERS, ", ".join(parts)))
    return found


def report(found: Sequence[Comparison], limit: int = 40) -> str:
    """A table: how many of each outcome, then what is not the same."""
    lines = []
    for outcome in (SAME, SAME_CODE, DIFFERS, ONLY_OLD, ONLY_NEW):
        count = sum(c.outcome == outcome for c in found)
        if count or outcome == SAME:
            lines.append(f"{outcome:12} {count:4}")
    rest = [c for c in found if c.outcome != SAME]
    lines += [f"  sm_{c.arch:4} {c.name:44} {c.outcome}{': ' * bool(c.detail)}{c.detail}" for c in rest[:limit]]
    if len(rest) > limit:
        lines.append(f"  and {len(rest) - limit} more")
    return "\n".join(lines)


def compile_every_row(folder: Path, root: Path = kernels.ROOT, workers: int | None = None) -> list[str]:
    """Compile every registry row of ``root`` for its targets into ``folder``; return the failures."""
    compiler, seen = jobs.compiler_version(), jobs.Seen(root / "kernels_cu")
    planned = jobs.plan(REGISTRY, compiler, seen)
    results, _, failures = jobs.take(planned, root, workers, jobs.to_stderr, folder / "objects")
    built = [(job, results[job.key]) for job in planned if job.key in results]
    kernels.publish(folder, *packs.make(built, kernels.package_version(root), compiler, seen.sources))
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: compile everything, or compare two builds."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.compare_cubins", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="OLD NEW", help="folders with a manifest.json")
    parser.add_argument("--compile", type=Path, metavar="FOLDER", help="compile every registry row into FOLDER")
    parser.add_argument("--jobs", type=int, metavar="N", help="compiler processes (default: number of CPUs)")
    parser.add_argument(
        "--renamed", action="append", default=[], metavar="OLD=NEW", help="a part of the rows' names that is new"
    )
    parser.add_argument("--limit", type=int, default=40, help="lines for what is not the same")
    options = parser.parse_args(argv)
    if options.compile is not None:
        failures = compile_every_row(options.compile, workers=options.jobs)
        if failures:
            print("\n".join(failures), file=sys.stderr)
            return 1
    if not options.folders:
        return 0
    if len(options.folders) != 2:
        parser.error(f"expected two folders, received {len(options.folders)}")
    renamed = dict(pair.split("=", 1) for pair in options.renamed)
    found = compare(packs.read(options.folders[0]), packs.read(options.folders[1]), renamed)
    print(report(found, options.limit))
    return int(any(c.outcome not in (SAME, SAME_CODE) for c in found))


if __name__ == "__main__":
    raise SystemExit(main())
