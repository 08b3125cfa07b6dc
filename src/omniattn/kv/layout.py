"""What a plan has to know of a cache: all but its arrays' addresses."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from .formats import KVFormat

#: Planes, and arrays of the caller, in the order in which launches take their addresses.
ADDRESSES: tuple[str, ...] = (
    "k", "v", "k_params", "v_params", "k_mean", "k_channel_scale", "recent_k", "recent_v", "recent_state", "k_scale",
    "v_scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScalePlaces:
    """Steps from a scale to the next, in elements, of K's and V's alike.

    Attributes
    ----------
    outer : int
        From a block to the next where each row has a scale, else from a sequence of the call to the next.
    head, token : int
    each_row : bool
        Each token and head has a scale, which `append` writes.
    sequences : int
        Sequences that there are scales for; 0: any number has the same.
    """

    outer: int
    head: int
    token: int
    each_row: bool
    sequences: int


@dataclass(frozen=True)
class CacheLayout:
    """Facts of a `KVCache` or `PagedKVCache`.

    Attributes
    ----------
    paged : bool
    num_blocks, block_size, num_kv_heads, head_dim : int
    k_format, v_format : KVFormat
    hadamard : bool
    key_arrays : tuple of str
        Which of k_mean and k_channel_scale the caller gave.
    recent_window, recent_ring, recent_slots : int
        Tokens of the recent window, tokens of a slot, slots; 0 for none.
    recent_format : KVFormat, optional
    device, ordinal : str, int
        Where the arrays are.
    array_order : str, optional
        "NHD" or "HND": how the caller's arrays have tokens and heads (`OnArrays.from_arrays`); None for planes of the
        cache's own.
    strides : (block, head, token), optional
        Of the caller's arrays, in elements, 0 for extents of 1.
    scales : ScalePlaces, optional
        Of the caller's arrays in 8 bits, where they have scales.

    V's head_dim, that of v_format, is another one in latent caches alone.
    """

    paged: bool
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    k_format: KVFormat
    v_format: KVFormat
    hadamard: bool
    key_arrays: tuple[str, ...]
    recent_window: int
    recent_ring: int
    recent_slots: int
    recent_format: KVFormat | None
    device: str
    ordinal: int
    array_order: str | None = None
    strides: tuple[int, int, int] | None = None
    scales: ScalePlaces | None = None

    @property
    def is_latent(self) -> bool:
        """Whether V has no rows of its own: its channels are the first ones of K's rows."""
        return self.v_format.head_dim != self.head_dim


_interned: weakref.WeakKeyDictionary[CacheLayout, weakref.ref[CacheLayout]] = weakref.WeakKeyDictionary()


def intern(layout: CacheLayout) -> CacheLayout:
    """The one object for equal layouts, as long as somebody holds it: plans are found by its identity."""
    known = _interned.get(layout)
    found = None if known is None else known()
    if found is None:
        _interned[layout] = weakref.ref(layout)
        return layout
    return found
