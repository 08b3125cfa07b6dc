"""Code of the guide: every page's Python runs as it stands, on the CPU, its blocks in order."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide"
PAGES = {path.stem: path for path in sorted(GUIDE.glob("*.md"))}
#: What a page's first block imports beside torch.
NEEDS = {"diffusion": ("diffusers",), "jax": ("jax",), "training": ("transformers",)}


def rank() -> dict[str, str]:
    """What torchrun tells a process: here one rank alone."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def backend_of_diffusers() -> Iterator[None]:
    """A backend that is set on one model becomes that of all of diffusers: back to its own afterwards."""
    yield
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is not None:
        dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


@pytest.mark.parametrize("name", PAGES)
def test_code_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    if name == "several_gpus":
        for variable, value in rank().items():
            monkeypatch.setenv(variable, value)
    names: dict[str, object] = {"__name__": "__main__"}
    assert blocks(PAGES[name]), "a page of the guide shows how"
    for block in blocks(PAGES[name]):
        exec(compile(block, f"docs/guide/{PAGES[name].name}", "exec"), names)
