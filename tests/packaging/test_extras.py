"""Extras of pyproject.toml that one lock cannot have together are said to be so."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    tomllib: Any = pytest.importorskip("tomli")
else:
    import tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]


def asked(extra: str) -> set[str]:
    """Names that an extra asks for, those of the extras that it names among them."""
    found = set()
    for text in EXTRAS[extra]:
        name, inner = re.findall(r"^([\w.-]+)(?:\[([\w,]+)\])?", text)[0]
        found |= {name} if name != "omniattn" else set().union(*(asked(x) for x in inner.split(",")))
    return found


def test_the_compiler_of_the_wheel_is_not_torch_s() -> None:
    compilers = {extra for extra in EXTRAS if "nvidia-cuda-nvrtc-cu12" in asked(extra) and extra != "jit12"}
    torches = {extra for extra in EXTRAS if "torch" in asked(extra)}
    assert compilers == {"aot", "test"}
    assert torches == {"torch", "frameworks"}
    said = {frozenset(one["extra"] for one in pair) for pair in PROJECT["tool"]["uv"]["conflicts"]}
    assert said == {frozenset((a, b)) for a in compilers for b in torches}
