"""The public functions, one file each: signature, docstring, call."""

from .append import append, copy_blocks, copy_recent
from .attention import attention, attention_varlen
from .decode import decode
from .explain import Explanation, explain
from .merge import merge_states
from .quantize import quantize_qk, quantize_v
from .score_mod import ScoreMod

__all__ = [
    "Explanation",
    "ScoreMod",
    "append",
    "attention",
    "attention_varlen",
    "copy_blocks",
    "copy_recent",
    "decode",
    "explain",
    "merge_states",
    "quantize_qk",
    "quantize_v",
]
