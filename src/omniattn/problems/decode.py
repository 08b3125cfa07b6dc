"""One call of ``decode``."""

from __future__ import annotations

from dataclasses import dataclass

from ..kv.layout import CacheLayout
from .outputs import Output


@dataclass(frozen=True)
class DecodeProblem:
    """One call of ``decode`` after validation; pointers are not in it.

    Attributes
    ----------
    dtype : str
        Element type of q.
    cache : CacheLayout
    batch, q_len, num_q_heads, num_kv_heads, head_dim : int
    capacity : int
        Tokens that a sequence can have at most.
    block_size, num_blocks, table_columns : int
        Of the cache; a contiguous one has a block for each sequence and no table (0 columns).
    window_left : int
        -1: unlimited.
    softmax_scale, softcap : float
    sinks : str
        ``"none"``, ``"float32"`` or ``"io"``.
    deterministic : bool
    shared_prefix : int
        First tokens that all sequences have in the same blocks, read once; 0: none.
    lse : bool
        The caller wants the LSE.
    q_strides, o_strides : tuple of int
        Element strides (batch, seq, head, ...).
    """

    dtype: str
    cache: CacheLayout
    batch: int
    q_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int
    block_size: int
    num_blocks: int
    table_columns: int
    window_left: int
    softmax_scale: float
    softcap: float
    sinks: str
    deterministic: bool
    shared_prefix: int = 0
    lse: bool = False
    q_strides: tuple[int, ...] = ()
    o_strides: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call returns."""
        o = Output("o", (self.batch, self.q_len, self.num_q_heads, self.head_dim), self.dtype)
        lse = Output("lse", (self.batch, self.num_q_heads, self.q_len), "float32")
        return (o, lse) if self.lse else (o,)
