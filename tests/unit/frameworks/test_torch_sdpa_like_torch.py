"""``sdpa`` and ``use_sdpa``: invalid calls raise what torch raises, causality with a mask is what torch computes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

import omniattn.torch as oat  # noqa: E402

F = torch.nn.functional
ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


INVALID: dict[str, dict[str, Any]] = {
    **{f"a mask of {x}": {"attn_mask": torch.ones(5, 5).to(getattr(torch, x))} for x in ("uint8", "int32", "int64")},
    "a mask of float16": {"attn_mask": torch.ones(5, 5).half()},
    "a mask of float64": {"attn_mask": torch.ones(5, 5).double()},
    "a mask of another length": {"attn_mask": torch.ones(5, 6).bool()},
    "a mask of more dimensions": {"attn_mask": torch.ones(1, 1, 1, 5, 5)},
    "a mask of no head": {"attn_mask": torch.ones(2, 0, 5, 5)},
    "fewer heads": {"key": torch.randn(2, 2, 5, 8), "value": torch.randn(2, 2, 5, 8)},
    "heads that do not divide": {
        "key": torch.randn(2, 3, 5, 8), "value": torch.randn(2, 3, 5, 8), "enable_gqa": True,
    },
    "another batch": {"key": torch.randn(3, 4, 5, 8)},
    "another head_dim": {"key": torch.randn(2, 4, 5, 16)},
    "mixed dtypes": {"key": torch.randn(2, 4, 5, 8).double()},
    "mixed devices": {"key": torch.randn(2, 4, 5, 8, device="meta")},
    "one dimension": {"value": torch.randn(8)},
    "dropout_p": {"dropout_p": 1.5},
}  # fmt: skip


def _by_name(**given: Any) -> Any:
    with oat.use_sdpa():
        return F.scaled_dot_product_attention(**given)


def _compiled(**given: Any) -> Any:
    try:
        return torch.compile(oat.sdpa, backend="eager")(**given)
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("run", [oat.sdpa, _by_name, _compiled], ids=["sdpa", "use_sdpa", "compiled"])
@pytest.mark.parametrize("case", INVALID)
def test_invalid_calls_raise_what_torch_raises(case: str, run: Any) -> None:
    """``except RuntimeError`` around a call catches ours too."""
    given = {name: torch.randn(2, 4, 5, 8) for name in ("query", "key", "value")} | INVALID[case]
    with pytest.raises(RuntimeError):
        ORIGINAL(**given)
    with pytest.raises(RuntimeError):
        run(**given)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3)], ids=str)
def test_causal_with_a_mask(shape: tuple[int, int], kind: str) -> None:
    """Both hold, as in torch's fused kernels; gradients are those of the mask that is both."""
    rows, columns = shape
    q, k = torch.randn(2, 4, rows, 8), torch.randn(2, 4, columns, 8)
    causal = torch.ones(rows, columns).bool().tril()
    for full in ((rows, columns), (2, 1, rows, columns), (1, 4, rows, columns), (1, columns), (rows, 1), (1, 1)):
        mask = torch.randn(full) if kind == "float" else torch.rand(full) < 0.7
        if kind == "bool":
            mask[..., 0] = True  # torch's result for a row of nothing is its own
        got = oat.sdpa(q, k, k, mask, is_causal=True)
        torch.testing.assert_close(got, ORIGINAL(q, k, k, mask, is_causal=True), rtol=0, atol=1e-6)
        with oat.use_sdpa():
            assert torch.equal(F.scaled_dot_product_attention(q, k, k, mask, is_causal=True), got)
    if kind == "bool":
        return
    mask = torch.randn(2, 1, rows, columns)
    leaves, twins = ([x.clone().requires_grad_() for x in (q, k, mask)] for _ in range(2))
    oat.sdpa(leaves[0], leaves[1], k, leaves[2], is_causal=True).sin().sum().backward()
    both = twins[2].masked_fill(~causal, -torch.inf)
    ORIGINAL(twins[0], twins[1], k, both).sin().sum().backward()
    for x, y in zip(leaves, twins, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-5)
