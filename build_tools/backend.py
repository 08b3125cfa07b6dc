"""PEP 517 backend: hatchling, plus the kernel compiler as a requirement of wheels alone.

Static ``build-system.requires`` would make ``pip install -e .`` and sdist builds download NVRTC too, although neither
compiles anything.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling import build as _hatchling
from hatchling.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]


def compiler_requirements(pyproject: Path) -> list[str]:
    """Return the extra ``aot`` of ``pyproject``: the one place that names the wheel's compiler."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # hatchling itself depends on tomli there
        import tomli as tomllib
    with pyproject.open("rb") as stream:
        extras = tomllib.load(stream)["project"]["optional-dependencies"]
    return list(extras["aot"])


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return hatchling's own requirements and the compilers'."""
    native = ["setuptools>=77"] if os.environ.get("OMNIATTN_BUILD_NATIVE") == "1" and sys.platform == "win32" else []
    compiler = compiler_requirements(Path("pyproject.toml"))
    return [*_hatchling.get_requires_for_build_wheel(config_settings), *compiler, *native]
