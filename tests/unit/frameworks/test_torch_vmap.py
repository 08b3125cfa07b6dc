"""torch.vmap over masks and block masks alone, nested, and beneath torch.func.grad."""

from __future__ import annotations

from typing import Any

import pytest

import omniattn as oa
from omniattn.errors import ShapeError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


def _qkv(batch: int, rows: int = 4) -> list[Any]:
    return [torch.randn(batch, rows, 2, 8, dtype=torch.float64) for _ in range(3)]


def _mask(shape: tuple[int, ...], kind: str) -> Any:
    return torch.randn(shape, dtype=torch.float64) if kind == "added" else torch.rand(shape) < 0.7


@pytest.mark.parametrize("kind", ["added", "bool"])
@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        (1, (3, 4, 4)), (1, (3, 2, 4, 4)), (1, (3, 1, 2, 4, 4)), (1, (3, 4)), (1, (3, 4, 1)),
        (2, (3, 4, 4)), (2, (3, 2, 4, 4)), (2, (3, 1, 4, 4)), (2, (3, 2, 2, 4, 4)), (2, (3, 1, 2, 4, 4)),
        (2, (3, 2, 1, 1, 4)), (4, (3, 4, 4)), (3, (3, 4, 4)),
    ],
    ids=str,
)  # fmt: skip
def test_nothing_but_a_mask(batch: int, shape: tuple[int, ...], kind: str) -> None:
    """A mask's own leading dimension is of heads, queries or a batch, as without vmap."""
    (q, k, v), masks = _qkv(batch), _mask(shape, kind)

    def run(mask: Any) -> Any:
        return oa.attention(q, k, v, mask=mask, return_lse=True)

    got = torch.vmap(run)(masks)
    last = torch.vmap(run, in_dims=masks.ndim - 1)(masks.movedim(0, -1))
    for i, mask in enumerate(masks):
        for made, moved, want in zip(got, last, run(mask), strict=True):
            torch.testing.assert_close(made[i], want, rtol=0, atol=1e-12)
            assert torch.equal(moved[i], made[i])


def test_in_dims_of_a_mask_among_none() -> None:
    (q, k, v), masks = _qkv(1), _mask((3, 2, 4, 4), "added")
    run = torch.vmap(lambda q, k, v, m: oa.attention(q, k, v, mask=m), in_dims=(None, None, None, 0))
    for got, mask in zip(run(q, k, v, masks), masks, strict=True):
        torch.testing.assert_close(got, oa.attention(q, k, v, mask=mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 2, 3), (3, 2, 2, 3), (3, 1, 2, 3), (3, 2, 2, 2, 3), (3, 1, 2, 2, 3)], ids=str)
def test_nothing_but_a_block_mask(shape: tuple[int, ...]) -> None:
    (q, _, _), (_, k, v), masks = _qkv(2, 256), _qkv(2, 384), _mask(shape, "bool")
    got = torch.vmap(lambda mask: oa.attention(q, k, v, block_mask=mask))(masks)
    for made, mask in zip(got, masks, strict=True):
        torch.testing.assert_close(made, oa.attention(q, k, v, block_mask=mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4), (1, 1, 4, 4), (2, 2, 4, 4)], ids=str)
def test_a_mask_that_is_the_same_for_all(shape: tuple[int, ...]) -> None:
    many, (q, k, v), mask = torch.randn(3, 2, 4, 2, 8, dtype=torch.float64), _qkv(2), _mask(shape, "added")
    for got, x in zip(torch.vmap(lambda x: oa.attention(x, k, v, mask=mask))(many), many, strict=True):
        torch.testing.assert_close(got, oa.attention(x, k, v, mask=mask), rtol=0, atol=1e-12)
    for got, x in zip(torch.vmap(lambda x: oa.attention(q, x, x, mask=mask))(many), many, strict=True):
        torch.testing.assert_close(got, oa.attention(q, x, x, mask=mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 5, 4, 4), (3, 5, 2, 4, 4), (3, 5, 1, 2, 4, 4)], ids=str)
def test_nested(shape: tuple[int, ...]) -> None:
    (q, k, v), masks, many = _qkv(1), _mask(shape, "added"), torch.randn(5, 1, 4, 2, 8, dtype=torch.float64)
    alone = torch.vmap(torch.vmap(lambda mask: oa.attention(q, k, v, mask=mask)))(masks)
    beside = torch.vmap(torch.vmap(lambda mask, q: oa.attention(q, k, v, mask=mask)), in_dims=(0, None))(masks, many)
    for i in range(3):
        for j in range(5):
            want = oa.attention(q, k, v, mask=masks[i, j])
            torch.testing.assert_close(alone[i, j], want, rtol=0, atol=1e-12)
            want = oa.attention(many[j], k, v, mask=masks[i, j])
            torch.testing.assert_close(beside[i, j], want, rtol=0, atol=1e-12)


def _loss(q: Any, k: Any, v: Any, mask: Any) -> Any:
    o, lse = oa.attention(q, k, v, mask=mask, return_lse=True)
    return o.sin().sum() + lse.cos().sum()


def _by_autograd(*arrays: Any) -> tuple[Any, ...]:
    inputs = [x.clone().requires_grad_() for x in arrays]
    return torch.autograd.grad(_loss(*inputs), inputs)


@pytest.mark.parametrize(("batch", "shape"), [(1, (3, 4, 4)), (1, (3, 2, 4, 4)), (2, (3, 2, 4, 4))], ids=str)
def test_gradients(batch: int, shape: tuple[int, ...]) -> None:
    """The gradient of a sum over a mapped dimension, and gradients of each mask."""
    qkv, masks = _qkv(batch), _mask(shape, "added")
    each = [_by_autograd(*qkv, mask) for mask in masks]
    of_sum = torch.func.grad(
        lambda *x: torch.vmap(_loss, in_dims=(None, None, None, 0))(*x).sum(), argnums=(0, 1, 2, 3)
    )(*qkv, masks)
    of_each = torch.vmap(torch.func.grad(_loss, argnums=(0, 1, 2, 3)), in_dims=(None, None, None, 0))(*qkv, masks)
    bools = torch.func.grad(lambda q: torch.vmap(lambda m: _loss(q, *qkv[1:], m))(masks > 0).sum())(qkv[0])
    torch.testing.assert_close(bools, sum(_by_autograd_of_q(*qkv, mask > 0) for mask in masks), rtol=0, atol=1e-10)
    for n in range(4):
        made = torch.stack([gradients[n] for gradients in each])
        torch.testing.assert_close(of_each[n], made, rtol=0, atol=1e-10)
        torch.testing.assert_close(of_sum[n], made if n == 3 else made.sum(0), rtol=0, atol=1e-10)


def _by_autograd_of_q(q: Any, k: Any, v: Any, mask: Any) -> Any:
    q = q.clone().requires_grad_()
    return torch.autograd.grad(_loss(q, k, v, mask), q)[0]


def test_wrong_masks_are_named() -> None:
    q, k, v = _qkv(2)
    for shape in ((3, 4, 5), (3, 3, 2, 4, 4), (3, 3, 4, 4), (3, 1, 2, 2, 4, 4)):
        with pytest.raises(ShapeError, match="argument 'mask'"):
            torch.vmap(lambda mask: oa.attention(q, k, v, mask=mask))(_mask(shape, "added"))
    with pytest.raises(ShapeError, match="argument 'q': expected 4 dimensions"):
        torch.vmap(lambda mask: oa.attention(q[0], k, v, mask=mask))(_mask((3, 4, 4), "added"))


def _compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("make", [lambda f: f, _compiled], ids=["eager", "compiled"])
def test_tensors_that_require_gradients_outside(make: Any) -> None:
    """vmap hides that what it wraps requires a gradient."""
    (q, k, v), masks = _qkv(1), _mask((3, 2, 4, 4), "added")
    run = make(torch.vmap(lambda mask: oa.attention(q, k, v, mask=mask)))
    given, wanted = masks.clone().requires_grad_(), masks.clone().requires_grad_()
    run(given).sin().sum().backward()
    sum(oa.attention(q, k, v, mask=mask).sin().sum() for mask in wanted).backward()
    torch.testing.assert_close(given.grad, wanted.grad, rtol=0, atol=1e-12)
    torch._dynamo.reset()
    many, blocks = torch.randn(3, 1, 256, 2, 8, dtype=torch.float64), torch.tensor([[True, False], [True, True]])

    def attend(x: torch.Tensor) -> torch.Tensor:
        return oa.attention(x, x, x, block_mask=blocks)

    given, wanted = many.clone().requires_grad_(), many.clone().requires_grad_()
    make(torch.vmap(attend))(given).sin().sum().backward()
    sum(attend(x).sin().sum() for x in wanted).backward()
    torch.testing.assert_close(given.grad, wanted.grad, rtol=0, atol=1e-12)
    torch._dynamo.reset()


@pytest.mark.parametrize("nested", [False, True], ids=["one", "nested"])
def test_compiled(nested: bool) -> None:
    (q, k, v), masks, sinks = _qkv(1), _mask((3, 2, 4, 4), "added"), torch.randn(3, 2, dtype=torch.float64)
    run = torch.vmap(lambda mask, sinks: oa.attention(q, k, v, mask=mask, sinks=sinks), in_dims=(0, None))
    run = torch.vmap(run, in_dims=(None, 0)) if nested else run
    given = masks, sinks if nested else sinks[0]
    torch.testing.assert_close(_compiled(run)(*given), run(*given), rtol=0, atol=1e-12)
    torch._dynamo.reset()


def test_by_sdpa() -> None:
    import omniattn.torch as oat

    (q, k, v), masks = _qkv(1), _mask((3, 2, 4, 4), "added")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    for got, mask in zip(torch.vmap(lambda mask: oat.sdpa(q, k, v, mask))(masks), masks, strict=True):
        torch.testing.assert_close(got, oat.sdpa(q, k, v, mask), rtol=0, atol=1e-12)
