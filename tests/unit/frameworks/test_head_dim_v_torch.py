"""v with a head_dim of its own in torch, on the CPU: autograd, operators, SDPA, Transformers, flash_attn."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn  # noqa: E402
from omniattn.compat import flash_attn_interface  # noqa: E402
from omniattn.frameworks.torch.head_dims import one_head_dim  # noqa: E402
from omniattn.torch import sdpa  # noqa: E402

pytestmark = pytest.mark.frameworks


def tensors(head_dim: int, head_dim_v: int, **options: Any) -> list[Any]:
    made = torch.Generator().manual_seed(0)
    shapes = ((2, 9, 4, head_dim), (2, 13, 2, head_dim), (2, 13, 2, head_dim_v))
    return [torch.randn(shape, generator=made, dtype=torch.float64, **options) for shape in shapes]


def written_out(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 8), (8, 24)])
def test_gradients(head_dim: int, head_dim_v: int) -> None:
    inputs = tensors(head_dim, head_dim_v, requires_grad=True)
    got = torch.autograd.grad(omniattn.attention(*inputs).sin().sum(), inputs)
    wanted = torch.autograd.grad(written_out(*inputs).sin().sum(), inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


class _OnGpu:
    """A tensor that says it is on a GPU."""

    def __init__(self, x: Any) -> None:
        self.x, self.shape, self.device = x, x.shape, torch.device("cuda")

    def dim(self) -> int:
        return self.x.dim()


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 8), (8, 24)])
def test_padding_for_gradients_of_a_gpu(head_dim: int, head_dim_v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd does there: the same results and gradients by tensors of one head_dim."""
    inputs = tensors(head_dim, head_dim_v, requires_grad=True)
    assert one_head_dim(*inputs, None) is None, "the CPU takes both"
    on_gpu = [_OnGpu(x) for x in inputs]
    pad = torch.nn.functional.pad
    monkeypatch.setattr(torch.nn.functional, "pad", lambda x, fill: pad(x.x, fill))
    found = one_head_dim(*on_gpu, None)
    monkeypatch.undo()
    assert found is not None
    q, k, v = (getattr(x, "x", x) for x in found[:3])
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 24
    assert (found.softmax_scale, found.head_dim_v) == (head_dim**-0.5, head_dim_v)
    o = omniattn.attention(q, k, v, softmax_scale=found.softmax_scale)[..., :head_dim_v]
    torch.testing.assert_close(o, written_out(*inputs), rtol=0, atol=1e-6)
    assert one_head_dim(*on_gpu[:2], _OnGpu(tensors(head_dim, head_dim)[2]), None) is None
    assert one_head_dim(*on_gpu[:2], _OnGpu(tensors(head_dim, 12)[2]), None) is None, "a check refuses it"


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 8), (8, 24), (10, 5)])
def test_sdpa_and_its_shapes(head_dim: int, head_dim_v: int) -> None:
    q, k, v = (x.transpose(1, 2) for x in tensors(head_dim, head_dim))
    v = v[..., :head_dim_v] if head_dim_v <= head_dim else tensors(head_dim, head_dim_v)[2].transpose(1, 2)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    got = sdpa(q, k, v, enable_gqa=True)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_compiled() -> None:
    inputs = tensors(24, 8)
    compiled = torch.compile(lambda *x: omniattn.attention(*x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), omniattn.attention(*inputs), rtol=0, atol=0)
    torch.library.opcheck(
        torch.ops.omniattn.attention.default,
        (*inputs, None, None, None, [], "NHD", False, None, None, 0.0, None, False, "exact", True, None),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_flash_attn() -> None:
    q, k, v = (x.float() for x in tensors(24, 8))
    o = flash_attn_interface.flash_attn_func(q, k, v)
    o = o[0] if isinstance(o, tuple) else o
    torch.testing.assert_close(o, written_out(q, k, v), rtol=0, atol=1e-5)
