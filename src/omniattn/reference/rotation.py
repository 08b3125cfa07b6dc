"""Random signs and a Hadamard transform over head_dim, as the quantizers apply them to rows of Q and K in fp32.

    R x = H D x / sqrt(n),   R.T R = 1

D: the sign of each channel. H: the Hadamard matrix of n channels, for each block of n. Formats: docs/quantization.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_MASK = 0xFFFFFFFF


def negative_channels(channels: int, seed: int) -> npt.NDArray[np.bool_]:
    """Which channels change their sign: a 32-bit hash of channel and seed is odd."""
    h = (np.arange(channels, dtype=np.uint64) + (seed * 0x9E3779B9 & _MASK)) & _MASK
    h = (h ^ h >> np.uint64(16)) * 0x85EBCA6B & _MASK
    h = (h ^ h >> np.uint64(13)) * 0xC2B2AE35 & _MASK
    h ^= h >> np.uint64(16)
    return np.asarray(h & 1, dtype=np.bool_)


def _strides(block: int) -> list[int]:
    """Distances of sums and differences in their order: 1, 2, 4, block / 4, block / 2, 8, ..., block / 8."""
    ascending = [1 << bit for bit in range(block.bit_length() - 1)]
    return [*ascending[:3], *ascending[3:][-2:], *ascending[3:-2]]


def _mix(rows: Array, block: int) -> Array:
    """Orthonormal Hadamard transform of each ``block`` channels, in fp32."""
    x = rows
    for stride in _strides(block):
        pairs = x.reshape(*rows.shape[:-1], rows.shape[-1] // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(rows.shape)
    return np.asarray(x * np.float32(block**-0.5))


def rotate(rows: Array, block: int, seed: int) -> Array:
    """R x of rows, (..., channels) in fp32; ``block``, a power of two, divides the number of channels."""
    negative = negative_channels(rows.shape[-1], seed)
    return _mix(np.where(negative, -rows, rows), block)


def rotate_back(rows: Array, block: int, seed: int) -> Array:
    """The inverse of `rotate`, up to rounding."""
    x = _mix(rows, block)
    return np.where(negative_channels(rows.shape[-1], seed), -x, x)
