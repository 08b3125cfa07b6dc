"""``precision="auto"`` and `Auto` where a framework hands a precision on: operators of torch, JAX, replacements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError

PRECISIONS: list[Any] = ["auto", oa.Auto(max_error=0.03)]


@pytest.fixture(params=PRECISIONS, ids=str)
def precision(request: pytest.FixtureRequest) -> Any:
    return request.param


def inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.standard_normal((1, 24, 2, 16)).astype(np.float32) for _ in range(3)]


@pytest.mark.frameworks
def test_operators_of_torch_get_it_as_text(precision: Any) -> None:
    pytest.importorskip("torch")
    from omniattn.frameworks.torch.library import precision_of, precision_text

    assert precision_of(precision_text(precision, "attention")) == precision
    odd = oa.Auto(1e-300 / 3)
    assert precision_of(precision_text(odd, "attention")) == odd


@pytest.mark.frameworks
def test_torch_compile_and_gradients(precision: Any) -> None:
    torch = pytest.importorskip("torch")

    def of(chosen: Any, wrap: Any) -> list[Any]:
        tensors = [torch.from_numpy(x).requires_grad_() for x in inputs()]
        run = wrap(lambda q, k, v: oa.attention(q, k, v, causal=True, precision=chosen))
        o = run(*tensors)
        o.square().sum().backward()
        return [o.detach(), *(t.grad for t in tensors)]

    want = of("exact", lambda f: f)
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        for a, b in zip(of(precision, wrap), want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.frameworks
def test_sdpa_takes_it(precision: Any) -> None:
    torch = pytest.importorskip("torch")
    import torch.nn.functional as F

    import omniattn.torch as of_torch

    q, k, v = (torch.from_numpy(x).transpose(1, 2) for x in inputs())
    want = of_torch.sdpa(q, k, v)
    assert torch.equal(of_torch.sdpa(q, k, v, precision=precision), want)
    with of_torch.use_sdpa(precision=precision):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), want)
    with pytest.raises(ArgumentError, match="'precision'"):
        of_torch.use_sdpa(precision="fastest")
    # Wide heads are exact attention's; a low precision has none.
    wide = torch.zeros(1, 1, 8, 264)
    assert of_torch.fallback_reason(wide, wide, wide, precision=precision) is None
    assert "the most of a low precision" in str(of_torch.fallback_reason(wide, wide, wide, precision="int8"))


@pytest.mark.frameworks
def test_comfyui_takes_it(precision: Any) -> None:
    torch = pytest.importorskip("torch")
    from omniattn.integrations.comfyui import make_override

    q, k, v = (torch.from_numpy(x).flatten(2) for x in inputs())

    def theirs(*_: Any, **__: Any) -> Any:
        raise AssertionError("ComfyUI's own")

    got, want = (make_override(p, devices=("cpu",))(theirs, q, k, v, 2) for p in (precision, "exact"))
    assert torch.equal(got, want)
    assert torch.equal(
        make_override(oa.Int8(), devices=("cpu",))(theirs, q, k, v, 2).isfinite().all(), torch.tensor(True)
    )
    with pytest.raises(ArgumentError, match=r"make_override.*'precision'.*'auto'"):
        make_override("fastest")


@pytest.mark.frameworks
def test_jax_keeps_it_as_a_constant(precision: Any) -> None:
    jax = pytest.importorskip("jax")

    def loss(q: Any, k: Any, v: Any, chosen: Any) -> Any:
        return (oa.attention(q, k, v, causal=True, precision=chosen) ** 2).sum()

    made = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), static_argnums=3)
    arrays = [jax.numpy.asarray(x) for x in inputs()]
    for a, b in zip(*(jax.tree.leaves(made(*arrays, p)) for p in (precision, "exact")), strict=True):
        np.testing.assert_array_equal(a, b)
