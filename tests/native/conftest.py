"""Fixtures of the tests of the C module."""

from __future__ import annotations

from pathlib import Path

import pytest

from .building import build


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libcuda's stand-in and the module lie."""
    made = tmp_path_factory.mktemp("native")
    build(made)
    return made
