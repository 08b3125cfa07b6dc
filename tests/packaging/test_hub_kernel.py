"""The folder for Hugging Face's `kernels`: relative imports, operators of its own, two versions in one process.

`.ci/hub_kernel` has `kernels` itself load it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import hub_kernel
from omniattn.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]
#: Loads folders as `kernels` does: the file of a module whose name is the id of its metadata.
LOAD = """
import importlib.util, json, sys
from pathlib import Path

def load(folder):
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

first, second = (load(Path(x)) for x in sys.argv[1:3])
assert first.__name__ != second.__name__
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hub") / "kernel"
    assert hub_kernel.main([str(made)]) == 0
    return made / "build" / "torch-cpu"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from omniattn.errors import ArgumentError\n", "from ...errors import ArgumentError\n"),
        ("from omniattn import errors, runtime\n", "from ... import errors, runtime\n"),
        ("import omniattn\n", 'omniattn = __import__(__name__.partition(".")[0])\n'),
        ("import omniattn as oa\n", 'oa = __import__(__name__.partition(".")[0])\n'),
        ("import omniattn.torch\n", 'omniattn = __import__(__name__.partition(".")[0] + ".torch")\n'),
        ("import omniattn.kv.cache as c\n", "from ...kv import cache as c\n"),
        ("from ..errors import X  # omniattn\n", "from ..errors import X  # omniattn\n"),
        ("x = torch.ops.omniattn.top_k\n", "x = torch.ops.lib.top_k\n"),
        ('f(f"omniattn::{x}")\n', 'f(f"lib::{x}")\n'),
        ('L = torch.library.Library("omniattn", "DEF")\n', 'L = torch.library.Library("lib", "DEF")\n'),
    ],
)
def test_what_is_rewritten(before: str, after: str) -> None:
    assert hub_kernel.rewritten(before, ("kv", "blocks"), "lib") == after


def test_an_import_that_cannot_be_rewritten_is_told() -> None:
    with pytest.raises(ValueError, match="several modules"):
        hub_kernel.rewritten("import os, omniattn\n", (), "lib")
    with pytest.raises(ValueError, match="expected once"):
        hub_kernel.with_extra_names("")


def test_what_is_in_the_folder(folder: Path) -> None:
    facts = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    assert (facts["name"], facts["backend"], facts["python-depends"]) == ("omniattn", {"type": "cpu"}, [])
    assert facts["id"].isidentifier()
    assert not (folder.parent / "torch-cuda").exists(), "a checkout has no kernels"
    assert not [p for p in folder.rglob("*.py") if "cli" in p.parts or "vllm" in p.parts or p.name == "__main__.py"]
    assert (folder / "reference/core.py").exists()
    assert "omniattn" in (folder.parents[1] / "README.md").read_text(encoding="utf-8")


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="FOLDER"):
        hub_kernel.write(tmp_path, ROOT / "src/omniattn", "a/b")
    with pytest.raises(ArgumentError, match="package"):
        hub_kernel.write(tmp_path / "new", tmp_path, "a/b")


def run(code: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def two(folder: Path, tmp_path: Path) -> tuple[str, str]:
    """A second version: the same with another name."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    name = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["id"]
    for path in [*other.rglob("*.py"), other / "metadata.json"]:
        path.write_text(path.read_text(encoding="utf-8").replace(name, f"{name}_b"), encoding="utf-8")
    return str(folder), str(other)


def test_two_versions_attend_in_one_process(two: tuple[str, str]) -> None:
    code = """
import numpy as np
x = np.random.default_rng(1).standard_normal((1, 5, 2, 8))
assert np.array_equal(first.attention(x, x, x), second.attention(x, x, x))
try:
    second.attention(x, x, x[..., 0])
except second.errors.ShapeError as error:
    assert not isinstance(error, first.errors.ShapeError)
assert not [m for m in sys.modules if m.partition(".")[0] == "omniattn"]
"""
    run(LOAD + code, *two)


@pytest.mark.frameworks
def test_operators_of_two_versions_do_not_collide(two: tuple[str, str]) -> None:
    pytest.importorskip("torch")
    code = """
import torch
x = torch.randn(1, 5, 2, 8)
for oa in (first, second):
    step = torch.compile(lambda q, oa=oa: oa.attention(q, q, q, causal=True), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(x), oa.attention(x, x, x, causal=True))
    torch.testing.assert_close(oa.flash_attn_func(x, x, x), oa.attention(x, x, x))
assert not [m for m in sys.modules if m.partition(".")[0] == "omniattn"]
"""
    run(LOAD + code, *two)
