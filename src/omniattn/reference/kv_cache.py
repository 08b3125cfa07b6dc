"""KV caches in NumPy: rotary embedding, quantization, packing; what the kernels are held to bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.arrays.host import bfloat16_bits
from omniattn.kv.formats import LATENT_656_CODES, LATENT_656_GROUP, KVFormat
from omniattn.reference.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3

Array = npt.NDArray[Any]
_F = np.float32

#: Smallest scale: what it rounds away is below 2^-61, and its inverse leaves room in fp32.
MIN_SCALE = _F(2.0**-60)
#: Smallest scale of FBGEMM's layout: the smallest fp16 number.
MIN_FP16 = _F(2.0**-24)
#: Smallest scale of `LATENT_656`, fp32's smallest normal number.
MIN_LATENT_SCALE = _F(2.0**-126)
#: Codes of the integer formats.
CODES: dict[str, tuple[int, int]] = {"int8": (-128, 127), "int4": (-8, 7)}


def bf16_round(x: Array) -> Array:
    """Nearest bfloat16, ties to even, as float32."""
    return (bfloat16_bits(np.asarray(x, dtype=_F)).astype(np.uint32) << np.uint32(16)).view(_F)


def bf16_up(x: Array) -> Array:
    """Smallest bfloat16 that is not below a positive ``x``, as float32."""
    bits = np.ascontiguousarray(x, dtype=_F).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(_F)


def fp16_down(x: Array) -> Array:
    """Largest fp16 number that is not above ``x``, -infinity below all, as float32."""
    with np.errstate(over="ignore"):
        near = np.asarray(x, dtype=_F).astype(np.float16)
        below = np.nextafter(near, np.float16(-np.inf))
    return np.where(near.astype(_F) > x, below, near).astype(_F)


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotary embedding (RoFormer, Su et al. 2021, section 3.2) of the first 2 * cos.shape[-1] channels, in float32.

    Pairs are (2i, 2i + 1) when ``interleaved``, else (i, i + n) with n = cos.shape[-1]. Products are rounded before
    their sum.
    """
    x = np.asarray(x, dtype=_F)
    out = x.copy()
    n = cos.shape[-1]
    first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(0, n), slice(n, 2 * n))
    a, b = x[..., first], x[..., second]
    c, s = np.asarray(cos, dtype=_F), np.asarray(sin, dtype=_F)
    out[..., first] = a * c - b * s
    out[..., second] = b * c + a * s
    return out


def hadamard(x: Array) -> Array:
    """Product with the orthonormal Hadamard matrix along the last dimension, a power of two, in float32."""
    x = np.asarray(x, dtype=_F)
    dim, step = x.shape[-1], 1
    while step < dim:
        pairs = x.reshape(*x.shape[:-1], dim // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        step *= 2
    return x * _F(dim**-0.5)


def pad_row(x: Array, fmt: KVFormat) -> Array:
    """(..., head_dim) to (..., row_dim) with zeros."""
    missing = fmt.row_dim - x.shape[-1]
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def transform_key(
    k: Array, fmt: KVFormat, mean: Array | None, channel_scale: Array | None, use_hadamard: bool
) -> Array:
    """What a quantized cache stores in place of K: (k - mean) / channel_scale, rotated. (..., heads, head_dim) in."""
    k = np.asarray(k, dtype=_F)
    if mean is not None:
        k = k - np.asarray(mean, dtype=_F)
    if channel_scale is not None:
        k = k / np.asarray(channel_scale, dtype=_F)
    k = pad_row(k, fmt)
    return hadamard(k) if use_hadamard else k


def restore_key(k: Array, fmt: KVFormat, mean: Array | None, channel_scale: Array | None, use_hadamard: bool) -> Array:
    """The inverse of `transform_key`: (..., heads, row_dim) to (..., heads, head_dim)."""
    k = hadamard(k) if use_hadamard else k
    k = k[..., : fmt.head_dim]
    if channel_scale is not None:
        k = k * np.asarray(channel_scale, dtype=_F)
    return k if mean is None else k + np.asarray(mean, dtype=_F)


def quantize_row(x: Array, fmt: KVFormat, valid_dim: int | None = None) -> tuple[Array, Array, Array]:
    """Codes, scale and zero of rows (..., row_dim).

    ::

        scale = bf16_up((max - zero) / hi or (zero - min) / -lo, whichever is more);   zero = bf16(min - lo (max - min) / (hi - lo))
        code = clip(round((x - zero) / scale), lo, hi)

    Without zero point, and for fp8, zero = 0 and scale = bf16_up(max|x| / hi), hi = 448 for fp8. A group with NaN or
    infinity gets the scale NaN and codes of 0. Channels from ``valid_dim`` on are padding and count in no group.

    FBGEMM's layout, nibble = code + 8::

        shift = fp16_down(min);   scale = fp16_up(max((max - shift) / 15, 2^-24));   nibble = clip(round((x - shift) / scale), 0, 15)

    ``zero`` is the shift. A group whose shift or scale is beyond fp16 is marked as one with infinity is (nibbles of 0).

    Returns
    -------
    codes : int16 (..., row_dim), for fp8 the byte
    scale, zero : float32 (..., groups), bfloat16 numbers; FBGEMM's layout: fp16 numbers
    """  # noqa: E501
    x = np.asarray(x, dtype=_F)
    lead = x.shape[:-1]
    grouped = x.reshape(*lead, fmt.groups, fmt.group_size)
    valid = np.arange(fmt.row_dim).reshape(fmt.groups, fmt.group_size) < (
        fmt.row_dim if valid_dim is None else valid_dim
    )
    finite: Array = np.asarray(np.isfinite(grouped).all(axis=-1))
    grouped = np.where(finite[..., None], grouped, _F(0))
    if fmt.layout == "fbgemm":
        return _quantize_fbgemm(grouped, finite, fmt)
    amax = np.abs(grouped).max(axis=-1)
    with np.errstate(over="ignore"):
        if fmt.zero_point:
            lo, hi = CODES[fmt.dtype]
            # Padding repeats the first channel of its group, or is 0 where the whole group is padding.
            shown = np.where(valid, grouped, grouped[..., :1])
            low, high = shown.min(axis=-1), shown.max(axis=-1)
            steps = _F(hi - lo)
            zero = bf16_round(low - _F(lo) * (high / steps - low / steps))
            scale = np.maximum((high - zero) / _F(hi), (zero - low) / _F(-lo))
        else:
            zero = np.zeros_like(amax)
            scale = amax / _F(E4M3_MAX if fmt.dtype == "fp8" else CODES[fmt.dtype][1])
    scale = bf16_up(np.maximum(scale, MIN_SCALE))
    scaled = (grouped - zero[..., None]) / scale[..., None]
    if fmt.dtype == "fp8":
        codes = encode_e4m3(scaled).astype(np.int16)
    else:
        lo, hi = CODES[fmt.dtype]
        codes = np.clip(np.rint(scaled), lo, hi).astype(np.int16)
    codes = np.where(finite[..., None], codes, np.int16(0)).reshape(*lead, fmt.row_dim)
    zero = np.where(finite, zero, _F(0))
    return codes, np.where(finite, scale, _F(np.nan)), zero


def _quantize_fbgemm(grouped: Array, finite: Array, fmt: KVFormat) -> tuple[Array, Array, Array]:
    """`quantize_row` of rows without padding, (..., groups, group_size); not finite groups are 0."""
    # The sum makes -0 +0: which of the two a minimum is, is nobody's business.
    shift = fp16_down(grouped.min(axis=-1) + _F(0))
    scale = -fp16_down(-np.maximum((grouped.max(axis=-1) - shift) / _F(15), MIN_FP16))
    finite = finite & np.isfinite(shift) & np.isfinite(scale)
    with np.errstate(invalid="ignore"):
        nibbles = np.clip(np.rint((grouped - shift[..., None]) / scale[..., None]), _F(0), _F(15))
    nibbles = np.where(finite[..., None], nibbles, _F(0)).astype(np.int16)
    codes = (nibbles + CODES["int4"][0]).astype(np.int16).reshape(*grouped.shape[:-2], fmt.row_dim)
    return codes, np.where(finite, scale, _F(np.nan)), np.where(finite, shift, _F(0))


@functools.lru_cache(maxsize=64)
def _bit_positions(fmt: KVFormat) -> Array:
    return np.array([fmt.position(channel) for channel in range(fmt.row_dim)])


def pack_row(codes: Array, fmt: KVFormat) -> npt.NDArray[np.uint8]:
    """Bytes of rows of codes, (..., row_dim) to (..., row_bytes). Integers are stored plus half their range."""
    at = _bit_positions(fmt)
    stored = codes.astype(np.int32) - (CODES[fmt.dtype][0] if fmt.dtype in CODES else 0)
    out = np.zeros((*codes.shape[:-1], fmt.row_bytes), dtype=np.uint8)
    for shift in range(0, 8, fmt.bits):
        here = np.flatnonzero(at % 8 == shift)
        out[..., at[here] // 8] |= (stored[..., here] << shift).astype(np.uint8)
    return out


def unpack_row(data: Array, fmt: KVFormat) -> Array:
    """Codes of rows of bytes, the inverse of `pack_row`."""
    at = _bit_positions(fmt)
    stored = (data[..., at // 8].astype(np.int32) >> (at % 8)) & ((1 << fmt.bits) - 1)
    return np.asarray((stored + (CODES[fmt.dtype][0] if fmt.dtype in CODES else 0)).astype(np.int16))


def row_scale(x: Array, fmt: KVFormat) -> Array:
    """The scale of each row (..., row_dim) of an array of the caller, NaN where a value is not finite."""
    amax = np.abs(np.asarray(x, dtype=_F)).max(axis=-1)
    scale = np.maximum(amax / _F(E4M3_MAX if fmt.dtype == "fp8" else CODES[fmt.dtype][1]), MIN_SCALE)
    return np.where(np.isfinite(amax), scale, _F(np.nan))


def encode_in_order(x: Array, scale: Array, fmt: KVFormat) -> npt.NDArray[np.uint8]:
    """Bytes of rows (..., row_dim) by their scales (...): codes of x / scale, 0 where the scale is NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.asarray(x, dtype=_F) / scale[..., None]
    if fmt.dtype == "fp8":
        codes = encode_e4m3(np.clip(scaled, _F(-E4M3_MAX), _F(E4M3_MAX)))
    else:
        kept = np.where(np.isnan(scaled), _F(0), np.clip(np.rint(scaled), *CODES[fmt.dtype]))
        codes = kept.astype(np.int8).view(np.uint8)
    return np.where(np.isnan(scale)[..., None], np.uint8(0), codes)


def decode_in_order(data: Array, scale: Array, fmt: KVFormat) -> Array:
    """Rows of bytes as float32 by their scales (...)."""
    codes = decode_e4m3(data) if fmt.dtype == "fp8" else np.ascontiguousarray(data).view(np.int8).astype(_F)
    return np.asarray(codes * scale[..., None])


def decode_656(data: Array) -> Array:
    """Latent rows (..., 656) of bytes as float32 (..., 576): `LATENT_656`."""
    data = np.ascontiguousarray(data)
    scales_end = LATENT_656_CODES + 4 * (LATENT_656_CODES // LATENT_656_GROUP)
    scales = data[..., LATENT_656_CODES:scales_end].copy().view("<f4")
    codes = decode_e4m3(data[..., :LATENT_656_CODES]) * np.repeat(scales, LATENT_656_GROUP, axis=-1)
    rest = data[..., scales_end:].copy().view("<u2").astype(np.uint32) << np.uint32(16)
    return np.concatenate([codes, rest.view(_F)], axis=-1)


def encode_656(x: Array) -> npt.NDArray[np.uint8]:
    """Latent rows (..., 576) as bytes (..., 656): `LATENT_656`.

    ::

        scale = max(max|x| / 448, 2^-126) of each 128 channels;   code = e4m3(x / scale)

    A group with NaN or infinity gets the scale NaN and codes of 0.
    """
    x = np.asarray(x)
    latent = x[..., :LATENT_656_CODES].astype(_F)
    groups = latent.reshape(*x.shape[:-1], LATENT_656_CODES // LATENT_656_GROUP, LATENT_656_GROUP)
    amax = np.abs(groups).max(axis=-1)
    scale = np.where(np.isfinite(amax), np.maximum(amax / _F(E4M3_MAX), MIN_LATENT_SCALE), _F(np.nan))
    with np.errstate(invalid="ignore"):
        scaled = groups / scale[..., None]
    codes = np.where(np.isnan(scale)[..., None], np.uint8(0), encode_e4m3(scaled)).reshape(latent.shape)
    rest = bfloat16_bits(x[..., LATENT_656_CODES:]).astype("<u2")
    parts = (codes, scale.astype("<f4"), rest)
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=-1)


def encode(
    x: Array, fmt: KVFormat, valid_dim: int | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """Rows (..., row_dim) in float32 as (data plane, parameter plane)."""
    if not fmt.quantized:
        with np.errstate(over="ignore"):
            bits = bfloat16_bits(x) if fmt.dtype == "bf16" else np.asarray(x).astype(np.float16).view(np.uint16)
        data = np.ascontiguousarray(bits).view(np.uint8)
        return data, np.zeros((*x.shape[:-1], 0), dtype=np.uint32)
    codes, scale, zero = quantize_row(x, fmt, valid_dim)
    if fmt.layout == "fbgemm":
        data = pack_row(codes, fmt)
        pairs = np.stack([scale, zero], axis=-1).astype("<f2")
        # One NaN of the many, as the kernels write it.
        bits = np.where(np.isnan(pairs), np.uint16(0x7E00), pairs.view("<u2"))
        data[..., : 4 * fmt.groups] = bits.reshape(*scale.shape[:-1], 2 * fmt.groups).view(np.uint8)
        return data, np.zeros((*x.shape[:-1], 0), dtype=np.uint32)
    params = bfloat16_bits(scale).astype(np.uint32) | bfloat16_bits(zero).astype(np.uint32) << np.uint32(16)
    return pack_row(codes, fmt), params


def decode_rows(data: Array, params: Array, fmt: KVFormat) -> Array:
    """Rows of a cache as float32, (..., row_dim): the inverse of `encode` up to its rounding."""
    if not fmt.quantized:
        bits = np.ascontiguousarray(data).view(np.uint16)
        return (
            (bits.astype(np.uint32) << np.uint32(16)).view(_F)
            if fmt.dtype == "bf16"
            else bits.view(np.float16).astype(_F)
        )
    codes = unpack_row(data, fmt)
    if fmt.layout == "fbgemm":
        pairs = np.ascontiguousarray(data[..., : 4 * fmt.groups]).view("<f2").astype(_F)
        nibbles = (codes - CODES["int4"][0]).astype(_F).reshape(*codes.shape[:-1], fmt.groups, fmt.group_size)
        return (nibbles * pairs[..., 0::2, None] + pairs[..., 1::2, None]).reshape(codes.shape)
    values = decode_e4m3(codes) if fmt.dtype == "fp8" else codes.astype(_F)
    scale = (params << np.uint32(16)).view(_F)
    zero = (params & np.uint32(0xFFFF0000)).view(_F)
    grouped = values.reshape(*values.shape[:-1], fmt.groups, fmt.group_size)
    return (grouped * scale[..., None] + zero[..., None]).reshape(values.shape)
