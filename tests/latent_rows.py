"""Rows of latent caches in 8 bits, in NumPy, by docs/kv_formats.md and by nothing of the package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def e4m3() -> Any:
    """NumPy's float8_e4m3fn."""
    return pytest.importorskip("ml_dtypes").float8_e4m3fn


def rows_656(rows: Any) -> Any:
    """Rows (n, 576) as bytes (n, 656)."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    groups = np.asarray(rows, np.float32)[:, :512].reshape(-1, 4, 128)
    scales = np.maximum(np.abs(groups).max(-1), np.float32(1e-6)) / np.float32(448)
    codes = (groups / scales[..., None]).astype(ml_dtypes.float8_e4m3fn).reshape(-1, 512)
    rest = np.asarray(rows, np.float32)[:, 512:].astype(ml_dtypes.bfloat16)
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in (codes, scales, rest)], axis=1)


def means_656(stored: Any) -> Any:
    """What bytes (n, 656) stand for in float64, (n, 576)."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = stored[:, :512].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = stored[:, 512:528].copy().view(np.float32).astype(np.float64)
    rest = stored[:, 528:].copy().view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([codes * np.repeat(scales, 128, axis=1), rest], axis=1)
