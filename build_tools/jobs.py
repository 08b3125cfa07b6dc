"""One row for one target: what the compiler sees of it, the compiler, and what it made."""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import os
import site
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if "omniattn" not in sys.modules and str(ROOT / "src") not in sys.path:
    # The registry and the compiler front are the package's own, used before the package is installed.
    sys.path.insert(0, str(ROOT / "src"))

from build_tools.code_text import device_code  # noqa: E402
from build_tools.objects import Compiled, Store  # noqa: E402
from omniattn.errors import CompileError  # noqa: E402
from omniattn.registry import PORTABLE_ARCHS, PREBUILT_ARCHS, KernelSpec  # noqa: E402
from omniattn.runtime import nvrtc  # noqa: E402
from omniattn.runtime.arch import Arch  # noqa: E402
from omniattn.runtime.compile import compile_options, compile_spec  # noqa: E402
from omniattn.runtime.sources import Sources  # noqa: E402

#: Compiler of the wheel: cubins of a 13.x compiler load on drivers from R580 on only, those of 12.9 from R525 on.
AOT_COMPILER = (12, 9)

#: Where NVRTC's package for CUDA 12 has it.
_COMPILER_LIBRARY = "nvidia/cuda_nvrtc/" + ("bin/nvrtc64_12*.dll" if sys.platform == "win32" else "lib/libnvrtc.so.12")

#: Folder in place of ``build/kernels/objects``, so that a build from an sdist can reuse a checkout's objects.
OBJECTS_VARIABLE = "OMNIATTN_BUILD_OBJECTS"

#: Changes with what `job_of` digests, so that older objects are not taken for new ones.
_KEY_FORMAT = 2


class BuildError(Exception):
    """The kernels cannot be built; the text lists every reason."""


@dataclass(frozen=True)
class Job:
    """One cubin to make; ``key`` is the digest of everything that the compiler sees."""

    spec: KernelSpec
    arch: str
    key: str

    def __str__(self) -> str:
        return f"{self.spec.name} (sm_{self.arch})"


class Seen:
    """What the compiler sees of the sources below a folder: their code, without comments and layout."""

    def __init__(self, root: Path) -> None:
        self.sources = Sources(root)
        self._digests: dict[str, str] = {}

    def digest(self, spec: KernelSpec) -> str:
        """sha256 of the code of a row's files."""
        parts = []
        for name, text in self.sources.of(spec).items():
            if name not in self._digests:
                self._digests[name] = hashlib.sha256(device_code(text).encode()).hexdigest()
            parts.append([name, self._digests[name]])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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


def job_of(spec: KernelSpec, arch: str, compiler: str, seen: Seen) -> Job:
    """Return the job of one cubin."""
    options = list(compile_options(spec, arch, lineinfo=False))
    digested = [_KEY_FORMAT, spec.symbol, seen.digest(spec), options, compiler]
    return Job(spec, arch, hashlib.sha256(json.dumps(digested).encode()).hexdigest())


def plan(rows: Iterable[KernelSpec], compiler: str, seen: Seen, archs: frozenset[str] | None = None) -> list[Job]:
    """Return the cubins of a wheel: each row for each of its targets, or for those of them in ``archs``."""
    return [
        job_of(spec, arch, compiler, seen)
        for spec in rows
        for arch in spec.prebuild
        if archs is None or arch in archs
    ]  # fmt: skip


def portable_jobs(
    rows: Iterable[KernelSpec], compiler: str, seen: Seen, archs: Sequence[str] | None = None
) -> list[Job]:
    """Return one row of each family, that of the largest head_dim, for targets that no wheel carries it for.

    Such GPUs compile it themselves. ``archs``: these targets, by default those of `PORTABLE_ARCHS`.
    """
    others = [arch for arch in PORTABLE_ARCHS if arch not in PREBUILT_ARCHS] if archs is None else archs
    largest: dict[str, KernelSpec] = {}
    for spec in rows:
        held = largest.get(spec.family)
        if not spec.arch_specific and (held is None or spec.head_dim > held.head_dim):
            largest[spec.family] = spec
    return [
        job_of(spec, arch, compiler, seen)
        for spec in largest.values()
        for arch in others
        if Arch.parse(arch).cc >= spec.min_arch
    ]


def store_of(root: Path = ROOT) -> Store:
    """Return the incremental store of a checkout, which everything that compiles rows ahead of time shares."""
    return Store(Path(os.environ.get(OBJECTS_VARIABLE) or root / "build/kernels/objects"))


def compiled(spec: KernelSpec, arch: str, root: Path = ROOT) -> Compiled:
    """Return a row compiled for ``arch``, out of the store if it is there: whatever the registry says of targets."""
    job, store = job_of(spec, arch, compiler_version(), Seen(root / "kernels_cu")), store_of(root)
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
        "size": len(result.cubin),
        "sha256": hashlib.sha256(result.cubin).hexdigest(),
        "registers": result.registers,
        "smem_static_bytes": result.smem_static_bytes,
        "spill_bytes": result.spill_bytes,
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
                failures.append(f"{job}: {error}")
    return failures


def compile_missing(
    missing: Sequence[Job],
    results: dict[str, Compiled],
    store: Store,
    kernels_root: Path,
    workers: int | None,
    say: Callable[[str], None],
) -> list[str]:
    """Compile what the store lacks into ``results`` and the store, with progress; return the failures' texts."""
    if not missing:
        return []
    workers = workers or os.cpu_count() or 1
    started, reused = time.monotonic(), len(results)
    # Two rows with the same code are one object.
    missing = list({job.key: job for job in missing}.values())
    say(f"{len(missing)} cubins to compile, {reused} up to date, {min(workers, len(missing))} processes")

    def done(job: Job, built: Compiled) -> None:
        results[job.key] = built
        store.put(job.key, built)
        entry = built.entry
        say(
            f"[{len(results) - reused:>4}/{len(missing)}] {time.monotonic() - started:6.1f} s  {job}  "
            f"{entry['registers']} registers, {entry['spill_bytes']} B spilled, {entry['size'] / 1024:.1f} KiB"
        )

    return run_jobs(missing, kernels_root, workers, done)


def take(
    jobs: Sequence[Job], root: Path, workers: int | None, say: Callable[[str], None], fresh: Path | None = None
) -> tuple[dict[str, Compiled], int, list[str]]:
    """Results of ``jobs`` by key, out of the checkout's store or the compiler; how many were compiled; failures.

    ``fresh``: another folder in place of that store, an empty one to have everything compiled.
    """
    store = store_of(root) if fresh is None else Store(fresh)
    results = {job.key: found for job in jobs if (found := store.get(job.key)) is not None}
    missing = [job for job in jobs if job.key not in results]
    failures = compile_missing(missing, results, store, root / "kernels_cu", workers, say)
    return results, len(missing), failures


def to_stderr(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)
