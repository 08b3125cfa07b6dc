"""Sources of the newest release of a package, by pip, without running anything of it.

Of a wheel the Python files are unpacked. pip unpacks an sdist before it asks the sdist's build backend for metadata; a
module that stands in for the backend refuses, and what was unpacked is read.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

#: What is unpacked of a wheel.
_SUFFIXES = (".py", ".pyi", "native_functions.yaml", "METADATA")
_LINUX = tuple(f"manylinux{tag}_x86_64" for tag in ("2014", "_2_17", "_2_24", "_2_28", "_2_34"))
_REFUSAL = 'raise RuntimeError("nothing of this package is run")\n'


class PeerError(Exception):
    """No sources of a package; the text says why."""


@dataclass(frozen=True)
class Release:
    """A version, and the folder of its sources."""

    version: str
    root: Path


def fetch(
    package: str, folder: Path, *, sdist: bool = False, pre: bool = False, platforms: tuple[str, ...] = _LINUX
) -> Release:
    """Download the newest release into an empty folder.

    Parameters
    ----------
    package : str
        The name on PyPI.
    folder : Path
        Gets the sources.
    sdist : bool
        There are no wheels.
    pre : bool
        There are no releases but those before the first.
    platforms : tuple of str
        Tags of wheels that are taken, the smallest of which has the same Python files as the others.

    Raises
    ------
    PeerError
        pip found no release.
    """
    folder.mkdir(parents=True)
    if sdist:
        return _of_sdist(package, folder)
    return _of_wheel(package, folder, [f"--platform={tag}" for tag in platforms] + ["--pre"] * pre)


def _pip(package: str, folder: Path, options: list[str], variables: dict[str, str]) -> str:
    """What pip says."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder / "files"),
         *options, package],
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.stdout


def _of_wheel(package: str, folder: Path, options: list[str]) -> Release:
    said = _pip(package, folder, ["--only-binary=:all:", "--python-version", "3.12", *options], {})
    wheels = list((folder / "files").glob("*.whl"))
    if len(wheels) != 1:
        errors = [line for line in said.splitlines() if line.startswith("ERROR")]
        raise PeerError(errors[-1].removeprefix("ERROR: ") if errors else said[-200:])
    release = Release(wheels[0].name.split("-")[1], folder / "sources")
    with zipfile.ZipFile(wheels[0]) as archive:
        for name in archive.namelist():
            if name.endswith(_SUFFIXES):
                archive.extract(name, release.root)
    wheels[0].unlink()
    return release


def _of_sdist(package: str, folder: Path) -> Release:
    refusal, unpacked = folder / "refusal" / "setuptools", folder / "unpacked"
    for path in (refusal, unpacked):
        path.mkdir(parents=True)
    (refusal / "__init__.py").write_text(_REFUSAL, encoding="utf-8")
    said = _pip(
        package, folder, ["--no-binary=:all:", "--no-clean", "--no-build-isolation", "--use-pep517"],
        {"TMPDIR": str(unpacked), "PYTHONPATH": str(refusal.parent)},
    )  # fmt: skip
    found = list(unpacked.glob("pip-*/*/PKG-INFO"))
    if len(found) != 1:
        raise PeerError(said[-200:])
    version = re.findall(r"^Version: (.+)$", found[0].read_text(encoding="utf-8"), re.MULTILINE)
    return Release(version[0], found[0].parent)
