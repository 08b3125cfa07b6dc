"""Compare two builds of the kernels: ``python -m build_tools.compare_cubins OLD NEW``.

OLD and NEW are folders with a ``manifest.json``, such as ``build/kernels``. ``--compile FOLDER`` makes one of every
registry row, those that are compiled at run time too (for their oldest target). Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_tools import kernels, sass
from build_tools.objects import Compiled, Store
from omniattn.registry import REGISTRY, KernelSpec

#: (name, target): manifest entry and binary.
Build = Mapping[tuple[str, str], tuple[Mapping[str, Any], bytes]]
SAME, SAME_CODE, DIFFERS, ONLY_OLD, ONLY_NEW = "same", "same code", "differs", "only in OLD", "only in NEW"


@dataclass(frozen=True)
class Comparison:
    """One cubin of either build: what is so of it, and registers, spills and instructions before and after."""

    name: str
    arch: str
    outcome: str
    detail: str = ""


def read(folder: Path) -> Build:
    """The build in ``folder``."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return {(e["name"], e["arch"]): (e, (folder / e["file"]).read_bytes()) for e in manifest["kernels"]}


def _facts(entry: Mapping[str, Any], cubin: bytes) -> tuple[int, int, int]:
    return entry["registers"], entry["spill_bytes"], sum(sass.count(sass.instructions(cubin, entry["arch"])).values())


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


def every_row(rows: Iterable[KernelSpec]) -> list[KernelSpec]:
    """The rows; those that no wheel carries with their oldest target to build for."""
    found = []
    for row in rows:
        major, minor = row.min_arch
        oldest = f"{major}{minor}" + "a" * row.arch_specific
        found.append(row if row.prebuild else dataclasses.replace(row, prebuild=(oldest,)))
    return found


def compile_every_row(folder: Path, root: Path = kernels.ROOT, workers: int | None = None) -> list[str]:
    """Compile every registry row of ``root`` into ``folder``; return the failures."""
    compiler = kernels.compiler_version()
    jobs = kernels.plan(every_row(REGISTRY), None, None, compiler, root / "kernels_cu")
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / "objects")
    results: dict[str, Compiled] = {job.key: there for job in jobs if (there := store.get(job.key)) is not None}
    missing = [job for job in jobs if job.key not in results]

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    failures = kernels.compile_missing(
        missing, results, store, root / "kernels_cu", workers or os.cpu_count() or 1, say
    )
    ordered = sorted(results.values(), key=lambda built: str(built.entry["file"]))
    manifest = {
        "format": kernels.MANIFEST_FORMAT,
        "package_version": kernels.package_version(root),
        "compiler": compiler,
        "kernels": [built.entry for built in ordered],
    }
    kernels.publish(folder, manifest, {built.entry["file"]: built.cubin for built in ordered})
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
    found = compare(read(options.folders[0]), read(options.folders[1]), renamed)
    print(report(found, options.limit))
    return int(any(c.outcome not in (SAME, SAME_CODE) for c in found))


if __name__ == "__main__":
    raise SystemExit(main())
