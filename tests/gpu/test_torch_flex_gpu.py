"""`flex_attention` on a GPU: translated functions and BlockMasks, forward and backward, against their definition."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import omniattn.torch as ours  # noqa: E402
from tests.unit.frameworks import test_torch_flex as cases  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTH = 500


def tensors(dtype: torch.dtype, length: int = LENGTH, heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, n, length, 64, generator=generator).cuda().to(dtype) for n in (4, heads, heads)]


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod, mask_mod) -> torch.Tensor:
    """In fp32, with the functions of all elements."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q.float() @ k.float().transpose(2, 3) * q.shape[-1] ** -0.5
    places = [
        torch.arange(n, device="cuda").view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(s.shape)
    ]
    made = cases.over_all(score_mod, s, *places) if score_mod is not None else s
    if mask_mod is not None:
        visible = cases.over_all(lambda _, *at: mask_mod(*at), s, *places).bool()
        made = made.masked_fill(~visible, -torch.inf)
    return torch.nan_to_num(torch.softmax(made, -1)) @ v.float()


def functions() -> dict[str, tuple]:
    """(score_mod, mask_mod) by names; their tensors lie on the GPU."""
    slopes = cases.SLOPES.cuda()
    doc = (torch.arange(LENGTH, device="cuda") // 90)[None].expand(2, -1).contiguous()
    table = cases.TABLE.cuda()
    return {
        "alibi": (lambda s, b, h, q, k: s + slopes[h] * (k - q), None),
        "documents": (None, lambda b, h, q, k: (doc[b, q] == doc[b, k]) & (q >= k)),
        "table and window": (
            lambda s, b, h, q, k: 5 * torch.tanh(s / 5) + table[h, (k - q).clamp(-32, 32) + 32],
            lambda b, h, q, k: (abs(q - k) < 70) | (k % 100 == 3),
        ),
        "integers": (lambda s, b, h, q, k: s + ((k - q) // 7 + (k - q) % 5) * 0.1 - (h & 1), None),
    }


@pytest.mark.parametrize("name", ["alibi", "documents", "table and window", "integers"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_forward(name: str, dtype: torch.dtype) -> None:
    score_mod, mask_mod = functions()[name]
    q, k, v = tensors(dtype, heads=2)
    blocks = None
    if mask_mod is not None:
        blocks = cases.theirs.create_block_mask(mask_mod, 2, None, LENGTH, LENGTH, device="cuda")
    o, lse = ours.flex_attention(q, k, v, score_mod, block_mask=blocks, enable_gqa=True, return_lse=True)
    want = definition(q, k, v, score_mod, mask_mod)
    assert float((o.float() - want).abs().max()) <= (2e-3 if dtype == torch.float16 else 1.6e-2)
    assert bool(torch.isfinite(lse).all())


@pytest.mark.parametrize("size", [128, 32], ids=str)
def test_gradients(size: int) -> None:
    score_mod, mask_mod = functions()["table and window"]
    q, k, v = (x.requires_grad_() for x in tensors(torch.float16))
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).cuda().half()
    blocks = cases.theirs.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cuda", BLOCK_SIZE=size)
    got = torch.autograd.grad(ours.flex_attention(q, k, v, score_mod, block_mask=blocks), (q, k, v), do)
    want = torch.autograd.grad(definition(q, k, v, score_mod, mask_mod), (q, k, v), do.float())
    for x, y in zip(got, want, strict=True):
        assert float((x.float() - y.float()).norm() / y.float().norm()) <= 4e-3
