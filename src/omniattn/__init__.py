"""omniattn: attention kernels for every array framework and every NVIDIA GPU from Ampere on.

Importing this package imports no framework and touches no GPU.
"""

from . import errors
from .append import append, copy_blocks, copy_recent
from .attention import attention, attention_varlen
from .blocks import BlockManager
from .cache import KVCache, PagedKVCache
from .decode import decode
from .explain import Explanation, explain
from .merge import merge_states
from .precision import Int4, Int8
from .problem import PRECISIONS
from .quantize import quantize_qk, quantize_v
from .quantized import QuantizedK, QuantizedQ, QuantizedQK, QuantizedV
from .version import __version__

__all__ = [
    "PRECISIONS",
    "BlockManager",
    "Explanation",
    "Int4",
    "Int8",
    "KVCache",
    "PagedKVCache",
    "QuantizedK",
    "QuantizedQ",
    "QuantizedQK",
    "QuantizedV",
    "__version__",
    "append",
    "attention",
    "attention_varlen",
    "copy_blocks",
    "copy_recent",
    "decode",
    "errors",
    "explain",
    "merge_states",
    "quantize_qk",
    "quantize_v",
]
