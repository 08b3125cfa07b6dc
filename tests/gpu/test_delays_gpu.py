"""Kernels whose warps come to barriers at random times give what they give else."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY, KernelSpec  # noqa: E402

pytestmark = pytest.mark.gpu

RUNS = 5


def delayed(spec: KernelSpec) -> KernelSpec:
    return dataclasses.replace(spec, defines=(*spec.defines, ("RANDOM_DELAYS", "1")))


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make selection take kernels with delays, of every GPU or of this one."""

    def choose(own: bool, of_backward: bool) -> None:
        rows = tuple(delayed(spec) for spec in REGISTRY if own or not spec.arch_specific)
        for name in ("select.backward", "plan.backward") if of_backward else ("select.candidates", "plan.attention"):
            module = sys.modules[f"omniattn.{name}"]
            if hasattr(module, "REGISTRY"):
                monkeypatch.setattr(module, "REGISTRY", rows)
        PLANS.clear()

    yield choose
    PLANS.clear()


def tensors(head_dim: int, packed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(head_dim)
    lead = (700,) if packed else (2, 350)
    q, do = (torch.randn(*lead, 4, head_dim, device="cuda", dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(*lead, 2, head_dim, device="cuda", dtype=torch.float16) for _ in range(2))
    starts = torch.tensor([0, 70, 70, 500, 700], device="cuda", dtype=torch.int32)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 430, "max_seqlen_k": 430}
    return (do, q, k, v), lengths if packed else {}


@pytest.mark.parametrize("own", [True, False], ids=["hopper", "every GPU"])
@pytest.mark.parametrize(("head_dim", "packed"), [(64, False), (128, False), (128, True), (256, False)])
def test_backward(head_dim: int, packed: bool, own: bool, delays: Any) -> None:
    (do, q, k, v), options = tensors(head_dim, packed)
    forward, backward = oa.attention, oa.attention_backward
    if packed:
        forward, backward = oa.attention_varlen, oa.attention_varlen_backward
    options |= {"causal": True}
    o, lse = forward(q, k, v, return_lse=True, **options)
    if not own:
        rows = tuple(spec for spec in REGISTRY if not spec.arch_specific)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("select.backward", "plan.backward"):
                if hasattr(sys.modules[f"omniattn.{name}"], "REGISTRY"):
                    patch.setattr(sys.modules[f"omniattn.{name}"], "REGISTRY", rows)
            PLANS.clear()
            expected = backward(do, q, k, v, o, lse, **options)
    else:
        expected = backward(do, q, k, v, o, lse, **options)
    delays(own, True)
    same = backward(do, q, k, v, o, lse, deterministic=True, **options)
    for _ in range(RUNS):
        again = backward(do, q, k, v, o, lse, deterministic=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(again, same, strict=True))
        assert torch.allclose(again[0], expected[0], atol=4e-3, rtol=4e-3)
        dq, dk, dv = backward(do, q, k, v, o, lse, **options)
        # dq is summed in any order.
        assert torch.allclose(dq, expected[0], atol=4e-3, rtol=4e-3)
        assert torch.equal(dk, expected[1])
        assert torch.equal(dv, expected[2])


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}, {"precision": "int8"}], ids=str)
@pytest.mark.parametrize(("head_dim", "packed"), [(64, False), (128, False), (128, True), (256, False)])
def test_forward(head_dim: int, packed: bool, options: dict[str, Any], delays: Any) -> None:
    (_, q, k, v), lengths = tensors(head_dim, packed)
    forward = oa.attention_varlen if packed else oa.attention
    expected = forward(q, k, v, **lengths, **options)
    assert not expected.isnan().any()
    delays(True, False)
    for _ in range(RUNS):
        assert torch.equal(forward(q, k, v, **lengths, **options), expected)
