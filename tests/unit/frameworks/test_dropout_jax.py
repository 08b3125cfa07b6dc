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


def test_integers_of_numpy() -> None:
    """A pair of them is a pair of integers."""
    arrays = _arrays()
    made = [
        omniattn.attention(*arrays, dropout_p=0.3, dropout_rng=rng) for rng in ((3, 4), (np.int64(3), np.uint32(4)))
    ]
    np.testing.assert_array_equal(*made)
    with pytest.raises(ArgumentError, match="dropout_rng"):
        omniattn.attention(*arrays, dropout_p=0.3, dropout_rng=(np.float32(3), 4))


def test_nothing_is_drawn() -> None:
    """JAX has no generator; the error shows how to pass a key."""
    with pytest.raises(ArgumentError, match=r"'dropout_rng': expected a key of jax\.random") as caught:
        omniattn.attention(*_arrays(), dropout_p=0.3)
    assert "dropout_rng=jax.random.key(1234), or dropout_rng=(1234, 0)" in str(caught.value)


@pytest.mark.parametrize("mapped", ["q, k, v", "q", "q, key", "key"])
def test_vmap_is_each_call(mapped: str) -> None:
    """Mask and gradient of an item are those of its own call, also where all have one key."""
    names = mapped.split(", ")
    q, k, v = (jax.numpy.stack([x, 2 * x]) if name in names else x for name, x in zip("qkv", _arrays(), strict=True))
    key = jax.random.split(jax.random.key(1)) if "key" in names else jax.random.key(1)
    axes = [0 if name in names else None for name in ("q", "k", "v", "key")]

    def drop(*arrays: Any) -> Any:
        return omniattn.attention(*arrays[:3], dropout_p=0.3, dropout_rng=arrays[3])

    gradient = jax.grad(lambda *arrays: (drop(*arrays) ** 2).sum())
    for function in (drop, gradient):
        made = jax.vmap(function, axes)(q, k, v, key)
        for i in range(2):
            one = [x if axis is None else x[i] for x, axis in zip((q, k, v, key), axes, strict=True)]
            np.testing.assert_allclose(made[i], function(*one), atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32, np.uint32])
def test_numbers_of_numpy_under_jit(dtype: Any) -> None:
    """The words of an array of NumPy are the same under jit, whatever its element type."""
    arrays, rng = _arrays(), np.array([2**40 + 3, 7], np.uint64).view(dtype)

    def drop(q: Any, k: Any, v: Any) -> Any:
        return omniattn.attention(q, k, v, dropout_p=0.3, dropout_rng=rng)

    wanted = omniattn.attention(*map(np.asarray, arrays), dropout_p=0.3, dropout_rng=(2**40 + 3, 7))
    np.testing.assert_allclose(drop(*arrays), wanted, atol=1e-6)
    np.testing.assert_allclose(jax.jit(drop)(*arrays), wanted, atol=1e-6)


def test_numbers_of_another_library() -> None:
    torch = pytest.importorskip("torch")
    q = jax.numpy.ones((1, 4, 2, 16))
    found = omniattn.attention(q, q, q, dropout_p=0.4, dropout_rng=torch.tensor([7, 9]))
    assert jax.numpy.array_equal(found, omniattn.attention(q, q, q, dropout_p=0.4, dropout_rng=(7, 9)))


def test_a_mask_takes_the_words_of_a_key() -> None:
    with pytest.raises(ArgumentError, match=r"argument 'dropout_rng'.*received key<.*return_rng=True"):
        omniattn.dropout_mask((1, 2, 4, 4), 0.4, jax.random.key(1))
