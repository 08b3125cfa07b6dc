"""Attention over two parts of the keys, merged, is attention over all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniattn import reference
from omniattn.errors import ArgumentError, DtypeError, ShapeError
from omniattn.testing import assert_close, make_qkv

pytestmark = pytest.mark.filterwarnings("error")


@settings(deadline=None, max_examples=60)
@given(
    sq=st.integers(0, 6),
    sk=st.integers(0, 9),
    cut=st.integers(0, 9),
    dtype=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 50),
)
def test_split_keys(sq: int, sk: int, cut: int, dtype: type, seed: int):
    q, k, v = make_qkv(batch=2, seqlen_q=sq, seqlen_k=sk, heads_q=4, heads_kv=2, head_dim=8, seed=seed)
    parts = [reference.attention(q, k[:, s], v[:, s], compute_dtype=dtype) for s in (slice(cut), slice(cut, None))]
    o, lse = reference.merge_states(*parts[0], *parts[1], compute_dtype=dtype)
    whole_o, whole_lse = reference.attention(q, k, v, compute_dtype=np.float64)
    assert o.dtype == lse.dtype == dtype
    atol = 4e-6 if dtype is np.float32 else 1e-13
    assert_close(o, whole_o, atol=atol)
    assert_close(lse, whole_lse, atol=atol)


def test_three_parts_under_a_causal_mask():
    q, k, v = make_qkv(seqlen_q=20, seqlen_k=20, heads_q=2, head_dim=16)
    visible = np.tril(np.ones((20, 20), dtype=bool))
    state: Any = None
    for part in (slice(0, 5), slice(5, 12), slice(12, 20)):
        mask = np.zeros_like(visible)
        mask[:, part] = visible[:, part]
        new = reference.attention(q, k, v, mask=mask, compute_dtype=np.float64)
        state = new if state is None else reference.merge_states(*state, *new, compute_dtype=np.float64)
    o, lse = reference.attention(q, k, v, causal=True, compute_dtype=np.float64)
    assert_close(state[0], o, atol=1e-13)
    assert_close(state[1], lse, atol=1e-13)


def test_packed():
    q, k, v = make_qkv(batch=None, seqlen_q=9, heads_q=2, head_dim=8)
    cu = np.array([0, 4, 9], np.int32)
    half = np.array([0, 2, 4], np.int32)
    picks = ([0, 1, 4, 5], [2, 3, 6, 7, 8])
    a = reference.attention_varlen(q, k[picks[0]], v[picks[0]], cu_seqlens_q=cu, cu_seqlens_k=half)
    b = reference.attention_varlen(q, k[picks[1]], v[picks[1]], cu_seqlens_q=cu, cu_seqlens_k=np.array([0, 2, 5]))
    o, lse = reference.merge_states(*a, *b)
    o_ref, lse_ref = reference.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, compute_dtype=np.float64)
    assert_close(o, o_ref, atol=2e-6)
    assert_close(lse, lse_ref, atol=2e-6)


def test_empty_sides():
    """The output of a side that saw no key is not looked at, not even for NaN."""
    rng = np.random.default_rng(0)
    o_a, lse_a = rng.standard_normal((1, 3, 2, 8)), rng.standard_normal((1, 2, 3))
    o_b, lse_b = np.full((1, 3, 2, 8), np.nan), np.full((1, 2, 3), -np.inf)
    for sides in ((o_a, lse_a, o_b, lse_b), (o_b, lse_b, o_a, lse_a)):
        o, lse = reference.merge_states(*sides, compute_dtype=np.float64)
        assert_close(o, o_a)
        assert_close(lse, lse_a)
    o, lse = reference.merge_states(o_b, lse_b, o_b, lse_b)
    assert np.all(o == 0)
    assert np.all(np.isneginf(lse))


def test_far_apart_and_nan():
    o_a, o_b = np.full((2, 1, 4), 1.0), np.full((2, 1, 4), 2.0)
    o, lse = reference.merge_states(o_a, np.array([[1e4, -1e4]]), o_b, np.array([[-1e4, 1e4]]))
    assert_close(o[:, 0, 0], np.array([1.0, 2.0]))
    assert_close(lse, np.array([[1e4, 1e4]]))
    o, lse = reference.merge_states(o_a, np.array([[np.nan, 0.0]]), o_b, np.array([[0.0, 0.0]]))
    assert np.isnan(o[0]).all()
    assert np.isnan(lse[0, 0])
    assert_close(o[1, 0], np.full(4, 1.5), atol=1e-6)


@pytest.mark.parametrize(
    ("index", "value", "error", "argument"),
    [
        (0, np.zeros((3, 8)), ShapeError, "o_a"),
        (2, np.zeros((1, 3, 2, 16)), ShapeError, "o_b"),
        (1, np.zeros((1, 3, 2)), ShapeError, "lse_a"),
        (3, np.zeros((2, 3)), ShapeError, "lse_b"),
        (3, np.zeros((1, 2, 3), dtype=np.int32), DtypeError, "lse_b"),
    ],
)
def test_wrong_arguments(index: int, value: np.ndarray, error: type[ArgumentError], argument: str):
    sides = [np.zeros((1, 3, 2, 8)), np.zeros((1, 2, 3)), np.zeros((1, 3, 2, 8)), np.zeros((1, 2, 3))]
    sides[index] = value
    with pytest.raises(error) as caught:
        reference.merge_states(*sides)
    assert caught.value.argument == argument
