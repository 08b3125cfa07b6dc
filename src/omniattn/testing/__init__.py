"""Tools to test attention with: seeded inputs, 16-bit rounding, a baseline, a comparison that NaN cannot pass.

What ``omniattn verify`` and the GPU tests run stands in modules that are imported by name:

``cases``, ``cache_cases``, ``mask_cases``, ``align_cases``, ``quantizer_cases``
    Calls of every operation: facts, inputs, reference, tolerance.
``expected``
    What must come out of attention, merging and quantization, and how far from it a result is.
``rows``
    A row of the registry through its cases, forced.
``ahead``
    References and binaries made in other processes before they are asked for.
``soak``
    Random problems of every operation beside float64: ``omniattn verify --soak``.
``frameworks``
    NumPy, torch, CuPy and JAX behind the few operations that cases need.
"""

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
