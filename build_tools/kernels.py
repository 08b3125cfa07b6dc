"""Compile registry rows ahead of time: ``python -m build_tools.kernels``.

Results go to ``build/kernels``: ``cubins/<arch>/<name>.cubin``, ``manifest.json`` and ``objects/``, the incremental
store, whose keys are digests of everything that the compiler sees. A failed build leaves the last good manifest and
cubins alone.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import multiprocessing
import os
import shutil
import site
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "src") not in sys.path:
    # The registry and the compiler front are the package's own, used before the package is installed.
    sys.path.insert(0, str(ROOT / "src"))

from build_tools import checks  # noqa: E402
from build_tools.objects import Compiled, Store, exclusive, write_atomic  # noqa: E402
from omniattn.errors import ArgumentError, CompileError  # noqa: E402
from omniattn.registry import PORTABLE_ARCHS, PREBUILT_ARCHS, REGISTRY, KernelSpec  # noqa: E402
from omniattn.runtime import env, nvrtc  # noqa: E402
from omniattn.runtime.arch import Arch  # noqa: E402
from omniattn.runtime.compile import compile_options, compile_spec  # noqa: E402
from omniattn.runtime.sources import Sources, source_digest  # noqa: E402

MANIFEST_FORMAT = 1

#: Compiler of the wheel: cubins of a 13.x compiler load on drivers from R580 on only, those of 12.9 from R525 on.
AOT_COMPILER = (12, 9)

#: Where NVRTC's package for CUDA 12 has it.
_COMPILER_LIBRARY = "nvidia/cuda_nvrtc/" + ("bin/nvrtc64_12*.dll" if sys.platform == "win32" else "lib/libnvrtc.so.12")

#: Folder in place of ``build/kernels/objects``, so that a build from an sdist can reuse a checkout's objects.
OBJECTS_VARIABLE = "OMNIATTN_BUILD_OBJECTS"


class BuildError(Exception):
    """The kernels cannot be built; the text lists every reason."""


@dataclass(frozen=True)
class Job:
    """One cubin to make; ``key`` names it in the incremental store."""

    spec: KernelSpec
    arch: str
    key: str


@dataclass(frozen=True)
class Built:
    """A finished build. ``files`` are relative to ``folder`` and are what a wheel carries."""

    folder: Path
    files: tuple[str, ...]
    compiled: int
    reused: int
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


def preload_compiler() -> None:
    """Load NVRTC from a folder that is on ``sys.path`` without being site-packages, if there is one.

    The requirements of ``pip install .`` are in such a folder. cuda-pathfinder looks into site-packages only, but takes
    a library that is loaded already.
    """
    known = {os.path.realpath(folder) for folder in (*site.getsitepackages(), site.getusersitepackages())}
    for entry in sys.path:
        if os.path.realpath(entry) in known:
            continue
        for library in sorted(Path(entry).glob(_COMPILER_LIBRARY)):
            if sys.platform == "win32":  # the compiler loads its builtins by name
                os.add_dll_directory(str(library.parent))
            ctypes.CDLL(str(library))
            return


def compiler_version(require: tuple[int, int] = AOT_COMPILER) -> str:
    """Return the compiler's name and full version, such as ``NVRTC 12.9.86``; raise unless it is ``require``."""
    preload_compiler()
    try:
        major, minor = nvrtc.get_compiler().version
    except CompileError as error:
        raise BuildError(f"{error}\nTo build kernels: pip install 'omniattn[aot]'") from error
    if (major, minor) != require:
        raise BuildError(
            f"the wheel's kernels are built by NVRTC {require[0]}.{require[1]}, found {major}.{minor}; "
            "files of a newer compiler need a newer driver. What to do: in an environment of its own, "
            "pip install 'omniattn[aot]'"
        )
    return f"NVRTC {_full_version(major, minor)}"


def _full_version(major: int, minor: int) -> str:
    # NVRTC itself tells no patch level, and the patch level changes code.
    from importlib.metadata import PackageNotFoundError, version

    for package in (f"nvidia-cuda-nvrtc-cu{major}", "nvidia-cuda-nvrtc"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if found.startswith(f"{major}.{minor}."):
            return found
    return f"{major}.{minor}"


def plan(
    rows: Iterable[KernelSpec], archs: frozenset[str] | None, only: str | None, compiler: str, kernels_root: Path
) -> list[Job]:
    """Return the cubins to make: each row for each of its targets that was asked for."""
    sources = Sources(kernels_root)
    return [
        job_of(spec, arch, compiler, sources)
        for spec in rows
        if only is None or only == spec.name
        for arch in spec.prebuild
        if archs is None or arch in archs
    ]


def job_of(spec: KernelSpec, arch: str, compiler: str, sources: Sources) -> Job:
    """Return the job of one cubin; its key is the digest of all that makes the result."""
    # smem_bytes is not seen by the compiler, but stands in the manifest.
    options = list(compile_options(spec, arch, lineinfo=False))
    seen = [MANIFEST_FORMAT, spec.name, spec.smem_bytes, source_digest(spec, sources), options, compiler]
    return Job(spec, arch, hashlib.sha256(json.dumps(seen).encode()).hexdigest())


def store_of(root: Path = ROOT) -> Store:
    """Return the incremental store of a checkout, which everything that compiles rows ahead of time shares."""
    return Store(Path(os.environ.get(OBJECTS_VARIABLE) or root / "build/kernels/objects"))


def compiled(spec: KernelSpec, arch: str, root: Path = ROOT) -> Compiled:
    """Return a row compiled for ``arch``, out of the store if it is there: whatever the registry says of targets."""
    job, store = job_of(spec, arch, compiler_version(), Sources(root / "kernels_cu")), store_of(root)
    found = store.get(job.key)
    if found is None:
        found = compile_job(job, root / "kernels_cu")
        store.put(job.key, found)
    return found


def compile_job(job: Job, kernels_root: Path) -> Compiled:
    """Compile one cubin (in a worker process)."""
    sources = Sources(kernels_root)
    # The checks read the log, so the compiler has to run: not a binary out of a cache that NVRTC keeps.
    result = compile_spec(job.spec, job.arch, sources, lineinfo=False, nvrtc_cache=False)
    entry = {
        "name": job.spec.name,
        "arch": job.arch,
        "file": f"cubins/{job.arch}/{job.spec.name}.cubin",
        "sha256": hashlib.sha256(result.cubin).hexdigest(),
        "source_digest": source_digest(job.spec, sources),
        "options": list(result.options),
        "registers": result.registers,
        "smem_static_bytes": result.smem_static_bytes,
        "smem_dynamic_bytes": job.spec.smem_bytes,
        "spill_bytes": result.spill_bytes,
        "size": len(result.cubin),
    }
    return Compiled(entry, result.cubin, result.log)


def run_jobs(jobs: Sequence[Job], kernels_root: Path, workers: int, done: Callable[[Job, Compiled], None]) -> list[str]:
    """Compile ``jobs`` in parallel processes, hand each result to ``done``, return the failures' texts."""
    failures: list[str] = []
    if not jobs:
        return failures
    # Processes, not threads: NVRTC serializes parts of its work within one. spawn, because forking a process that holds
    # a loaded CUDA library is undefined.
    context = multiprocessing.get_context("spawn")
    workers = min(workers, len(jobs))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=preload_compiler) as pool:
        pending = {pool.submit(compile_job, job, kernels_root): job for job in jobs}
        for future in as_completed(pending):
            job = pending[future]
            error = future.exception()
            if error is None:
                done(job, future.result())
            else:
                failures.append(f"{job.spec.name} (sm_{job.arch}): {error}")
    return failures


def build(
    root: Path = ROOT,
    *,
    rows: Iterable[KernelSpec] = REGISTRY,
    archs: frozenset[str] | None = None,
    only: str | None = None,
    workers: int | None = None,
    check: bool = False,
    echo: Callable[[str], None] | None = None,
) -> Built:
    """Bring ``build/kernels`` up to date with the registry.

    Parameters
    ----------
    root : Path
        The checkout: holds ``kernels_cu`` and ``src``, receives ``build/kernels``.
    rows : iterable of KernelSpec
        Rows to build.
    archs : frozenset of str, optional
        Targets to build for; by default ``OMNIATTN_CUDA_ARCHS``, else all that each row names.
    only : str, optional
        Build this row alone; the manifest stays as it is, since it would be incomplete.
    workers : int, optional
        Compiler processes; the number of CPUs by default.
    check : bool
        Fail if anything would have to be compiled, instead of compiling it.
    echo : callable, optional
        Receives progress lines; standard error by default.

    Returns
    -------
    Built
        What a wheel has to carry.

    Raises
    ------
    BuildError
        A compile error, an undeclared spill, serialized wgmma, an ignored setmaxnreg, an orphan source, or (``check``)
        an object that is not up to date. All failures are listed, not only the first.
    """
    kernels_root, folder, rows = root / "kernels_cu", root / "build/kernels", list(rows)
    complaints = checks.registry_complaints(rows, kernels_root) + checks.include_complaints(kernels_root)
    if only is not None and only not in {row.name for row in rows}:
        complaints.append(f"--only: expected the name of a registry row, received {only!r}")
    if complaints:
        raise BuildError("\n".join(complaints))
    archs = archs if archs is not None else wanted_archs()
    compiler = compiler_version()
    jobs = plan(rows, archs, only, compiler, kernels_root)
    store = store_of(root)
    # One build at a time: the second then finds everything done.
    with exclusive(folder / ".lock"):
        results = {job.key: found for job in jobs if (found := store.get(job.key)) is not None}
        missing = [job for job in jobs if job.key not in results]
        if check and missing:
            names = ", ".join(f"{job.spec.name}/sm_{job.arch}" for job in missing[:8])
            raise BuildError(
                f"{len(missing)} of {len(jobs)} cubins are not up to date ({names}); run python -m build_tools.kernels"
            )
        say = echo or _to_stderr
        failures = compile_missing(missing, results, store, kernels_root, workers or os.cpu_count() or 1, say)
        for job in jobs:
            if job.key in results:
                built = results[job.key]
                failures += checks.log_complaints(job.spec, job.arch, built.log, built.entry["spill_bytes"])
                for line in checks.warnings(built.log):
                    say(f"{job.spec.name} (sm_{job.arch}): {line}")
        if failures:
            raise BuildError(f"{len(failures)} problem(s) in the kernel build:\n" + "\n".join(failures))
        ordered = sorted((results[job.key] for job in jobs), key=lambda built: built.entry["file"])
        manifest = {
            "format": MANIFEST_FORMAT,
            "package_version": package_version(root),
            "compiler": compiler,
            "kernels": [built.entry for built in ordered],
        }
        if only is None and not check:
            publish(folder, manifest, {built.entry["file"]: built.cubin for built in ordered})
    files = ("manifest.json", *(built.entry["file"] for built in ordered))
    return Built(folder, files, len(missing), len(jobs) - len(missing), manifest)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compile_missing(
    missing: Sequence[Job],
    results: dict[str, Compiled],
    store: Store,
    kernels_root: Path,
    workers: int,
    say: Callable[[str], None],
) -> list[str]:
    """Compile what the store lacks into ``results`` and the store, with progress; return the failures' texts."""
    if not missing:
        return []
    started, reused = time.monotonic(), len(results)
    say(f"{len(missing)} cubins to compile, {reused} up to date, {min(workers, len(missing))} processes")

    def done(job: Job, built: Compiled) -> None:
        results[job.key] = built
        store.put(job.key, built)
        entry = built.entry
        say(
            f"[{len(results) - reused:>3}/{len(missing)}] {time.monotonic() - started:6.1f} s  {entry['file']}  "
            f"{entry['registers']} registers, {entry['spill_bytes']} B spilled, {entry['size'] / 1024:.1f} KiB"
        )

    return run_jobs(missing, kernels_root, workers, done)


def publish(folder: Path, manifest: Mapping[str, Any], cubins: Mapping[str, bytes]) -> None:
    """Put cubins and manifest in place; the manifest goes first and comes last, so that what it names exists."""
    text = (json.dumps(manifest, indent=1) + "\n").encode()
    target = folder / "manifest.json"
    if target.is_file() and target.read_bytes() == text and _intact(folder, cubins):
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".stage-") as stage_name:
        stage = Path(stage_name)
        (stage / "cubins").mkdir()
        for file, cubin in cubins.items():
            (stage / file).parent.mkdir(exist_ok=True)
            (stage / file).write_bytes(cubin)
        target.unlink(missing_ok=True)
        shutil.rmtree(folder / "cubins", ignore_errors=True)
        os.replace(stage / "cubins", folder / "cubins")
    write_atomic(target, text)


def _intact(folder: Path, cubins: Mapping[str, bytes]) -> bool:
    there = {path.relative_to(folder).as_posix(): path for path in folder.glob("cubins/*/*")}
    return there.keys() == cubins.keys() and all(path.read_bytes() == cubins[file] for file, path in there.items())


def portable_jobs(rows: Iterable[KernelSpec], archs: Sequence[str], compiler: str, sources: Sources) -> list[Job]:
    """Return one row of each family, that of the largest head_dim, for each of ``archs`` that it may run on."""
    largest: dict[str, KernelSpec] = {}
    for spec in rows:
        held = largest.get(spec.family)
        if not spec.arch_specific and (held is None or spec.head_dim > held.head_dim):
            largest[spec.family] = spec
    return [
        job_of(spec, arch, compiler, sources)
        for spec in largest.values()
        for arch in archs
        if Arch.parse(arch).cc >= spec.min_arch
    ]


def check_portable(
    root: Path = ROOT, *, rows: Iterable[KernelSpec] = REGISTRY, workers: int | None = None
) -> list[str]:
    """Compile one row of each family for the targets that the wheel does not carry; return the failures."""
    archs = [arch for arch in PORTABLE_ARCHS if arch not in PREBUILT_ARCHS]
    kernels_root, store = root / "kernels_cu", store_of(root)
    jobs = portable_jobs(rows, archs, compiler_version(), Sources(kernels_root))
    results: dict[str, Compiled] = {job.key: found for job in jobs if (found := store.get(job.key)) is not None}
    missing = [job for job in jobs if job.key not in results]
    failures = compile_missing(missing, results, store, kernels_root, workers or os.cpu_count() or 1, _to_stderr)
    for job in jobs:
        if (built := results.get(job.key)) is not None:
            failures += checks.log_complaints(job.spec, job.arch, built.log, built.entry["spill_bytes"])
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: build, narrow, check."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.kernels", description=__doc__)
    parser.add_argument(
        "--arch", metavar="LIST", help="targets, such as 80,90a (default: OMNIATTN_CUDA_ARCHS, else all)"
    )
    parser.add_argument("--only", metavar="NAME", help="compile this row alone, leave the manifest")
    parser.add_argument("--jobs", type=int, metavar="N", help="compiler processes (default: number of CPUs)")
    parser.add_argument("--check", action="store_true", help="compile nothing; fail unless everything is up to date")
    parser.add_argument("--portable", action="store_true", help="compile one row per family for other GPUs, and stop")
    options = parser.parse_args(argv)
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"argument --jobs: expected at least 1, received {options.jobs}")
    try:
        if options.portable:
            failures = check_portable(workers=options.jobs)
            if failures:
                raise BuildError("\n".join(failures))
            print(f"every family compiles for {', '.join(f'sm_{arch}' for arch in PORTABLE_ARCHS)}")
            return 0
        built = build(archs=wanted_archs(options.arch), only=options.only, workers=options.jobs, check=options.check)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    kernels = built.manifest["kernels"]
    size = sum(entry["size"] for entry in kernels) / 2**20
    print(
        f"{len(kernels)} cubins ({size:.2f} MiB): {built.compiled} compiled, {built.reused} up to date; {built.folder}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
