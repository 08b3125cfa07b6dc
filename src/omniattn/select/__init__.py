"""Problem + GPU -> registry row, for every operation. Pure: no driver, no arrays; explains itself.

``OMNIATTN_FORCE_KERNEL`` names rows that have to be used by the operations that they belong to.
"""

from .auto import preferences
from .backward import select_backward, select_backward_rows, select_dq
from .cache import (
    row_kind,
    select_append,
    select_clear,
    select_copy,
    select_decode,
    select_dequantize,
    select_merge,
)
from .candidate import Candidate, MaskInput
from .candidates import candidates, rows_of
from .choice import Selection
from .choose import Choice, choices, ranked
from .fit import needs_mods
from .masks import select_mask_align, select_masks, select_tile_kinds
from .orders import order_of_keys, order_of_queries
from .partial import combine_of, tail_row
from .quantize import (
    select_delta,
    select_fp8_quantizer,
    select_fp8_values,
    select_kv,
    select_layout,
    select_quantizer,
)

__all__ = [
    "Candidate",
    "Choice",
    "MaskInput",
    "Selection",
    "candidates",
    "choices",
    "combine_of",
    "needs_mods",
    "order_of_keys",
    "order_of_queries",
    "preferences",
    "ranked",
    "row_kind",
    "rows_of",
    "select_append",
    "select_backward",
    "select_backward_rows",
    "select_clear",
    "select_copy",
    "select_decode",
    "select_delta",
    "select_dequantize",
    "select_dq",
    "select_fp8_quantizer",
    "select_fp8_values",
    "select_kv",
    "select_layout",
    "select_mask_align",
    "select_masks",
    "select_merge",
    "select_quantizer",
    "select_tile_kinds",
    "tail_row",
]
