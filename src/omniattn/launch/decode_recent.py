"""``decode`` over a cache with a recent window: its two sides one behind the other, merged."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .decode import NEWEST, OLDER, Recent, plan_decode
from .decode_merged import MergedPlan

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..decode import DecodeProblem


class RecentPlan(MergedPlan):
    """Everything about a call but its pointers; the sides are the quantized tokens and the window's."""

    __slots__ = ()

    def launch(self, stream: int, pointers: tuple[int, ...], recent_k: int, recent_v: int) -> None:
        """Queue all kernels on ``stream``; ``pointers`` as for `DecodePlan.launch`."""
        q, lengths, slots, state = pointers[0], pointers[7], pointers[9], pointers[10]
        sinks, o, lse, workspace = pointers[11:]
        rings = (q, recent_k, recent_v, 0, 0, 0, 0, lengths, slots, slots, state)
        self.launch_sides(stream, pointers[:11], rings, (sinks, o, lse, workspace))


def plan_decode_recent(
    problem: DecodeProblem, cache: KVCache, q_strides: tuple[int, ...], o_strides: tuple[int, ...], ordinal: int
) -> RecentPlan:
    """The plan for GPU ``ordinal``, with its kernels loaded."""
    p = problem
    assert cache.recent_format is not None
    row = p.num_q_heads * p.head_dim
    own = (p.q_len * row, row, p.head_dim, 1)
    recent = Recent(cache.recent_window, cache.recent_ring, cache.recent_slots)
    older = plan_decode(
        dataclasses.replace(p, sinks="none"), (cache.k_format, cache.v_format), cache.hadamard, q_strides, own, ordinal,
        dataclasses.replace(recent, side=OLDER),
    )  # fmt: skip
    slots = dataclasses.replace(
        p, block_size=cache.recent_ring, num_blocks=cache.recent_slots, table_columns=int(cache.paged)
    )
    newest = plan_decode(
        slots, (cache.recent_format, cache.recent_format), False, q_strides, own, ordinal,
        dataclasses.replace(recent, side=NEWEST),
    )  # fmt: skip
    shape = (p.batch, p.q_len, p.num_q_heads, p.head_dim)
    return RecentPlan(older, newest, shape, (p.num_q_heads * p.q_len, p.q_len, 1), o_strides, p.dtype, ordinal)
