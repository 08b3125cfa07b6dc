"""The blocked reference against attention written out by its definition."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniattn import reference
from omniattn.errors import ArgumentError, DtypeError, ShapeError
from omniattn.reference import core
from omniattn.testing import GENERATORS, assert_close, make_qkv, normal, round_to, same_dtype_naive
from tests.numerics import naive64

# The reference promises to be silent, whatever the input.
pytestmark = pytest.mark.filterwarnings("error")


def check(q: np.ndarray, k: np.ndarray, v: np.ndarray, atol: float = 1e-12, **options: Any) -> None:
    """Both outputs in float64 against the definition."""
    o, lse = reference.attention(q, k, v, compute_dtype=np.float64, **options)
    o_ref, lse_ref = naive64.dense(q, k, v, **options)
    assert o.dtype == lse.dtype == np.float64
    assert_close(o, o_ref, atol=atol, label="o")
    assert_close(lse, lse_ref, atol=atol, label="lse")


def make_mask(kind: str, batch: int, heads: int, sq: int, sk: int) -> np.ndarray | None:
    rng = np.random.default_rng(5)
    shapes = {
        "bool": (batch, heads, sq, sk),
        "float": (batch, heads, sq, sk),
        "float-inf": (batch, heads, sq, sk),
        "bool-keys": (batch, 1, 1, sk),
        "bool-2d": (sq, sk),
        "float-heads": (1, heads, 1, sk),
        "float-rows": (1, 1, sq, 1),
        "half": (1, 1, sq, sk),
    }
    if kind == "none":
        return None
    if kind.startswith("bool"):
        return rng.random(shapes[kind]) < 0.6
    mask = rng.standard_normal(shapes[kind]).astype(np.float16 if kind == "half" else np.float32)
    if kind == "float-inf":
        mask[rng.random(mask.shape) < 0.4] = -np.inf
    return mask


SHAPES = [
    # batch, heads_q, heads_kv, sq, sk, dim
    (2, 4, 2, 7, 7, 16),
    (1, 3, 1, 5, 11, 8),
    (1, 2, 2, 11, 5, 24),
    (1, 1, 1, 1, 9, 8),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, (2, 1), (0, 0), (-1, 2), (3, -1), (2**62, 2**62)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (1.5, True), (0.0, True)])
def test_window_causal_softcap_sinks(shape: tuple[int, ...], window: Any, causal: bool, softcap: float, sinks: bool):
    batch, hq, hkv, sq, sk, dim = shape
    q, k, v = make_qkv(batch=batch, heads_q=hq, heads_kv=hkv, seqlen_q=sq, seqlen_k=sk, head_dim=dim)
    logits = normal((hq,), seed=9, dtype="float32") if sinks else None
    check(q, k, v, causal=causal, window=window, softcap=softcap, sinks=logits)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "kind", ["bool", "float", "float-inf", "bool-keys", "bool-2d", "float-heads", "float-rows", "half"]
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks(shape: tuple[int, ...], kind: str, layout: str, causal: bool):
    batch, hq, hkv, sq, sk, dim = shape
    q, k, v = make_qkv(batch=batch, heads_q=hq, heads_kv=hkv, seqlen_q=sq, seqlen_k=sk, head_dim=dim, layout=layout)
    check(q, k, v, layout=layout, causal=causal, mask=make_mask(kind, batch, hq, sq, sk), softmax_scale=0.7)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_random_problems(data: st.DataObject):
    small = st.integers(0, 9)
    heads_kv, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    batch, sq, sk = data.draw(st.integers(0, 2)), data.draw(small), data.draw(small)
    layout = data.draw(st.sampled_from(["NHD", "HND"]))
    kind = data.draw(st.sampled_from(["none", "bool", "float-inf", "bool-keys", "float-rows"]))
    q, k, v = make_qkv(
        data.draw(st.sampled_from([name for name in GENERATORS if name != "huge_logits"])),
        batch=batch,
        seqlen_q=sq,
        seqlen_k=sk,
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=8 * data.draw(st.integers(1, 4)),
        layout=layout,
        seed=data.draw(st.integers(0, 1000)),
    )
    if data.draw(st.booleans()):
        v = v[..., : 8 * data.draw(st.integers(1, v.shape[-1] // 8))]
    check(
        q,
        k,
        v,
        atol=1e-10,
        layout=layout,
        causal=data.draw(st.booleans()),
        window=data.draw(st.none() | st.tuples(st.integers(-1, 9), st.integers(-1, 9))),
        softmax_scale=data.draw(st.none() | st.floats(-2, 2)),
        softcap=data.draw(st.sampled_from([0.0, 0.5, 30.0])),
        mask=make_mask(kind, batch, heads_kv * group, sq, sk),
        sinks=data.draw(st.none() | st.just(normal((heads_kv * group,), 3))),
    )


@pytest.mark.parametrize(("sq", "sk", "batch"), [(0, 5, 2), (5, 0, 2), (0, 0, 1), (4, 4, 0)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_empty(sq: int, sk: int, batch: int, layout: str):
    q, k, v = make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads_q=2, head_dim=8, layout=layout)
    o, lse = reference.attention(q, k, v, layout=layout)
    assert o.shape == q.shape
    assert lse.shape == (batch, 2, sq)
    assert o.dtype == lse.dtype == np.float32
    assert np.all(o == 0)
    assert np.all(np.isneginf(lse))


def test_row_that_attends_to_nothing():
    """Hidden by the window, by causality, by a boolean mask, by an additive one: o = 0 and lse = -inf each time."""
    q, k, v = make_qkv(seqlen_q=6, seqlen_k=3, heads_q=2, head_dim=8)
    row_two = np.ones((6, 1), dtype=bool)
    row_two[2] = False
    additive = np.where(row_two, np.float32(0), np.float32(-np.inf))
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"causal": True}, [0, 1, 2]),
        ({"window": (0, 0)}, [0, 1, 2]),
        ({"mask": row_two}, [2]),
        ({"mask": additive}, [2]),
    ]
    for options, empty in cases:
        for dtype in (np.float32, np.float64):
            o, lse = reference.attention(q, k, v, compute_dtype=dtype, **options)
            others = [i for i in range(6) if i not in empty]
            assert np.all(o[:, empty] == 0)
            assert np.all(np.isneginf(lse[:, :, empty]))
            assert np.all(np.isfinite(lse[:, :, others]))
            sinks = np.array([0.25, -3.0], dtype=np.float32)
            o, lse = reference.attention(q, k, v, compute_dtype=dtype, sinks=sinks, **options)
            assert np.all(o[:, empty] == 0)
            assert np.allclose(lse[0][:, empty], sinks[:, None], rtol=0, atol=1e-7)


def test_lse_is_the_natural_logarithm_of_the_sum():
    """Two keys with scores log 3 and log 5, and a sink of log 2."""
    q = np.ones((1, 1, 1, 1))
    k = np.log(np.array([3.0, 5.0])).reshape(1, 2, 1, 1)
    v = np.array([1.0, 0.0]).reshape(1, 2, 1, 1)
    o, lse = reference.attention(q, k, v, compute_dtype=np.float64)
    assert lse.item() == pytest.approx(np.log(8), abs=1e-15)
    assert o.item() == pytest.approx(3 / 8, abs=1e-15)
    o, lse = reference.attention(q, k, v, sinks=np.log([2.0]), compute_dtype=np.float64)
    assert lse.item() == pytest.approx(np.log(10), abs=1e-15)
    assert o.item() == pytest.approx(3 / 10, abs=1e-15)


def test_causal_aligns_to_the_last_key():
    """A single new query after six cached keys sees all of them."""
    q, k, v = make_qkv(seqlen_q=1, seqlen_k=7, heads_q=1, head_dim=8)
    full, _ = reference.attention(q, k, v)
    causal, _ = reference.attention(q, k, v, causal=True)
    np.testing.assert_array_equal(full, causal)


def test_infinite_sink_logits():
    q, k, v = make_qkv(seqlen_q=3, seqlen_k=3, heads_q=1, head_dim=8)
    plain = reference.attention(q, k, v)
    absent = reference.attention(q, k, v, sinks=np.array([-np.inf], dtype=np.float32))
    for with_sink, without in zip(absent, plain, strict=True):
        np.testing.assert_array_equal(with_sink, without)


def test_huge_logits_stay_finite():
    q, k, v = make_qkv("huge_logits", seqlen_q=40, seqlen_k=50, heads_q=2, head_dim=64)
    o, lse = reference.attention(q, k, v)
    assert np.isfinite(o).all()
    assert lse.max() > 200, "the input has to be one whose exponentials overflow"
    check(q, k, v, atol=1e-9)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor", ["q", "k", "v"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 0)}, {"mask": "bool"}], ids=str)
def test_non_finite_input_reaches_only_the_rows_that_see_it(value: float, tensor: str, options: dict[str, Any]):
    q, k, v = make_qkv(seqlen_q=6, seqlen_k=6, heads_q=2, heads_kv=1, head_dim=8)
    clean = reference.attention(q, k, v, causal=True)[0]
    options = {name: make_mask("bool", 1, 2, 6, 6) if name == "mask" else option for name, option in options.items()}
    {"q": q, "k": k, "v": v}[tensor][0, 3, 0, 2] = value
    check(q, k, v, **options)
    if options == {"causal": True}:
        o = reference.attention(q, k, v, causal=True)[0]
        np.testing.assert_array_equal(o[:, :3], clean[:, :3])
        assert not np.array_equal(o[:, 3], clean[:, 3])


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32 - 1), causal=st.booleans(), kind=st.sampled_from(["none", "bool", "float-inf"]))
def test_many_non_finite_inputs(seed: int, causal: bool, kind: str):
    """NaN and both infinities together: opposite infinities meet, and NaN weights meet infinite values."""
    rng = np.random.default_rng(seed)
    tensors = make_qkv(seqlen_q=5, seqlen_k=6, heads_q=2, heads_kv=1, head_dim=8, seed=seed % 1000)
    for tensor, count in zip(tensors, (1, 1, 12), strict=True):
        at = rng.choice(tensor.size, size=rng.integers(count + 1), replace=False)
        tensor.reshape(-1)[at] = rng.choice([np.nan, np.inf, -np.inf], size=at.size)
    check(*tensors, causal=causal, mask=make_mask(kind, 1, 2, 5, 6))


def test_additive_minus_infinity_hides_even_nan():
    q, k, v = make_qkv(seqlen_q=4, seqlen_k=4, heads_q=1, head_dim=8)
    mask = np.zeros((4, 4), dtype=np.float32)
    mask[:, 1] = -np.inf
    expected = reference.attention(q, k, v, mask=mask)
    k[0, 1] = np.nan
    v[0, 1] = np.inf
    for got, wanted in zip(reference.attention(q, k, v, mask=mask), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 3)}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], rows: int):
    q, k, v = make_qkv(batch=2, seqlen_q=37, seqlen_k=41, heads_q=4, heads_kv=2, head_dim=16)
    options = {"mask": make_mask("float-inf", 2, 4, 37, 41), "compute_dtype": np.float64, **options}
    whole = reference.attention(q, k, v, **options)
    assert core.block_rows(37, 41) == 37
    monkeypatch.setattr(core, "BLOCK_SCORES", rows * 41)
    monkeypatch.setattr(core, "MIN_BLOCK_ROWS", 1)
    assert core.block_rows(37, 41) == rows
    for blocked, single in zip(reference.attention(q, k, v, **options), whole, strict=True):
        assert_close(blocked, single, atol=1e-13)


def test_strides_layouts_and_repeats():
    """Views give the same bits as contiguous copies, and a second call the same as the first."""
    big = normal((2, 9, 4, 32))
    q, k, v = big[:, ::2, :, :16], big[:, 1:8, ::2, 8:24], big[:, 1:8, ::2, 16:]
    first = reference.attention(q, k, v, causal=True)
    for other in (
        reference.attention(q.copy(), k.copy(), v.copy(), causal=True),
        reference.attention(q, k, v, causal=True),
    ):
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)
    o, lse = reference.attention(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="HND", causal=True)
    assert_close(o.swapaxes(1, 2), first[0], atol=1e-6)
    assert_close(lse, first[1], atol=1e-6)
    broadcast = np.broadcast_to(k[:, :1], k.shape)
    check(q, broadcast, v)


def test_different_value_dim():
    q, k, _ = make_qkv(seqlen_q=5, heads_q=2, head_dim=16)
    v = normal((1, 5, 2, 40), seed=8)
    o, _ = reference.attention(q, k, v)
    assert o.shape == (1, 5, 2, 40)
    check(q, k, v)


def test_float32_is_close_to_float64():
    q, k, v = make_qkv(seqlen_q=300, seqlen_k=500, heads_q=2, head_dim=128)
    o32, lse32 = reference.attention(q, k, v, causal=True)
    o64, lse64 = reference.attention(q, k, v, causal=True, compute_dtype=np.float64)
    assert_close(o32, o64, atol=5e-6)
    assert_close(lse32, lse64, atol=5e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_long_sequence_fits_in_memory(causal: bool):
    """One head's full scores would be 256 MB; the blocks have to stay far below, outputs included."""
    q, k, v = make_qkv(seqlen_q=8192, heads_q=2, heads_kv=1, head_dim=128)
    tracemalloc.start()
    try:
        o, lse = reference.attention(q, k, v, causal=causal)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < o.nbytes + lse.nbytes + 24 * 2**20
    for row in (0, 127, 128, 5000, 8191):
        keys = row + 1 if causal else 8192
        o_ref, lse_ref = naive64.dense(q[:, row : row + 1], k[:, :keys], v[:, :keys])
        assert_close(o[:, row : row + 1], o_ref, atol=2e-6)
        assert_close(lse[:, :, row : row + 1], lse_ref, atol=4e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["normal", "outlier", "channel_bias"])
def test_same_dtype_naive_is_a_usable_bound(dtype: str, kind: str):
    """Worse than the rounded exact result, and by no more than 16-bit arithmetic explains."""
    q, k, v = make_qkv(kind, seqlen_q=64, seqlen_k=96, heads_q=2, head_dim=64, dtype=dtype)
    exact, lse = reference.attention(q, k, v, causal=True, compute_dtype=np.float64)
    naive, lse_naive = same_dtype_naive(q, k, v, dtype=dtype, causal=True)
    np.testing.assert_array_equal(naive, round_to(naive, dtype))
    report = assert_close(round_to(exact, dtype), exact, naive=naive, dtype=dtype)
    assert report.naive_max_abs is not None
    assert report.max_abs < report.naive_max_abs
    epsilon = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    largest_score = np.abs(lse[np.isfinite(lse)]).max() + np.log(96)
    assert report.naive_max_abs < 8 * epsilon * max(largest_score, 1.0) * np.abs(v).max()
    assert np.abs(lse_naive - lse).max() < 4 * epsilon * max(largest_score, 1.0)


def test_same_dtype_naive_rejects_what_it_cannot_honour():
    q, k, v = make_qkv(seqlen_q=4, head_dim=8)
    with pytest.raises(TypeError, match="compute_dtype"):
        same_dtype_naive(q, k, v, compute_dtype=np.float64)
    with pytest.raises(TypeError, match="colour"):
        same_dtype_naive(q, k, v, colour=1)


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"layout": "DHN"}, ArgumentError, "layout"),
        ({"q": np.zeros((2, 3, 4), np.float32)}, ShapeError, "q"),
        ({"q": np.zeros((1, 4, 2, 8), np.int32)}, DtypeError, "q"),
        ({"k": np.zeros((1, 4, 2, 16), np.float32)}, ShapeError, "k"),
        ({"k": np.zeros((2, 4, 2, 8), np.float32)}, ShapeError, "k"),
        ({"k": np.zeros((1, 4, 3, 8), np.float32), "v": np.zeros((1, 4, 3, 8), np.float32)}, ShapeError, "k"),
        ({"v": np.zeros((1, 5, 2, 8), np.float32)}, ShapeError, "v"),
        ({"mask": np.zeros((3, 4), bool)}, ShapeError, "mask"),
        ({"mask": np.zeros((4, 4), np.int8)}, DtypeError, "mask"),
        ({"sinks": np.zeros(3, np.float32)}, ShapeError, "sinks"),
        ({"sinks": np.zeros((2, 1), np.float32)}, ShapeError, "sinks"),
        ({"window": (-2, 0)}, ArgumentError, "window"),
        ({"softcap": -1.0}, ArgumentError, "softcap"),
        ({"softcap": float("nan")}, ArgumentError, "softcap"),
        ({"softmax_scale": float("inf")}, ArgumentError, "softmax_scale"),
        ({"compute_dtype": np.float16}, DtypeError, "compute_dtype"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[ArgumentError], argument: str):
    q, k, v = make_qkv(seqlen_q=4, heads_q=2, head_dim=8)
    call = {"q": q, "k": k, "v": v, **change}
    with pytest.raises(error) as caught:
        reference.attention(**call)
    assert caught.value.argument == argument
    assert f"'{argument}'" in str(caught.value)
