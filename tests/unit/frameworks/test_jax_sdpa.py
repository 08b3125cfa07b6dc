"""`omniattn.jax.dot_product_attention` beside `jax.nn.dot_product_attention` on the CPU: values and gradients."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import omniattn as oa

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _on_cpu() -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def _attention() -> Any:
    from omniattn.jax import dot_product_attention

    return dot_product_attention


def _inputs(rows: int, keys: int, heads: int = 4, kv_heads: int = 2, batch: int | None = 2) -> list[Any]:
    rng = np.random.default_rng(rows * 100 + keys)
    lead = () if batch is None else (batch,)
    shapes = ((*lead, rows, heads, 16), (*lead, keys, kv_heads, 16), (*lead, keys, kv_heads, 16))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def _random(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(7).standard_normal(shape), jnp.float32)


def _mask(*shape: int) -> Any:
    # The first key is visible to all: JAX's own gives the mean of the values where none is, this package 0.
    return jnp.asarray(np.random.default_rng(8).random(shape) < 0.6).at[..., 0].set(True)


CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "plain": ((6, 9), {}),
    "scale": ((6, 9), {"scale": 0.3}),
    "causal": ((7, 7), {"is_causal": True}),
    "causal, more keys": ((5, 9), {"is_causal": True}),
    "causal, more queries": ((9, 5), {"is_causal": True}),
    "window": ((8, 8), {"local_window_size": 2}),
    "window, more keys": ((5, 12), {"local_window_size": (2, 3)}),
    "window, more queries": ((9, 7), {"local_window_size": (3, 1)}),
    "causal window": ((8, 8), {"local_window_size": (3, 2), "is_causal": True}),
    "mask": ((6, 9), {"mask": _mask(2, 4, 6, 9)}),
    "mask for all heads, causal": ((6, 9), {"mask": _mask(2, 1, 6, 9), "is_causal": True}),
    "bias": ((6, 9), {"bias": _random(2, 4, 6, 9)}),
    "bias for all, mask": ((6, 9), {"bias": _random(1, 4, 1, 9), "mask": _mask(1, 1, 6, 9)}),
    "lengths of keys": ((6, 9), {"key_value_seq_lengths": jnp.asarray([4, 9], jnp.int32)}),
    "lengths": (
        (6, 9),
        {
            "query_seq_lengths": jnp.asarray([3, 6], jnp.int32),
            "key_value_seq_lengths": jnp.asarray([9, 2], jnp.int32),
            "bias": _random(1, 1, 6, 9),
            "is_causal": True,
        },
    ),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str, jitted: bool) -> None:
    (rows, keys), options = CASES[case]
    q, k, v = _inputs(rows, keys)
    weights = _random(*q.shape)
    given = dict(options)
    bias = given.pop("bias", jnp.zeros((1, 1, 1, 1), jnp.float32))

    def loss(attention: Any) -> Any:
        def f(q: Any, k: Any, v: Any, bias: Any) -> Any:
            o = attention(q, k, v, bias=bias if "bias" in options else None, **given)
            return (o * weights).sum(), o

        return f

    for_all = jax.value_and_grad(loss(_attention()), argnums=(0, 1, 2, 3), has_aux=True)
    (_, got), gradients = (jax.jit(for_all) if jitted else for_all)(q, k, v, bias)
    (_, want), expected = jax.value_and_grad(
        loss(jax.nn.dot_product_attention), argnums=(0, 1, 2, 3), has_aux=True
    )(q, k, v, bias)  # fmt: skip
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got, want, atol=2e-6)
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_residual_heads_and_batch(batch: int | None, kv_heads: int) -> None:
    q, k, v = _inputs(5, 7, kv_heads=kv_heads, batch=batch)
    got = _attention()(q, k, v, return_residual=True)
    want = jax.nn.dot_product_attention(q, k, v, return_residual=True)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, atol=2e-6)
    none = jax.grad(lambda q: _attention()(q, k, v, return_residual=True)[1].sum())(q)
    assert not np.asarray(none).any()


def test_rows_that_see_nothing_are_zero() -> None:
    q, k, v = _inputs(9, 4)
    o, residual = _attention()(q, k, v, local_window_size=(2, 0), return_residual=True)
    want = jax.nn.dot_product_attention(q, k, v, local_window_size=(2, 0))
    np.testing.assert_allclose(o[:, :6], want[:, :6], atol=2e-6)
    assert not np.asarray(o[:, 6:]).any()
    assert (np.asarray(residual[:, 6:]) == -np.inf).all()


def test_bfloat16_and_other_bias() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in _inputs(6, 9))
    bias = _random(1, 4, 6, 9).astype(jnp.float16)
    got = _attention()(q, k, v, bias)
    assert got.dtype == jnp.bfloat16
    want = jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)), bias.astype(jnp.float32))
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-2)
    gradient = jax.grad(lambda b: _attention()(q, k, v, b).astype(jnp.float32).sum())(bias)
    assert (gradient.dtype, gradient.shape) == (jnp.float16, bias.shape)


def test_the_signature_is_that_of_jax() -> None:
    own = inspect.signature(_attention()).parameters
    of_jax = inspect.signature(jax.nn.dot_product_attention).parameters
    assert [(p.name, p.kind, p.default) for p in own.values()][: len(of_jax)] == [
        (p.name, p.kind, p.default) for p in of_jax.values()
    ]
    assert list(own)[len(of_jax) :] == ["precision"]


def test_other_implementations_are_those_of_jax() -> None:
    q, k, v = _inputs(6, 6)
    got = _attention()(q, k, v, is_causal=True, implementation="xla")
    np.testing.assert_array_equal(got, jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"implementation": "triton"}, "argument 'implementation': expected None, 'omniattn', 'xla' or 'cudnn'"),
        ({"implementation": "xla", "precision": "int8"}, "argument 'precision': expected 'exact' with"),
        ({"local_window_size": -1}, "argument 'local_window_size': expected None, an integer >= 0"),
        ({"local_window_size": (1, 2, 3)}, "argument 'local_window_size'"),
        ({"local_window_size": 1.5}, "argument 'local_window_size'"),
        ({"mask": np.ones((1, 1, 6, 6), np.float32)}, "argument 'mask': expected bool (True: visible)"),
        ({"bias": np.ones((1, 1, 6, 6), bool)}, "argument 'bias': expected a floating type"),
        ({"bias": np.ones((1, 1, 1, 6, 6), np.float32)}, "argument 'bias': expected at most 4 dimensions"),
        # Not one that is cut to what is looked at.
        ({"mask": np.ones((1, 1, 1, 7), bool)}, "argument 'mask': expected a shape that broadcasts to (batch,"),
        ({"mask": np.ones((1, 1, 9, 6), bool)}, "argument 'mask': expected a shape that broadcasts"),
        ({"bias": np.ones((3, 1, 6, 6), np.float32)}, "argument 'bias': expected a shape that broadcasts"),
        ({"bias": "x"}, "argument 'bias': expected an array, received str"),
        ({"query_seq_lengths": {}}, "argument 'query_seq_lengths': expected an array"),
        ({"scale": "1"}, "dot_product_attention(): argument 'scale': expected a finite number"),
        ({"is_causal": "no"}, "argument 'is_causal': expected True or False"),
        ({"return_residual": 2}, "argument 'return_residual': expected True or False"),
        ({"implementation": np.ones(2)}, "argument 'implementation': expected None"),
        ({"precision": "int9"}, "dot_product_attention(): argument 'precision'"),
        ({"query_seq_lengths": np.ones(3, np.int32)}, "argument 'query_seq_lengths': expected shape (2,)"),
        ({"key_value_seq_lengths": np.ones(2, np.float32)}, "argument 'key_value_seq_lengths': expected int32"),
    ],
)
def test_errors(options: dict[str, Any], text: str) -> None:
    with pytest.raises(oa.errors.ArgumentError) as caught:
        _attention()(*_inputs(6, 6), **options)
    assert text in str(caught.value)


def test_rank() -> None:
    q, k, v = _inputs(6, 6)
    for given, name in (((q, None, v), "key"), ((q, k, v.astype(np.float16)), "value"), ((q[..., :5], k, v), "query")):
        with pytest.raises(oa.errors.ArgumentError) as caught:
            _attention()(*given)
        assert (caught.value.function, caught.value.argument) == ("dot_product_attention", name)
    with pytest.raises(oa.errors.ShapeError, match=r"argument 'key': expected 4 dimensions"):
        _attention()(q, k[0, 0], v)
