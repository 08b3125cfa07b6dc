"""omniattn: attention kernels for every array framework and every NVIDIA GPU from Ampere on.

Importing this package imports no framework and touches no GPU. Public names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:
    from . import errors
    from .kv.blocks import BlockManager
    from .kv.cache import KVCache, PagedKVCache
    from .kv.runs import SharedLevel, SharedPrefixes, SharedRuns
    from .kv.swap import SwapSpace
    from .ops.append import append, copy_blocks, copy_recent
    from .ops.attention import attention, attention_varlen
    from .ops.attention_backward import attention_backward, attention_varlen_backward
    from .ops.calibrate_sparse import calibrate_sparse
    from .ops.choose_runs import choose_shared_runs
    from .ops.decode import decode
    from .ops.dropout import dropout_mask
    from .ops.explain import Explanation, explain
    from .ops.index_logits import index_logits
    from .ops.merge import merge_states
    from .ops.quantize import quantize_qk, quantize_v
    from .ops.score_mod import ScoreMod
    from .ops.sparse import attention_sparse
    from .ops.sparse_blocks import sparse_blocks
    from .ops.top_k import top_k
    from .ops.with_cache import attention_with_kvcache
    from .problems import (
        PRECISIONS,
        Auto,
        Fp8,
        Int4,
        Int8,
        QuantizedK,
        QuantizedQ,
        QuantizedQK,
        QuantizedV,
        Sparse,
    )
    from .problems.calibration import SparseCalibration

#: Room that each public name comes from.
_ROOMS = {
    "PRECISIONS": "problems",
    "Auto": "problems",
    "BlockManager": "kv.blocks",
    "Explanation": "ops",
    "Fp8": "problems",
    "Int4": "problems",
    "Int8": "problems",
    "KVCache": "kv.cache",
    "PagedKVCache": "kv.cache",
    "QuantizedK": "problems",
    "QuantizedQ": "problems",
    "QuantizedQK": "problems",
    "QuantizedV": "problems",
    "ScoreMod": "ops",
    "SharedLevel": "kv.runs",
    "SharedPrefixes": "kv.runs",
    "SharedRuns": "kv.runs",
    "Sparse": "problems",
    "SparseCalibration": "problems.calibration",
    "SwapSpace": "kv.swap",
    "append": "ops",
    "attention": "ops",
    "attention_backward": "ops",
    "attention_sparse": "ops",
    "attention_varlen": "ops",
    "attention_varlen_backward": "ops",
    "attention_with_kvcache": "ops",
    "calibrate_sparse": "ops",
    "choose_shared_runs": "ops",
    "copy_blocks": "ops",
    "copy_recent": "ops",
    "decode": "ops",
    "dropout_mask": "ops.dropout",
    "errors": "",
    "explain": "ops",
    "index_logits": "ops",
    "merge_states": "ops",
    "quantize_qk": "ops",
    "quantize_v": "ops",
    "sparse_blocks": "ops",
    "top_k": "ops",
}

__all__ = [
    "PRECISIONS",
    "Auto",
    "BlockManager",
    "Explanation",
    "Fp8",
    "Int4",
    "Int8",
    "KVCache",
    "PagedKVCache",
    "QuantizedK",
    "QuantizedQ",
    "QuantizedQK",
    "QuantizedV",
    "ScoreMod",
    "SharedLevel",
    "SharedPrefixes",
    "SharedRuns",
    "Sparse",
    "SparseCalibration",
    "SwapSpace",
    "__version__",
    "append",
    "attention",
    "attention_backward",
    "attention_sparse",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_with_kvcache",
    "calibrate_sparse",
    "choose_shared_runs",
    "copy_blocks",
    "copy_recent",
    "decode",
    "dropout_mask",
    "errors",
    "explain",
    "index_logits",
    "merge_states",
    "quantize_qk",
    "quantize_v",
    "sparse_blocks",
    "top_k",
]


def __getattr__(name: str) -> object:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{room}"), name) if room else import_module(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
