"""Code in docs/score_mods.md on a GPU: as on the CPU, and softcap by an expression as by `softcap=`."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from tests.unit.docs.test_docs_score_mods import BLOCKS, by_definition, names_after  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_of_the_page(block: str) -> None:
    names = names_after(block, "cuda", torch.float16)
    assert np.abs(names["o"].float().cpu().numpy() - by_definition(names)).max() < 4e-3
    if "mod" in names and "tanhf" in names["mod"].expression:
        same = oa.attention(names["q"], names["k"], names["v"], softcap=30.0)
        assert (same.float() - names["o"].float()).abs().max() < 2e-3
