"""docs/internals: its code prints what stands below it, its excerpts are the sources', its example can be added."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from build_tools import checks, page_code
from build_tools.host_structs import Headers, text
from build_tools.page_code import Block, PageError, blocks, renewed

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/internals"
EXAMPLE = (FOLDER / "add_a_kernel.md").read_text(encoding="utf-8")
#: What a copy of the checkout does without.
LEFT_OUT = {
    "src": ("*.npz", "*.egg-info"),
    "tests": ("gpu", "native", "numerics", "frameworks", "integrations", "examples"),
}

# ------------------------------------------------------------------------------------------------- Code and its output


@pytest.mark.parametrize("name", page_code.PAGES)
def test_code_prints_what_the_page_shows(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert renewed(page) == page, "run: python -m build_tools.page_code --write"


PAGE = """Text.
```python
x = 2
print(x)
```
```text
old
```

`a/file.py`:
```python
raise ValueError
```

```python
print(x + 1, __name__)
```

```text
```
"""


def test_a_page_is_renewed() -> None:
    assert renewed(PAGE) == PAGE.replace("old\n", "2\n").replace("```text\n```", "```text\n3 __main__\n```")
    assert [(block.language, block.file, block.follows) for block in blocks(PAGE)] == [
        ("python", "", False), ("text", "", True), ("python", "a/file.py", False), ("python", "", True),
        ("text", "", True),
    ]  # fmt: skip
    with pytest.raises(PageError, match=r"no text block shows what this prints:\nprint\(x \+ 1"):
        renewed(PAGE.replace("\n```text\n```\n", "\nNothing.\n\n```text\n```\n"))
    with pytest.raises(PageError, match="ZeroDivisionError"):
        renewed(PAGE.replace("x = 2", "x = 1 / 0"))


def test_a_page_that_is_not_true_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page_code, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    assert page_code.main(["page.md"]) == 1
    assert page_code.main(["--write", "page.md"]) == 0
    assert page_code.main(["page.md"]) == 0
    told = "page.md: its code prints something else\npage.md: renewed\n"
    assert capsys.readouterr().out == told


# ------------------------------------------------------------------------------------------------------------ Excerpts


def excerpt_is_of(excerpt: str, source: str) -> bool:
    """Whether the lines stand in the source one behind the other; ``...`` is for lines that are left out."""
    at = 0
    for part in re.split(r"^ *(?:// |# )?\.\.\.\n", excerpt, flags=re.MULTILINE):
        at = source.find(part, at)
        if at < 0 or (at > 0 and source[at - 1] != "\n"):
            return False
        at += len(part)
    return True


def test_excerpts_are_the_sources() -> None:
    page = (FOLDER / "kernel_file.md").read_text(encoding="utf-8")
    excerpts = [block for block in blocks(page) if block.file]
    assert len(excerpts) >= 5
    wrong = [f"{x.file}: {x.text}" for x in excerpts if not excerpt_is_of(x.text, (ROOT / x.file).read_text("utf-8"))]
    assert wrong == []


def test_an_excerpt_that_is_not_the_sources() -> None:
    source = "a\n  b\nc\nd\n"
    for right in ("a\n", "  b\nc\n", "a\n...\nd\n", "a\n  // ...\nd\n"):
        assert excerpt_is_of(right, source)
    for wrong in ("b\n", "a\nc\n", "d\n...\na\n", "a\n...\ne\n"):
        assert not excerpt_is_of(wrong, source)


# ------------------------------------------------------------------------------------------------------------- Example


def edited(before: str, diff: str) -> str:
    """A text with a diff whose places, ``@@`` between them, have no line numbers: each stands once in the text."""
    for place in diff.split("@@\n"):
        lines = place.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert before.count(old) == 1, f"expected one place, found {before.count(old)}:\n{old}"
        before = before.replace(old, new)
    return before


@dataclass(frozen=True)
class Copy:
    """A copy of the checkout that the page's blocks go into."""

    root: Path

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the page, by this interpreter and with nothing of the real checkout on its path."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OMNIATTN_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join((str(self.root / "src"), str(self.root))),
            "OMNIATTN_CACHE_DIR": str(self.root / "cache"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }  # fmt: skip
        words = shlex.split(command)
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        assert words.pop(0) == "python", command
        done = [sys.executable, *words]
        return subprocess.run(done, cwd=self.root, env=environment, capture_output=True, text=True, check=False)

    def take(self, block: Block) -> None:
        """Write or change a file, or run commands and compare what they say."""
        if block.file:
            path = self.root / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            is_there = path.exists()
            assert is_there == (block.language == "diff"), f"{block.file}: new files stand whole, others as a diff"
            path.write_text(edited(path.read_text("utf-8"), block.text) if is_there else block.text, encoding="utf-8")
            return
        assert block.language == "console", f"who runs this?\n{block.text}"
        for part in block.text.removeprefix("$ ").split("\n$ "):
            command, _, shown = part.partition("\n")
            done = self.run(command)
            pattern = re.escape(shown.strip()).replace(r"\.\.\.", ".*")
            printed = (done.stdout + done.stderr).strip()
            assert re.fullmatch(pattern, printed, re.DOTALL) is not None, f"{command}\n{printed}"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """The checkout with the page's operation: every block of the page in its order."""
    root = tmp_path_factory.mktemp("example") / "checkout"
    for name in ("src", "build_tools", "kernels_cu", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", *LEFT_OUT.get(name, ()))
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("pyproject.toml", ".clang-format"):
        shutil.copy(ROOT / name, root / name)
    made = Copy(root)
    for block in blocks(EXAMPLE):
        made.take(block)
    return made


@pytest.fixture
def changed(example: Copy) -> Iterator[Copy]:
    """The same; what a test changes is put back."""
    files = [example.root / block.file for block in blocks(EXAMPLE) if block.file]
    before = {path: path.read_text(encoding="utf-8") for path in files}
    yield example
    for path, content in before.items():
        path.write_text(content, encoding="utf-8")


def test_the_example_is_in_the_house_style(example: Copy) -> None:
    names = sorted({block.file for block in blocks(EXAMPLE) if block.file})
    python = [name for name in names if name.endswith(".py")]
    for command in (
        f"python -m ruff check --no-cache {' '.join(python)}",
        f"python -m ruff format --check --no-cache {' '.join(python)}",
    ):
        done = example.run(command)
        assert done.returncode == 0, done.stdout + done.stderr
    device = [str(example.root / name) for name in names if name.startswith("kernels_cu/")]
    program = Path(sys.executable).parent / "clang-format"
    done = subprocess.run([program, "--dry-run", "--Werror", *device], cwd=example.root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_its_rows_enter_the_table_without_spills(example: Copy) -> None:
    code = "from build_tools import kernels; kernels.SAMPLE = 0; kernels.renew(workers=1)"
    done = example.run(f"python -c {shlex.quote(code)}")
    assert done.returncode == 0, done.stderr
    lines = (example.root / "build_tools/compiled.csv").read_text(encoding="utf-8").splitlines()
    own = [line.split(",") for line in lines if ",norm_rows_sm80_" in line]
    spills = lines[0].split(",").index("spill_bytes")
    assert {line[0] for line in own} >= {"80", "90a", "100", "120"}
    assert {line[spills] for line in own} == {"0"}


def test_a_wrong_kernel_fails_the_example_s_test(changed: Copy) -> None:
    path = changed.root / "kernels_cu/entry/norm_rows_sm80.cu"
    path.write_text(path.read_text(encoding="utf-8").replace("mask > 0;", "mask > 1;"), encoding="utf-8")
    done = changed.run("python -m pytest -q tests/unit/kernels/test_norm_rows_on_host.py")
    assert done.returncode == 1
    assert "4 failed" in done.stdout  # rows of more than 8 lanes


def test_a_row_that_is_gone_and_a_header_of_the_system_are_refused(changed: Copy) -> None:
    init = changed.root / "src/omniattn/registry/__init__.py"
    init.write_text(init.read_text(encoding="utf-8").replace("        *norm_rows_rows(),\n", ""), encoding="utf-8")
    done = changed.run("python -m build_tools.kernels --arch 90a")
    assert done.returncode == 1
    assert "entry/norm_rows_sm80.cu: orphan source" in done.stderr
    header = changed.root / "kernels_cu/params/norm_rows.cuh"
    header.write_text("#include <cstdint>\n" + header.read_text(encoding="utf-8"), encoding="utf-8")
    (complaint,) = checks.include_complaints(changed.root / "kernels_cu")
    assert complaint.startswith("params/norm_rows.cuh: includes <cstdint>")


def test_a_field_that_the_host_does_not_know_is_found(changed: Copy) -> None:
    structs = (changed.root / "src/omniattn/launch/structs.py").read_text(encoding="utf-8")
    assert structs == text(Headers(changed.root / "kernels_cu"))
    header = changed.root / "kernels_cu/params/norm_rows.cuh"
    header.write_text(header.read_text(encoding="utf-8").replace("int64 rows;", "int64 rows, first;"), encoding="utf-8")
    assert structs != text(Headers(changed.root / "kernels_cu"))
