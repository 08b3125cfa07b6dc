"""Tests that need a GPU name only what there is: nothing else tells before they run on one."""

from __future__ import annotations

import ast
import importlib
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.frameworks

FOLDER = Path(__file__).parents[2] / "gpu"


def _imported(statement: ast.Import | ast.ImportFrom) -> dict[str, Any]:
    """What an import of this project's own binds, by name."""
    if isinstance(statement, ast.Import):
        return {a.asname or a.name: importlib.import_module(a.name) for a in statement.names if a.name == "omniattn"}
    name = "tests.gpu" * (statement.level == 1) + "." * (statement.level == 1 and bool(statement.module))
    name += statement.module or ""
    if name.split(".")[0] not in ("omniattn", "tests"):
        return {}
    module = importlib.import_module(name)
    found = {}
    for alias in statement.names:
        if not hasattr(module, alias.name):  # a module that nobody has imported, or an error
            importlib.import_module(f"{name}.{alias.name}")
        found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


def missing_names(text: str) -> list[str]:
    """Attributes of imported modules, as ``name.attribute``, that they do not have."""
    tree = ast.parse(text)
    modules: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules |= {n: x for n, x in _imported(node).items() if isinstance(x, types.ModuleType)}
    for node in ast.walk(tree):  # parameters are other things
        if isinstance(node, ast.arg):
            modules.pop(node.arg, None)
    names = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name))
    return [
        f"{n.value.id}.{n.attr}" for n in names
        if isinstance(n.value, ast.Name) and n.value.id in modules and not hasattr(modules[n.value.id], n.attr)
    ]  # fmt: skip


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_names(path: Path) -> None:
    if path.stem in ("test_jax_gpu", "test_native_jax_gpu"):
        pytest.importorskip("jax")
    assert missing_names(path.read_text()) == []


def test_what_is_found() -> None:
    """A module's name that there is not, whatever the module is called; and imports of such names."""
    text = "import omniattn as oa\nfrom omniattn.compat import cached as c\nc._rotate, c.replace, oa.decode, oa.encode"
    assert missing_names(text) == ["c._rotate", "oa.encode"]
    with pytest.raises(ImportError):
        missing_names("from omniattn.compat import nothing")
