"""The test tools themselves: rounding, inputs, and a comparison that must be able to fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniattn.errors import ArgumentError, DtypeError, ShapeError
from omniattn.testing import GENERATORS, assert_close, compare, make_qkv, round_to, rounding_bound

pytestmark = pytest.mark.filterwarnings("error")


def all_values(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Every non-negative finite number of a 16-bit format in order, then one past the last, and its bits."""
    infinity = 0x7C00 if dtype == "float16" else 0x7F80
    bits = np.arange(infinity, dtype=np.uint32)
    if dtype == "float16":
        values = bits.astype(np.uint16).view(np.float16).astype(np.float64)
    else:
        values = (bits << np.uint32(16)).view(np.float32).astype(np.float64)
    overflow = 2 * values[-1] - values[-2]  # stands for infinity; its bits are even, as rounding needs it
    return np.append(values, overflow), np.append(bits, np.uint32(infinity))


def round_by_search(x: np.ndarray, dtype: str) -> np.ndarray:
    """Nearest of all numbers of the format, found in a sorted list; nothing in common with bit arithmetic."""
    values, bits = all_values(dtype)
    magnitude = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    below = above - 1
    to_below, to_above = magnitude - values[below], values[above] - magnitude
    take_above = (to_above < to_below) | ((to_above == to_below) & (bits[above] % 2 == 0))
    index = np.where(take_above, above, below)
    result = np.where(index == len(values) - 1, np.inf, values[index])
    return np.copysign(result, x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_and_every_tie(dtype: str):
    values, _ = all_values(dtype)
    ties = (values[:-1] + values[1:]) / 2  # exact in float64
    with np.errstate(over="ignore"):
        points = np.concatenate([values, ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf), [1e300]])
    points = np.concatenate([points, -points])
    np.testing.assert_array_equal(round_to(points, dtype), round_by_search(points, dtype))
    with np.errstate(over="ignore"):
        single = points.astype(np.float32)
    np.testing.assert_array_equal(round_to(single, dtype), round_by_search(single, dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@settings(max_examples=200, deadline=None)
@given(x=st.floats(allow_nan=False))
def test_any_double(dtype: str, x: float):
    got, wanted = round_to(np.array([x]), dtype), round_by_search(np.array([x]), dtype)
    np.testing.assert_array_equal(got, wanted)
    assert np.signbit(got) == np.signbit(wanted)


def test_nan_survives_rounding():
    patterns = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], dtype=np.uint32).view(np.float32)
    for dtype in ("float16", "bfloat16", "float32"):
        assert np.isnan(round_to(patterns, dtype)).all()
    with pytest.raises(DtypeError, match="float8"):
        round_to(patterns, "float8")
    with pytest.raises(DtypeError, match="int64"):
        round_to(np.arange(3), "bfloat16")


def test_rounding_accepts_any_strides():
    x = np.arange(24, dtype=np.float64).reshape(4, 6) / 7
    np.testing.assert_array_equal(round_to(x.T[::2], "bfloat16"), round_to(x.T[::2].copy(), "bfloat16"))
    assert round_to(np.float64(1.0), "bfloat16").shape == ()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e4])
def test_rounding_bound(dtype: str, scale: float):
    """Never exceeded, and not loose: some of many values come near it."""
    x = np.random.default_rng(2).uniform(-scale, scale, 20000)
    error = np.abs(round_to(x, dtype) - x).max()
    bound = rounding_bound(x, dtype)
    assert error <= bound
    # All of x below half of the smallest subnormal number is the one case in which the bound is not reached.
    if scale > 1e-8 or dtype == "bfloat16":
        assert error > 0.9 * bound
    assert rounding_bound(np.array([]), dtype) == 0
    assert rounding_bound(np.array([np.nan, np.inf, 1.0]), dtype) == rounding_bound(np.array([1.0]), dtype)


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_generators(kind: str, dtype: str):
    x = GENERATORS[kind]((2, 300, 2, 64), 7, dtype)
    assert x.dtype == np.float32
    assert x.shape == (2, 300, 2, 64)
    assert np.isfinite(x).all()
    np.testing.assert_array_equal(x, round_to(x, dtype))
    np.testing.assert_array_equal(x, GENERATORS[kind]((2, 300, 2, 64), 7, dtype))
    assert not np.array_equal(x, GENERATORS[kind]((2, 300, 2, 64), 8, dtype))
    assert GENERATORS[kind]((0, 4, 8), 0, dtype).shape == (0, 4, 8)


def test_generators_have_their_property():
    shape = (1, 2000, 2, 64)
    x = {kind: generate(shape, 3, "bfloat16").astype(np.float64) for kind, generate in GENERATORS.items()}
    channel_means = {kind: value.reshape(-1, 64).mean(axis=0) for kind, value in x.items()}
    assert abs(x["normal"].std() - 1) < 0.02
    assert np.abs(channel_means["normal"]).max() < 0.1
    assert 1e-4 < np.mean(np.abs(x["outlier"]) > 7) < 1e-3
    assert np.mean(np.abs(x["normal"]) > 7) == 0
    assert 2 < channel_means["channel_bias"].std() < 6
    assert np.allclose(channel_means["mean_shift"], 3, atol=0.1)
    assert np.sum(np.all(x["zero_channel"].reshape(-1, 64) == 0, axis=0)) == 1
    q, k, v = make_qkv("huge_logits", seqlen_q=64, head_dim=64)
    assert np.abs(np.einsum("bqhd,bkhd->bhqk", q, k)).max() / 8 > 500
    assert np.abs(v).max() < 10


def test_make_qkv():
    q, k, v = make_qkv(batch=2, seqlen_q=3, seqlen_k=5, heads_q=4, heads_kv=2, head_dim=8)
    assert (q.shape, k.shape, v.shape) == ((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    assert not np.array_equal(k, v)
    swapped = make_qkv(batch=2, seqlen_q=3, seqlen_k=5, heads_q=4, heads_kv=2, head_dim=8, layout="HND")
    for a, b in zip((q, k, v), swapped, strict=True):
        assert b.flags.c_contiguous
        np.testing.assert_array_equal(a, b.swapaxes(1, 2))
    assert make_qkv(batch=None, seqlen_q=3, heads_q=2, head_dim=8)[0].shape == (3, 2, 8)
    with pytest.raises(ArgumentError, match="outlier"):
        make_qkv("nothing")
    with pytest.raises(ArgumentError, match="NHD"):
        make_qkv(layout="BSHD")


def test_compare_figures():
    report = compare(np.array([1.0, 2.0, 5.0]), np.array([1.0, 3.0, 4.5]), atol=0.5)
    assert report.max_abs == 1.0
    assert report.mean_abs == 0.5
    assert report.rel_l1 == pytest.approx(1.5 / 8.5)
    assert report.rmse == pytest.approx(math.sqrt(1.25 / 3))
    assert report.cosine == pytest.approx((1 + 6 + 22.5) / math.sqrt(30 * 30.25))
    assert report.worst_index == (1,)
    assert report.worst_values == (2.0, 3.0)
    assert report.tolerance == 0.5
    assert not report.ok
    assert compare(np.array([1.0, 2.0, 5.0]), np.array([1.0, 3.0, 4.5]), atol=1.0).ok


def test_tolerance_has_three_parts():
    ref = np.array([1.0, -2.0])
    report = compare(ref, ref, naive=np.array([1.25, -2.0]), atol=0.125, dtype="bfloat16")
    assert report.naive_max_abs == 0.25
    assert report.tolerance == 0.125 + 2 * 0.25 + 2.0**-7


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        ([math.nan, 1.0], [0.0, 1.0]),
        ([0.0, 1.0], [math.nan, 1.0]),
        ([math.inf, 1.0], [0.0, 1.0]),
        ([math.inf, 1.0], [-math.inf, 1.0]),
        ([math.nan, 1.0], [math.inf, 1.0]),
    ],
)
def test_masks_must_be_equal(got: list[float], wanted: list[float]):
    got, wanted = [5.0, *got], [0.0, *wanted]
    report = compare(np.array(got), np.array(wanted), atol=math.inf)
    assert not report.ok
    assert not (report.nan_equal and report.inf_equal)
    assert report.worst_index == (1,)
    # So that a test which looks at one figure only fails as well.
    assert all(math.isnan(x) for x in (report.max_abs, report.mean_abs, report.rel_l1, report.rmse, report.cosine))
    with pytest.raises(AssertionError, match="different"):
        assert_close(np.array(got), np.array(wanted), atol=math.inf)


def test_equal_masks_pass_and_the_rest_is_compared():
    special = [math.nan, math.inf, -math.inf]
    assert assert_close(np.array([*special, 1.0]), np.array([*special, 1.0])).max_abs == 0
    with pytest.raises(AssertionError, match=r"case: .*worst at \(3,\)"):
        assert_close(np.array([*special, 1.0]), np.array([*special, 1.5]), atol=0.25, label="case")


def test_nan_tolerance_fails():
    assert not compare(np.zeros(2), np.zeros(2), atol=math.nan).ok


def test_compare_refuses_other_shapes_and_types():
    with pytest.raises(ShapeError, match="ref"):
        compare(np.zeros((2, 1)), np.zeros(2))
    with pytest.raises(ShapeError, match="naive"):
        compare(np.zeros(2), np.zeros(2), naive=np.zeros(1))
    with pytest.raises(DtypeError, match="int64"):
        compare(np.zeros(2, dtype=np.int64), np.zeros(2))


def test_compare_degenerate_arrays():
    empty = compare(np.zeros((0, 3)), np.zeros((0, 3)))
    assert empty.ok
    assert empty.worst_index is None
    assert compare(np.zeros(3), np.zeros(3)).cosine == 1.0
    assert compare(np.ones(3), np.zeros(3)).cosine == 0.0
    assert compare(np.ones(3), np.zeros(3)).rel_l1 == math.inf
    assert compare(np.full(3, 1e200), np.full(3, 1e200)).cosine == pytest.approx(1.0)
