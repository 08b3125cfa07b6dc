"""Names of the kernels and of the package are in the field's words too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted((ROOT / "kernels_cu").glob("**/*.cu*"))
MODULES = sorted((ROOT / "src/omniattn").glob("**/*.py"))

#: What the project once said, and what it says.
WORDS = {
    "fold": "pack_gqa",
    "form": "score_mod, encoding",
    "forms": "score_mods",
    "granule": "group, tile",
    "lift": "raise, add",
    "look": "load, read",
    "looks": "loads, reads",
    "manieth": "c, c + n, c + 2n, ...",
    "piece": "split, work item, tile",
    "pieces": "splits, work items, tiles",
    "turn": "rotation, ping-pong order",
    "turns": "rotations, ping-pong order",
}

#: Names of others, which the package overrides, calls or returns.
FOREIGN = {"numpy.shares_memory", "shares_memory"}


def words_of(identifier: str) -> list[str]:
    """The words of ``kBlockM``, ``max_seqlen_q`` or ``AttnFwdParams``, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)]


def wrong(identifiers: set[str]) -> list[str]:
    """Identifiers with a word that has a better one."""
    return sorted(
        f"{name}: say {WORDS[word]}" for name in identifiers - FOREIGN for word in words_of(name) if word in WORDS
    )


def identifiers_of_kernel(text: str) -> set[str]:
    code = re.sub(r'//[^\n]*|"[^"\n]*"', " ", text)
    return set(re.findall(r"\b[A-Za-z_]\w*", code))


def identifiers_of_module(text: str) -> Iterator[str]:
    """What a module names: no strings, and no attributes of others' objects that it only reads."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.relative_to(ROOT / "kernels_cu").as_posix())
def test_kernels(path: Path) -> None:
    assert wrong(identifiers_of_kernel(path.read_text(encoding="utf-8")) | {path.stem}) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_modules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert wrong({*identifiers_of_module(text), path.stem}) == []


def test_what_is_read() -> None:
    assert words_of("kShareSlots2") == ["k", "share", "slots"]
    assert words_of("AttnFwdFormsSm90Params") == ["attn", "fwd", "forms", "sm", "params"]
    assert words_of("_BWD_SM90_FORMS") == ["bwd", "sm", "forms"]
    assert wrong({"has_forms", "transform", "AttnFormsParams"}) == [
        "AttnFormsParams: say score_mods", "has_forms: say score_mods"
    ]  # fmt: skip
    assert wrong(set(identifiers_of_module("def look(x, *, turn):\n    x.fold = 1\n    return 'piece'"))) == [
        "fold: say pack_gqa", "look: say load, read", "turn: say rotation, ping-pong order"
    ]  # fmt: skip
    assert wrong(identifiers_of_kernel('int look; // a piece\nfail("wide");')) == ["look: say load, read"]
