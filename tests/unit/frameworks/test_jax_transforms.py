"""`attention` and its relatives under jit, grad, vmap, checkpoint and scan, on the CPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import omniattn as oa

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
pytestmark = pytest.mark.frameworks

Q, K = (2, 6, 4, 16), (2, 9, 2, 16)


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def _random(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _qkv(dtype: str = "float32") -> tuple[Any, ...]:
    return tuple(_random(*shape, seed=i, dtype=dtype) for i, shape in enumerate((Q, K, K)))


def _same(got: Any, want: Any) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def _all_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(_same, got, want)


def _naive(q: Any, k: Any, v: Any, mask: Any = None, sinks: Any = None, *, causal: bool = False) -> tuple[Any, Any]:
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        s = s + mask
    if causal:
        rows, keys = q.shape[1], k.shape[1]
        s = jnp.where(jnp.arange(keys) <= jnp.arange(rows)[:, None] + keys - rows, s, -jnp.inf)
    more = s if sinks is None else jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], -1)
    lse = jax.nn.logsumexp(more, axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(s - lse[..., None]), v), lse


# --- jit -------------------------------------------------------------------------------------------------------------

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, LSE": {"causal": True, "return_lse": True},
    "window": {"window": (3, 1), "softcap": 5.0, "softmax_scale": 0.3},
    "int8": {"precision": "int8"},
    "Int4, LSE": {"precision": oa.Int4(), "return_lse": True},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CALLS)
def test_jit(case: str, dtype: str) -> None:
    call = functools.partial(oa.attention, **CALLS[case])
    _all_same(jax.jit(call)(*_qkv(dtype)), call(*_qkv(dtype)))


@pytest.mark.parametrize("name", ["mask", "block_mask", "sinks", "score_mod"])
def test_jit_with_more_arrays(name: str) -> None:
    q, k, v = _qkv()
    x = {
        "mask": _random(1, 4, 6, 9, seed=5) > 0,
        "block_mask": jnp.asarray([[[[True]], [[False]], [[True]], [[True]]]]),
        "sinks": _random(4, seed=6),
        "score_mod": _random(4, seed=7),
    }[name]

    def call(x: Any) -> Any:
        return oa.attention(q, k, v, **{name: _mod(x) if name == "score_mod" else x})

    _same(jax.jit(call)(x), call(x))
    assert np.abs(np.asarray(call(x) - oa.attention(q, k, v))).max() > 1e-3


def _mod(slopes: Any, grad: bool = True) -> oa.ScoreMod:
    return oa.ScoreMod(
        "score + slopes[h] * (k - q)",
        reference=lambda score, b, h, q, k, slopes: score + slopes[h] * (k - q),
        grad="1.0f" if grad else None,
        reference_grad=(lambda score, b, h, q, k, slopes: np.ones_like(score)) if grad else None,
        slopes=slopes,
    )


def test_options_of_one_value_and_several_types_are_different_calls() -> None:
    q, k, v = _qkv()
    jax.jit(lambda q: oa.attention(q, k, v, causal=True))(q)
    with pytest.raises(oa.errors.ArgumentError, match="argument 'causal'"):
        jax.jit(lambda q: oa.attention(q, k, v, causal=1))(q)


def test_traced_once() -> None:
    traces = []

    @jax.jit
    def call(q: Any, k: Any, v: Any) -> Any:
        traces.append(1)
        return oa.attention(q, k, v, window=[3, 0])

    for i in range(3):
        call(*(x + i for x in _qkv()))
    assert len(traces) == 1
    assert call._cache_size() == 1


def test_the_program_says_what_it_calls() -> None:
    text = str(jax.make_jaxpr(functools.partial(oa.attention, causal=True))(*_qkv()))
    assert "omniattn_attention[" in text
    assert "causal=True" in text


def test_shapes_without_values() -> None:
    shapes = jax.eval_shape(functools.partial(oa.attention, return_lse=True), *_qkv("bfloat16"))
    assert [(x.shape, str(x.dtype)) for x in shapes] == [(Q, "bfloat16"), ((2, 4, 6), "float32")]


def test_empty() -> None:
    q, k, v = _qkv()
    assert jax.jit(oa.attention)(q[:0], k[:0], v[:0]).shape == (0, 6, 4, 16)
    assert not np.asarray(jax.jit(oa.attention)(q, k[:, :0], v[:, :0])).any()


def test_constants_and_numpy_arrays_beside_tracers() -> None:
    q, k, v = _qkv()
    _same(jax.jit(lambda q: oa.attention(q, np.asarray(k), v))(q), oa.attention(q, k, v))


def test_varlen() -> None:
    q, k, v = (x[0] for x in _qkv())
    starts = jnp.asarray([0, 2, 6], jnp.int32), jnp.asarray([0, 4, 9], jnp.int32)

    def call(q: Any, k: Any, v: Any, starts: Any) -> Any:
        return oa.attention_varlen(
            q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=4, max_seqlen_k=5, causal=True
        )

    _same(jax.jit(call)(q, k, v, starts), call(q, k, v, starts))
    got = jax.jit(jax.grad(lambda *x: (call(*x) ** 2).sum(), (0, 1, 2)))(q, k, v, starts)

    def one(q: Any, k: Any, v: Any) -> Any:
        parts = ((q[:2], k[:4], v[:4]), (q[2:], k[4:], v[4:]))
        return sum((_naive(*(x[None] for x in part), causal=True)[0] ** 2).sum() for part in parts)

    for a, b in zip(got, jax.grad(one, (0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    mapped = jax.vmap(lambda q: call(q, k, v, starts))(jnp.stack([q, q * 2]))
    _same(mapped[1], call(q * 2, k, v, starts))


def test_merge_states() -> None:
    q, k, v = _qkv()

    def both(q: Any) -> Any:
        a, b = (oa.attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(4), slice(4, None)))
        return oa.merge_states(*a, *b)

    _all_same(jax.jit(both)(q), both(q))
    want = oa.attention(q, k, v, return_lse=True)
    for a, b in zip(both(q), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    # Packed: a mapped dimension is the batch.
    o, lse = want
    got = jax.vmap(oa.merge_states)(o, lse, o, lse)
    for i in range(2):
        _all_same([x[i] for x in got], list(oa.merge_states(o[i], lse[i], o[i], lse[i])))


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_gradients(way: Callable[..., Any]) -> None:
    operands = (*_qkv(), _random(1, 4, 6, 9, seed=5), _random(4, seed=6))
    weights = _random(*Q, seed=8), _random(2, 4, 6, seed=9)

    def loss(attention: Callable[..., Any]) -> Callable[..., Any]:
        def f(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
            o, lse = attention(q, k, v, mask=mask, sinks=sinks, causal=True)
            return (o * weights[0]).sum() + (lse * weights[1]).sum()

        return f

    own = way(loss(functools.partial(oa.attention, return_lse=True)))
    got = jax.grad(own, (0, 1, 2, 3, 4))(*operands)
    want = jax.grad(loss(_naive), (0, 1, 2, 3, 4))(*operands)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_only_what_is_asked_for_is_computed() -> None:
    q, k, v = _qkv()
    mask = _random(2, 4, 6, 9, seed=5)
    text = str(jax.make_jaxpr(jax.grad(lambda q: oa.attention(q, k, v, mask=mask).sum()))(q))
    assert "wanted=('dq',)" in text
    text = str(jax.make_jaxpr(jax.grad(lambda v, m: oa.attention(q, k, v, mask=m).sum(), (0, 1)))(v, mask))
    assert "wanted=('dv', 'dmask')" in text


def test_what_a_checkpoint_keeps_is_not_computed_again() -> None:
    q, k, v = _qkv()

    def forwards(**policy: Any) -> int:
        f = jax.checkpoint(lambda q: jnp.sin(oa.attention(jnp.sin(q), k, v)).sum(), **policy)
        text = str(jax.make_jaxpr(jax.grad(f))(q))
        np.testing.assert_allclose(
            jax.grad(f)(q), jax.grad(lambda q: jnp.sin(_naive(jnp.sin(q), k, v)[0]).sum())(q), atol=1e-5
        )
        return text.count("omniattn_attention[")

    keep = jax.checkpoint_policies.save_only_these_names("omniattn_o", "omniattn_lse")
    assert (forwards(), forwards(policy=keep)) == (2, 1)


def test_gradient_of_the_lse_alone() -> None:
    q, k, v = _qkv()
    got = jax.grad(lambda q: oa.attention(q, k, v, return_lse=True)[1].sum())(q)
    np.testing.assert_allclose(got, jax.grad(lambda q: _naive(q, k, v)[1].sum())(q), atol=1e-5)


def test_gradients_keep_dtypes() -> None:
    q, k, v = _qkv("bfloat16")
    sinks, mask = _random(4, seed=6, dtype="bfloat16"), _random(6, 9, seed=5, dtype="bfloat16")
    got = jax.grad(lambda *x: oa.attention(*x[:3], sinks=x[3], mask=x[4]).astype("float32").sum(), range(5))(
        q, k, v, sinks, mask
    )
    assert [(x.shape, str(x.dtype)) for x in got] == [(x.shape, "bfloat16") for x in (q, k, v, sinks, mask)]


def test_low_precision_is_straight_through() -> None:
    q, k, v = _qkv()
    o, lse = oa.attention(q, k, v, precision="int8", return_lse=True)
    want = oa.attention_backward(jnp.ones_like(o), q, k, v, o, lse)
    got = jax.grad(lambda *x: oa.attention(*x, precision="int8").sum(), (0, 1, 2))(q, k, v)
    _all_same(list(got), list(want))


def test_score_mod_has_gradients_and_its_arrays_have_none() -> None:
    q, k, v = _qkv()
    slopes = _random(4, seed=7)
    bias = slopes[:, None, None] * (jnp.arange(9) - jnp.arange(6)[:, None])
    got = jax.jit(jax.grad(lambda q, s: oa.attention(q, k, v, score_mod=_mod(s)).sum()))(q, slopes)
    np.testing.assert_allclose(got, jax.grad(lambda q: _naive(q, k, v, bias)[0].sum())(q), atol=1e-5)
    with pytest.raises(oa.errors.UnsupportedError, match="a gradient of 'slopes' is asked for"):
        jax.grad(lambda s: oa.attention(q, k, v, score_mod=_mod(s)).sum())(slopes)
    with pytest.raises(oa.errors.UnsupportedError, match="score_mod without its derivative"):
        jax.grad(lambda q: oa.attention(q, k, v, score_mod=_mod(slopes, grad=False)).sum())(q)


def test_backwards_under_jit() -> None:
    q, k, v = _qkv()
    o, lse = oa.attention(q, k, v, return_lse=True)
    call = functools.partial(oa.attention_backward, wanted=("dv", "dq"))
    _all_same(jax.jit(call)(o, q, k, v, o, lse), call(o, q, k, v, o, lse))


def test_what_has_no_gradient() -> None:
    q, k, v = _qkv()
    predicts = oa.Int8(sparse=oa.Sparse(topk=0.5))
    lse = jnp.zeros((2, 4, 6))
    places = {"cu_seqlens_q": jnp.array([0, 6]), "seqused_k": jnp.array([9]), "block_table": jnp.array([[1]])}
    cases: dict[str, Callable[[Any], Any]] = {
        "which block_table does not have": lambda q: oa.attention_varlen(
            q[0], k, v, **places, max_seqlen_q=6, max_seqlen_k=9
        ).sum(),
        "which sparse= of a precision does not have": lambda q: oa.attention(q, k, v, precision=predicts).sum(),
        "merge_states.*no derivative": lambda q: oa.merge_states(q, lse, q, lse)[0].sum(),
        "quantize_v.*no derivative": lambda q: oa.quantize_v(q).v_scale.sum(),
        "attention.*no second derivatives": lambda q: jax.grad(lambda q: oa.attention(q, k, v).sum())(q).sum(),
    }
    for text, f in cases.items():
        with pytest.raises(oa.errors.UnsupportedError, match=text):
            jax.grad(f)(q)


# --- vmap ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(0, 0, 0), (1, None, None), (0, None, 2), (None, 1, 1)])
def test_vmap_is_one_larger_batch(axes: tuple[int | None, ...]) -> None:
    operands = [x if a is None else jnp.stack([x, -x, 2 * x], a) for x, a in zip(_qkv(), axes, strict=True)]
    call = functools.partial(oa.attention, causal=True, return_lse=True)
    mapped = jax.vmap(call, axes)
    text = str(jax.make_jaxpr(mapped)(*operands))
    assert "scan" not in text
    assert "while" not in text
    got = mapped(*operands)
    for i in range(3):
        one = [x if a is None else jnp.take(x, i, a) for x, a in zip(operands, axes, strict=True)]
        _all_same([x[i] for x in got], list(call(*one)))


@pytest.mark.parametrize("shape", [(6, 9), (1, 6, 9), (1, 1, 6, 9), (2, 4, 6, 9), (2, 1, 1, 9)])
@pytest.mark.parametrize("mapped", [False, True])
def test_vmap_of_masks(shape: tuple[int, ...], mapped: bool) -> None:
    q, k, v = _qkv()
    many, mask = jnp.stack([q, -q, 2 * q]), _random(*((3,) * mapped), *shape, seed=5)
    got = jax.vmap(lambda q, m: oa.attention(q, k, v, mask=m), (0, 0 if mapped else None))(many, mask)
    for i in range(3):
        _same(got[i], oa.attention(many[i], k, v, mask=mask[i] if mapped else mask))


@pytest.mark.parametrize("name", ["sinks", "score_mod", "block_mask"])
def test_vmap_of_other_arrays(name: str) -> None:
    q, k, v = _qkv()
    x = _random(3, 4, seed=5) if name != "block_mask" else _random(3, 2, 4, 1, 1, seed=5) > 0

    def call(x: Any) -> Any:
        return oa.attention(q, k, v, **{name: _mod(x) if name == "score_mod" else x})

    got = jax.jit(jax.vmap(call))(x)
    for i in range(3):
        _same(got[i], call(x[i]))


@pytest.mark.parametrize(
    ("shape", "mapped"), [(None, False), *((s, m) for s in ((), (1,), (2, 2), (2, 2, 1)) for m in (False, True))]
)
def test_vmap_of_factors(shape: tuple[int, ...] | None, mapped: bool) -> None:
    """Factors of e4m3 arrays, a number too, that all items share or that each has."""
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 2, 5, 2, 16)), jnp.float8_e4m3fn) for _ in range(3))
    factor = 0.5 if shape is None else jnp.asarray(rng.uniform(0.5, 1.0, (*((3,) * mapped), *shape)), jnp.float32)

    def call(q: Any, k: Any, v: Any, factor: Any) -> Any:
        return oa.attention(q, k, v, descale_q=factor, descale_k=factor, descale_v=factor)

    axes = (0, 0, 0, 0 if mapped else None)
    if shape is None:  # a Python number, not a traced one
        got = jax.vmap(lambda q, k, v: call(q, k, v, factor))(q, k, v)
    else:
        got = jax.vmap(call, axes)(q, k, v, factor)
    for i in range(3):
        _same(got[i], call(q[i], k[i], v[i], factor[i] if mapped else factor))


def test_gradients_of_each_item() -> None:
    q, k, v = (jnp.stack([x, -2 * x]) for x in _qkv())
    bias, sinks = _random(2, 4, 6, 9, seed=5), _random(2, 4, seed=6)

    def loss(attention: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v, mask, sinks: (attention(q, k, v, mask=mask, sinks=sinks) ** 2).sum()

    got = jax.vmap(jax.grad(loss(oa.attention), range(5)))(q, k, v, bias, sinks)
    want = jax.vmap(jax.grad(loss(lambda *x, **y: _naive(*x, **y)[0]), range(5)))(q, k, v, bias, sinks)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_errors_come_while_tracing() -> None:
    q, k, v = _qkv()
    cases: list[tuple[str, Callable[[Any], Any]]] = [
        ("argument 'v': expected shape", lambda q: oa.attention(q, k, v[:, :3])),
        ("argument 'k': expected float32, like q", lambda q: oa.attention(q, k.astype("bfloat16"), v)),
        ("argument 'k': expected an array, received None", lambda q: oa.attention(q, None, v)),
        ("argument 'out': expected None in a call that JAX traces", lambda q: oa.attention(q, k, v, out=q)),
        ("a call that JAX traces, received the float 1.0", lambda q: oa.attention(q, k, v, out=1.0)),
        ("argument 'stream': expected None in a call that JAX traces", lambda q: oa.attention(q, k, v, stream=0)),
        ("argument 'dq': expected None", lambda q: oa.attention_backward(q, q, k, v, q, q[..., 0], dq=q)),
        ("argument 'layout'", lambda q: oa.attention(q, k, v, layout="BHSD")),
        ("argument 'window'", lambda q: oa.attention(q, k, v, window=(1, 2, 3))),
    ]
    for text, call in cases:
        with pytest.raises(oa.errors.ArgumentError) as caught:
            jax.jit(call)(q)
        assert text in str(caught.value)


def test_traced_options_are_refused() -> None:
    q, k, v = _qkv()
    with pytest.raises(oa.errors.ArgumentError) as caught:
        jax.jit(lambda q, s: oa.attention(q, k, v, softmax_scale=s))(q, 0.5)
    assert "argument 'softmax_scale': expected a value that is known when the call is traced" in str(caught.value)


def test_arrays_of_other_libraries_are_refused() -> None:
    torch = pytest.importorskip("torch")
    q, k, _ = _qkv()
    with pytest.raises(oa.errors.UnsupportedError, match="argument 'v' is a Tensor in a call that JAX traces"):
        jax.jit(lambda q: oa.attention(q, k, torch.zeros(K)))(q)


def test_contents_are_looked_at_when_the_program_runs() -> None:
    q, k, v = (x[0] for x in _qkv())

    @jax.jit
    def call(starts: Any) -> Any:
        return oa.attention_varlen(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=6, max_seqlen_k=6)

    with pytest.raises(jax.errors.JaxRuntimeError, match="argument 'cu_seqlens_q'"):
        jax.block_until_ready(call(jnp.asarray([0, 5, 3], jnp.int32)))
    assert call(jnp.asarray([0, 5, 6], jnp.int32)).shape == Q[1:]


def test_old_versions_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    room = importlib.import_module("omniattn.frameworks.jax")
    monkeypatch.setattr(jax, "__version_info__", (0, 6, 2))
    with pytest.raises(oa.errors.UnsupportedError, match=r"JAX 0\.7 or newer"):
        importlib.reload(room)
    monkeypatch.undo()
    importlib.reload(room)
