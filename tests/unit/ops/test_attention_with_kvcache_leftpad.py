"""Padding in front of the sequences of a cache, on the CPU: ``attention_with_kvcache(leftpad_k=)``."""

from __future__ import annotations

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import DtypeError, ShapeError, UnsupportedError
from tests.unit.ops.test_attention_with_kvcache import DIM, HEADS, Served, ints


@pytest.mark.parametrize("page", [0, 3, 16])
@pytest.mark.parametrize("q_len", [1, 5, 20])
def test_padding_in_front(page: int, q_len: int) -> None:
    """As if the tokens behind it were all that there are; it may be anything."""
    tokens, pads = [25, 30, 7, 0, 41], ints(3, 0, 7, 2, -4)
    call = Served([(q_len, n) for n in tokens], page)
    q = call.batch(q_len)
    for b, pad in enumerate(pads):
        call.k[b], call.v[b] = (x[b][max(pad, 0) :] for x in (call.k, call.v))
    for options in ({}, {"causal": False}, {"window": (4, -1)}, {"softcap": 3.0}):
        o, lse = oa.attention_with_kvcache(q, call.cache, **call.places, leftpad_k=pads, return_lse=True, **options)
        for b, (expected, of_lse) in enumerate(call.expected(list(q), **options)):
            np.testing.assert_allclose(o[b], expected, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(lse[b], of_lse, rtol=1e-6, atol=1e-6)
    flat = q.reshape(-1, HEADS, DIM)
    packed = {"cu_seqlens_q": np.arange(6, dtype=np.int32) * q_len, "max_seqlen_q": q_len}
    made = oa.attention_with_kvcache(flat, call.cache, **call.places, **packed, leftpad_k=pads, causal=False)
    whole = oa.attention_with_kvcache(q, call.cache, **call.places, leftpad_k=pads, causal=False)
    np.testing.assert_array_equal(made.reshape(q.shape), whole)


def test_errors_of_padding_in_front() -> None:
    call = Served([(1, 9), (1, 13)], 4)
    q = call.batch(1)
    for pads, error, text in (
        (ints(1, 2, 3), ShapeError, r"'leftpad_k': expected shape \(2,\)"),
        (np.zeros(2, np.int64), DtypeError, "'leftpad_k': expected int32"),
    ):
        with pytest.raises(error, match=text):
            oa.attention_with_kvcache(q, call.cache, **call.places, leftpad_k=pads)
    with pytest.raises(UnsupportedError, match="leftpad_k with shared_prefix"):
        oa.attention_with_kvcache(q, call.cache, **call.places, leftpad_k=ints(1, 2), shared_prefix=4)
