"""Keys and values of a quantized cache in 16 bits, in a workspace, for attention over pages to read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..kv.layout import CacheLayout
from .attention import AttentionProblem, AttentionStrides, Pages
from .memory import ITEMSIZE
from .quantize import carve

#: Keys of a page of the workspace, as ``kernels_cu/params/kv_dequantize.cuh`` has it.
PAGE = 128
#: Bytes of keys and values that are there at a time, and rounds: more bytes only where one sequence alone has more, or
#: where there would be more rounds.
_MOST_BYTES, _MOST_ROUNDS = 512 << 20, 64


@dataclass(frozen=True)
class DequantizeProblem:
    """Which keys of a cache a call of attention over pages wants in 16 bits.

    Lengths are on the device: how many keys there are is not known here. Sequences whose keys do not fit into the
    workspace together go through it in rounds, whole sequences each.

    Attributes
    ----------
    dtype : str
        Element type of queries, and of keys and values in the workspace.
    cache : CacheLayout
    batch, rows : int
        Sequences, and queries of all of them.
    q_len : int
        Queries of each sequence; 0 of packed ones.
    capacity : int
        Tokens that a sequence can have at most.
    table_columns : int
        Entries of a sequence in the block table; 0: there is none.
    block_size, num_blocks : int
        Of the table's blocks: of a contiguous cache with ``batch_index`` a sequence is one.
    window_left : int
        Keys before a query that it sees; -1 for all.
    few : int
        Sequences of up to so many queries are not for attention over pages.
    """

    dtype: str
    cache: CacheLayout
    batch: int
    rows: int
    q_len: int
    capacity: int
    table_columns: int
    block_size: int
    num_blocks: int
    window_left: int
    few: int = 0

    @property
    def columns(self) -> int:
        """Entries of a sequence in the workspace's table."""
        return max(1, -(-self.capacity // PAGE))

    @property
    def _longest(self) -> int:
        """Pages of a sequence at most: of a window those that all queries of the call together could see."""
        if self.window_left < 0:
            return self.columns
        return min(self.columns, -(-(self.rows + self.window_left) // PAGE) + 1)

    @property
    def _sequences(self) -> int:
        """Sequences that have more than `few` queries, at most."""
        return max(1, self.batch if self.q_len else min(self.batch, self.rows // (self.few + 1)))

    @property
    def pages(self) -> int:
        """Pages of the workspace."""
        page_bytes = 2 * PAGE * self.cache.num_kv_heads * self.cache.head_dim * ITEMSIZE[self.dtype]
        least = self._longest * -(-self._sequences // _MOST_ROUNDS)
        return min(self._sequences * self._longest, max(least, _MOST_BYTES // page_bytes))

    @property
    def rounds(self) -> int:
        """Rounds at most: those of sequences that are all as long as possible."""
        return -(-self._sequences // (self.pages // self._longest))

    def places(self) -> tuple[dict[str, int], int]:
        """Offsets of the arrays of `KvDequantizeParams` in the workspace, and their end."""
        plane = (self.pages, self.cache.num_kv_heads, PAGE, self.cache.head_dim)
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "k": (plane, self.dtype), "v": (plane, self.dtype), "table": ((self.batch, self.columns), "int32"),
            **{name: ((max(self.batch, 1),), "int32") for name in ("lens", "starts")},
            "ends": ((self.rounds,), "int32"), "used": ((self.rounds, self.batch), "int32"),
            "cu": ((self.batch + 1,), "int32"),
        }  # fmt: skip
        return carve(shapes)

    def attention(self, call: AttentionProblem) -> AttentionProblem:
        """``call`` over the workspace's pages, in one round of several."""
        heads, dim = self.cache.num_kv_heads, self.cache.head_dim
        own = heads * PAGE * dim, dim, PAGE * dim
        strides = call.strides
        assert strides is not None
        pages = Pages(PAGE, self.pages, self.columns, self.columns if self.batch > 1 else 0, in_rounds=self.rounds > 1)
        return replace(
            call, pages=pages, strides=AttentionStrides(strides.q, own, own, strides.o, strides.lse, strides.mask),
            used=(self.rounds > 1, True), queries_per_sequence=0 if self.rounds > 1 else call.queries_per_sequence,
            passed_over=self.few,
        )  # fmt: skip
