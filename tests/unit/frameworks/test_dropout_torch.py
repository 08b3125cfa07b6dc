"""Dropout of torch tensors: autograd, the generator, torch.compile, vmap, SDPA, FlashAttention's functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import omniattn  # noqa: E402
from omniattn.compat import flash_attn  # noqa: E402
from omniattn.errors import ArgumentError, UnsupportedError  # noqa: E402
from omniattn.torch import use_sdpa  # noqa: E402

pytestmark = pytest.mark.frameworks


def _leaves(*shape: int, count: int = 3) -> list[Any]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, generator=g).requires_grad_() for _ in range(count)]


def _written_out(q: Any, k: Any, v: Any, rng: Any, p: float) -> Any:
    """In torch, with what `dropout_mask` keeps. q: (batch, seq, heads, head_dim)."""
    kept = torch.from_numpy(omniattn.dropout_mask((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), p, rng))
    share = round(p * 256) / 256
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(s, -1) * kept / (1 - share), v)


def test_gradients_are_those_of_the_mask() -> None:
    """Drawn in the forward, the same in the backward."""
    leaves = _leaves(2, 33, 2, 16)
    o, rng = omniattn.attention(*leaves, dropout_p=0.3, return_rng=True)
    wanted = _written_out(*leaves, rng, 0.3)
    torch.testing.assert_close(o, wanted, atol=1e-10, rtol=1e-10)
    do = torch.randn_like(o)
    for found, expected in zip(
        torch.autograd.grad(o, leaves, do), torch.autograd.grad(wanted, leaves, do), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_value_of_another_head_dim_has_gradients() -> None:
    """It is padded, with the same mask."""
    q, k = _leaves(1, 20, 2, 16, count=2)
    (v,) = _leaves(1, 20, 2, 8, count=1)
    o, rng = omniattn.attention(q, k, v, dropout_p=0.3, return_rng=True)
    wanted = _written_out(q, k, v, rng, 0.3)
    do = torch.randn_like(o)
    for found, expected in zip(
        torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(wanted, (q, k, v), do), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_generator_is_drawn_from() -> None:
    """Seeds repeat, calls differ, checkpoints drop the same again."""
    leaves = _leaves(1, 40, 1, 16)
    torch.manual_seed(3)
    first, second = (omniattn.attention(*leaves, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, omniattn.attention(*leaves, dropout_p=0.5))
    assert not torch.equal(first, second)
    before = torch.random.get_rng_state()
    omniattn.attention(*leaves, dropout_p=0.0)
    assert "NumPy" in omniattn.explain(omniattn.attention, *leaves, dropout_p=0.5).short()
    assert torch.equal(before, torch.random.get_rng_state())

    from torch.utils.checkpoint import checkpoint

    do = torch.randn_like(first)
    gradients = []
    for call in (
        lambda *x: omniattn.attention(*x, dropout_p=0.5),
        lambda *x: checkpoint(lambda *y: omniattn.attention(*y, dropout_p=0.5), *x, use_reentrant=False),
    ):
        torch.manual_seed(5)
        gradients.append(torch.autograd.grad(call(*leaves), leaves, do))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_tensors_of_seed_and_offset() -> None:
    """A pair of tensors, as torch's own operators have them, and one of both."""
    leaves = _leaves(1, 20, 1, 8)
    pair = (torch.tensor(7), torch.tensor([9]))
    forms = [(7, 9), (np.int64(7), np.uint8(9)), pair, torch.tensor([7, 9]), torch.tensor([7, 9], dtype=torch.uint64)]
    found = [omniattn.attention(*leaves, dropout_p=0.5, dropout_rng=rng) for rng in forms]
    assert all(torch.equal(found[0], x) for x in found)
    big = omniattn.attention(*leaves, dropout_p=0.5, dropout_rng=(2**64 - 1, 2**63))
    assert torch.equal(big, omniattn.attention(*leaves, dropout_p=0.5, dropout_rng=torch.tensor([-1, -(2**63)])))
    for bad in ((1,), (1, -1), (True, 2), (1.0, 2), (torch.tensor(1.5), pair[1]), (torch.tensor([1, 2]), pair[1])):
        with pytest.raises(ArgumentError, match="dropout_rng"):
            omniattn.attention(*leaves, dropout_p=0.5, dropout_rng=bad)
    with pytest.raises(ArgumentError, match=r"expected \(seed, offset\).*received the int 7"):
        omniattn.attention(*leaves, dropout_p=0.5, dropout_rng=7)


def test_torch_compile_has_it_whole() -> None:
    """Forward and backward in one graph, drawn anew at each call."""
    leaves = _leaves(1, 24, 2, 16)

    def model(q: Any, k: Any, v: Any) -> Any:
        return omniattn.attention(q, k, v, dropout_p=0.25, return_rng=True)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    (a, of_a), (b, of_b) = compiled(*leaves), compiled(*leaves)
    assert not torch.equal(of_a, of_b)
    for o, rng in ((a, of_a), (b, of_b)):
        wanted = _written_out(*leaves, rng, 0.25)
        torch.testing.assert_close(o, wanted, atol=1e-10, rtol=1e-10)
        do = torch.randn_like(o)
        for found, expected in zip(
            torch.autograd.grad(o, leaves, do), torch.autograd.grad(wanted, leaves, do), strict=True
        ):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    def packed(q: Any, k: Any, v: Any, starts: Any) -> Any:
        return omniattn.attention_varlen(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=24, max_seqlen_k=24, dropout_p=0.25,
            dropout_rng=(1, 2),
        )  # fmt: skip

    rows = [x[0] for x in leaves]
    starts = torch.tensor([0, 10, 24], dtype=torch.int32)
    found = torch.compile(packed, backend="aot_eager", fullgraph=True)(*rows, starts)
    assert torch.equal(found, packed(*rows, starts))


def test_operators_and_transforms() -> None:
    """torch.func.grad and vmap with given numbers; each mapped call is one by itself."""
    leaves = [x.detach() for x in _leaves(1, 12, 1, 8)]

    def loss(q: Any) -> Any:
        return omniattn.attention(q, *leaves[1:], dropout_p=0.5, dropout_rng=(3, 4)).square().sum()

    q = leaves[0].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(q), q)
    torch.testing.assert_close(torch.func.grad(loss)(leaves[0]), wanted)
    many = torch.stack([leaves[0], 2 * leaves[0]])
    mapped = torch.vmap(lambda x: omniattn.attention(x, *leaves[1:], dropout_p=0.5, dropout_rng=(3, 4)))(many)
    each = [omniattn.attention(x, *leaves[1:], dropout_p=0.5, dropout_rng=(3, 4)) for x in many]
    torch.testing.assert_close(mapped, torch.stack(each))


def test_sdpa_drops() -> None:
    """Under use_sdpa: a mean near what is without, another one each time; everything at 1 by torch."""
    q, k, v = (x.detach().float() for x in _leaves(1, 4, 64, 16))
    with use_sdpa():
        torch.manual_seed(0)
        one = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        two = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        torch.manual_seed(0)
        assert torch.equal(one, F.scaled_dot_product_attention(q, k, v, dropout_p=0.2))
        assert not torch.equal(one, two)
        many = sum(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2) for _ in range(200)) / 200
        assert (many - F.scaled_dot_product_attention(q, k, v)).abs().max() < 0.15
        assert F.scaled_dot_product_attention(q, k, v, dropout_p=1.0).abs().max() == 0
    with use_sdpa(precision="int8"), pytest.raises(UnsupportedError, match=r"dropout_p=0\.2"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)


def test_sdpa_passes_on_what_it_has_no_kernels_for() -> None:
    """With dropout too: nested tensors, whose sizes nobody may ask for; and no dimension at all is named."""
    nested = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 5)])
    made = omniattn.torch.sdpa(nested, nested, nested, dropout_p=0.1)
    assert made.is_nested
    assert [x.shape for x in made.unbind()] == [x.shape for x in nested.unbind()]
    wide = torch.randn(1, 1, 3, 264)
    torch.manual_seed(0)
    made = omniattn.torch.sdpa(wide, wide, wide, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(made, F.scaled_dot_product_attention(wide, wide, wide, dropout_p=0.5))
    with pytest.raises(ArgumentError, match="query"):
        omniattn.torch.sdpa(*(torch.tensor(1.0) for _ in range(3)), dropout_p=0.1)


def test_flash_attn_drops() -> None:
    """`flash_attn_func`, and the functions without gradients with the numbers of their forward."""
    leaves = _leaves(1, 40, 2, 16)
    torch.manual_seed(1)
    o = flash_attn.flash_attn_func(*leaves, dropout_p=0.3)
    torch.manual_seed(1)
    assert torch.equal(o, omniattn.attention(*leaves, dropout_p=0.3))
    do = torch.randn_like(o)
    torch.manual_seed(1)
    out, lse, _, rng = flash_attn._flash_attn_forward(*leaves, 0.3, 0.25, False, -1, -1, 0.0, None, False)
    assert torch.equal(out, o)
    made = [torch.empty_like(x) for x in leaves]
    flash_attn._flash_attn_backward(
        do, *leaves, out, lse, *made, 0.3, 0.25, False, -1, -1, 0.0, None, False, rng_state=rng
    )
    for found, expected in zip(made, torch.autograd.grad(o, leaves, do), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    with pytest.raises(ArgumentError, match="rng_state"):
        flash_attn._flash_attn_backward(do, *leaves, out, lse, *made, 0.3, 0.25, False, -1, -1, 0.0, None, False)
    with pytest.raises(UnsupportedError, match="score_mod"):
        flash_attn.flash_attn_func(*leaves, dropout_p=0.3, alibi_slopes=torch.ones(2))
    assert flash_attn.flash_attn_func(*leaves, dropout_p=0.3, return_attn_probs=True)[2].numel() == 0
