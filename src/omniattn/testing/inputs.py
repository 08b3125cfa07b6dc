"""Seeded inputs of the kinds that break attention kernels.

Every generator takes (shape, seed, dtype) and returns float32 values that are exact in `dtype`, so that each backend
starts from the same numbers. The last dimension is the channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.errors import ArgumentError
from omniattn.testing.rounding import round_to

Float32 = npt.NDArray[np.float32]
Generator = Callable[[Sequence[int], int, str], Float32]

OUTLIER_FRACTION = 1e-3
OUTLIER_VARIANCE = 100.0
BIAS_STD = 4.0
MEAN = 3.0
HUGE_STD = 24.0


def normal(shape: Sequence[int], seed: int = 0, dtype: str = "bfloat16") -> Float32:
    """N(0, 1).

    Parameters
    ----------
    shape : sequence of int
        Any, zero extents included.
    seed : int
        Same seed, same numbers.
    dtype : {"float16", "bfloat16", "float32"}
        Type whose values are returned, as float32.

    Returns
    -------
    ndarray of float32
    """
    return round_to(_gauss(np.random.default_rng(seed), shape), dtype)


def outlier(shape: Sequence[int], seed: int = 0, dtype: str = "bfloat16") -> Float32:
    """N(0, 1) in which 0.1 % of the elements have N(0, 100) added (standard deviation 10).

    Parameters as in `normal`.
    """
    rng = np.random.default_rng(seed)
    x = _gauss(rng, shape)
    # A tensor too small to draw one by chance still gets one.
    count = max(1, round(x.size * OUTLIER_FRACTION)) if x.size else 0
    at = rng.choice(x.size, size=count, replace=False) if count else np.empty(0, dtype=np.intp)
    x.reshape(-1)[at] += rng.standard_normal(count, dtype=np.float32) * np.float32(OUTLIER_VARIANCE**0.5)
    return round_to(x, dtype)


def channel_bias(shape: Sequence[int], seed: int = 0, dtype: str = "bfloat16") -> Float32:
    """N(0, 1) plus one constant for each channel, N(0, 16), as keys of real models have.

    Parameters as in `normal`.
    """
    rng = np.random.default_rng(seed)
    x = _gauss(rng, shape)
    x += rng.standard_normal(x.shape[-1:], dtype=np.float32) * np.float32(BIAS_STD)
    return round_to(x, dtype)


def mean_shift(shape: Sequence[int], seed: int = 0, dtype: str = "bfloat16") -> Float32:
    """N(3, 1): every channel has the same mean, not 0.

    Parameters as in `normal`.
    """
    return round_to(_gauss(np.random.default_rng(seed), shape) + np.float32(MEAN), dtype)


def zero_channel(shape: Sequence[int], seed: int = 0, dtype: str = "bfloat16") -> Float32:
    """N(0, 1) with one channel, drawn by the seed, exactly 0: no quantizer may divide by its range.

    Parameters as in `normal`.
    """
    rng = np.random.default_rng(seed)
    x = _gauss(rng, shape)
    if x.ndim and x.shape[-1]:
        x[..., int(rng.integers(x.shape[-1]))] = 0
    return round_to(x, dtype)


def huge_logits(shape: Sequence[int], seed: int = 0, dtype: str = "bfloat16") -> Float32:
    """N(0, 24**2): as q and k, scores of several hundred, where exp without its maximum overflows.

    Parameters as in `normal`.
    """
    return round_to(_gauss(np.random.default_rng(seed), shape) * np.float32(HUGE_STD), dtype)


GENERATORS: dict[str, Generator] = {
    "normal": normal,
    "outlier": outlier,
    "channel_bias": channel_bias,
    "mean_shift": mean_shift,
    "zero_channel": zero_channel,
    "huge_logits": huge_logits,
}


def make_qkv(
    kind: str = "normal",
    *,
    batch: int | None = 1,
    seqlen_q: int = 128,
    seqlen_k: int | None = None,
    heads_q: int = 2,
    heads_kv: int | None = None,
    head_dim: int = 64,
    layout: str = "NHD",
    seed: int = 0,
    dtype: str = "bfloat16",
) -> tuple[Float32, Float32, Float32]:
    """Query, key and value of one kind.

    Parameters
    ----------
    kind : str
        A key of `GENERATORS`. "huge_logits" concerns q and k; v is then "normal".
    batch : int or None
        None leaves the batch dimension out: the packed tensors of `attention_varlen`.
    seqlen_q, seqlen_k, heads_q, heads_kv, head_dim : int
        seqlen_k = seqlen_q and heads_kv = heads_q unless given.
    layout : {"NHD", "HND"}
        Order of the dimensions. The values at (batch, seq, head, dim) are the same in both.
    seed : int
        Same seed, same numbers; q, k and v differ from each other.
    dtype : {"float16", "bfloat16", "float32"}
        Type whose values are returned, as float32.

    Returns
    -------
    q, k, v : ndarray of float32
        C-contiguous.

    Raises
    ------
    omniattn.errors.ArgumentError
        Unknown `kind` or `layout`.
    """
    if kind not in GENERATORS:
        raise ArgumentError("kind", f"one of {', '.join(GENERATORS)}", repr(kind), function="make_qkv")
    if layout not in ("NHD", "HND"):
        raise ArgumentError("layout", "'NHD' or 'HND'", repr(layout), function="make_qkv")
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    heads_kv = heads_q if heads_kv is None else heads_kv
    tensors = []
    for index, (seqlen, heads) in enumerate(((seqlen_q, heads_q), (seqlen_k, heads_kv), (seqlen_k, heads_kv))):
        generate = normal if kind == "huge_logits" and index == 2 else GENERATORS[kind]
        shape = (seqlen, heads, head_dim) if batch is None else (batch, seqlen, heads, head_dim)
        # Three streams of one seed; seed + index would make k of one seed equal q of the next.
        tensor = generate(shape, 3 * seed + index, dtype)
        tensors.append(tensor if layout == "NHD" else np.ascontiguousarray(tensor.swapaxes(-3, -2)))
    q, k, v = tensors
    return q, k, v


def _gauss(rng: np.random.Generator, shape: Sequence[int]) -> npt.NDArray[Any]:
    return np.asarray(rng.standard_normal(tuple(shape), dtype=np.float32))
