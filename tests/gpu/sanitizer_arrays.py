"""Arrays of the calls under compute-sanitizer: CuPy's, moved by copies alone."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from omniattn.testing.frameworks import BFloat16Array


def to_gpu(x: Any, dtype: Any = np.float16) -> Any:
    return cupy.asarray(np.ascontiguousarray(x, dtype=dtype))


def poisoned(shape: tuple[int, ...]) -> Any:
    return to_gpu(np.full(shape, np.nan))


def in_bfloat16(x: Any) -> BFloat16Array:
    """Rounded towards zero; NaN stays one."""
    return BFloat16Array(to_gpu(np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16, np.uint16))


def check(o: Any, lse: Any = None) -> None:
    """Everything has been written; values are compared elsewhere."""
    if isinstance(o, BFloat16Array):
        assert ((cupy.asnumpy(o.array) & 0x7FFF) <= 0x7F80).all()
    else:
        assert not np.isnan(cupy.asnumpy(o)).any()
    if isinstance(o, BFloat16Array):  # whose library is not CuPy
        lse = cupy.from_dlpack(lse)
    assert lse is None or not np.isnan(cupy.asnumpy(lse)).any()
