"""One call of ``append``, ``copy_blocks`` or ``copy_recent``."""

from __future__ import annotations

from dataclasses import dataclass

from ..kv.layout import CacheLayout
from .outputs import Output

#: Which channels make a pair of the rotary embedding.
ROPE_STYLES: tuple[str, ...] = ("half", "interleaved")


@dataclass(frozen=True)
class AppendProblem:
    """One call of ``append`` after validation; pointers are not in it.

    Attributes
    ----------
    dtype : str
        Element type of k and v.
    cache : CacheLayout
    batch, rows, tokens, head_dim, num_kv_heads : int
        ``rows`` new tokens in all; ``tokens`` a sequence, 0 for packed ones.
    capacity, block_size, num_blocks, table_columns : int
        As in `DecodeProblem`.
    rope : str
        ``"none"`` or one of `ROPE_STYLES`.
    rope_pairs, rope_rows : int
        Extents of cos and sin.
    k_strides, v_strides : tuple of int
        Element strides of k and v, heads included; none of v for latent caches.
    k_pe_strides : tuple of int
        Of a latent cache's channels behind V's, where these are in an array of their own.
    slots, positions : str
        Element types of slot_mapping, by which tokens are written then, and of positions; "" for none.
    """

    dtype: str
    cache: CacheLayout
    batch: int
    rows: int
    tokens: int
    head_dim: int
    num_kv_heads: int
    capacity: int
    block_size: int
    num_blocks: int
    table_columns: int
    rope: str
    rope_pairs: int
    rope_rows: int
    k_strides: tuple[int, ...] = ()
    v_strides: tuple[int, ...] = ()
    slots: str = ""
    positions: str = ""
    k_pe_strides: tuple[int, ...] = ()

    @property
    def packed(self) -> bool:
        """Whether k and v are packed, with cu_seqlens or slot_mapping."""
        return len(self.k_strides) == 3

    @property
    def outputs(self) -> tuple[Output, ...]:
        """None: the cache is written in place."""
        return ()


@dataclass(frozen=True)
class CopyProblem:
    """Copies inside a cache.

    Attributes
    ----------
    cache : CacheLayout
    recent : bool
        Slots of the recent window; otherwise blocks.
    pairs : tuple of (source, destination)
    """

    cache: CacheLayout
    recent: bool
    pairs: tuple[tuple[int, int], ...]

    @property
    def outputs(self) -> tuple[Output, ...]:
        """None: the cache is written in place."""
        return ()
