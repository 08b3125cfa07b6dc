"""Code in docs/score_mods.md: it runs as it stands there, and gives what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import reference

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "score_mods.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SEQLEN = 200


def names_after(block: str, device: str, dtype: Any) -> dict[str, Any]:
    """What a block leaves behind."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, SEQLEN, 4, 64, generator=generator).to(device, dtype) for _ in range(3))
    names: dict[str, Any] = {"oa": oa, "np": np, "torch": torch, "q": q, "k": k, "v": v}
    exec(block, names)
    return names


def by_definition(names: dict[str, Any]) -> Any:
    """The same attention with everything the block asks for as one additive mask."""
    i, j = np.arange(SEQLEN)[:, None], np.arange(SEQLEN)
    q, k, v = (names[x].float().cpu().numpy() for x in "qkv")
    if "blocks" in names:
        visible = names["blocks"].cpu().numpy().repeat(64, 0).repeat(64, 1)[:SEQLEN, :SEQLEN]
        return reference.attention(q, k, v, mask=visible)[0]
    read = {name: x.cpu().numpy() for name, x in names["mod"].arrays.items()}
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / 8
    made = np.stack(
        [
            np.stack([names["mod"].reference(scores[b, h], b, h, i, j[None], **read) for h in range(4)])
            for b in range(2)
        ]
    )  # fmt: skip
    p = np.exp(made - made.max(axis=-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_of_the_page(block: str) -> None:
    names = names_after(block, "cpu", torch.float32)
    np.testing.assert_allclose(names["o"].numpy(), by_definition(names), atol=2e-5)
