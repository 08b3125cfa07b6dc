"""`attention_beside`, the call of a ring beside a transfer, where torch has to see it."""

from __future__ import annotations

from typing import Any

import pytest

import omniattn as oa
from omniattn.ops.attention import attention_beside

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402


@pytest.mark.parametrize("quantized", [False, True])
def test_a_call_beside_a_transfer_under_a_dispatch_mode(quantized: bool) -> None:
    """That a GPU is shared is a fact of a plan: a mode that watches the call finds it as any other."""
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    operands: tuple[Any, ...] = (q, k, v)
    if quantized:
        pair = oa.quantize_qk(q, k, smooth_k=False)
        operands = pair.q, pair.k, oa.quantize_v(v)
    others = {"sinks": None, "window": (3, 0), "softmax_scale": None, "softcap": 0.0, "deterministic": False}
    expected = attention_beside(*operands, is_shared=False, **others)
    with FlopCounterMode(display=False):
        made = attention_beside(*operands, is_shared=True, **others)
    for found, wanted in zip(made, expected, strict=True):
        assert torch.equal(found, wanted)
    if not quantized:
        leaf = q.clone().requires_grad_()
        attention_beside(leaf, k, v, is_shared=True, **others)[0].sum().backward()
        assert leaf.grad is not None
