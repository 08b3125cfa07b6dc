"""Calls under JAX's transformations on a GPU: the bits of eager calls, streams, donation, command buffers, threads."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

# JAX would otherwise take most of the GPU's memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import omniattn as oa
from omniattn import testing

pytestmark = pytest.mark.gpu

SHAPE_Q, SHAPE_K = (2, 200, 8, 64), (2, 333, 2, 64)


@pytest.fixture(scope="module")
def jax() -> Any:
    module = pytest.importorskip("jax")
    pytest.importorskip("omniattn.jax")
    return module


@pytest.fixture(params=[True, False], ids=["command buffers", "callbacks"])
def command_buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, jax: Any) -> Iterator[bool]:
    from omniattn.frameworks.jax import lowering

    monkeypatch.setattr(lowering, "COMMAND_BUFFERS", request.param)
    jax.clear_caches()
    yield bool(request.param)
    jax.clear_caches()


def _arrays(jax: Any, *shapes: tuple[int, ...], seed: int = 0, dtype: str = "bfloat16") -> list[Any]:
    rng = np.random.default_rng(seed)
    gpu = jax.devices("gpu")[0]
    return [jax.device_put(rng.standard_normal(s).astype(np.float32), gpu).astype(dtype) for s in shapes]


def _qkv(jax: Any, seed: int = 0, dtype: str = "bfloat16") -> list[Any]:
    return _arrays(jax, SHAPE_Q, SHAPE_K, SHAPE_K, seed=seed, dtype=dtype)


def _same(got: Any, want: Any) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


def _float(x: Any) -> Any:
    return np.asarray(x.astype("float32"))


def _starts(jax: Any, *numbers: int) -> Any:
    return jax.device_put(np.asarray(numbers, np.int32), jax.devices("gpu")[0])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal with LSE": {"causal": True, "return_lse": True},
    "window, softcap": {"window": (50, 3), "softcap": 20.0},
    "few queries": {"few": True},
    "mask": {"mask": "bool"},
    "bias": {"mask": "bias"},
    "sinks": {"sinks": True},
    "int8": {"precision": "int8"},
    "int4 with LSE": {"precision": "int4", "return_lse": True},
}


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "bfloat16") for case in OPTIONS), ("plain", "float16"), ("mask", "float16")]
)
def test_compiled_calls_give_the_bits_of_eager_ones(jax: Any, case: str, dtype: str) -> None:
    q, k, v = _qkv(jax, dtype=dtype)
    options = dict(OPTIONS[case])
    if options.pop("few", False):
        q = q[:, :1]
    more = {}
    if "mask" in options:
        (bias,) = _arrays(jax, (2, 8, SHAPE_Q[1], SHAPE_K[1]), seed=3, dtype=dtype)
        more["mask"] = bias > -0.5 if options.pop("mask") == "bool" else bias
    if options.pop("sinks", False):
        (more["sinks"],) = _arrays(jax, (8,), seed=4, dtype="float32")
    want = oa.attention(q, k, v, **more, **options)
    got = jax.jit(lambda q, k, v, more: oa.attention(q, k, v, **more, **options))(q, k, v, more)
    jax.tree.map(_same, got, want)


def test_empty(jax: Any, command_buffers: bool) -> None:
    q, k, v = _qkv(jax)
    call = jax.jit(functools.partial(oa.attention, return_lse=True))
    assert call(q[:0], k[:0], v[:0])[0].shape == (0, *SHAPE_Q[1:])
    o, lse = call(q, k[:, :0], v[:, :0])
    assert not _float(o).any()
    assert (np.asarray(lse) == -np.inf).all()


def test_varlen(jax: Any) -> None:
    q, k, v = (x[0] for x in _qkv(jax))
    starts = _starts(jax, 0, 70, 70, 200), _starts(jax, 0, 100, 130, 333)

    def call(q: Any, k: Any, v: Any, starts: Any) -> Any:
        return oa.attention_varlen(
            q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=130, max_seqlen_k=203, causal=True,
            return_lse=True,
        )  # fmt: skip

    jax.tree.map(_same, jax.jit(call)(q, k, v, starts), call(q, k, v, starts))
    gradient = jax.jit(jax.grad(lambda *x: call(*x)[0].astype("float32").sum(), (0, 1, 2)))(q, k, v, starts)
    o, lse = call(q, k, v, starts)
    want = oa.attention_varlen_backward(
        jax.numpy.ones_like(o), q, k, v, o, lse, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=130,
        max_seqlen_k=203, causal=True,
    )  # fmt: skip
    _same(gradient[1], want[1])
    _same(gradient[2], want[2])
    np.testing.assert_allclose(_float(gradient[0]), _float(want[0]), atol=1e-2)


@pytest.mark.parametrize("case", ["plain", "causal with LSE", "sinks", "bias", "int8"])
@pytest.mark.parametrize("way", ["jit of grad", "grad", "checkpoint"])
def test_gradients(jax: Any, case: str, way: str) -> None:
    q, k, v = _qkv(jax)
    options = dict(OPTIONS[case])
    more = {}
    if options.pop("mask", None):
        (more["mask"],) = _arrays(jax, (2, 8, SHAPE_Q[1], SHAPE_K[1]), seed=3)
    if options.pop("sinks", False):
        (more["sinks"],) = _arrays(jax, (8,), seed=4, dtype="float32")
    (do,) = _arrays(jax, SHAPE_Q, seed=5)
    (dlse,) = _arrays(jax, (2, 8, SHAPE_Q[1]), seed=6, dtype="float32")

    def f(q: Any, k: Any, v: Any, more: Any) -> Any:
        return oa.attention(q, k, v, deterministic=True, **more, **options)

    def pull(q: Any, k: Any, v: Any, more: Any) -> Any:
        _, vjp = jax.vjp(jax.checkpoint(f) if way == "checkpoint" else f, q, k, v, more)
        return vjp((do, dlse) if "return_lse" in options else do)

    got = (pull if way == "grad" else jax.jit(pull))(q, k, v, more)
    precision = {"precision": options["precision"]} if "precision" in options else {}
    causal = {"causal": options["causal"]} if "causal" in options else {}
    o, lse = oa.attention(q, k, v, return_lse=True, **causal, **more, **precision)
    wanted = ("dq", "dk", "dv", *(["dsinks"] * ("sinks" in more)), *(["dmask"] * ("mask" in more)))
    want = oa.attention_backward(
        do, q, k, v, o, lse, dlse=dlse if "return_lse" in options else None, wanted=wanted, deterministic=True,
        **causal, **more,
    )  # fmt: skip
    for a, b in zip((*got[:3], *got[3].values()), want, strict=True):
        _same(a, b.astype(a.dtype))


def test_vmap(jax: Any) -> None:
    """One call of all: the bits are those of the batches as one, whose tile may be another than that of each."""
    many = [jax.numpy.stack([x, x[::-1], x * 2]) for x in _qkv(jax)]
    got = jax.jit(jax.vmap(functools.partial(oa.attention, causal=True)))(*many)
    _same(got.reshape(-1, *got.shape[2:]), oa.attention(*(x.reshape(-1, *x.shape[2:]) for x in many), causal=True))
    for i in range(3):
        one = oa.attention(*(x[i] for x in many), causal=True)
        np.testing.assert_allclose(_float(got[i]), _float(one), rtol=2e-2, atol=2e-2)


def test_merge_states(jax: Any) -> None:
    q, k, v = _qkv(jax)
    half = SHAPE_K[1] // 2

    def both(q: Any, k: Any, v: Any) -> Any:
        a = oa.attention(q, k[:, :half], v[:, :half], return_lse=True)
        b = oa.attention(q, k[:, half:], v[:, half:], return_lse=True)
        return oa.merge_states(*a, *b)

    want, lse = oa.attention(q, k, v, return_lse=True)
    got = jax.jit(both)(q, k, v)
    np.testing.assert_allclose(_float(got[0]), _float(want), atol=2e-2)
    np.testing.assert_allclose(got[1], lse, atol=1e-4)
    jax.tree.map(_same, got, both(q, k, v))


def test_quantized_operands(jax: Any) -> None:
    q, k, v = _qkv(jax)

    def inside(q: Any, k: Any, v: Any) -> Any:
        pair = oa.quantize_qk(q, k)
        return oa.attention(pair.q, pair.k, oa.quantize_v(v))

    pair, value = oa.quantize_qk(q, k), oa.quantize_v(v)
    want = oa.attention(pair.q, pair.k, value)
    _same(jax.jit(inside)(q, k, v), want)
    # In one call keys may be split otherwise: the bases of P differ then.
    in_one = oa.attention(q, k, v, precision="int8")
    assert testing.compare(_float(in_one), _float(want)).rel_l1 <= 0.035
    _same(jax.jit(lambda pair, value: oa.attention(pair.q, pair.k, value))(pair, value), want)


@pytest.mark.parametrize("fmt", ["bf16", "int8"])
@pytest.mark.parametrize("paged", [False, True])
def test_decoding_with_a_donated_cache(jax: Any, fmt: str, paged: bool, command_buffers: bool) -> None:
    tables = _starts(jax, *range(8)).reshape(2, 4) if paged else None
    like = _qkv(jax)[0]

    def new() -> Any:
        if paged:
            return oa.PagedKVCache(8, 16, 2, 64, like=like, k_dtype=fmt)
        return oa.KVCache(2, 64, 2, 64, like=like, k_dtype=fmt)

    def step(cache: Any, q: Any, k: Any, v: Any, lengths: Any, tables: Any) -> Any:
        oa.append(cache, k, v, seq_lens=lengths, block_table=tables)
        return oa.decode(q, cache, seq_lens=lengths, block_table=tables), cache

    compiled = jax.jit(step, donate_argnums=0)
    cache, eager = new(), new()
    places = set()
    for i in range(1, 7):
        q, k, v = _arrays(jax, (2, 1, 8, 64), (2, 1, 2, 64), (2, 1, 2, 64), seed=i)
        lengths = _starts(jax, i, i)
        o, cache = compiled(cache, q, k, v, lengths, tables)
        want, eager = step(eager, q, k, v, lengths, tables)
        _same(o, want)
        places.add(cache.k.unsafe_buffer_pointer())
    assert compiled._cache_size() == 1
    assert len(places) <= 2, "donated planes are not written in place"
    # From here on without jit, on what the compiled steps made.
    o, cache = step(cache, q, k, v, _starts(jax, 7, 7), tables)
    want, eager = step(eager, q, k, v, _starts(jax, 7, 7), tables)
    _same(o, want)


@pytest.mark.parametrize("how", ["new", "written", "read"])
def test_a_cache_of_eager_calls_can_be_donated(jax: Any, how: str) -> None:
    def step(cache: Any, k: Any, v: Any, lengths: Any) -> Any:
        oa.append(cache, k, v, seq_lens=lengths)
        return cache

    q, *tokens = _arrays(jax, (2, 1, 8, 64), (2, 1, 2, 64), (2, 1, 2, 64))
    caches = [oa.KVCache(2, 64, 2, 64, like=q, k_dtype="bf16") for _ in range(2)]
    first = 1
    if how != "new":
        for cache in caches:
            step(cache, *tokens, _starts(jax, 1, 1))
        first = 2
    if how == "read":
        caches[0].k.block_until_ready()
    compiled = jax.jit(step, donate_argnums=0)
    cache, eager = caches
    for i in range(first, first + 3):
        cache = compiled(cache, *tokens, _starts(jax, i, i))
        step(eager, *tokens, _starts(jax, i, i))
    _same(cache.k[:, :, : first + 2], eager.k[:, :, : first + 2])
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(caches[0].k)


def test_scan(jax: Any, command_buffers: bool) -> None:
    like = _qkv(jax)[0]
    steps = _arrays(jax, (9, 2, 1, 8, 64), (9, 2, 1, 2, 64), (9, 2, 1, 2, 64))

    def body(carry: Any, x: Any) -> Any:
        cache, lengths = carry
        oa.append(cache, x[1], x[2], seq_lens=lengths)
        return (cache, lengths + 1), oa.decode(x[0], cache, seq_lens=lengths)

    cache = oa.KVCache(2, 64, 2, 64, like=like, k_dtype="bf16")
    first = (cache, _starts(jax, 1, 1))
    _, got = jax.jit(lambda first, steps: jax.lax.scan(body, first, steps))(first, steps)
    carry = (oa.KVCache(2, 64, 2, 64, like=like, k_dtype="bf16"), _starts(jax, 1, 1))
    for i in range(9):
        carry, want = body(carry, [x[i] for x in steps])
        _same(got[i], want)


def test_chained_calls_in_one_program(jax: Any, command_buffers: bool) -> None:
    """Every call's inputs are what the one before has just made, with other work between: the stream is XLA's own."""

    def chain(q: Any, k: Any, v: Any, heavy: Any) -> Any:
        for _ in range(6):
            heavy = heavy @ heavy * 1e-3
            q = oa.attention(q + heavy[0, 0].astype(q.dtype) * 0, k, v, causal=True) + q
        return q

    compiled = jax.jit(chain)
    heavy = jax.numpy.ones((2048, 2048), "float32")
    for seed in range(12):
        q, k, v = _qkv(jax, seed)
        want = q
        for _ in range(6):
            want = oa.attention(want, k, v, causal=True) + want
        _same(compiled(q, k, v, heavy), want)


def test_late_inputs_and_early_readers(jax: Any) -> None:
    q, k, v = _qkv(jax)
    want = oa.attention(q, k, v)

    @jax.jit
    def slow(x: Any, heavy: Any) -> Any:
        for _ in range(40):
            heavy = heavy @ heavy * 0
        return x + heavy[0, 0].astype(x.dtype)

    heavy = jax.numpy.ones((4096, 4096), "float32")
    call = jax.jit(oa.attention)
    call(q, k, v)
    late = [slow(x, heavy) for x in (q, k, v)]
    o = call(*late)
    doubled = o * 2
    _same(doubled, want * 2)
    # An eager call behind a compiled one, and the other way round.
    _same(oa.attention(call(*late), k, v), oa.attention(want, k, v))
    _same(call(oa.attention(*late), k, v), call(want, k, v))


def test_threads(jax: Any, command_buffers: bool) -> None:
    call = jax.jit(functools.partial(oa.attention, causal=True))
    inputs = [_qkv(jax, seed) for seed in range(4)]
    expected = [oa.attention(*x, causal=True) for x in inputs]

    def work(i: int) -> None:
        for _ in range(25):
            _same(call(*inputs[i]), expected[i])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_shard_map(jax: Any) -> None:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices("gpu")[:1]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    f = functools.partial(oa.attention, causal=True)
    shared = jax.shard_map(f, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)
    q, k, v = _qkv(jax)
    _same(jax.jit(shared)(q, k, v), f(q, k, v))
    got = jax.jit(jax.grad(lambda *x: shared(*x).astype("float32").sum(), (1, 2)))(q, k, v)
    want = jax.jit(jax.grad(lambda *x: f(*x).astype("float32").sum(), (1, 2)))(q, k, v)
    jax.tree.map(_same, got, want)


def test_a_result_that_an_exception_drops_leaves_it_alone(jax: Any) -> None:
    """An expression that fails drops what it had; the caller gets its exception, and nothing that hides it."""
    q, k, v = _qkv(jax)

    def fails() -> Any:
        raise KeyError("the caller's")

    for expression in (
        lambda: oa.attention(q, k, v) + fails(),
        lambda: (oa.attention(q, k, v, return_lse=True), fails()),
        lambda: [oa.attention(q, k, v) if i == 0 else fails() for i in range(2)],
    ):
        with pytest.raises(KeyError, match="the caller's"):
            expression()


def test_the_interpreter_may_end_while_results_live(jax: Any) -> None:
    """Their memory goes back when the process ends, without a word."""
    code = """
import jax
import omniattn as oa

q = jax.numpy.ones((1, 64, 2, 64), "bfloat16")
held = [oa.attention(q, q, q), jax.jit(oa.attention)(q, q, q), oa.attention(q, q, q, return_lse=True)]
print(float(held[0].astype("float32").sum()))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{64.0 * 2 * 64}\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert "rror" not in done.stderr


def test_float32_is_for_the_cpu(jax: Any) -> None:
    q, k, v = _qkv(jax, dtype="float32")
    with pytest.raises(oa.errors.DtypeError, match="float16 or bfloat16 or float8_e4m3fn on cuda"):
        jax.jit(oa.attention)(q, k, v)
    on_cpu = [jax.device_put(x, jax.devices("cpu")[0]) for x in (q, k, v)]
    _same(jax.jit(oa.attention)(*on_cpu), oa.attention(*on_cpu))


def test_the_persistent_compilation_cache(jax: Any, tmp_path: Any, command_buffers: bool) -> None:
    """Programs of one text, which a folder may hold, and of other options: each does what it was traced for."""
    from jax.experimental.compilation_cache import compilation_cache

    settings = {
        "jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }  # fmt: skip
    before = {name: getattr(jax.config, name) for name in settings}
    q, k, v = _qkv(jax)

    def program(causal: bool) -> Any:
        def chained(q: Any, k: Any, v: Any) -> Any:
            for _ in range(6):
                q = oa.attention(q, k, v, causal=causal)
            return q

        return jax.jit(chained)

    wants = {causal: program(causal)(q, k, v) for causal in (True, False)}
    assert np.abs(_float(wants[True]) - _float(wants[False])).max() > 1e-3
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        for causal in (True, False, True):
            jax.clear_caches()
            compilation_cache.reset_cache()
            compiled = program(causal)
            for _ in range(3):
                _same(compiled(q, k, v), wants[causal])
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.parametrize("name", ["causal", "bias", "lengths"])
def test_dot_product_attention(jax: Any, name: str) -> None:
    from omniattn.jax import dot_product_attention

    q, k, v = _qkv(jax)
    options: dict[str, Any] = {"causal": {"is_causal": True}, "bias": {}, "lengths": {}}[name]
    if name == "bias":
        (options["bias"],) = _arrays(jax, (1, 8, SHAPE_Q[1], SHAPE_K[1]), seed=3)
    if name == "lengths":
        options["key_value_seq_lengths"] = _starts(jax, 333, 77)
        options["query_seq_lengths"] = _starts(jax, 150, 200)

    def loss(attention: Any) -> Any:
        def f(q: Any, k: Any, v: Any) -> Any:
            o = attention(q, k, v, **options)
            return (o.astype("float32") ** 2).sum(), o

        return jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))

    (_, got), gradients = loss(dot_product_attention)(q, k, v)
    exact = [x.astype("float32") for x in (q, k, v)]
    (_, want), expected = loss(jax.nn.dot_product_attention)(*exact)
    np.testing.assert_allclose(_float(got), want, atol=2e-2)
    for a, b in zip(gradients, expected, strict=True):
        error = np.abs(_float(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()
        assert error <= 2e-2
