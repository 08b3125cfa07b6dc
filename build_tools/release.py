"""What a release would publish, checked as a whole: ``python -m build_tools.release FOLDER``.

The folder holds one sdist, the wheel for every platform, and any number of platform wheels of the same version. Their
kernels are the same byte for byte, each file passes the content check of the smoke test and `twine check --strict`,
and pip would take no two for the same platform. Uploads nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
_SHARED = "omniattn/_kernels/"


class ReleaseError(Exception):
    """The files are not a release."""


def _smoke_test() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smoke_test", ROOT / "wheels/smoke_test.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digests(wheel: Path) -> dict[str, str]:
    """Files that all wheels share, the package's modules and kernels, by name; auditwheel also lists folders."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(_SHARED) or name.endswith(".py")]
        names = [name for name in names if not name.endswith("/")]
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


def _tags(wheel: Path) -> set[tuple[str, str, str]]:
    python, abi, platforms = wheel.stem.split("-")[-3:]
    return {(python, abi, platform) for platform in platforms.split(".")}


def check(folder: Path, version: str, sources: Path | None = ROOT / "kernels_cu") -> list[str]:
    """Check the files of ``folder`` as one release of ``version``; return a line for each, raise at the first fault.

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
    from .kernels import package_version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds the files, and nothing else")
    options = parser.parse_args(argv)
    try:
        lines = check(options.folder, package_version(ROOT))
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
