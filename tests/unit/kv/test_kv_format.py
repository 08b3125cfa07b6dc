"""Formats of KV caches: every bit has one owner, quantization keeps its bounds, the documentation's tables are true."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniattn.errors import ArgumentError
from omniattn.kv.formats import KV_BITS, KVFormat, check_format, row_dim
from omniattn.reference import kv_cache

DOCS = Path(__file__).parents[3] / "docs"
FORMATS = [
    KVFormat(dtype, dim, group, zero, is_key)
    for dtype in KV_BITS
    for dim in (40, 64, 96, 128, 256)
    for group in {row_dim(dim), 32}
    for zero in ((False, True) if dtype.startswith("int") else (False,))
    for is_key in (True, False)
    if KV_BITS[dtype] < 16 or group == row_dim(dim)
]


def label(fmt: KVFormat) -> str:
    return f"{fmt.dtype}-d{fmt.head_dim}-g{fmt.group_size}-{'zero' if fmt.zero_point else 'sym'}-{'kv'[not fmt.is_key]}"


@pytest.mark.parametrize("fmt", FORMATS, ids=label)
def test_every_bit_belongs_to_one_element(fmt: KVFormat) -> None:
    bits = [fmt.position(channel) + i for channel in range(fmt.row_dim) for i in range(fmt.bits)]
    assert sorted(bits) == list(range(8 * fmt.row_bytes))
    assert fmt.row_bytes % 16 == 0


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.quantized], ids=label)
def test_pack_and_unpack(fmt: KVFormat) -> None:
    rng = np.random.default_rng(0)
    lo, hi = kv_cache.CODES.get(fmt.dtype, (0, 255))
    codes = rng.integers(lo, hi + 1, size=(3, 5, fmt.row_dim)).astype(np.int16)
    data = kv_cache.pack_row(codes, fmt)
    assert data.shape == (3, 5, fmt.row_bytes)
    np.testing.assert_array_equal(kv_cache.unpack_row(data, fmt), codes)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.quantized], ids=label)
@pytest.mark.parametrize("kind", ["normal", "biased", "huge", "tiny", "constant", "zero"])
def test_error_is_at_most_half_a_step(fmt: KVFormat, kind: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((50, fmt.head_dim)).astype(np.float32)
    x = {
        "normal": x, "biased": x + 300, "huge": x * np.float32(1e37), "tiny": x * np.float32(1e-30),
        "constant": np.full_like(x, 2.7), "zero": x * 0,
    }[kind]  # fmt: skip
    x = kv_cache.pad_row(x, fmt)
    data, params = kv_cache.encode(x, fmt, fmt.head_dim)
    back = kv_cache.decode_rows(data, params, fmt)
    scale = np.repeat((params << np.uint32(16)).view(np.float32), fmt.group_size, axis=-1)
    shown = slice(0, fmt.head_dim)
    # fp8 has 3 mantissa bits; scale and zero are exact, the products have fp32's rounding.
    half = 2.0**-4 * np.abs(x) + 2.0**-10 * scale if fmt.dtype == "fp8" else 0.5 * scale
    error = np.abs(back.astype(np.float64) - x)
    assert (error <= half * 1.0001 + 2.0**-21 * np.abs(x))[..., shown].all()
    assert np.isfinite(back[..., shown]).all()


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.quantized], ids=label)
def test_not_finite_values_mark_their_group_and_no_other(fmt: KVFormat) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((1, fmt.row_dim), dtype=np.float32)
        x[0, 5] = bad
        back = kv_cache.decode_rows(*kv_cache.encode(x, fmt), fmt)
        assert np.isnan(back[0, : fmt.group_size]).all()
        assert np.isfinite(back[0, fmt.group_size :]).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_rows_are_plain_arrays(dtype: str) -> None:
    fmt = KVFormat(dtype, 64, 64, False, True)
    x = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float16).astype(np.float32)
    data, params = kv_cache.encode(x, fmt)
    assert params.shape == (4, 0)
    if dtype == "fp16":
        np.testing.assert_array_equal(data.view(np.float16), x)
    else:
        np.testing.assert_array_equal(kv_cache.decode_rows(data, params, fmt), kv_cache.bf16_round(x))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_rounding_up_never_rounds_down(seed: int, small: bool) -> None:
    x = np.abs(np.random.default_rng(seed).standard_normal(100)).astype(np.float32) * (1e-18 if small else 1.0)
    up = kv_cache.bf16_up(x)
    assert (up >= x).all()
    assert (up <= x * (1 + 2.0**-7)).all()
    np.testing.assert_array_equal(kv_cache.bf16_round(up), up)


def test_hadamard_is_orthonormal_and_its_own_inverse() -> None:
    eye = np.eye(64, dtype=np.float32)
    h = kv_cache.hadamard(eye)
    np.testing.assert_allclose(h @ h.T, eye, atol=1e-6)
    np.testing.assert_allclose(kv_cache.hadamard(h), eye, atol=1e-6)


@pytest.mark.parametrize(("interleaved", "n"), [(True, 8), (True, 16), (False, 8), (False, 16)])
def test_rotation_is_that_of_complex_numbers(interleaved: bool, n: int) -> None:
    rng = np.random.default_rng(3)
    x, angle = rng.standard_normal((5, 2, 32)).astype(np.float32), rng.standard_normal((5, 1, n))
    out = kv_cache.rotate(x, np.cos(angle), np.sin(angle), interleaved)
    a, b = (x[..., 0 : 2 * n : 2], x[..., 1 : 2 * n : 2]) if interleaved else (x[..., :n], x[..., n : 2 * n])
    turned = (a + 1j * b) * np.exp(1j * angle)
    c, d = (out[..., 0 : 2 * n : 2], out[..., 1 : 2 * n : 2]) if interleaved else (out[..., :n], out[..., n : 2 * n])
    np.testing.assert_allclose(c + 1j * d, turned, atol=1e-5)
    np.testing.assert_array_equal(out[..., 2 * n :], x[..., 2 * n :])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("int5", 128, None, True), "k_dtype"),
        ((8, 128, None, True), "k_dtype"),
        (("int4", 128, 48, True), "group_size"),
        (("int4", 128, 256, True), "group_size"),
        (("int4", 128, True, True), "group_size"),
        (("int4", 128, 64.0, True), "group_size"),
    ],
)
def test_errors_name_the_argument(arguments: tuple[object, int, object, bool], name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        check_format(*arguments, "KVCache", is_key=True)
    assert caught.value.argument == name


def test_tables_of_the_documentation() -> None:
    """Each line ``| dtype | head_dim | group | row bytes | parameter bytes |`` of docs/kv_formats.md."""
    text = (DOCS / "kv_formats.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (bf16|fp16|fp8|int8|int4) \| (\d+) \| (\d+|–) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert len(rows) >= 12
    for dtype, dim, group, data_bytes, parameter_bytes in rows:
        fmt = KVFormat(dtype, int(dim), row_dim(int(dim)) if group == "–" else int(group), False, True)
        assert (fmt.row_bytes, 4 * fmt.groups) == (int(data_bytes), int(parameter_bytes))


@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_examples_of_the_documentation(dtype: str, is_key: bool) -> None:
    """Each line ``| K int4 | 128 | channel | byte | low bit |``."""
    text = (DOCS / "kv_formats.md").read_text(encoding="utf-8")
    name = f"{'K' if is_key else 'V'} {dtype}"
    rows = re.findall(rf"^\| {name} \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert len(rows) >= 4
    for dim, channel, byte, bit in (map(int, row) for row in rows):
        assert KVFormat(dtype, dim, dim, False, is_key).position(channel) == 8 * byte + bit
