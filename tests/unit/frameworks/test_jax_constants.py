"""Calls whose arrays all have values, in functions that JAX traces: closed over, they are constants of the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import omniattn as oa

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    import omniattn.jax  # noqa: F401 - makes pytrees of caches and of quantized operands

    with jax.default_device(jax.devices("cpu")[0]):
        yield


def _random(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


Q, K, V = _random(2, 6, 4, 16), _random(2, 9, 2, 16, seed=1), _random(2, 9, 2, 16, seed=2)
STARTS = {"cu_seqlens_q": jnp.asarray([0, 2, 6], jnp.int32), "cu_seqlens_k": jnp.asarray([0, 4, 9], jnp.int32)}
LENGTHS = {"max_seqlen_q": 4, "max_seqlen_k": 5}
DO, LSE = _random(2, 6, 4, 16, seed=3), _random(2, 4, 6, seed=4)


def _attend() -> Any:
    return oa.attention(Q, K, V, causal=True, return_lse=True)


def _quantized() -> Any:
    pair = oa.quantize_qk(Q, K)
    return oa.attention(pair.q, pair.k, oa.quantize_v(V))


#: Of JAX's arrays alone, which are closed over.
CALLS: dict[str, Callable[[], Any]] = {
    "attention": _attend,
    "int8": lambda: oa.attention(Q, K, V, precision="int8"),
    "a mask of NumPy": lambda: oa.attention(Q, K, V, mask=np.tri(6, 9, 3, dtype=bool)),
    "a score modification": lambda: oa.attention(
        Q, K, V, score_mod=oa.ScoreMod("score + by[h]", reference=lambda s, b, h, q, k, by: s + by[h], by=Q[0, 0, :, 0])
    ),
    "attention_varlen": lambda: oa.attention_varlen(Q[0], K[0], V[0], **STARTS, **LENGTHS),
    "seqused_k": lambda: oa.attention_varlen(Q[0], K[0], V[0], **STARTS, **LENGTHS, seqused_k=np.asarray([3, 5], "i4")),
    "attention_backward": lambda: oa.attention_backward(DO, Q, K, V, *_attend(), causal=True),
    "attention_varlen_backward": lambda: oa.attention_varlen_backward(
        DO[0], Q[0], K[0], V[0], DO[0], LSE[0], **STARTS, **LENGTHS
    ),
    "quantize_qk and quantize_v": _quantized,
    "merge_states": lambda: oa.merge_states(DO, LSE, Q, LSE + 1),
    "dot_product_attention": lambda: oa.jax.dot_product_attention(Q, K, V),
}
TRANSFORMS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "jit": lambda call: jax.jit(call)(),
    "cond": lambda call: jax.lax.cond(True, call, call),
    "scan": lambda call: jax.tree.map(lambda x: x[1], jax.lax.scan(lambda c, _: (c, call()), 0, None, length=2)[1]),
    "checkpoint": lambda call: jax.checkpoint(call)(),
    "grad of jit": lambda call: jax.grad(lambda x: jax.jit(lambda: (x, call()))(), has_aux=True)(1.0)[1],
    "vmap of jit": lambda call: jax.tree.map(
        lambda x: x[2], jax.vmap(lambda x: jax.tree.map(lambda y: y + 0 * x, jax.jit(call)()))(jnp.zeros(3))
    ),
    # These compute at once what does not depend on their argument.
    "vmap": lambda call: jax.vmap(lambda x: call(), out_axes=None)(jnp.zeros(3)),
    "grad": lambda call: jax.grad(lambda x: (x, call()), has_aux=True)(1.0)[1],
    "ensure_compile_time_eval": lambda call: jax.jit(lambda: _now(call))(),
}


def _now(call: Callable[[], Any]) -> Any:
    with jax.ensure_compile_time_eval():
        made = call()
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(made))
    return made


def _close(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_constants_alone(name: str) -> None:
    call = CALLS[name]
    _close(jax.jit(call)(), call())
    shapes = jax.eval_shape(call)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(shapes)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(call())
    ]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform(transform: str) -> None:
    _close(TRANSFORMS[transform](_attend), _attend())


def test_the_first_call_of_a_process_may_be_traced() -> None:
    from omniattn.arrays import from_dlpack

    from_dlpack._trace_query.cache_clear()
    text = str(jax.make_jaxpr(_attend)())
    assert "omniattn_attention[" in text


def test_numpy_arrays_alone_are_no_part_of_a_trace() -> None:
    arrays = [np.asarray(x) for x in (Q, K, V)]
    kinds = []

    @jax.jit
    def call() -> Any:
        o = oa.attention(*arrays)
        kinds.append(type(o))
        return o

    _close(call(), oa.attention(Q, K, V))
    assert kinds == [np.ndarray]


@pytest.mark.parametrize("traced", range(3))
def test_constants_of_both_libraries_beside_one_tracer(traced: int) -> None:
    given = [np.asarray(Q), K, np.asarray(V)]

    def call(x: Any) -> Any:
        return oa.attention(*given[:traced], x, *given[traced + 1 :])

    _close(jax.jit(call)(given[traced]), oa.attention(Q, K, V))
    _close(jax.grad(lambda x: call(x).sum())(jnp.asarray(given[traced])), jax.grad(_sum, traced)(Q, K, V))


def _sum(q: Any, k: Any, v: Any) -> Any:
    return oa.attention(q, k, v).sum()


def test_shard_map_outside_of_jit() -> None:
    spec = jax.sharding.PartitionSpec()
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices("cpu")[:1])
    shared = jax.shard_map(lambda q: oa.attention(q, K, V), mesh=mesh, in_specs=(spec,), out_specs=spec)
    _close(shared(Q), oa.attention(Q, K, V))
    _close(jax.shard_map(_attend, mesh=mesh, in_specs=(), out_specs=spec)(), _attend())


def test_caches_stay_arguments() -> None:
    cache, paged = oa.KVCache(2, 8, 2, 16, like=Q), oa.PagedKVCache(4, 8, 2, 16, like=Q)
    tokens, lengths = _random(2, 1, 2, 16), jnp.asarray([1, 1], jnp.int32)
    rows, counts = np.asarray(tokens), np.asarray(lengths)
    _, made = jax.jit(lambda c: (oa.append(c, tokens, tokens, seq_lens=lengths), c))(cache)
    for of in (cache, made):
        for call in (
            lambda of: oa.append(of, tokens, tokens, seq_lens=lengths),
            lambda of: oa.append(of, rows, rows, seq_lens=counts),
            lambda of: oa.decode(tokens, of, seq_lens=lengths),
        ):
            with pytest.raises(oa.errors.UnsupportedError, match="a cache that is no argument of the traced function"):
                jax.jit(lambda of=of, call=call: call(of))()
    with pytest.raises(oa.errors.UnsupportedError, match=r"copy_blocks\(\): a KV cache of JAX"):
        jax.jit(lambda: oa.copy_blocks(paged, [(0, 1)]))()
    with pytest.raises(oa.errors.UnsupportedError, match=r"a new JAX array with memory.*making it \(a KV cache, say\)"):
        jax.jit(lambda: oa.KVCache(2, 8, 2, 16, like=Q).k)()
    # Not broken by what was refused, and constants beside a cache that is an argument.
    step = jax.jit(lambda c: (oa.append(c, rows, tokens, seq_lens=counts), oa.decode(rows, c, seq_lens=lengths))[1])
    oa.append(cache, tokens, tokens, seq_lens=lengths)
    _close(step(made), oa.decode(tokens, cache, seq_lens=lengths))
