"""Inputs, poisoned outputs and bounds that the GPU numerics tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import omniattn as oa
from omniattn import reference, testing

TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: Absolute error of the LSE: fp32 sums of a few hundred terms, ex2.approx and lg2.approx.
LSE_ATOL = 2e-5
#: Relative error of the scores, and so of a large LSE: the tensor core truncates its fp32 accumulator at each of up to
#: 16 steps along head_dim, up to 2^-23 each and all in one direction (seen on an H200 at head_dim 256: 1.7e-6).
LSE_RTOL = 16 * 2.0**-23 + 5e-7


def to_gpu(x: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to("cuda", TORCH_DTYPES[dtype])


def poisoned(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """An output in which whatever the kernel does not write fails every comparison."""
    return torch.full(shape, float("nan"), device="cuda", dtype=TORCH_DTYPES[dtype])


def to_numpy(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return x.float().cpu().numpy()


def check_lse(lse: np.ndarray[Any, Any], ref: np.ndarray[Any, Any], label: str) -> None:
    """-inf, +inf and NaN at the same places, the rest within the bounds above."""
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(ref), err_msg=label)
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(ref), err_msg=label)
    finite = np.isfinite(ref)
    np.testing.assert_allclose(lse[finite], ref[finite], rtol=LSE_RTOL, atol=LSE_ATOL, err_msg=label)


def run_dense(
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    dtype: str,
    label: str = "",
    *,
    gpu: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run on the GPU and compare with the NumPy reference.

    ``options`` go to both as NumPy values; ``gpu`` overrides those that need another form there (mask, sinks).
    """
    given = {name: torch.from_numpy(x).cuda() if isinstance(x, np.ndarray) else x for name, x in options.items()}
    given |= gpu or {}
    out = poisoned((*q.shape[:-1], v.shape[-1]), dtype)
    o, lse = oa.attention(to_gpu(q, dtype), to_gpu(k, dtype), to_gpu(v, dtype), out=out, return_lse=True, **given)
    assert o is out
    options.pop("deterministic", None)  # a promise about bits, which the reference has no say in
    ref_o, ref_lse = reference.attention(q, k, v, **options)
    naive, _ = testing.same_dtype_naive(q, k, v, dtype=dtype, **options)
    testing.assert_close(to_numpy(o), ref_o, naive=naive, dtype=dtype, atol=1e-6, label=label)
    check_lse(lse.cpu().numpy(), ref_lse, label)
