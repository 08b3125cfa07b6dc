"""Check a wheel as a user meets it: ``python wheels/smoke_test.py [WHEEL]`` (built first if none is named).

Reads the file, then installs it into a fresh virtual environment and uses it there: contents against the manifest,
size, tag, bill of materials, import time, a CPU call, the command line, and what a GPU call says on a machine without
a driver; of a platform wheel the C module too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROBE = Path(__file__).resolve().parent / "probe.py"

MAX_WHEEL_BYTES = 30_000_000
KERNELS = "omniattn/_kernels/"
#: The C module, where a platform wheel has it, and how the file begins (ELF; Windows).
MODULES = {"omniattn/_native.abi3.so": b"\x7fELF", "omniattn/_native.pyd": b"MZ"}


class SmokeTestError(Exception):
    """The wheel is not what it should be."""


def run(command: Sequence[str | Path], **changes: str) -> str:
    """Run a command away from the checkout, so that nothing is imported from it; return its standard output."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    with tempfile.TemporaryDirectory() as elsewhere:
        result = subprocess.run(
            [str(part) for part in command],
            cwd=elsewhere,
            env={**environment, **changes},
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    if result.returncode != 0:
        shown = " ".join(str(part) for part in command)
        raise SmokeTestError(f"{shown}: exit code {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result.stdout


def build_wheel(out: Path, source: Path = ROOT) -> Path:
    """Build the wheel of ``source`` into ``out`` with this interpreter's own tools; return its path."""
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source])
    (wheel,) = out.glob("*.whl")
    return wheel


def check_contents(wheel: Path, sources: Path | None = ROOT / "kernels_cu") -> str:
    """Check names, tag, size, and that cubins and manifest say the same; return a one-line summary.

    Parameters
    ----------
    wheel : Path
        The file.
    sources : Path, optional
        Kernel sources that the wheel must hold, byte for byte; None where there is no checkout to compare with.
    """
    problems = []
    tag = "-".join(wheel.stem.split("-")[-3:])
    is_native = tag.startswith("cp310-abi3-") and not tag.endswith("-any")
    if tag != "py3-none-any" and not is_native:
        problems.append(f"expected a tag py3-none-any or cp310-abi3-PLATFORM, received {wheel.name}")
    size = wheel.stat().st_size
    if size >= MAX_WHEEL_BYTES:
        problems.append(f"expected less than {MAX_WHEEL_BYTES} bytes, received {size}")
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if not name.endswith("/")]  # auditwheel lists folders too
        names = set(files)
        if len(names) != len(files):
            problems.append("a file is in the archive twice")
        manifest = json.loads(archive.read(KERNELS + "manifest.json"))
        listed = {KERNELS + pack["file"]: pack for pack in manifest["packs"]}
        held = {name for name in names if name.startswith(KERNELS + "packs/")}
        problems += [f"{name} is in the manifest, not in the wheel" for name in sorted(listed.keys() - held)]
        problems += [f"{name} is in the wheel, not in the manifest" for name in sorted(held - listed.keys())]
        problems += [x for name in sorted(held & listed.keys()) for x in _pack_problems(archive, name, listed[name])]
        problems += _source_problems(archive, names, sources)
        allowed = ("omniattn/", f"omniattn-{manifest['package_version']}.dist-info/")
        problems += [f"{name} does not belong into the wheel" for name in sorted(names) if not name.startswith(allowed)]
        problems += [f"{name} is build waste" for name in sorted(names) if name.endswith((".pyc", "~"))]
        (metadata,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        purelib = f"Root-Is-Purelib: {str(not is_native).lower()}"
        if purelib not in archive.read(metadata).decode():
            problems.append(f"expected {purelib} in WHEEL")
        modules = sorted(names & MODULES.keys())
        if len(modules) != is_native:
            problems.append(f"expected {int(is_native)} C module for the tag {tag}, received {modules}")
        problems += [f"{x} is no library" for x in modules if not archive.read(x).startswith(MODULES[x])]
        problems += _bill_problems(archive, names, held | set(modules))
        for wanted in ("omniattn/py.typed", "omniattn/__init__.py"):
            if wanted not in names:
                problems.append(f"{wanted} is missing")
        if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
            problems.append("the license is missing")
    if problems:
        raise SmokeTestError(f"{wheel.name}:\n" + "\n".join(problems))
    cubins = sum(len(pack["kernels"]) for pack in listed.values())
    packs = f"{cubins} cubins in {len(listed)} packs by {manifest['compiler']}"
    return f"{wheel.name}: {size / 1e6:.2f} MB, {len(names)} files, {packs}"


def _pack_problems(archive: zipfile.ZipFile, name: str, pack: dict[str, Any]) -> list[str]:
    """A pack is the file of the manifest, opens, and holds the cubins that are listed, without a gap."""
    data = archive.read(name)
    if hashlib.sha256(data).hexdigest() != pack["file_sha256"]:
        return [f"{name} does not match its checksum in the manifest"]
    content = lzma.decompress(data)
    if hashlib.sha256(content).hexdigest() != pack["sha256"] or len(content) != pack["size"]:
        return [f"{name} does not open to what the manifest says"]
    problems, offset = [], 0
    for kernel, size, sha256, *_ in pack["kernels"]:
        cubin = content[offset : offset + size]
        offset += size
        if hashlib.sha256(cubin).hexdigest() != sha256 or cubin[:4] != b"\x7fELF":
            problems.append(f"{kernel} in {name} is not the cubin of the manifest")
    return [*problems, *([f"{name} holds more than the manifest lists"] if offset != len(content) else [])]


def _bill_problems(archive: zipfile.ZipFile, names: set[str], binaries: set[str]) -> list[str]:
    """The bill of materials names each binary file, with its digest where it gives one."""
    (found, *more) = sorted(name for name in names if name.endswith("/sboms/omniattn.cdx.json")) or [""]
    if not found or more:
        return ["expected one bill of materials, sboms/omniattn.cdx.json"]
    files = json.loads(archive.read(found))["metadata"]["component"]["components"]
    listed = {file["name"]: file for file in files}
    problems = [f"{name} is missing in the bill of materials" for name in sorted(binaries - listed.keys())]
    problems += [f"{name} is in the bill of materials, not in the wheel" for name in sorted(listed.keys() - binaries)]
    for name in sorted(binaries & listed.keys()):
        digests = [digest["content"] for digest in listed[name].get("hashes", ())]
        if digests and digests != [hashlib.sha256(archive.read(name)).hexdigest()]:
            problems.append(f"{name} is another file than the bill of materials says")
    return problems


def _source_problems(archive: zipfile.ZipFile, names: set[str], sources: Path | None) -> list[str]:
    prefix = KERNELS + "src/"
    held = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    if not held:
        return ["the wheel holds no kernel sources: it could not compile for a new GPU"]
    if sources is None:
        return []
    wanted = {path.relative_to(sources).as_posix(): path for path in sources.glob("**/*.cu*")}
    problems = [f"kernel source {name} is missing" for name in sorted(wanted.keys() - held)]
    problems += [f"kernel source {name} is not in the checkout" for name in sorted(held - wanted.keys())]
    for name in sorted(held & wanted.keys()):
        if archive.read(prefix + name) != wanted[name].read_bytes():
            problems.append(f"kernel source {name} differs from the checkout's")
    return problems


def make_environment(folder: Path, wheel: Path) -> Path:
    """Install the wheel, with what it requires and nothing else, into a new environment; return its interpreter."""
    venv.create(folder, with_pip=True, clear=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel])
    run([python, "-m", "pip", "check", "--disable-pip-version-check"])
    return python


def check_use(python: Path, has_module: bool = False) -> list[str]:
    """Use the installed package as ``wheels/probe.py`` says, its C module too where it has one; return its lines."""
    # Each probe is a process of its own: what one imports or initializes must not hide the next one's fault.
    names = ("imports", "import-time", "cpu", "gpu-error", "kernels", *(["native"] if has_module else []))
    # Packs are opened out of this wheel, not out of what an earlier one has left in this user's cache.
    with tempfile.TemporaryDirectory() as cache:
        lines = [run([python, "-I", PROBE, name], OMNIATTN_CACHE_DIR=cache).strip() for name in names]
    program = python.parent / ("omniattn.exe" if os.name == "nt" else "omniattn")
    # Tables need the extra "cli"; the bare package answers in JSON, and says so.
    shown = json.loads(run([program, "info", "--json"]))
    if not isinstance(shown, dict) or not shown:
        raise SmokeTestError(f"omniattn info --json: expected an object with content, received {shown!r}")
    lines.append(f"omniattn info --json: {', '.join(shown)}")
    return lines


def smoke_test(wheel: Path, *, sources: Path | None = ROOT / "kernels_cu") -> list[str]:
    """Run every check on ``wheel``; return what was seen, raise SmokeTestError at the first failure."""
    lines = [check_contents(wheel, sources)]
    with tempfile.TemporaryDirectory(prefix="omniattn-smoke-") as folder:
        lines += check_use(make_environment(Path(folder) / "venv", wheel), not wheel.name.endswith("-any.whl"))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "wheel", type=Path, nargs="?", help="the wheel to check (default: build one from this checkout)"
    )
    options = parser.parse_args(argv)
    try:
        if options.wheel is not None:
            lines = smoke_test(options.wheel.resolve())
        else:
            with tempfile.TemporaryDirectory(prefix="omniattn-wheel-") as folder:
                lines = smoke_test(build_wheel(Path(folder)))
    except SmokeTestError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
