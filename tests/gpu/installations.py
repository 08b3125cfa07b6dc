"""Installations of the package with chosen cubins, and fresh processes that use them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from build_tools import kernels, packs
from build_tools.jobs import Job
from build_tools.objects import Compiled
from omniattn import __version__, runtime
from omniattn.registry import KernelSpec
from omniattn.runtime.arch import Arch
from omniattn.runtime.loader import compile_to
from omniattn.runtime.store import get_store

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("runtime_child.py")

#: (kernel, target as the manifest calls it, for example "90a") -> binary.
Cubins = Mapping[tuple[KernelSpec, str], bytes]


def compile_missing(specs: Iterable[KernelSpec]) -> None:
    """Compile into the cache, in parallel, what this GPU has no binary of: one after the other would take minutes."""
    cc = runtime.device_info(0).cc
    missing = [s for s in specs if not s.unfit(cc) and runtime.resolve(s, cc).kind == "jit"]
    if missing:
        # Spawned: this process has used CUDA.
        with get_context("spawn").Pool(min(16, os.cpu_count() or 1, len(missing))) as pool:
            pool.starmap(compile_to, [(spec, Arch.of_device(cc).number) for spec in missing], chunksize=1)


def write_cubins(folder: Path, cubins: Cubins) -> None:
    """Write binaries and a manifest that vouches for them, as the ahead-of-time build does."""
    built = []
    for (spec, arch), image in cubins.items():
        entry = {"size": len(image), "sha256": hashlib.sha256(image).hexdigest(), "registers": 0,
                 "smem_static_bytes": 0, "spill_bytes": 0}  # fmt: skip
        built.append((Job(spec, arch, ""), Compiled(entry, image, "")))
    kernels.publish(folder, *packs.make(built, __version__, "the NVRTC of this test", get_store().sources))


def wheel_layout(folder: Path, cubins: Cubins) -> Path:
    """Lay the package out in ``folder`` as a wheel installs it, with ``cubins`` and no others; returns ``folder``."""
    package = folder / "omniattn"
    shutil.copytree(ROOT / "src" / "omniattn", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "kernels_cu", package / "_kernels" / "src")
    write_cubins(package / "_kernels", cubins)
    return folder


def clean_environment(package: Path, **variables: str) -> dict[str, str]:
    """This process's environment without omniattn's variables; ``package`` is the folder to import omniattn from."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMNIATTN_")}
    path = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), **variables}


def start(*command: str, package: Path = ROOT / "src", **variables: str) -> subprocess.Popen[str]:
    """Start ``runtime_child.py`` in a fresh process; `finish` waits for it."""
    return subprocess.Popen(
        [sys.executable, str(CHILD), *command],
        env=clean_environment(package, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what the child reported; its traceback fails the test."""
    try:
        out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the child process did not end\n{out}\n{err}") from None
    assert process.returncode == 0, f"the child process ended with {process.returncode}\n{out}\n{err}"
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def run(*command: str, package: Path = ROOT / "src", **variables: str) -> dict[str, Any]:
    """Run ``runtime_child.py`` in a fresh process and return its report."""
    return finish(start(*command, package=package, **variables))
