"""Marks of tests that need more than the oldest torch this package supports; tests/skips.py knows their reasons."""

from __future__ import annotations

import pytest
import torch

VERSION = tuple(int(x) for x in torch.__version__.split(".")[:2])

needs_flash_impls = pytest.mark.skipif(
    VERSION < (2, 11), reason="torch before 2.11 has no flash implementations to activate"
)
needs_compiled_quantizers = pytest.mark.skipif(
    VERSION < (2, 8), reason="torch before 2.8 compiles no quantizers: test_quantizers_of_older_torch"
)
