"""Quantized operands of attention: arrays of the caller's framework and the facts about them.

``attention(qk.q, qk.k, v)`` takes them in the places of q, k and v; ``omniattn.checks.operands`` says what has to fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .quantize import QuantizeProblem


@dataclass(frozen=True)
class QuantizedQK:
    """Q and K as integers or e4m3 with their scales; arrays of the caller's framework. Formats: docs/quantization.md.

    Attributes
    ----------
    q, k : QuantizedQ, QuantizedK
        One of them each, for `omniattn.attention` and `omniattn.attention_varlen`.
    q_int, k_int : array, (batch, heads, rows, head_dim_pad) int8; int4 for "sm80": (..., head_dim_pad / 2) uint8;
        "float8_e4m3": uint8 bytes.
        Heads first whatever the layout of the input; (heads, rows, ...) for packed sequences.
    q_scale, k_scale : array, float32
        Scales of the groups.
    row_bias : array, (batch, num_q_heads, seqlen_q), float32, or None ("float8_e4m3" without smooth_k or with_bias)
        NaN for a query that holds NaN or infinity. Elsewhere q . k_mean (not times softmax_scale) with ``with_bias``,
        else 0.
    k_mean : array, (batch, num_kv_heads, head_dim_pad), float32, or None
        What smooth_k took away.
    q_mean : array, (batch, num_q_heads, blocks of 128, head_dim_pad), float32, or None
        What smooth_q took away.
    delta_s : array, (batch, num_q_heads, blocks of 128, keys), float32, or None
        q_mean . (k - k_mean), which smooth_q takes from the scores.
    cu_seqlens_q, cu_seqlens_k : array or None
        Of packed sequences: copies of what was given, clamped to the tensors and never decreasing.
    problem : QuantizeProblem
        Element type, granularity, grouping, what was smoothed, extents.
    layout : str
        Of the arrays that were quantized.
    """

    q_int: Any
    k_int: Any
    q_scale: Any
    k_scale: Any
    row_bias: Any
    k_mean: Any
    q_mean: Any
    delta_s: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    problem: QuantizeProblem
    layout: str

    # New ones at every use: an object that two refer to, and that refers to them, would be freed by the garbage
    # collector only, and its GPU memory with it.
    @property
    def q(self) -> QuantizedQ:
        """Q, as `omniattn.attention` takes it."""
        return QuantizedQ(self)

    @property
    def k(self) -> QuantizedK:
        """K, as `omniattn.attention` takes it."""
        return QuantizedK(self)

    @property
    def dtype(self) -> str:
        """``"int8"``, ``"int4"`` or ``"float8_e4m3"``."""
        return self.problem.qk_dtype

    @property
    def granularity(self) -> str:
        """Rows that share a scale."""
        return self.problem.granularity

    @property
    def grouping(self) -> str:
        """``"sm90"`` or ``"sm80"``."""
        return self.problem.grouping

    @property
    def with_bias(self) -> bool:
        """Whether row_bias holds q . k_mean."""
        return self.problem.row_bias == "full"


@dataclass(frozen=True, eq=False)
class QuantizedQ:
    """Q of a `QuantizedQK`: what `omniattn.attention` takes in q's place.

    Attributes
    ----------
    pair : QuantizedQK
        Whose Q it is.
    """

    pair: QuantizedQK


@dataclass(frozen=True, eq=False)
class QuantizedK:
    """K of a `QuantizedQK`: what `omniattn.attention` takes in k's place.

    Attributes
    ----------
    pair : QuantizedQK
        Whose K it is.
    """

    pair: QuantizedQK


@dataclass(frozen=True)
class QuantizedV:
    """V in 8 or 16 bits with a scale for each channel; arrays of the caller's framework.

    Attributes
    ----------
    v : array
        "float8_e4m3": uint8 bytes, (batch, num_kv_heads, head_dim_pad, keys rounded up to 128), keys permuted within
        16. "float16": (batch, num_kv_heads, seqlen_k, head_dim_pad).
    v_scale, v_mean : array, (batch, num_kv_heads, head_dim_pad), float32
        Of each channel; means are 0 without smooth_v, and with it no plain means of v (`quantize_v`).
    cu_seqlens_k : array or None
        As in `QuantizedQK`.
    problem : QuantizeProblem
    layout : str
    """

    v: Any
    v_scale: Any
    v_mean: Any
    cu_seqlens_k: Any
    problem: QuantizeProblem
    layout: str

    @property
    def dtype(self) -> str:
        """``"float8_e4m3"`` or ``"float16"``."""
        return self.problem.v_dtype


#: What `omniattn.attention` recognizes.
OPERANDS = (QuantizedQ, QuantizedK, QuantizedV, QuantizedQK)
