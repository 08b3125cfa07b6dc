"""Compile registry rows ahead of time: ``python -m build_tools.kernels``.

Results go to ``build/kernels``: ``packs/``, ``manifest.json`` and ``objects/``, the incremental store, whose keys are
digests of everything that the compiler sees. A failed build leaves the last good manifest and packs alone. All rows for
all targets take about 50 minutes on two cores; a checkout carries what the compiler said of them in a table
(``build_tools/table.py``), and ``--changed`` compiles what of it is no longer so.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_tools import checks, packs
from build_tools.jobs import ROOT, BuildError, Job, Seen, compiler_version, plan, portable_jobs, take, to_stderr
from build_tools.objects import Compiled, exclusive, write_atomic
from build_tools.table import FILE, Table
from omniattn.errors import ArgumentError
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.runtime import env
from omniattn.runtime.arch import Arch

#: Patterns of the rows that a wheel is built of, separated by blanks, for tests; unset: all of them.
ROWS_VARIABLE = "OMNIATTN_BUILD_ROWS"

#: Target of the GPUs that everything is measured on: its rows are compiled at once when their sources change.
MEASURED_ARCH = "90a"
#: Stale rows of other targets that ``--changed`` compiles, drawn anew each time; a release compiles all.
SAMPLE = 60
#: Rows that a check compiles again, to see that the table is true.
PROBES = 4


@dataclass(frozen=True)
class Built:
    """A finished build. ``files`` are relative to ``folder`` and are what a wheel carries."""

    folder: Path
    files: tuple[str, ...]
    compiled: int
    cubins: int
    manifest: Mapping[str, Any]


def kernel_sources(kernels_root: Path) -> list[Path]:
    """Return every device source below ``kernels_root``, sorted."""
    return sorted(path for pattern in ("**/*.cu", "**/*.cuh") for path in kernels_root.glob(pattern))


def package_version(root: Path) -> str:
    """Read ``__version__`` from the package's text."""
    for line in (root / "src/omniattn/version.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            return line.split("=", 1)[1].strip().strip("\"'")
    raise BuildError("src/omniattn/version.py: expected a line '__version__ = \"...\"', found none")


def wanted_archs(argument: str | None = None) -> frozenset[str] | None:
    """Return the targets asked for by ``--arch`` or ``OMNIATTN_CUDA_ARCHS``; None means all that each row names."""
    try:
        if argument is None:
            from_environment = env.get("OMNIATTN_CUDA_ARCHS")
            return frozenset(from_environment) if from_environment else None
        parts = argument.replace(",", " ").replace(";", " ").split()
        return frozenset(Arch.parse(part, argument="--arch").number for part in parts)
    except ArgumentError as error:
        raise BuildError(str(error)) from error


def wanted_rows(rows: Iterable[KernelSpec], patterns: str | None = None) -> list[KernelSpec]:
    """Return the rows whose names match one of ``patterns`` or of those in ``OMNIATTN_BUILD_ROWS``; else all."""
    given = (os.environ.get(ROWS_VARIABLE, "") if patterns is None else patterns).split()
    found = [row for row in rows if not given or any(fnmatch.fnmatchcase(row.name, pattern) for pattern in given)]
    if not found:
        received = " ".join(given)
        raise BuildError(f"{ROWS_VARIABLE}: expected patterns that match names of registry rows, received {received!r}")
    return found


def build(
    root: Path = ROOT,
    *,
    rows: Iterable[KernelSpec] = REGISTRY,
    archs: frozenset[str] | None = None,
    workers: int | None = None,
    echo: Callable[[str], None] | None = None,
) -> Built:
    """Bring ``build/kernels`` up to date with the registry.

    Parameters
    ----------
    root : Path
        The checkout: holds ``kernels_cu`` and ``src``, receives ``build/kernels``.
    rows : iterable of KernelSpec
        Rows to build, of which ``OMNIATTN_BUILD_ROWS`` may choose some.
    archs : frozenset of str, optional
        Targets to build for; by default ``OMNIATTN_CUDA_ARCHS``, else all that each row names.
    workers : int, optional
        Compiler processes; the number of CPUs by default.
    echo : callable, optional
        Receives progress lines; standard error by default.

    Returns
    -------
    Built
        What a wheel has to carry.

    Raises
    ------
    BuildError
        A compile error, more spills than the table says, serialized wgmma, an ignored setmaxnreg, an orphan source, or
        a result that contradicts the table. All failures are listed, not only the first.
    """
    kernels_root, folder, rows = root / "kernels_cu", root / "build/kernels", list(rows)
    _complain(checks.registry_complaints(rows, kernels_root) + checks.include_complaints(kernels_root))
    compiler, seen, say = compiler_version(), Seen(kernels_root), echo or to_stderr
    jobs = plan(wanted_rows(rows), compiler, seen, archs if archs is not None else wanted_archs())
    # One build at a time: the second then finds everything done.
    with exclusive(folder / ".lock"):
        results, compiled, failures = take(jobs, root, workers, say)
        _complain([*failures, *_texts(_judge(jobs, results, Table.load(root), say))])
        built = [(job, results[job.key]) for job in jobs]
        manifest, files = packs.make(built, package_version(root), compiler, seen.sources)
        publish(folder, manifest, files)
    return Built(folder, ("manifest.json", *files), compiled, len(jobs), manifest)


def _complain(complaints: Sequence[str]) -> None:
    if complaints:
        raise BuildError(f"{len(complaints)} problem(s) in the kernel build:\n" + "\n".join(complaints))


def _judge(
    jobs: Iterable[Job],
    results: Mapping[str, Compiled],
    table: Table,
    say: Callable[[str], None],
    accept_spills: bool = False,
) -> dict[tuple[str, str], list[str]]:
    """What is wrong with compiled rows, by (arch, name); warnings of the compiler are said."""
    wrong: dict[tuple[str, str], list[str]] = {}
    for job in jobs:
        if job.key not in results:
            continue
        built = results[job.key]
        texts = checks.log_complaints(job.spec, job.arch, built.log)
        texts += checks.code_complaints(job.spec, job.arch, built.cubin)
        if table.is_current(job):
            texts.append(table.contradiction(job, built))
        elif not accept_spills:
            texts.append(table.spills_more(job, built.entry["spill_bytes"]))
        if found := [text for text in texts if text]:
            wrong[job.arch, job.spec.name] = found
        for line in checks.warnings(built.log):
            say(f"{job}: {line}")
    return wrong


def _texts(wrong: Mapping[tuple[str, str], Sequence[str]]) -> list[str]:
    return [text for texts in wrong.values() for text in texts]


def publish(folder: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Put packs and manifest in place; the manifest goes first and comes last, so that what it names exists."""
    text = packs.manifest_text(manifest).encode()
    target = folder / "manifest.json"
    if target.is_file() and target.read_bytes() == text and _intact(folder, files):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".stage-") as stage_name:
        stage = Path(stage_name)
        (stage / "packs").mkdir()
        for file, data in files.items():
            (stage / file).parent.mkdir(exist_ok=True)
            (stage / file).write_bytes(data)
        target.unlink(missing_ok=True)
        shutil.rmtree(folder / "packs", ignore_errors=True)
        os.replace(stage / "packs", folder / "packs")
    write_atomic(target, text)


def _intact(folder: Path, files: Mapping[str, bytes]) -> bool:
    there = {path.relative_to(folder).as_posix(): path for path in folder.glob("packs/*/*")}
    return there.keys() == files.keys() and all(path.read_bytes() == files[file] for file, path in there.items())


def all_jobs(root: Path = ROOT, rows: Iterable[KernelSpec] = REGISTRY) -> list[Job]:
    """Return everything that the table speaks of: a wheel's cubins, and a row of each family for other GPUs."""
    compiler, seen, rows = compiler_version(), Seen(root / "kernels_cu"), list(rows)
    return [*plan(rows, compiler, seen), *portable_jobs(rows, compiler, seen)]


def renew(
    root: Path = ROOT,
    *,
    rows: Iterable[KernelSpec] = REGISTRY,
    everything: bool = False,
    accept_spills: bool = False,
    workers: int | None = None,
    echo: Callable[[str], None] | None = None,
) -> tuple[int, int]:
    """Bring the table up to date: new rows, what is stale for sm_90a, some of the rest; returns compiled, still stale.

    Interrupted, it keeps what was compiled: the next run goes on from there.

    Parameters
    ----------
    root, rows, workers, echo
        As in `build`.
    everything : bool
        Leave nothing stale.
    accept_spills : bool
        Take up rows that spill more registers than they did.

    Raises
    ------
    BuildError
        As in `build`; the rows that are named do not enter the table.
    """
    rows, say = list(rows), echo or to_stderr
    _complain(checks.registry_complaints(rows, root / "kernels_cu") + checks.include_complaints(root / "kernels_cu"))
    jobs, table = all_jobs(root, rows), Table.load(root)
    table.keep_only(jobs)
    stale = [job for job in jobs if not table.is_current(job)]
    if not everything:
        # What `check` demands, and rows of any target that are not there at all.
        needed = [job.arch == MEASURED_ARCH or (job.arch, job.spec.name) not in table for job in stale]
        others = [job for job, need in zip(stale, needed, strict=True) if not need]
        stale = [job for job, need in zip(stale, needed, strict=True) if need]
        stale += random.sample(others, min(SAMPLE, len(others)))
    with exclusive(root / "build/kernels/.lock"):
        failures: list[str] = []
        compiled = 0
        # In portions, each of which is in the table before the next one begins.
        for first in range(0, len(stale), 100):
            portion = stale[first : first + 100]
            results, fresh, broken = take(portion, root, workers, say)
            compiled += fresh
            wrong = _judge(portion, results, table, say, accept_spills)
            for job in portion:
                if job.key in results and (job.arch, job.spec.name) not in wrong:
                    table.note(job, results[job.key])
            table.save(root)
            failures += [*broken, *_texts(wrong)]
            say(f"{min(first + 100, len(stale))} of {len(stale)} rows are in {FILE}")
        table.save(root)
    _complain(failures)
    return compiled, sum(not table.is_current(job) for job in jobs)


def check(
    root: Path = ROOT,
    *,
    rows: Iterable[KernelSpec] = REGISTRY,
    workers: int | None = None,
    echo: Callable[[str], None] | None = None,
) -> list[str]:
    """What is wrong with the table: rows that it lacks, entries that are not true.

    Rows of sm_90a whose digest is not in the table are compiled, and a few current ones of any target, drawn anew each
    time. Stale entries of other targets are allowed: a release compiles them.
    """
    rows, say = list(rows), echo or to_stderr
    complaints = checks.registry_complaints(rows, root / "kernels_cu") + checks.include_complaints(root / "kernels_cu")
    jobs, table = all_jobs(root, rows), Table.load(root)
    absent = [str(job) for job in jobs if (job.arch, job.spec.name) not in table]
    if absent:
        complaints.append(f"{FILE} lacks {len(absent)} rows ({', '.join(absent[:8])})")
    known = {(job.arch, job.spec.name) for job in jobs}
    if gone := [f"{name} (sm_{arch})" for arch, name in table if (arch, name) not in known]:
        complaints.append(f"{FILE} has {len(gone)} rows that the registry does not have ({', '.join(gone[:8])})")
    current = [job for job in jobs if table.is_current(job)]
    stale = [job for job in jobs if job.arch == MEASURED_ARCH and not table.is_current(job)]
    # Not out of the store of objects: a probe has to be compiled.
    probes = random.sample(current, min(PROBES, len(current)))
    with tempfile.TemporaryDirectory() as empty:
        results, _, failures = take([*stale, *probes], root, workers, say, fresh=Path(empty))
    complaints += failures + _texts(_judge([*stale, *probes], results, table, say))
    if stale:
        complaints.append(
            f"{len(stale)} rows for sm_{MEASURED_ARCH} are not in {FILE} as they are today ({stale[0]}, ...)"
        )
    return [*complaints, *(["run python -m build_tools.kernels --changed"] if complaints else [])]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: build, narrow, renew the table, check it."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.kernels", description=__doc__)
    parser.add_argument(
        "--arch", metavar="LIST", help="targets, such as 80,90a (default: OMNIATTN_CUDA_ARCHS, else all)"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="compiler processes (default: number of CPUs)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--changed", action="store_true",
        help=f"renew {FILE}: what changed for sm_{MEASURED_ARCH}, and {SAMPLE} stale rows of other targets",
    )  # fmt: skip
    mode.add_argument("--table", action="store_true", help=f"renew {FILE} wholly")
    parser.add_argument(
        "--accept-spills", action="store_true", help="with --changed or --table: rows may spill more than they did"
    )
    mode.add_argument("--check", action="store_true", help=f"say what is wrong with {FILE}")
    options = parser.parse_args(argv)
    if options.accept_spills and not (options.changed or options.table):
        parser.error("argument --accept-spills: expected --changed or --table beside it")
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"argument --jobs: expected at least 1, received {options.jobs}")
    try:
        if options.check:
            complaints = check(workers=options.jobs)
            print("\n".join(complaints) or f"{FILE} is true")
            return int(bool(complaints))
        if options.changed or options.table:
            compiled, stale = renew(everything=options.table, accept_spills=options.accept_spills, workers=options.jobs)
            print(f"{compiled} compiled; {stale} entries of {FILE} are stale, for a release to renew")
            return 0
        built = build(archs=wanted_archs(options.arch), workers=options.jobs)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    size = sum((built.folder / file).stat().st_size for file in built.files) / 1e6
    opened = sum(pack["size"] for pack in built.manifest["packs"]) / 1e6
    print(
        f"{built.cubins} cubins ({opened:.1f} MB) in {len(built.files) - 1} packs ({size:.2f} MB): "
        f"{built.compiled} compiled, {built.cubins - built.compiled} up to date; {built.folder}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
