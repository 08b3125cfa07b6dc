"""Arrays of the calls under compute-sanitizer: CuPy's, moved by copies alone."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np


def to_gpu(x: Any, dtype: Any = np.float16) -> Any:
    return cupy.asarray(np.ascontiguousarray(x, dtype=dtype))


def poisoned(shape: tuple[int, ...]) -> Any:
    return to_gpu(np.full(shape, np.nan))


def check(o: Any, lse: Any = None) -> None:
    """Everything has been written; values are compared elsewhere."""
    assert not np.isnan(cupy.asnumpy(o)).any()
    assert lse is None or not np.isnan(cupy.asnumpy(lse)).any()
