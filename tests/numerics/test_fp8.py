"""Accuracy of e4m3 for Q, K, P and V in NumPy: what blocks of scales and the rotation are worth."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import reference, testing
from omniattn.data import load_activations
from omniattn.reference import e4m3_arrays, low_precision
from omniattn.reference.dequantize import dequantize_qk, dequantize_v
from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.testing import Report, compare

#: RMSE of FlashAttention-3's FP8 on outliers (Shah et al. 2024, table 3): with blocks and rotation, and without either.
PUBLISHED_RMSE = 9.1e-3


@functools.cache
def inputs(kind: str, head_dim: int) -> tuple[Any, ...]:
    """q, k, v and their attention in double precision."""
    q, k, v = testing.make_qkv(kind, seqlen_q=512, seqlen_k=4096, heads_q=2, head_dim=head_dim, seed=1)
    return q, k, v, reference.attention(q, k, v, compute_dtype=np.float64)[0]


def found(knobs: Any, kind: str, head_dim: int, **options: Any) -> Report:
    q, k, v, exact = inputs(kind, head_dim)
    return compare(low_precision.attention(q, k, v, precision=knobs, **options)[0], exact)


def test_rmse_on_outliers_is_below_the_published_one() -> None:
    best = found(oa.Fp8(), "outlier", 128)
    assert best.rmse <= PUBLISHED_RMSE
    # Each of both alone is worse, and neither is worst.
    blocks = found(oa.Fp8(hadamard=False), "outlier", 128).rmse
    neither = found(oa.Fp8(hadamard=False, granularity="per_tensor"), "outlier", 128).rmse
    assert best.rmse < 0.75 * blocks < 0.75 * neither
    # At d64 fewer channels share an outlier, and the weights of few keys decide.
    assert found(oa.Fp8(), "outlier", 64).rmse <= 1.6e-2


@pytest.mark.parametrize("kind", ["normal", "outlier"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotation_costs_no_accuracy_where_q_and_k_have_no_mean(kind: str, head_dim: int) -> None:
    with_it, without = (found(oa.Fp8(hadamard=h), kind, head_dim).rel_l1 for h in (True, False))
    assert with_it <= 1.02 * without
    for cls in (oa.Int8, oa.Int4):
        with_it, without = (found(cls(hadamard=h), kind, head_dim).rel_l1 for h in (True, False))
        assert with_it <= 1.02 * without
        assert kind != "outlier" or with_it <= 0.8 * without


def test_a_mean_of_k_is_worth_taking_away() -> None:
    """It is large in a few channels, where e4m3 is as accurate as anywhere; rotated, it is large in all of them."""
    smooth, rotated, plain = (
        found(oa.Fp8(hadamard=h, smooth_k=s), "channel_bias", 128).rel_l1
        for h, s in ((True, True), (True, False), (False, False))
    )
    assert smooth < plain < rotated
    assert smooth <= 0.6 * rotated


def test_another_seed_is_as_good() -> None:
    errors = [found(oa.Fp8(seed=seed), "outlier", 128).rmse for seed in (0, 1, 2**32 - 1)]
    assert max(errors) <= 1.1 * min(errors)


@pytest.mark.parametrize("layer", range(4))
def test_on_a_real_model(layer: int) -> None:
    x = load_activations()[layer]
    exact = reference.attention(x.q, x.k, x.v, causal=True, compute_dtype=np.float64)[0]
    reports = {
        name: compare(low_precision.attention(x.q, x.k, x.v, precision=knobs, causal=True)[0], exact)
        for name, knobs in {"fp8": oa.Fp8(), "smooth": oa.Fp8(smooth_k=True), "int8": oa.Int8()}.items()
    }
    assert reports["fp8"].cosine >= 0.996
    assert reports["int8"].rel_l1 < reports["smooth"].rel_l1 * 1.2
    assert reports["smooth"].rel_l1 <= 0.08


@pytest.mark.parametrize("knobs", [oa.Fp8(), oa.Fp8(hadamard=False, smooth_k=True, smooth_v=False)], ids=str)
def test_the_kernel_error_alone(knobs: oa.Fp8) -> None:
    """Attention of the dequantized inputs is what is left when only P is rounded."""
    q, k, v, _ = inputs("outlier", 64)
    p = knobs.precision
    qk = oa.quantize_qk(
        q, k, dtype="float8_e4m3", hadamard=p.hadamard, smooth_k=p.smooth_k, granularity=p.granularity, with_bias=True
    )
    values = oa.quantize_v(v, smooth_v=p.smooth_v)
    whole = [x.swapaxes(1, 2) for x in (*dequantize_qk(qk), dequantize_v(values))]
    want, want_lse = reference.attention(*whole, compute_dtype=np.float64)
    o, lse = low_precision.attention(q, k, v, precision=knobs)
    report = compare(o, want)
    assert report.cosine >= 0.9997
    assert report.rel_l1 <= 0.025
    # q . k_mean is that of Q before its quantization.
    assert np.abs(lse - want_lse).max() <= (2e-2 if p.smooth_k else 1e-4)


def test_sums_of_one_sign_over_many_keys() -> None:
    """13 bits within a tile and fp32 across tiles keep the error of long sums; 13 bits throughout do not."""
    rng = np.random.default_rng(0)
    errors: dict[tuple[str, int], float] = {}
    for keys in (1024, 16384):
        q, k = (encode_e4m3(rng.standard_normal((1, n, 1, 64)).astype(np.float32)) for n in (32, keys))
        v = encode_e4m3(rng.uniform(1, 2, (1, keys, 1, 64)).astype(np.float32))
        exact = reference.attention(*(decode_e4m3(x) for x in (q, k, v)), compute_dtype=np.float64)[0]
        for accumulator in ("two_level", "single_level"):
            o, _ = e4m3_arrays.attention(q, k, v, accumulator=accumulator)
            errors[accumulator, keys] = compare(o, exact).rel_l1
    assert errors["two_level", 16384] <= 1.2 * errors["two_level", 1024]
    assert errors["single_level", 16384] >= 3 * errors["two_level", 16384]
