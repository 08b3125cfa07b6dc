"""PyTorch's own attention interfaces on this package's kernels.

``sdpa`` and ``use_sdpa`` take the place of ``torch.nn.functional.scaled_dot_product_attention``, ``flex_attention``
that of torch's function of this name. Importing this module
also registers the flash-attention implementation "omniattn" with torch 2.11 and newer; it does nothing until
``torch.nn.attention.activate_flash_attention_impl("omniattn")`` is called.
"""

from __future__ import annotations

# An exported program needs the operators, and these the functions.
from .. import ops as ops
from ..frameworks.torch import tracing as tracing
from .flash import register_flash_impl
from .flex import flex_attention, trace_score_mod
from .functional import fallback_reason, sdpa, use_sdpa
from .operators import HAS_IMPLEMENTATIONS

__all__ = ["fallback_reason", "flex_attention", "register_flash_impl", "sdpa", "trace_score_mod", "use_sdpa"]

if HAS_IMPLEMENTATIONS:
    register_flash_impl()
