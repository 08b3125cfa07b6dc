"""Calls of ``index_logits`` and ``top_k``."""

from __future__ import annotations

from dataclasses import dataclass

from ..registry.indexer import INDEX_HEADS
from .outputs import Output


@dataclass(frozen=True)
class IndexLogitsProblem:
    """One call of ``index_logits`` after validation; pointers are not in it.

    Attributes
    ----------
    sequences, queries, num_heads : int
        Of q; the rows of one sequence with ranges of keys count as one sequence.
    max_keys : int
        Columns of the logits.
    block_size, num_blocks : int
        Of the cache; num_blocks 0: the keys lie one behind the other.
    table_stride : int
        Elements between the rows of the block table.
    q_strides : (int, int, int)
        Bytes between sequences, queries, heads.
    k_strides, scale_strides : (int, int)
        Bytes between blocks and keys; 0 where there is one of them.
    scale_offset : int
        Bytes from a block's first key to its first scale, where both are in one array; -1: they are not.
    weights_stride, logits_stride : int
        Elements between rows.
    ranges : (bool, bool, bool)
        Whether there are seq_lens, k_start, k_end.
    """

    sequences: int
    queries: int
    num_heads: int
    max_keys: int
    block_size: int
    num_blocks: int
    table_stride: int
    q_strides: tuple[int, int, int]
    k_strides: tuple[int, int]
    scale_strides: tuple[int, int]
    scale_offset: int
    weights_stride: int
    logits_stride: int
    ranges: tuple[bool, bool, bool]

    @property
    def rows(self) -> int:
        """Rows of the logits."""
        return self.sequences * self.queries

    @property
    def has_aligned_keys(self) -> bool:
        """Whether every key begins at a multiple of 16 bytes; else at one of 4."""
        return all(stride % 16 == 0 for stride in self.k_strides)

    def query_tile(self, slots: int) -> int:
        """Queries of a CTA that has room for ``slots`` queries of 64 heads."""
        return max(min(slots // -(-self.num_heads // INDEX_HEADS), self.queries), 1)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call returns."""
        return (Output("logits", (self.rows, self.max_keys), "float32"),)


@dataclass(frozen=True)
class TopKProblem:
    """One call of ``top_k`` after validation; pointers are not in it.

    Attributes
    ----------
    rows, width, k : int
    next_n : int
        Rows of a sequence.
    block_size : int
        Of the block table; 0: there is none.
    logits_stride, indices_stride, table_stride : int
        Elements between rows.
    has_aligned_rows : bool
        Whether every row of logits begins at a multiple of 16 bytes.
    ranges : (bool, bool)
        Whether there are starts, lengths.
    """

    rows: int
    width: int
    k: int
    next_n: int
    block_size: int
    logits_stride: int
    indices_stride: int
    table_stride: int
    has_aligned_rows: bool
    ranges: tuple[bool, bool]

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call returns."""
        return (Output("indices", (self.rows, self.k), "int32"),)
