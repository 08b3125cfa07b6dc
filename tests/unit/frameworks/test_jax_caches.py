"""KV caches and quantized operands as pytrees: decoders under jit, donation, scan, meshes of devices, on the CPU."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import omniattn as oa

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    import omniattn.jax  # noqa: F401 - makes pytrees of caches

    with jax.default_device(jax.devices("cpu")[0]):
        yield


def _random(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _cache(kind: str, fmt: str, **options: Any) -> Any:
    like = jnp.zeros(1)
    more: dict[str, Any] = {"k_dtype": fmt, **options}
    if fmt == "int4":
        more |= {"k_mean": _random(2, 16, seed=3), "hadamard": True}
    if kind == "paged":
        return oa.PagedKVCache(8, 8, 2, 16, like=like, **more)
    return oa.KVCache(2, 32, 2, 16, like=like, **more)


def _tables(kind: str) -> Any:
    return jnp.arange(8, dtype=jnp.int32)[::-1].reshape(2, 4) if kind == "paged" else None


def _step(cache: Any, q: Any, k: Any, v: Any, lengths: Any, tables: Any) -> Any:
    oa.append(cache, k, v, seq_lens=lengths, block_table=tables)
    return oa.decode(q, cache, seq_lens=lengths, block_table=tables), cache


def _tokens(i: int) -> tuple[Any, ...]:
    lengths = jnp.asarray([i, i + 2], jnp.int32)
    return *(_random(2, 1, heads, 16, seed=3 * i + heads) for heads in (4, 2, 2)), lengths


def _same(got: Any, want: Any) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_decoding_is_that_without_jit(kind: str, fmt: str) -> None:
    window = {} if fmt in ("fp16", "bf16") or kind == "paged" else {"recent_window": 4}
    cache, eager = _cache(kind, fmt, **window), _cache(kind, fmt, **window)
    traces = []

    def counted(*arguments: Any) -> Any:
        traces.append(1)
        return _step(*arguments)

    compiled = jax.jit(counted, donate_argnums=0)
    for i in range(1, 7):
        o, cache = compiled(cache, *_tokens(i), _tables(kind))
        want, eager = _step(eager, *_tokens(i), _tables(kind))
        _same(o, want)
    assert len(traces) == 1
    assert type(cache) is type(eager)
    # What the steps made is a cache like any other.
    o, cache = _step(cache, *_tokens(7), _tables(kind))
    _same(o, _step(eager, *_tokens(7), _tables(kind))[0])
    assert cache.nbytes == eager.nbytes


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_prompts_and_single_tokens(kind: str) -> None:
    """A batch of prompts, a mixed batch and single tokens of packed queries, over one cache."""
    prompts, rows = _random(2, 20, 4, 16, seed=5), _random(7, 4, 16, seed=6)
    k, v = (_random(2, 20, 2, 16, seed=seed) for seed in (7, 8))
    starts, one_each = jnp.asarray([0, 5, 7], jnp.int32), jnp.asarray([0, 1, 2], jnp.int32)
    mod = oa.ScoreMod("score + 1", reference=lambda score, b, h, q, k: score * (1 + b + h))

    def steps(cache: Any, tables: Any, lengths: Any) -> Any:
        oa.append(cache, k, v, seq_lens=lengths, block_table=tables)
        places = {"seq_lens": lengths, "block_table": tables, "return_lse": True}
        made = (
            oa.attention_with_kvcache(prompts, cache, **places),
            oa.attention_with_kvcache(rows, cache, cu_seqlens_q=starts, max_seqlen_q=5, causal=False, **places),
            oa.attention_with_kvcache(rows[:2], cache, cu_seqlens_q=one_each, max_seqlen_q=1, **places),
            oa.attention_with_kvcache(prompts[:, :3], cache, score_mod=mod, **places),
        )
        return made, cache

    lengths = jnp.asarray([20, 25], jnp.int32)
    made, _ = jax.jit(steps, donate_argnums=0)(_cache(kind, "fp16"), _tables(kind), lengths)
    expected, cache = steps(_cache(kind, "fp16"), _tables(kind), lengths)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        _same(a, b)
    if kind == "contiguous":
        places = {"seq_lens": lengths, "batch_index": jnp.asarray([1, 1], jnp.int32)}
        made = jax.jit(lambda c: oa.attention_with_kvcache(prompts, c, **places))(cache)
        _same(made, oa.attention_with_kvcache(prompts, cache, **places))

    def loss(q: Any, cache: Any) -> Any:
        places = {"seq_lens": lengths, "block_table": _tables(kind)}
        return jax.grad(lambda q: oa.attention_with_kvcache(q, cache, **places).sum())(q)

    with pytest.raises(oa.errors.UnsupportedError, match=r"attention_with_kvcache\(\): no derivative"):
        jax.jit(loss)(prompts, cache)


def test_a_donated_cache_is_written_in_place() -> None:
    compiled = jax.jit(_step, donate_argnums=0)
    _, cache = compiled(_cache("contiguous", "fp16"), *_tokens(1), None)
    place = cache.k.unsafe_buffer_pointer()
    for i in range(2, 5):
        before = cache
        _, cache = compiled(cache, *_tokens(i), None)
        assert cache.k.unsafe_buffer_pointer() == place
        assert before.k.is_deleted()


def test_a_cache_that_is_not_donated_stays_as_it_is() -> None:
    compiled = jax.jit(_step)
    _, first = compiled(_cache("contiguous", "fp16"), *_tokens(1), None)
    values = np.asarray(first.k).copy()
    _, second = compiled(first, *_tokens(2), None)
    np.testing.assert_array_equal(np.asarray(first.k), values)
    assert (np.asarray(second.k) != values).any()


def test_scan() -> None:
    steps = [_tokens(i) for i in range(1, 6)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[x[:3] for x in steps])

    def body(carry: Any, x: Any) -> Any:
        cache, lengths = carry
        o, cache = _step(cache, *x, lengths, None)
        return (cache, lengths + 1), o

    first = (_cache("contiguous", "int8"), jnp.asarray([1, 3], jnp.int32))
    (_, lengths), got = jax.jit(lambda first, x: jax.lax.scan(body, first, x))(first, stacked)
    assert lengths.tolist() == [6, 8]
    eager = _cache("contiguous", "int8")
    for o, step in zip(got, steps, strict=True):
        _same(o, _step(eager, *step, None)[0])


def test_rotary_embedding_and_packed_tokens() -> None:
    angles = jnp.arange(32)[:, None] * jnp.asarray([1.0, 0.1, 0.01])
    k, v = _random(5, 2, 16, seed=1), _random(5, 2, 16, seed=2)
    lengths, starts = jnp.asarray([2, 3], jnp.int32), jnp.asarray([0, 2, 5], jnp.int32)

    def fill(cache: Any, k: Any, v: Any) -> Any:
        oa.append(cache, k, v, seq_lens=lengths, cu_seqlens=starts, cos=jnp.cos(angles), sin=jnp.sin(angles))
        return cache

    got, want = jax.jit(fill)(_cache("contiguous", "fp16"), k, v), fill(_cache("contiguous", "fp16"), k, v)
    for b, n in enumerate((2, 3)):
        _same(got.k[b, :, :n], want.k[b, :, :n])


def test_a_cache_has_to_be_an_argument() -> None:
    cache, (q, k, v, lengths) = _cache("contiguous", "fp16"), _tokens(1)
    for call in (
        lambda q: oa.decode(q, cache, seq_lens=lengths),
        lambda q: oa.append(cache, q[:, :, :2], v, seq_lens=lengths),
    ):
        with pytest.raises(oa.errors.UnsupportedError, match="a cache that is no argument of the traced function"):
            jax.jit(call)(q)
    del k


def test_what_a_traced_cache_cannot_do() -> None:
    @jax.jit
    def copied(cache: Any) -> Any:
        assert "traced" in repr(cache)
        oa.copy_blocks(cache, [(0, 1)])
        return cache

    with pytest.raises(oa.errors.UnsupportedError, match=r"copy_blocks\(\): a KV cache of JAX in a function that JAX"):
        copied(_cache("paged", "fp16"))
    with pytest.raises(oa.errors.UnsupportedError, match="is a JAX tracer"):
        jax.jit(lambda x: oa.KVCache(1, 8, 1, 16, like=x).k)(jnp.zeros(1))


def test_errors_come_while_tracing() -> None:
    q, k, v, lengths = _tokens(1)
    with pytest.raises(oa.errors.ShapeError, match=r"argument 'k'.*the cache's"):
        jax.jit(_step)(_cache("contiguous", "fp16"), q, q, v, lengths, None)
    with pytest.raises(oa.errors.ArgumentError, match="argument 'block_table'"):
        jax.jit(_step)(_cache("paged", "fp16"), q, k, v, lengths, None)


def test_copies_and_pickles_of_what_a_step_made() -> None:
    _, cache = jax.jit(_step)(_cache("contiguous", "int8"), *_tokens(1), None)
    twins = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    want = oa.decode(_tokens(1)[0], cache, seq_lens=_tokens(1)[3])
    for twin in twins:
        assert type(twin) is oa.KVCache
        _same(oa.decode(_tokens(1)[0], twin, seq_lens=_tokens(1)[3]), want)


def test_leaves_and_structure() -> None:
    cache = _cache("contiguous", "int4", recent_window=4)
    leaves, structure = jax.tree.flatten(cache)
    assert len(leaves) == 8  # k and v with parameters, the recent window's three, k_mean
    again = jax.tree.unflatten(structure, leaves)
    assert jax.tree.structure(again) == structure
    assert jax.tree.structure(jax.tree.map(lambda x: x + 0, again)) == structure
    assert jax.tree.structure(_cache("contiguous", "int4", recent_window=4)) == structure
    assert jax.tree.structure(_cache("contiguous", "int4", recent_window=5)) != structure
    with pytest.raises(AttributeError):
        getattr(again, "nothing_of_this_name")  # noqa: B009


def test_arrays_that_the_cache_was_not_made_with() -> None:
    q, k, v, lengths = _tokens(1)
    cache = _cache("contiguous", "fp16")
    for change, error in (
        (lambda x: x[:, :, :8], oa.errors.ShapeError),
        (lambda x: x.astype("float32"), oa.errors.DtypeError),
    ):
        changed = jax.tree.map(change, cache)
        with pytest.raises(error, match=r"argument 'cache\.k': expected"):
            oa.decode(q, changed, seq_lens=lengths)
        with pytest.raises(error, match=r"argument 'cache\.k': expected"):
            jax.jit(_step)(changed, q, k, v, lengths, None)


def test_vmap_over_caches() -> None:
    many = [_cache("contiguous", "int8") for _ in range(3)]
    tokens = [_tokens(i) for i in (1, 1, 1)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *many)
    inputs = jax.tree.map(lambda *x: jnp.stack([y * (i + 1) for i, y in enumerate(x)]), *[x[:3] for x in tokens])
    got, after = jax.vmap(lambda cache, q, k, v: _step(cache, q, k, v, tokens[0][3], None))(stacked, *inputs)
    for i, cache in enumerate(many):
        want, cache = _step(cache, *(x[i] for x in inputs), tokens[0][3], None)
        _same(got[i], want)
        _same(after.k[i][:, :, :1], cache.k[:, :, :1])


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_operands(precision: str) -> None:
    q, k, v = _random(2, 6, 4, 16), _random(2, 9, 2, 16, seed=1), _random(2, 9, 2, 16, seed=2)
    options = {"dtype": precision, "smooth_q": precision == "int4", "with_bias": True}

    def inside(q: Any, k: Any, v: Any) -> Any:
        pair = oa.quantize_qk(q, k, **options)
        return oa.attention(pair.q, pair.k, oa.quantize_v(v), return_lse=True)

    want = inside(q, k, v)
    jax.tree.map(_same, jax.jit(inside)(q, k, v), want)
    pair, value = jax.jit(lambda q, k, v: (oa.quantize_qk(q, k, **options), oa.quantize_v(v)))(q, k, v)
    attend = functools.partial(oa.attention, return_lse=True)
    jax.tree.map(_same, attend(pair.q, pair.k, value), want)
    jax.tree.map(_same, jax.jit(lambda pair, value: attend(pair.q, pair.k, value))(pair, value), want)
    many = jax.vmap(lambda q: oa.quantize_qk(q, k, **options))(jnp.stack([q, 2 * q]))
    _same(many.q_int[1], oa.quantize_qk(2 * q, k, **options).q_int)
    mapped = jax.vmap(inside, (0, None, None))(jnp.stack([q, 2 * q]), k, v)
    jax.tree.map(lambda a, b: _same(a[1], b), mapped, inside(2 * q, k, v))
    with pytest.raises(oa.errors.UnsupportedError, match="no derivative"):
        jax.grad(lambda q: inside(q, k, v)[0].sum())(q)


_MESH = """
import jax, numpy as np, functools, omniattn as oa, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
def new(heads, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((2, 8, heads, 16)), "float32")
q, k, v = new(4, 0), new(1, 1), new(1, 2)
f = functools.partial(oa.attention, causal=True)
mesh = Mesh(np.array(jax.devices()), ("x",))
loss = lambda f: lambda *x: (f(*x) ** 2).sum()
host = lambda x: [np.asarray(y) for y in jax.tree.leaves(x)]
want = host((f(q, k, v), jax.grad(loss(f), (0, 1, 2))(q, k, v)))
heads, batch = P(None, None, "x"), P("x")
for check in (True, False):
    for specs in ((batch, batch, batch), (heads, P(), P())):
        shared = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check)
        got = host((jax.jit(shared)(q, k, v), jax.jit(jax.grad(loss(shared), (0, 1, 2)))(q, k, v)))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
divided = [jax.device_put(x, NamedSharding(mesh, batch)) for x in (q, k, v)]
np.testing.assert_array_equal(np.asarray(jax.jit(f)(*divided)), want[0])
explicit = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(explicit):
    divided = [jax.device_put(x, P("x")) for x in (q, k, v)]
    got = host((jax.jit(f)(*divided), jax.jit(jax.grad(loss(f), (0, 1, 2)))(*divided)))
for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)
print("as one device", len(jax.devices()))
"""


def test_meshes_of_devices() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", _MESH], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "as one device 2", done.stderr[-2000:]
