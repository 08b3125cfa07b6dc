"""README: its code runs (on the CPU), CI runs its commands."""

from __future__ import annotations

import ast
import re
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
        "do": array(*shape),
        "cu": cu,
        "o_a": o_a,
        "lse_a": lse_a,
        "o_b": o_b,
        "lse_b": lse_b,
        "k_new": array(2, 3, 8, 128),
        "v_new": array(2, 3, 8, 128),
        "q_new": array(2, 3, 16, 128),
        "q_rows": array(24, 16, 128),
        "cache_16": oa.PagedKVCache(8, 16, 8, 128, like=q),
        "lens": torch.tensor([5, 16], dtype=torch.int32),
        "table": torch.tensor([[7], [2]], dtype=torch.int32),
    }


@pytest.mark.frameworks
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


def test_ci_runs_both_commands() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    patterns = re.findall(r"grep -E '([^']+)' README\.md", script)
    lines = [command("demo"), command("pytest")]
    assert 'pip install -e ".[cli]"' in lines[0]
    assert 'pip install -e ".[test]"' in lines[1]
    assert [re.findall(pattern, README, re.MULTILINE) for pattern in patterns] == [[line] for line in lines]
    names = re.findall(r'^(\w+)="\$\(grep', script, re.MULTILINE)
    assert [script.count(f'eval "${{{name}}}"') for name in names] == [1, 1]
