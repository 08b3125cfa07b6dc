"""What a plain framework would compute in a 16-bit type: the yardstick for a kernel's rounding error."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.reference import attention
from omniattn.testing.rounding import check_dtype, round_to


def same_dtype_naive(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, *, dtype: str = "bfloat16", **options: Any
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Attention in which everything that a framework stores between two operations is rounded to `dtype`.

    q k^T (float32 sums) is rounded; so are the scores after scale, softcap and mask; the softmax runs in float32
    and its normalized probabilities are rounded; P V has float32 sums and its result is rounded.

    Parameters
    ----------
    q, k, v : array_like, floating
        As in `omniattn.reference.attention`; rounded to `dtype` first.
    dtype : {"float16", "bfloat16", "float32"}
        The framework's type.
    **options
        layout, causal, window, softmax_scale, softcap, mask, sinks of `omniattn.reference.attention`. Others raise
        TypeError.

    Returns
    -------
    o : ndarray of float32
        Representable in `dtype`.
    lse : ndarray of float32
        (batch, heads_q, seqlen_q), of the rounded scores.

    Notes
    -----
    A kernel in the same type keeps more between its steps, so FlashAttention (Dao, 2023) and this package
    test max|o - ref| <= 2 max|same_dtype_naive - ref| + rounding; `compare` applies that bound.
    """
    check_dtype(dtype, "same_dtype_naive")
    if "compute_dtype" in options:
        raise TypeError("same_dtype_naive() computes in float32; compute_dtype is not an option")
    rounder = functools.partial(round_to, dtype=dtype)
    o, lse = attention(rounder(q), rounder(k), rounder(v), _round_to=rounder, **options)
    return round_to(o, dtype), lse
