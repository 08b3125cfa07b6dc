"""JAX's own attention interface on this package's kernels.

``dot_product_attention`` takes the place of ``jax.nn.dot_product_attention``. Importing this module also makes pytrees
of `omniattn.KVCache`, `omniattn.PagedKVCache` and of quantized operands, which are then arguments and results of
compiled functions. `omniattn.attention` and the other functions need no import: they know JAX's tracers by themselves.
"""

from __future__ import annotations

from ..frameworks.jax import caches as caches
from .functional import dot_product_attention

__all__ = ["dot_product_attention"]
