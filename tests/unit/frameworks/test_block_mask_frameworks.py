"""Gradients of calls with a block mask by torch's autograd, its compiler and transforms, and by JAX; on the CPU."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from tests.unit.ops.test_block_mask_gradients import Arrays, gradients, inputs

BLOCK: dict[str, Any] = {"block_size": 64, "causal": True}


def expected(x: Arrays) -> tuple[np.ndarray, ...]:
    return gradients(x, ("dq", "dk", "dv"), block_mask=x["blocks"], **BLOCK)


@pytest.mark.frameworks
@pytest.mark.parametrize("compiled", [False, True])
def test_torch(compiled: bool) -> None:
    torch = pytest.importorskip("torch")
    x = inputs()
    q, k, v = (torch.tensor(x[name], requires_grad=True) for name in "qkv")
    blocks, do = torch.tensor(x["blocks"]), torch.tensor(x["do"])

    def attend(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, block_mask=blocks, **BLOCK)

    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    call(q, k, v).backward(do)
    for got, want in zip((q, k, v), expected(x), strict=True):
        np.testing.assert_allclose(got.grad.numpy(), want, atol=1e-12)


@pytest.mark.frameworks
def test_torch_transforms() -> None:
    torch = pytest.importorskip("torch")
    x = inputs()
    q, k, v, do = (torch.tensor(x[name]) for name in ("q", "k", "v", "do"))
    blocks = torch.stack([torch.tensor(x["blocks"]), torch.ones(2, 4, 3, 4, dtype=torch.bool)])

    def loss(q: Any, blocks: Any) -> Any:
        return (oa.attention(q, k, v, block_mask=blocks, **BLOCK) * do).sum()

    both = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(q, blocks)
    full = {**x, "blocks": np.ones((2, 4, 3, 4), dtype=bool)}
    for got, one in zip(both, (x, full), strict=True):
        np.testing.assert_allclose(got.numpy(), expected(one)[0], atol=1e-12)


@pytest.mark.frameworks
def test_torch_gradients_are_an_operator() -> None:
    torch = pytest.importorskip("torch")
    x = inputs()
    q, k, v, do, blocks = (torch.tensor(x[name]) for name in ("q", "k", "v", "do", "blocks"))
    o, lse = oa.attention(q, k, v, block_mask=blocks, return_lse=True, **BLOCK)

    def call(do: Any) -> Any:
        return oa.attention_backward(do, q, k, v, o, lse, block_mask=blocks, wanted=("dv", "dq"), **BLOCK)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(do), call(do), strict=True):
        assert torch.equal(got, want)


@pytest.mark.frameworks
def test_jax() -> None:
    jax = pytest.importorskip("jax")
    jnp = importlib.import_module("jax.numpy")
    x = inputs()
    q, k, v, do = (jnp.asarray(x[name], jnp.float32) for name in ("q", "k", "v", "do"))
    blocks = jnp.stack([jnp.asarray(x["blocks"]), jnp.ones((2, 4, 3, 4), bool)])

    def loss(q: Any, k: Any, v: Any, blocks: Any) -> Any:
        return (oa.attention(q, k, v, block_mask=blocks, **BLOCK) * do).sum()

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v, blocks[0])
    for got, want in zip(found, expected(x), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)
    mapped = jax.vmap(jax.grad(loss), in_axes=(None, None, None, 0))(q, k, v, blocks)
    full = {**x, "blocks": np.ones((2, 4, 3, 4), dtype=bool)}
    for got, one in zip(mapped, (x, full), strict=True):
        np.testing.assert_allclose(got, expected(one)[0], atol=2e-4)
