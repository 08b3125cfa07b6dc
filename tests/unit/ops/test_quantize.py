"""quantize_qk and quantize_v on the CPU: formats, layouts of scales, arguments, what a plan tells the kernels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import testing
from omniattn.errors import ArgumentError, DtypeError, ShapeError, StrideError
from omniattn.ops.quantize import MEAN_IS_READY, quantize_around
from omniattn.problems import Precision
from omniattn.problems.precision import GRANULARITIES, GROUPINGS, knobs_of
from omniattn.reference.dequantize import dequantize_qk, dequantize_v
from omniattn.reference.e4m3 import decode_e4m3, encode_e4m3
from omniattn.reference.quantize import KEY_ORDER, pack_int4, unpack_int4

KERNELS = Path(__file__).parents[3] / "kernels_cu"
NAN = np.nan


def qkv(rows_q: int = 300, rows_k: int = 517, head_dim: int = 72, **more: Any) -> Any:
    return testing.make_qkv(
        "channel_bias", batch=2, seqlen_q=rows_q, seqlen_k=rows_k, heads_q=4, heads_kv=2, head_dim=head_dim, **more
    )


def test_e4m3_codes_of_all_values_and_between() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = decode_e4m3(codes)
    finite = np.isfinite(values)
    assert np.isnan(values[[0x7F, 0xFF]]).all()
    assert finite.sum() == 254
    assert (values[0x7E], values[1], values[8]) == (448.0, 2.0**-9, 2.0**-6)
    assert np.array_equal(encode_e4m3(values[finite]), codes[finite])
    up = values[:0x7F].astype(np.float64)
    middle = ((up[:-1] + up[1:]) / 2).astype(np.float32)
    assert np.array_equal(encode_e4m3(middle) & 1, np.zeros(len(middle)))  # ties to even
    assert np.array_equal(encode_e4m3(np.nextafter(middle, np.float32(1e9))), codes[1:0x7F])
    assert np.array_equal(encode_e4m3(np.nextafter(middle, np.float32(0))), codes[:0x7E])
    special = np.array([np.inf, -np.inf, NAN, 1e30, -1e30, 464.0, 1e-45, -0.0], dtype=np.float32)
    assert encode_e4m3(special).tolist() == [0x7F, 0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0, 0x80]


def test_e4m3_agrees_with_another_implementation() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = (np.random.default_rng(0).standard_normal(100_000) * 60).astype(np.float32)
    assert np.array_equal(encode_e4m3(x), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3"])
def test_around_a_given_mean(dtype: str) -> None:
    """The operands of keys from which it has been taken away; of K's own mean those of smooth_k."""
    e4m3 = dtype == "float8_e4m3"
    said: dict[str, Any] = {"dtype": dtype, "granularity": "per_block" if e4m3 else "per_thread", "grouping": "sm90"}
    said |= {"hadamard": e4m3, "seed": 3}
    q, k, _ = qkv()
    ready = np.full(4, MEAN_IS_READY, dtype=np.int32)
    other = np.random.default_rng(0).standard_normal((2, 2, 96)).astype(np.float32)
    own = oa.quantize_qk(q, k, smooth_k=True, **said)
    pairs = [(own.k_mean, own), (other, oa.quantize_qk(q, k - other[:, None, :, :72], smooth_k=False, **said))]
    for mean, expected in pairs:
        found = quantize_around(q, k, mean, ready, **said)
        for name in ("q_int", "k_int", "q_scale", "k_scale"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        assert found.k_mean is None
        assert found.problem == dataclasses.replace(expected.problem, smooth_k=False)
        # Plans of attention on operands are found by it.
        assert found.problem is quantize_around(q, k, mean, ready, **said).problem


def test_nibbles() -> None:
    values = np.arange(-7, 8).repeat(2)[:28].astype(np.int8).reshape(2, 14)
    packed = pack_int4(values)
    assert packed.shape == (2, 7)
    assert packed[0, 0] == (int(values[0, 0]) & 15) | (int(values[0, 1]) & 15) << 4
    assert np.array_equal(unpack_int4(packed), values)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_dequantized_is_near(dtype: str, granularity: str, grouping: str) -> None:
    q, k, _ = qkv()
    qk = oa.quantize_qk(q, k, dtype=dtype, granularity=granularity, grouping=grouping, smooth_q=True)
    levels = 127 if dtype == "int8" else 7
    for got, x, mean in zip(dequantize_qk(qk), (q, k), (qk.q_mean, qk.k_mean), strict=True):
        x = x.swapaxes(1, 2)
        spread = np.abs(x).max() + np.abs(mean).max()
        assert np.abs(got - x).max() <= spread / levels / 2 * 1.0001
    two_to_a_byte = dtype == "int4" and grouping == "sm80"
    assert np.abs(np.asarray(qk.q_int, dtype=np.int16)).max() <= (255 if two_to_a_byte else levels)
    assert qk.q_int.shape[-1] == (48 if two_to_a_byte else 96)
    assert qk.q_int.dtype == (np.uint8 if two_to_a_byte else np.int8)


@pytest.mark.parametrize(("grouping", "slice_rows", "tile"), [("sm90", 16, 128), ("sm80", 32, 64)])
def test_where_scales_are(grouping: str, slice_rows: int, tile: int) -> None:
    """The index formulas of docs/quantization.md, group by group."""
    q, k, _ = qkv(rows_q=200, rows_k=150)
    qk = oa.quantize_qk(q, k, grouping=grouping, smooth_k=False)
    qh, kh = q.swapaxes(1, 2), k.swapaxes(1, 2)
    assert qk.q_scale.shape == (2, 4, 2 * 128 // slice_rows * 8)
    assert qk.k_scale.shape == (2, 2, -(-150 // tile) * 4)
    for row in range(256):
        mates = [r for r in range(200) if r // slice_rows == row // slice_rows and r % 8 == row % 8]
        expected = np.abs(qh[:, :, mates]).max(axis=(2, 3)) / np.float32(127) if mates else 1
        assert np.array_equal(qk.q_scale[:, :, row // slice_rows * 8 + row % 8], np.broadcast_to(expected, (2, 4)))
    for key in range(-(-150 // tile) * tile):
        mates = [j for j in range(150) if j // tile == key // tile and j % 8 // 2 == key % 8 // 2]
        expected = np.abs(kh[:, :, mates]).max(axis=(2, 3)) / np.float32(127) if mates else 1
        assert np.array_equal(qk.k_scale[:, :, key // tile * 4 + key % 8 // 2], np.broadcast_to(expected, (2, 2)))


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_coarse_scales_are_broadcast_into_the_same_layout(grouping: str) -> None:
    q, k, _ = qkv(rows_q=256, rows_k=256)
    fine = oa.quantize_qk(q, k, grouping=grouping)
    parts = {"per_tensor": (1, 1), "per_block": (2, 256 // (128 if grouping == "sm90" else 64))}
    parts["per_warp"] = (16 if grouping == "sm90" else 8, parts["per_block"][1])
    for granularity, (of_q, of_k) in parts.items():
        coarse = oa.quantize_qk(q, k, grouping=grouping, granularity=granularity)
        for name, count in (("q_scale", of_q), ("k_scale", of_k)):
            wide, narrow = getattr(fine, name), getattr(coarse, name)
            assert narrow.shape == wide.shape
            blocks = narrow.reshape(*narrow.shape[:2], count, -1)
            assert (blocks == blocks[..., :1]).all()
            assert np.array_equal(blocks[..., 0], wide.reshape(blocks.shape).max(axis=-1))
    token = oa.quantize_qk(q, k, grouping=grouping, granularity="per_token")
    assert token.q_scale.shape == (2, 4, 256)
    assert np.array_equal(token.q_scale, np.abs(q.swapaxes(1, 2)).max(axis=-1) / np.float32(127))


def test_values_are_transposed_and_permuted() -> None:
    _, _, v = qkv(rows_k=200)
    got = oa.quantize_v(v, smooth_v=False)
    assert got.v.shape == (2, 2, 96, 256)
    vh = v.swapaxes(1, 2)
    scale = np.abs(vh).max(axis=2) / np.float32(448)
    assert np.array_equal(got.v_scale[..., :72], scale)
    assert (got.v_scale[..., 72:] == 1).all()
    assert (got.v_mean == 0).all()
    codes = encode_e4m3(vh * (np.float32(1) / scale)[:, :, None])
    for position in range(256):
        key = position // 16 * 16 + (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)[position % 16]
        expected = codes[:, :, key] if key < 200 else np.zeros((2, 2, 72))
        assert np.array_equal(got.v[:, :, :72, position], expected)
    assert (got.v[:, :, 72:] == 0).all()
    assert sorted(KEY_ORDER) == list(range(16))


@pytest.mark.parametrize("smooth_v", [False, True])
@pytest.mark.parametrize("dtype", ["float8_e4m3", "float16"])
def test_dequantized_values(dtype: str, smooth_v: bool) -> None:
    _, _, v = qkv(rows_k=200)
    got = oa.quantize_v(v, dtype=dtype, smooth_v=smooth_v)
    error = np.abs(dequantize_v(got) - v.swapaxes(1, 2))
    bound = 2.0**-4 if dtype == "float8_e4m3" else 2.0**-11
    assert error.max() <= bound * np.abs(v).max()
    if not smooth_v:
        assert (got.v_mean == 0).all()
        return
    mean = v.mean(axis=1)
    # A mean below 1/16 of what is left of a channel stays where it is.
    away = np.abs(mean) > np.maximum(v.max(axis=1) - mean, mean - v.min(axis=1)) / 16
    assert away.any()
    assert not away.all()
    expected = np.where(away, mean, 0)
    if dtype == "float8_e4m3":  # and what rounding took away, so that the mean over the keys is that of v
        left = got.v_mean[..., :72] - expected
        assert (np.abs(left) <= 2.0**-4 * np.abs(v.swapaxes(1, 2)).max(axis=2)).all()
        assert np.allclose(dequantize_v(got).mean(axis=2), mean, rtol=0, atol=1e-3)
    else:
        assert np.allclose(got.v_mean[..., :72], expected, rtol=1e-5)


def test_smoothing_adds_up() -> None:
    """q . k is what quantization sees, plus delta_s, plus row_bias."""
    q, k, _ = qkv(rows_q=260, rows_k=300, head_dim=64)
    qk = oa.quantize_qk(q, k, smooth_q=True, with_bias=True)
    qh, kh = (x.swapaxes(1, 2).astype(np.float64) for x in (q, k))
    kh = kh.repeat(2, axis=1)
    block = np.arange(260) // 128
    smooth_q = qh - qk.q_mean[:, :, block].astype(np.float64)
    smooth_k = kh - qk.k_mean.repeat(2, axis=1)[:, :, None]
    total = smooth_q @ smooth_k.swapaxes(2, 3) + qk.delta_s[:, :, block, :300] + qk.row_bias[..., None]
    assert np.abs(total - qh @ kh.swapaxes(2, 3)).max() <= 1e-3
    assert np.allclose(qk.k_mean[0, 0], k[0, :, 0].mean(axis=0), rtol=1e-5, atol=1e-5)
    assert (qk.delta_s[..., 300:] == 0).all()
    assert qk.delta_s.shape == (2, 4, 3, 384)
    without = oa.quantize_qk(q, k)
    assert (without.row_bias == 0).all()
    assert without.q_mean is None
    assert without.delta_s is None
    assert not without.with_bias
    assert oa.quantize_qk(q, k, smooth_k=False).k_mean is None


def test_not_a_number_marks_rows_and_key_groups() -> None:
    q, k, v = qkv(rows_q=40, rows_k=140, head_dim=64)
    q[0, 9, 1, 3], q[1, 20, 0, 0], k[0, 131, 1, 5], v[0, 7, 0, 2], v[1, 100, 1, 3] = NAN, np.inf, -np.inf, NAN, np.inf
    clean = [np.where(np.isfinite(x), x, 0) for x in (q, k)]
    qk, expected = oa.quantize_qk(q, k, smooth_q=True), oa.quantize_qk(*clean, smooth_q=True)
    assert np.argwhere(np.isnan(qk.row_bias)).tolist() == [[0, 1, 9], [1, 0, 20]]
    assert np.argwhere(np.isnan(qk.k_scale)).tolist() == [[0, 1, 4 + 1]]
    assert (qk.q_int[0, 1, 9] == 0).all()
    assert (qk.k_int[0, 1, 131] == 0).all()
    assert np.array_equal(qk.q_mean, expected.q_mean)
    assert np.array_equal(qk.k_mean, expected.k_mean)
    assert np.array_equal(np.isnan(qk.delta_s).any(axis=2), np.isnan(qk.delta_s).all(axis=2))
    assert np.argwhere(np.isnan(qk.delta_s[:, :, 0])).tolist() == [[0, 2, 131], [0, 3, 131]]
    got = dequantize_v(oa.quantize_v(v, smooth_v=True))
    assert np.argwhere(np.isnan(got)).tolist() == [[0, 0, 7, 2], [1, 1, 100, 3]]


def test_zeros_and_tiny_values_have_scale_one() -> None:
    for fill in (0.0, 1e-40):
        x = np.full((1, 5, 1, 64), fill, dtype=np.float32)
        qk, v = oa.quantize_qk(x, x, smooth_k=False, smooth_q=False), oa.quantize_v(x)
        assert (qk.q_scale == 1).all()
        assert (qk.k_scale == 1).all()
        assert (qk.q_int == 0).all()
        assert (v.v_scale == 1).all()
        assert (v.v == 0).all()


def test_means_of_huge_values_do_not_overflow() -> None:
    k = np.full((1, 1000, 1, 8), 3e38, dtype=np.float32)
    qk = oa.quantize_qk(k, k, smooth_q=True)
    assert np.allclose(qk.k_mean[..., :8], 3e38, rtol=1e-5)
    assert np.isfinite(qk.k_scale).all()


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_packed_sequences_are_the_sequences(grouping: str) -> None:
    of_q, of_k = [100, 1, 0, 257], [130, 300, 5, 0]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (of_q, of_k))
    q = testing.normal((400, 4, 64))
    k, v = testing.normal((450, 2, 64), 1), testing.normal((450, 2, 64), 2)
    both = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 257, "max_seqlen_k": 300}
    qk = oa.quantize_qk(q, k, grouping=grouping, smooth_q=True, with_bias=True, **both)
    values = oa.quantize_v(v, smooth_v=True, cu_seqlens_k=cu_k, max_seqlen_k=300)
    tile, per_tile = (128, 64) if grouping == "sm90" else (64, 32)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = oa.quantize_qk(q[None, rows], k[None, keys], grouping=grouping, smooth_q=True, with_bias=True)
        one_v = oa.quantize_v(v[None, keys], smooth_v=True)
        assert np.array_equal(qk.q_int[:, rows], one.q_int[0])
        assert np.array_equal(qk.k_int[:, keys], one.k_int[0])
        assert np.array_equal(qk.row_bias[:, rows], one.row_bias[0])
        first_q = -(-cu_q[b] // 128) + b
        blocks = one.q_mean.shape[2]
        assert np.array_equal(qk.q_scale[:, first_q * per_tile :][:, : one.q_scale.shape[2]], one.q_scale[0])
        assert np.array_equal(qk.q_mean[:, first_q : first_q + blocks], one.q_mean[0])
        columns = one.delta_s.shape[3]
        assert np.array_equal(qk.delta_s[:, first_q : first_q + blocks, :columns], one.delta_s[0])
        first_k = (-(-cu_k[b] // tile) + b) * 4
        assert np.array_equal(qk.k_scale[:, first_k : first_k + one.k_scale.shape[2]], one.k_scale[0])
        assert np.array_equal(qk.k_mean[b], one.k_mean[0])
        first_v = (-(-cu_k[b] // 128) + b) * 128
        assert np.array_equal(values.v[:, :, first_v : first_v + one_v.v.shape[3]], one_v.v[0])
        assert np.array_equal(values.v_scale[b], one_v.v_scale[0])


@pytest.mark.frameworks
def test_layouts_and_frameworks() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = qkv(rows_q=50, rows_k=60, head_dim=64)
    expected, values = oa.quantize_qk(q, k), oa.quantize_v(v)
    hnd = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    assert np.array_equal(oa.quantize_qk(hnd[0], hnd[1], layout="HND").k_int, expected.k_int)
    assert np.array_equal(oa.quantize_v(hnd[2], layout="HND").v, values.v)
    of_torch = [torch.from_numpy(x).bfloat16() for x in (q, k, v)]
    got = oa.quantize_qk(of_torch[0], of_torch[1])
    assert isinstance(got.q_int, torch.Tensor)
    assert got.q_int.dtype == torch.int8
    assert np.array_equal(got.q_int.numpy(), expected.q_int)
    assert np.array_equal(oa.quantize_v(of_torch[2]).v.numpy(), values.v)
    assert (got.dtype, got.granularity, got.grouping, values.dtype) == ("int8", "per_thread", "sm90", "float8_e4m3")


@pytest.mark.parametrize(
    ("options", "argument", "expected", "received"),
    [
        ({"dtype": "int2"}, "dtype", "'int8' or 'int4' or 'float8_e4m3'", "'int2'"),
        ({"dtype": "float8_e4m3", "granularity": "per_thread"}, "granularity", "'per_block'", "'per_thread'"),
        ({"dtype": "float8_e4m3", "grouping": "sm80"}, "grouping", "'sm90'", "'sm80'"),
        ({"dtype": "float8_e4m3", "smooth_q": True}, "smooth_q", "False with dtype='float8_e4m3'", "True"),
        ({"hadamard": 0}, "hadamard", "True or False", "0"),
        ({"seed": 2**32}, "seed", "0 to 4294967295", "4294967296"),
        ({"granularity": "per_row"}, "granularity", "'per_thread'", "'per_row'"),
        ({"granularity": ["per_row"]}, "granularity", "'per_thread'", "['per_row']"),
        ({"grouping": "sm100"}, "grouping", "'sm90' or 'sm80'", "'sm100'"),
        ({"smooth_k": 1}, "smooth_k", "True or False", "1"),
        ({"smooth_q": None}, "smooth_q", "True or False", "None"),
        ({"with_bias": "yes"}, "with_bias", "True or False", "'yes'"),
        ({"layout": "BHSD"}, "layout", "'NHD' or 'HND'", "'BHSD'"),
        ({"max_seqlen_k": 5}, "max_seqlen_k", "None without cu_seqlens", "5"),
    ],
)
def test_options_of_qk(options: dict[str, Any], argument: str, expected: str, received: str) -> None:
    q, k, _ = qkv(rows_q=4, rows_k=4, head_dim=8)
    with pytest.raises(ArgumentError) as caught:
        oa.quantize_qk(q, k, **options)
    assert caught.value.argument == argument
    assert expected in str(caught.value)
    assert received in str(caught.value)
    assert "quantize_qk()" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        (lambda q, k: (q, k[..., :4]), ShapeError, "k"),
        (lambda q, k: (q[..., :4], k[..., :4]), ShapeError, "q"),
        (lambda q, k: (q, k[:1]), ShapeError, "k"),
        (lambda q, k: (q[:, :, :3], k), ShapeError, "k"),
        (lambda q, k: (q[0], k[0]), ShapeError, "q"),
        (lambda q, k: (q, k.astype(np.float16)), DtypeError, "k"),
        (lambda q, k: (q.astype(np.int32), k.astype(np.int32)), DtypeError, "q"),
        (lambda q, k: (np.asfortranarray(q), k), StrideError, "q"),
        (lambda q, k: ("q", k), ArgumentError, "q"),
    ],
)
def test_arrays_of_qk(change: Any, error: type[ArgumentError], argument: str) -> None:
    q, k, _ = qkv(rows_q=4, rows_k=4, head_dim=8)
    with pytest.raises(error) as caught:
        oa.quantize_qk(*change(q, k))
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"cu_seqlens_q": None}, ArgumentError, "cu_seqlens_q"),
        ({"cu_seqlens_k": np.array([0, 4], dtype=np.int64)}, DtypeError, "cu_seqlens_k"),
        ({"cu_seqlens_k": np.array([0, 2, 4], dtype=np.int32)}, ShapeError, "cu_seqlens_k"),
        ({"cu_seqlens_k": np.array([0, 5], dtype=np.int32)}, ArgumentError, "cu_seqlens_k"),
        ({"cu_seqlens_k": np.array([1, 4], dtype=np.int32)}, ArgumentError, "cu_seqlens_k"),
        ({"max_seqlen_k": None}, ArgumentError, "max_seqlen_k"),
        ({"max_seqlen_q": -1}, ArgumentError, "max_seqlen_q"),
        ({"max_seqlen_q": 2**31}, ArgumentError, "max_seqlen_q"),
    ],
)
def test_packed_arguments(change: dict[str, Any], error: type[ArgumentError], argument: str) -> None:
    x = np.ones((4, 2, 8), dtype=np.float32)
    cu = np.array([0, 4], dtype=np.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 4, "max_seqlen_k": 4, **change}
    with pytest.raises(error) as caught:
        oa.quantize_qk(x, x, **options)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("v", "options", "error", "argument"),
    [
        (np.ones((1, 4, 2, 8), np.float32), {"dtype": "int8"}, ArgumentError, "dtype"),
        (np.ones((1, 4, 2, 8), np.float32), {"smooth_v": 0}, ArgumentError, "smooth_v"),
        (np.ones((4, 2, 8), np.float32), {}, ShapeError, "v"),
        (np.ones((1, 4, 2, 12), np.float32), {}, ShapeError, "v"),
        (np.ones((1, 4, 2, 520), np.float32), {}, ShapeError, "v"),
        (np.ones((1, 4, 2, 8), np.int8), {}, DtypeError, "v"),
        (np.ones((1, 4, 2, 8), np.float32), {"stream": 0}, ArgumentError, "stream"),
    ],
)
def test_arguments_of_v(v: Any, options: dict[str, Any], error: type[ArgumentError], argument: str) -> None:
    with pytest.raises(error) as caught:
        oa.quantize_v(v, **options)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"granularity": "fine"}, "granularity"),
        ({"pv": "int8"}, "pv"),
        ({"smooth_k": 1}, "smooth_k"),
        ({"hadamard": 1}, "hadamard"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"min_seqlen": 1.0}, "min_seqlen"),
        ({"smooth_v": 0}, "smooth_v"),
        ({"min_seqlen": True}, "min_seqlen"),
    ],
)
def test_precisions_check_their_knobs(options: dict[str, Any], argument: str) -> None:
    for cls in (oa.Int8, oa.Int4, oa.Fp8):
        if not set(options) <= {field.name for field in dataclasses.fields(cls)}:
            continue
        with pytest.raises(ArgumentError) as caught:
            cls(**options)
        assert caught.value.argument == argument
        assert caught.value.function == cls.__name__


def test_precisions() -> None:
    assert (oa.Int8().qk, oa.Int4().qk, oa.Int8().smooth_q, oa.Int4().smooth_q) == ("int8", "int4", False, True)
    assert not isinstance(oa.Int4(), oa.Int8)
    assert oa.Int4().precision == Precision("int4", "auto", "auto", "per_thread", True, True, True)
    for knobs in (
        oa.Int8(smooth_q=True, pv="fp16"), oa.Int4(granularity="per_block", smooth_k=False),
        oa.Int8(hadamard=True, seed=7, min_seqlen=4096), oa.Fp8(smooth_v=True),
        oa.Fp8("per_tensor", False, True, False),
    ):  # fmt: skip
        assert knobs_of(knobs.precision) == knobs
    assert hash(oa.Int8()) == hash(oa.Int8())
    assert oa.Int8() != oa.Int4(smooth_q=False)
