"""The public functions, one file each: signature, docstring, call."""

from .append import append, copy_blocks, copy_recent
from .attention import attention, attention_varlen
from .attention_backward import attention_backward, attention_varlen_backward
from .calibrate_sparse import calibrate_sparse
from .choose_runs import choose_shared_runs
from .decode import decode
from .explain import Explanation, explain
from .index_logits import index_logits
from .merge import merge_states
from .quantize import quantize_qk, quantize_v
from .score_mod import ScoreMod
from .sparse import attention_sparse
from .sparse_blocks import sparse_blocks
from .top_k import top_k
from .with_cache import attention_with_kvcache

__all__ = [
    "Explanation",
    "ScoreMod",
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
    "explain",
    "index_logits",
    "merge_states",
    "quantize_qk",
    "quantize_v",
    "sparse_blocks",
    "top_k",
]
