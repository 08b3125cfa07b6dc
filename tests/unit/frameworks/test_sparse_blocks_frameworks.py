"""``sparse_blocks`` under torch.compile, without memory, and under JAX's transforms, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.errors import ArgumentError, UnsupportedError  # noqa: E402

pytestmark = pytest.mark.frameworks

OPTIONS: tuple[dict[str, Any], ...] = (
    {"topk": 0.4, "causal": True},
    {"cdf": 0.5, "block_size": 64, "keep_first": 1, "layout": "HND"},
    {"topk": (0.1, 0.3, 0.5, 1.0)},
)


def arrays(layout: str = "NHD") -> list[Any]:
    torch.manual_seed(0)
    made = [torch.randn(2, n, h, 32) for n, h in ((300, 4), (500, 2))]
    return [x.transpose(1, 2) if layout == "HND" else x for x in made]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_torch(options: dict[str, Any]) -> None:
    q, k = arrays(options.get("layout", "NHD"))
    want = oa.sparse_blocks(q.numpy(), k.numpy(), **options)
    got = oa.sparse_blocks(q, k, **options)
    assert got.dtype == torch.bool
    np.testing.assert_array_equal(got.numpy(), want)
    compiled = torch.compile(lambda *x: oa.sparse_blocks(*x, **options), fullgraph=True, backend="aot_eager")
    np.testing.assert_array_equal(compiled(q, k).numpy(), want)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_without_memory(options: dict[str, Any]) -> None:
    from torch._subclasses import FakeTensorMode

    given = arrays(options.get("layout", "NHD"))
    real = oa.sparse_blocks(*given, **options)
    with FakeTensorMode() as mode:
        made = oa.sparse_blocks(*(mode.from_tensor(x) for x in given), **options)
    assert (made.shape, made.dtype) == (real.shape, real.dtype)


def test_opcheck() -> None:
    import omniattn.frameworks.torch.tracing  # noqa: F401

    q, k = arrays()
    arguments = (q, k, [0.4], None, -0.1, [128, 64], True, 0, "NHD")
    torch.library.opcheck(torch.ops.omniattn.sparse_blocks.default, arguments)


def test_with_attention_compiled() -> None:
    q, k = arrays()
    v = torch.randn_like(k)

    def both(q: Any, k: Any, v: Any) -> Any:
        blocks = oa.sparse_blocks(q, k, topk=0.5)
        return oa.attention(q, k, v, block_mask=blocks, block_size=(128, 64), precision="int8")

    got = torch.compile(both, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(got, both(q, k, v))


def test_gradients_raise() -> None:
    q, k = arrays()
    with pytest.raises(UnsupportedError, match="requires a gradient"):
        torch.func.vmap(lambda x: oa.sparse_blocks(x, k, topk=0.5))(q[None].requires_grad_())


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    for options in OPTIONS:
        q, k = (x.contiguous().numpy() for x in arrays(options.get("layout", "NHD")))
        want = oa.sparse_blocks(q, k, **options)
        got = jax.jit(lambda *x, o=options: oa.sparse_blocks(*x, **o))(q, k)
        np.testing.assert_array_equal(np.asarray(got), want)


def test_in_one_call() -> None:
    q, k = arrays()
    v = torch.randn_like(k)
    of_heads = oa.Int8(sparse=oa.Sparse(topk=(0.2, 0.4, 0.6, 1.0)))
    want = oa.attention(*(x.numpy() for x in (q, k, v)), precision=of_heads)
    compiled = torch.compile(lambda *x: oa.attention(*x, precision=of_heads), fullgraph=True, backend="aot_eager")
    np.testing.assert_allclose(compiled(q, k, v).numpy(), want, rtol=0, atol=1e-6)
    low = oa.Int8(sparse=oa.Sparse(topk=0.5, keep_first=1))

    def call(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, precision=low, causal=True)

    want = call(q, k, v)
    blocks = oa.sparse_blocks(q, k, topk=0.5, keep_first=1, causal=True)
    assert torch.equal(
        oa.attention(q, k, v, block_mask=blocks, block_size=(128, 64), precision="int8", causal=True), want
    )
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), want)
    mapped = torch.func.vmap(call)(*(torch.stack([x, x]) for x in (q, k, v)))
    assert torch.equal(mapped[0], want)
    with pytest.raises(UnsupportedError, match="sparse="):
        call(q.clone().requires_grad_(), k, v)
    with pytest.raises(UnsupportedError, match="sparse="):
        torch.func.grad(lambda x: call(x, k, v).sum())(q)
    jax = pytest.importorskip("jax")
    given = [x.numpy() for x in (q, k, v)]
    np.testing.assert_array_equal(np.asarray(jax.jit(call)(*given)), want.numpy())
    with pytest.raises(UnsupportedError, match="sparse="):
        jax.grad(lambda x: call(x, *given[1:]).sum())(given[0])


def test_wrong_numbers_of_shares_compiled() -> None:
    q, k = arrays()
    for topk in ((0.5,), (0.5, 0.5, 0.5)):
        call = torch.compile(lambda *x, t=topk: oa.sparse_blocks(*x, topk=t), backend="aot_eager")
        with pytest.raises(Exception, match="one for each query head"):
            call(q, k)


def test_calibrated_on_tensors_of_others() -> None:
    jnp = pytest.importorskip("jax.numpy")
    q, k = arrays()
    given = [q, k, torch.randn_like(k)]
    want = oa.calibrate_sparse([x.numpy() for x in given], max_error=0.5).entries["attention"]
    for same in ([x.clone().requires_grad_() for x in given], [jnp.asarray(x.numpy()) for x in given]):
        found = oa.calibrate_sparse(same, max_error=0.5).entries["attention"]
        assert (found.shares, found.kept) == (want.shares, want.kept)
        np.testing.assert_allclose(found.errors, want.errors, rtol=1e-5)
    low = oa.calibrate_sparse([x.bfloat16() for x in given], max_error=0.5).entries["attention"]
    assert low.shares == want.shares
    np.testing.assert_allclose(low.errors, want.errors, atol=0.01)


def test_shares_that_require_a_gradient() -> None:
    q, k = arrays()
    shares = torch.full((4,), 0.5)
    assert oa.Sparse(topk=shares).topk == (0.5,) * 4
    assert torch.equal(oa.sparse_blocks(q, k, topk=shares), oa.sparse_blocks(q, k, topk=0.5))
    shares.requires_grad_()
    for call in (lambda: oa.Sparse(topk=shares), lambda: oa.sparse_blocks(q, k, topk=shares)):
        with pytest.raises(ArgumentError, match=r"'topk'.*requires_grad"):
            call()
