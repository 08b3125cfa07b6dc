"""The module that pyright checks strictly has every public name. `.ci/run` has pyright check it."""

from __future__ import annotations

import ast
from pathlib import Path

import omniattn
from build_tools import public_types

ROOT = Path(__file__).resolve().parents[2]


def test_every_public_name_is_checked() -> None:
    text = public_types.text()
    ast.parse(text)
    missing = [name for name in omniattn.__all__ if f"omniattn.{name}," not in text and name != "errors"]
    assert missing == []
    assert "    omniattn.PagedKVCache.from_arrays,\n" in text
    assert "    omniattn.torch.flex_attention,\n" in text
    assert "    omniattn.errors.ShapeError,\n" in text


def test_ci_runs_the_checker() -> None:
    assert "\n.venv/bin/python -m build_tools.public_types\n" in (ROOT / ".ci/run").read_text(encoding="utf-8")
