"""README: its commands run, its code runs (on the CPU), CI runs its test command."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def command(word: str) -> str:
    """Return the one shell line that contains ``word`` and sets up an environment."""
    (found,) = [line for block in blocks("sh") for line in block.splitlines() if word in line and "-m venv" in line]
    return found


def namespace(torch: Any, oa: Any, packed: bool) -> dict[str, Any]:
    """What README's snippets take as given: q, k, v, two partial results, offsets of packed batches, new tokens."""

    def array(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.bfloat16)

    shape = (24, 4, 32) if packed else (2, 24, 4, 32)
    q, k, v = (array(*shape) for _ in range(3))
    (o_a, lse_a), (o_b, lse_b) = (
        oa.attention(array(2, 24, 4, 32), k4, k4, return_lse=True) for k4 in (array(2, 9, 4, 32),) * 2
    )
    cu = torch.tensor([0, 8, 24], dtype=torch.int32)
    return {
        "torch": torch,
        "oa": oa,
        "q": q,
        "k": k,
        "v": v,
        "cu": cu,
        "o_a": o_a,
        "lse_a": lse_a,
        "o_b": o_b,
        "lse_b": lse_b,
        "k_new": array(2, 3, 8, 128),
        "v_new": array(2, 3, 8, 128),
        "q_new": array(2, 3, 16, 128),
        "lens": torch.tensor([5, 16], dtype=torch.int32),
        "table": torch.tensor([[7], [2]], dtype=torch.int32),
    }


def test_python_code_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    import omniattn as oa

    statements = 0
    for block in blocks("python"):
        text = block.replace('device="cuda"', 'device="cpu"').replace("4096", "48")
        carried: dict[str, Any] = {}
        for node in ast.parse(text).body:
            source = ast.unparse(node)
            # Lines of a block stand for themselves: each gets inputs of its kind, then what the block has made so far.
            given = namespace(torch, oa, packed="attention_varlen" in source)
            if "attention_varlen" not in source:
                given.update(carried)
            before = dict(given)
            exec(compile(source, "README.md", "exec"), given)
            carried.update({name: value for name, value in given.items() if value is not before.get(name, ...)})
            statements += 1
    assert statements >= 6


def test_the_install_command_shows_the_demo(tmp_path: Path) -> None:
    """The first command for a fresh machine, as it stands, in a copy of the checkout."""
    copy = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv", "venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, copy, ignore=ignored)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMNIATTN_", "PYTHONPATH"))}
    done = subprocess.run(["bash", "-c", command("demo")], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SmolLM2" in done.stdout
    assert not (copy / "build").exists(), "an editable install compiled something"


def test_ci_runs_the_test_command() -> None:
    line = command("pytest")
    assert 'pip install -e ".[test]"' in line
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"grep -E '([^']+)' README\.md", script)
    assert re.findall(pattern, README, re.MULTILINE) == [line]
