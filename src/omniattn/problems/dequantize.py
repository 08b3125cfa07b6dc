"""Keys and values of a quantized cache in 16 bits, in a workspace, for attention to read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..kv.layout import CacheLayout
from .attention import AttentionProblem, AttentionStrides
from .memory import ITEMSIZE
from .quantize import carve

#: Keys of which each sequence has a multiple in the workspace (``kernels_cu/params/kv_dequantize.cuh``).
PAGE = 128
#: Bytes of keys and values that are there at a time, and rounds: more bytes only where one sequence alone has more, or
#: where there would be more rounds.
_MOST_BYTES, MOST_ROUNDS = 1 << 30, 64


@dataclass(frozen=True)
class DequantizeProblem:
    """Which keys of a cache attention wants in 16 bits.

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
        Sequences of up to so many queries are not for attention.
    leftpad : bool
        Sequences have keys in front that are nobody's.
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
    leftpad: bool = False

    @property
    def _longest(self) -> int:
        """Pages of a sequence at most: of a window those that all queries of the call together could see."""
        pages = max(1, -(-self.capacity // PAGE))
        if self.window_left < 0:
            return pages
        return min(pages, -(-(self.rows + self.window_left) // PAGE) + 1)

    @property
    def _sequences(self) -> int:
        """Sequences that have more than `few` queries, at most."""
        return max(1, self.batch if self.q_len else min(self.batch, self.rows // (self.few + 1)))

    @property
    def pages(self) -> int:
        """Pages of the workspace."""
        page_bytes = 2 * PAGE * self.cache.num_kv_heads * self.cache.head_dim * ITEMSIZE[self.dtype]
        least = self._longest * -(-self._sequences // MOST_ROUNDS)
        return min(self._sequences * self._longest, max(least, _MOST_BYTES // page_bytes))

    @property
    def rounds(self) -> int:
        """Rounds at most: those of sequences that are all as long as possible."""
        return -(-self._sequences // (self.pages // self._longest))

    @property
    def is_part(self) -> bool:
        """Whether a launch of attention has the queries of some sequences alone."""
        return self.rounds > 1 or self.few > 0

    def places(self) -> tuple[dict[str, int], int]:
        """Offsets of the arrays of `KvDequantizeParams` in the workspace, and their end."""
        plane = (self.cache.num_kv_heads, self.pages * PAGE, self.cache.head_dim)
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "k": (plane, self.dtype), "v": (plane, self.dtype), "cu_k": ((self.rounds, self.batch + 1), "int32"),
            "lens": ((self.batch,), "int32"), "used_q": ((self.rounds, self.batch), "int32"),
            "cu_q": ((self.batch + 1,), "int32"),
        }  # fmt: skip
        return carve(shapes)

    def attention(self, call: AttentionProblem) -> AttentionProblem:
        """``call`` as one of packed sequences over the workspace."""
        dim, rows = self.cache.head_dim, self.pages * PAGE
        own, strides = (0, dim, rows * dim), call.strides
        assert strides is not None
        return replace(
            call, pages=None, seqlen_k=rows, max_seqlen_k=min(self._longest * PAGE, max(self.capacity, 1)),
            strides=AttentionStrides(strides.q, own, own, strides.o, strides.lse, strides.mask),
            used=(self.is_part, True), queries_per_sequence=0, is_part=self.is_part,
        )  # fmt: skip
