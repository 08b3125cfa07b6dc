"""Packed sequences against one dense call for each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniattn import reference
from omniattn.errors import ArgumentError, DtypeError, ShapeError
from omniattn.testing import assert_close, make_qkv, normal
from tests.numerics import naive64

pytestmark = pytest.mark.filterwarnings("error")


def cumulative(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_random_batches(data: st.DataObject):
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=4))
    lengths_q, lengths_k = [p[0] for p in pairs], [p[1] for p in pairs]
    spare_q, spare_k = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    heads_kv, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    heads = heads_kv * group
    layout = data.draw(st.sampled_from(["NHD", "HND"]))
    q, k, v = make_qkv(
        batch=None,
        seqlen_q=sum(lengths_q) + spare_q,
        seqlen_k=sum(lengths_k) + spare_k,
        heads_q=heads,
        heads_kv=heads_kv,
        head_dim=8,
        layout=layout,
        seed=data.draw(st.integers(0, 99)),
    )
    longest = (max(lengths_q, default=0), max(lengths_k, default=0))
    maxima = data.draw(st.sampled_from([(None, None), longest, (longest[0] + 2, longest[1] + 1)]))
    mask_shape = (len(pairs), heads, *(given if given is not None else own for given, own in zip(maxima, longest)))
    mask = data.draw(st.sampled_from([None, "bool", "float"]))
    if mask == "bool":
        mask = np.random.default_rng(1).random(mask_shape) < 0.7
    elif mask == "float":
        mask = np.random.default_rng(1).standard_normal(mask_shape)
    options: dict[str, Any] = {
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.none() | st.tuples(st.integers(-1, 6), st.integers(-1, 6))),
        "softcap": data.draw(st.sampled_from([0.0, 3.0])),
        "sinks": data.draw(st.none() | st.just(normal((heads,), 4))),
    }
    cu_q, cu_k = cumulative(lengths_q), cumulative(lengths_k)
    o, lse = reference.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=maxima[0],
        max_seqlen_k=maxima[1],
        layout=layout,
        mask=mask,
        compute_dtype=np.float64,
        **options,
    )
    assert o.shape == q.shape
    q, k, v, o = (x if layout == "HND" else x.swapaxes(0, 1) for x in (q, k, v, o))
    assert lse.shape == (heads, q.shape[1])
    for b in range(len(pairs)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        o_ref, lse_ref = naive64.sequence(
            q[:, rows],
            k[:, keys],
            v[:, keys],
            mask=None if mask is None else mask[b, :, : lengths_q[b], : lengths_k[b]],
            **options,
        )
        assert_close(o[:, rows], o_ref, atol=1e-12)
        assert_close(lse[:, rows], lse_ref, atol=1e-12)
    assert np.all(o[:, cu_q[-1] :] == 0)
    assert np.all(np.isneginf(lse[:, cu_q[-1] :]))


def test_neighbours_do_not_leak():
    """NaN in one sequence leaves the others' bits alone."""
    q, k, v = make_qkv(batch=None, seqlen_q=12, heads_q=2, head_dim=8)
    cu = cumulative([4, 0, 5, 3])
    clean = reference.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    for tensor in (q, k, v):
        tensor[4:9] = np.nan
    dirty = reference.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    others = [*range(4), *range(9, 12)]
    np.testing.assert_array_equal(dirty[0][others], clean[0][others])
    np.testing.assert_array_equal(dirty[1][:, others], clean[1][:, others])
    assert np.isnan(dirty[0][4:9]).all()


GOOD = np.array([0, 2, 5], dtype=np.int32)


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"cu_seqlens_q": np.array([1, 2, 5], np.int32)}, ArgumentError, "cu_seqlens_q"),
        ({"cu_seqlens_q": np.array([0, 4, 3], np.int32)}, ArgumentError, "cu_seqlens_q"),
        ({"cu_seqlens_k": np.array([0, 2, 6], np.int32)}, ArgumentError, "cu_seqlens_k"),
        ({"cu_seqlens_k": np.array([0, 5], np.int32)}, ShapeError, "cu_seqlens_k"),
        ({"cu_seqlens_q": np.array([], np.int32)}, ShapeError, "cu_seqlens_q"),
        ({"cu_seqlens_q": np.array([[0, 2, 5]], np.int32)}, ShapeError, "cu_seqlens_q"),
        ({"cu_seqlens_q": np.array([0.0, 2, 5])}, DtypeError, "cu_seqlens_q"),
        ({"max_seqlen_q": 2}, ArgumentError, "max_seqlen_q"),
        ({"max_seqlen_k": 2}, ArgumentError, "max_seqlen_k"),
        ({"mask": np.zeros((2, 1, 4, 3), bool)}, ShapeError, "mask"),
        ({"q": np.zeros((1, 5, 2, 8), np.float32)}, ShapeError, "q"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[ArgumentError], argument: str):
    q, k, v = make_qkv(batch=None, seqlen_q=5, heads_q=2, head_dim=8)
    call = {"q": q, "k": k, "v": v, "cu_seqlens_q": GOOD, "cu_seqlens_k": GOOD, **change}
    with pytest.raises(error) as caught:
        reference.attention_varlen(**call)
    assert caught.value.argument == argument
