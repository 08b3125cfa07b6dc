"""Means and ranges of V and K, of a sample of the keys of long sequences; what the sample does not show is not lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.problems.quantize import sample_log2
from omniattn.reference.dequantize import dequantize_v
from omniattn.reference.quantize import sampled


@pytest.mark.parametrize("rows", [0, 1, 511, 1023, 1024, 3000, 4096, 8191, 8192, 100_000])
def test_samples_are_spread_over_the_sequence(rows: int) -> None:
    chosen = sampled(np.arange(rows)[:, None])[:, 0]
    step = 1 << sample_log2(rows)
    assert len(chosen) == rows // step
    assert (chosen // step == np.arange(rows // step)).all()
    assert step == 1 or len(chosen) >= 256
    assert step <= 32
    if step > 1:  # no residue is left out, nor of a longer period most of those that there is room for
        assert set(chosen % step) == set(range(step))
        period = step * step
        assert len(set(chosen % period)) > 0.5 * min(period, len(chosen))


@pytest.mark.parametrize(
    ("options", "kept", "replaced"),
    [
        ({"dtype": "float8_e4m3", "smooth_v": False}, 15.0, 16.5),
        ({"dtype": "float8_e4m3", "smooth_v": True}, 15.0, 16.5),
        ({"dtype": "float8_e4m3", "pv_accumulator": "fp16"}, 3.7, 4.1),
        ({"dtype": "float16"}, 31.9, 32.0),
    ],
)
def test_where_the_headroom_ends(options: dict[str, Any], kept: float, replaced: float) -> None:
    chosen = sampled(np.arange(2000)[:, None])[:, 0]
    hidden = np.setdiff1d(np.arange(2000), chosen)
    v = np.ones((1, 2000, 1, 32), dtype=np.float32)
    v[0, chosen[1::2]] = -1.0  # a range of 1, and no mean
    plain = oa.quantize_v(v, **options)
    v[0, hidden[3], 0, :3], v[0, hidden[3], 0, 3:6] = kept, replaced
    changed = (oa.quantize_v(v, **options).v_scale != plain.v_scale)[0, 0]
    assert changed[:6].tolist() == [False, False, False, True, True, True]
    assert not changed[6:].any()


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float16"])
def test_values_beyond_what_the_sample_shows(dtype: str) -> None:
    """A scale that is too small for one value is replaced; channels of their own are not touched."""
    rng = np.random.default_rng(3)
    v = rng.standard_normal((1, 2000, 1, 32), dtype=np.float32)
    hidden = np.setdiff1d(np.arange(2000), sampled(np.arange(2000)[:, None])[:, 0])
    plain = oa.quantize_v(v, dtype=dtype)
    v[0, hidden[40], 0, 5] = 5000.0
    got = oa.quantize_v(v, dtype=dtype)
    others = np.arange(32) != 5
    assert np.array_equal(got.v_scale[..., others], plain.v_scale[..., others])
    assert got.v_scale[0, 0, 5] > 20 * plain.v_scale[0, 0, 5]
    back = dequantize_v(got)[0, 0]
    assert abs(back[hidden[40], 5] - 5000) <= 5000 / 16
    assert np.abs(back[:, others] - v[0, :, 0, others].T).max() <= 2.0**-4 * np.abs(v[..., others]).max()


def test_fp16_scales_are_powers_of_two_and_never_overflow() -> None:
    v = np.array([3.0e38, 65504.0, 1.0, 1e-3, 0.0, 1e-38, -2.0, 255.0], dtype=np.float32).reshape(1, 1, 1, 8)
    got = oa.quantize_v(v.repeat(3, axis=1), dtype="float16")
    mantissa, _ = np.frexp(got.v_scale)
    assert (mantissa == 0.5).all()
    assert np.isfinite(got.v).all()
    assert np.abs(got.v).max() < 256
    assert np.allclose(dequantize_v(got)[0, 0, 0], v[0, 0, 0], rtol=2**-11, atol=2.0**-100)
