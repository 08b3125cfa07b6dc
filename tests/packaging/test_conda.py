"""The conda recipe asks for what pyproject.toml asks for."""

from __future__ import annotations

import re
from pathlib import Path

from omniattn.version import __version__

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (ROOT / "conda/recipe.yaml").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def asked(part: str, name: str) -> str:
    """Bounds of a package in a part of the recipe's requirements."""
    (text,) = re.findall(rf"^  {part}:\n((?:    - .*\n)+)", RECIPE, re.MULTILINE)
    (found,) = re.findall(rf"^    - {re.escape(name)}(?: (.*))?$", text, re.MULTILINE)
    return str(found)


def test_the_recipe_is_of_this_version_and_project() -> None:
    assert f'version: "{__version__}"' in RECIPE
    assert asked("run", "python") == re.findall(r'^requires-python = "(.*)"', PROJECT, re.MULTILINE)[0]
    for name in ("numpy", "cuda-bindings"):
        bounds = re.findall(rf'^    "{name}([^;"]*)[;"]', PROJECT, re.MULTILINE)
        assert asked("run", name) == bounds[0]
    assert asked("host", "cuda-bindings") == re.findall(r'"cuda-bindings([^;"]*<13)', PROJECT)[0]
    assert asked("host", "cuda-nvrtc") == "==" + re.findall(r"nvidia-cuda-nvrtc-cu12==([\d.]+)", PROJECT)[0]
    assert asked("host", "hatchling") == re.findall(r'requires = \["hatchling([^"]*)"', PROJECT)[0]
    assert asked("run_constraints", "pytorch") == re.findall(r'^torch = \["torch(.*)"\]', PROJECT, re.MULTILINE)[0]
    assert asked("run_constraints", "jax") == re.findall(r'^jax = \["jax(.*)"\]', PROJECT, re.MULTILINE)[0]


def test_every_bound_has_an_operator() -> None:
    """rattler-build reads no recipe that has a version without one."""
    (text,) = re.findall(r"^requirements:\n((?: .*\n)+)", RECIPE, re.MULTILINE)
    bounds = re.findall(r"^    - \S+ (.+)$", text, re.MULTILINE)
    assert len(bounds) >= 9
    assert [bound for bound in bounds if not re.fullmatch(r"(?:[<>=!]=?[\d.]+,?)+|\d+(?:\.\d+)*\.\*", bound)] == []
