"""Tools to test attention with: seeded inputs, 16-bit rounding, a baseline, a comparison that NaN cannot pass."""

from omniattn.testing.compare import Report, assert_close, compare
from omniattn.testing.inputs import (
    GENERATORS,
    channel_bias,
    huge_logits,
    make_qkv,
    mean_shift,
    normal,
    outlier,
    zero_channel,
)
from omniattn.testing.naive import same_dtype_naive
from omniattn.testing.rounding import round_to, rounding_bound

__all__ = [
    "GENERATORS",
    "Report",
    "assert_close",
    "channel_bias",
    "compare",
    "huge_logits",
    "make_qkv",
    "mean_shift",
    "normal",
    "outlier",
    "round_to",
    "rounding_bound",
    "same_dtype_naive",
    "zero_channel",
]
