"""What a release would publish, checked as a whole: ``python -m build_tools.release FOLDER``.

The folder holds one sdist, the wheel for every platform, and any number of platform wheels of the same version. Their
kernels are the same byte for byte, and those that the committed table of compiled rows says: every row for every
target, nothing stale. Each file passes the content check of the smoke test and `twine check --strict`, and pip would
take no two for the same platform. Uploads nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from build_tools.table import FILE, Table

ROOT = Path(__file__).resolve().parent.parent
_SHARED = "omniattn/_kernels/"
_MANIFEST = _SHARED + "manifest.json"


class ReleaseError(Exception):
    """The files are not a release."""


def _smoke_test() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smoke_test", ROOT / "wheels/smoke_test.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _manifest(wheel: Path) -> dict[str, Any]:
    """The manifest of a wheel's kernels without the packs' own digests: LZMA's libraries differ between systems."""
    with zipfile.ZipFile(wheel) as archive:
        manifest: dict[str, Any] = json.loads(archive.read(_MANIFEST))
    for pack in manifest["packs"]:
        del pack["file_sha256"]
    return manifest


def _digests(wheel: Path) -> dict[str, str]:
    """Files that all wheels share, the package's modules and kernels, by name; auditwheel also lists folders.

    What is in the packs the manifest says, and the content check compares the two.
    """
    found = {_MANIFEST: hashlib.sha256(json.dumps(_manifest(wheel)).encode()).hexdigest()}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("omniattn/") and name.endswith((".py", ".cu", ".cuh")):
                found[name] = hashlib.sha256(archive.read(name)).hexdigest()
    return found


def _kernel_problems(manifest: dict[str, Any], table: Table, wanted: Iterable[tuple[str, str]]) -> list[str]:
    """What ``wanted`` (arch, name) the kernels lack, and which are others than the table's."""
    held = {(pack["arch"], kernel[0]): kernel[2] for pack in manifest["packs"] for kernel in pack["kernels"]}
    missing = [f"{name} (sm_{arch})" for arch, name in sorted(set(wanted) - held.keys())]
    other = [
        f"{name} (sm_{arch})"
        for (arch, name), sha256 in sorted(held.items())
        if (arch, name) not in table or not sha256.startswith(table[arch, name].sha256)
    ]
    problems = [f"lacks {len(missing)} kernels of the registry: {', '.join(missing[:5])}"] if missing else []
    if other:
        problems.append(
            f"has {len(other)} kernels that {FILE} does not vouch for: {', '.join(other[:5])}; what to do: "
            "python -m build_tools.kernels --table, and commit it"
        )
    return problems


def _tags(wheel: Path) -> set[tuple[str, str, str]]:
    python, abi, platforms = wheel.stem.split("-")[-3:]
    return {(python, abi, platform) for platform in platforms.split(".")}


def check(
    folder: Path, version: str, sources: Path | None, table: Table, wanted: Iterable[tuple[str, str]]
) -> list[str]:
    """Check the files of ``folder`` as one release of ``version``; return a line for each, raise at the first fault.

    Parameters
    ----------
    folder : Path
    version : str
    sources : Path, optional
        Kernel sources that the wheels must hold, see ``wheels/smoke_test.py``.
    table : Table
        What the kernels must be.
    wanted : iterable of (arch, name)
        Kernels that must be there.

    Raises
    ------
    ReleaseError
        Names the file, what was expected and what is there.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    wheels = [path for path in files if path.suffix == ".whl"]
    expected = f"omniattn-{version}.tar.gz"
    strangers = [path.name for path in files if path not in wheels and path.name != expected]
    if strangers or len(files) - len(wheels) != 1:
        raise ReleaseError(f"{folder}: expected {expected} and wheels, received {[path.name for path in files]}")
    plain = f"omniattn-{version}-py3-none-any.whl"
    if plain not in [path.name for path in wheels]:
        raise ReleaseError(f"{folder}: expected {plain}, received {[path.name for path in wheels]}")
    if problems := _kernel_problems(_manifest(folder / plain), table, wanted):
        raise ReleaseError(f"{plain}: {'; '.join(problems)}")
    smoke, shared = _smoke_test(), _digests(folder / plain)
    taken: dict[tuple[str, str, str], str] = {}
    lines: list[str] = []
    for wheel in wheels:
        if wheel.name.split("-")[1] != version:
            raise ReleaseError(f"{wheel.name}: expected version {version}")
        for tag in _tags(wheel):
            if taken.setdefault(tag, wheel.name) != wheel.name:
                raise ReleaseError(f"{wheel.name}: {taken[tag]} has the tag {'-'.join(tag)} too")
        other = {name for name, digest in (_digests(wheel).items() ^ shared.items())}
        if other:
            raise ReleaseError(f"{wheel.name}: differs from {plain} in {', '.join(sorted(other)[:5])}")
        try:
            lines.append(smoke.check_contents(wheel, sources))
        except smoke.SmokeTestError as error:
            raise ReleaseError(str(error)) from error
    lines.append(f"{expected}: {(folder / expected).stat().st_size / 1e6:.2f} MB")
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], capture_output=True, text=True
    )
    if done.returncode:
        raise ReleaseError(f"twine check --strict failed:\n{done.stdout}{done.stderr}")
    return [*lines, f"twine check --strict: {len(files)} files pass"]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    from .kernels import REGISTRY, BuildError, all_jobs, package_version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds the files, and nothing else")
    options = parser.parse_args(argv)
    try:
        wanted = [(arch, spec.name) for spec in REGISTRY for arch in spec.prebuild]
        table = Table.load(ROOT)
        lines = check(options.folder, package_version(ROOT), ROOT / "kernels_cu", table, wanted)
        # Of GPUs, too, that no wheel has cubins for: they compile these rows themselves.
        if stale := [job for job in all_jobs(ROOT) if not table.is_current(job)]:
            raise ReleaseError(
                f"{len(stale)} entries of {FILE} are stale ({stale[0]}, ...); what to do: "
                "python -m build_tools.kernels --table, and commit it"
            )
    except (ReleaseError, BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
