"""Dropout of JAX arrays: by a key, under jit and grad."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import omniattn  # noqa: E402
from omniattn.errors import ArgumentError  # noqa: E402

pytestmark = pytest.mark.frameworks


def _arrays() -> list[Any]:
    r = np.random.default_rng(0)
    return [jax.numpy.asarray(r.standard_normal((1, 20, 2, 16)).astype(np.float32)) for _ in range(3)]


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_decides(make: Any) -> None:
    """The words that come back are those of the mask, eagerly and under jit."""
    arrays = _arrays()
    o, rng = omniattn.attention(*arrays, dropout_p=0.3, dropout_rng=make(1), return_rng=True)
    as_numpy = [np.asarray(x) for x in arrays]
    wanted = omniattn.attention(*as_numpy, dropout_p=0.3, dropout_rng=np.asarray(rng))
    np.testing.assert_allclose(o, wanted, atol=1e-6)

    def drop(q: Any, k: Any, v: Any, key: Any) -> Any:
        return omniattn.attention(q, k, v, dropout_p=0.3, dropout_rng=key)

    np.testing.assert_allclose(jax.jit(drop)(*arrays, make(1)), wanted, atol=1e-6)
    assert not np.allclose(drop(*arrays, make(2)), wanted)


def test_gradients_are_those_of_the_mask() -> None:
    """jax.grad beside `attention_backward` of NumPy."""
    arrays = _arrays()
    do = np.random.default_rng(1).standard_normal((1, 20, 2, 16)).astype(np.float32)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (omniattn.attention(q, k, v, dropout_p=0.3, dropout_rng=(5, 6), causal=True) * do).sum()

    made = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
    as_numpy = [np.asarray(x) for x in arrays]
    known = {"dropout_p": 0.3, "dropout_rng": (5, 6), "causal": True}
    o, lse = omniattn.attention(*as_numpy, return_lse=True, **known)
    wanted = omniattn.attention_backward(do, *as_numpy, o, lse, **known)
    for found, expected in zip(made, wanted, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_nothing_is_drawn() -> None:
    """JAX has no generator."""
    with pytest.raises(ArgumentError, match="dropout_rng"):
        omniattn.attention(*_arrays(), dropout_p=0.3)
