"""``decode`` over a cache with a recent window: its two sides one behind the other, then `merge_states_sm80`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .. import runtime
from ..select import Target, select_merge_states
from .decode import NEWEST, OLDER, DecodePlan, Recent, plan_decode
from .merge_states import MergePlan

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..decode import DecodeProblem

_ALIGNMENT = 256


class RecentPlan:
    """Everything about a call but its pointers.

    Parameters
    ----------
    older, newest : DecodePlan
        Of the quantized tokens and of the window's; the sinks are with the second one.
    merge : MergePlan
    o_bytes, lse_bytes : int
        Of one side's result.
    """

    __slots__ = ("_places", "merge", "newest", "older", "workspace_bytes")

    def __init__(self, older: DecodePlan, newest: DecodePlan, merge: MergePlan, o_bytes: int, lse_bytes: int) -> None:
        self.older, self.newest, self.merge = older, newest, merge
        # The sides' O, their LSE, a place for the merged one, and scratch memory that one side has after the other.
        self._places = [0]
        for size in (o_bytes, o_bytes, lse_bytes, lse_bytes, lse_bytes):
            self._places.append(self._places[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self.workspace_bytes = self._places[-1] + max(older.workspace_bytes, newest.workspace_bytes)

    def launch(self, stream: int, pointers: tuple[int, ...], recent_k: int, recent_v: int) -> None:
        """Queue all kernels on ``stream``; ``pointers`` as for `DecodePlan.launch`."""
        q, lengths, slots, state = pointers[0], pointers[7], pointers[9], pointers[10]
        sinks, o, lse, workspace = pointers[11:]
        o_older, o_newest, lse_older, lse_newest, lse_merged, scratch = (workspace + at for at in self._places)
        self.older.launch(stream, (*pointers[:11], 0, o_older, lse_older, scratch))
        rings = (recent_k, recent_v, 0, 0, 0, 0, lengths, slots, slots, state)
        self.newest.launch(stream, (q, *rings, sinks, o_newest, lse_newest, scratch))
        self.merge.launch(stream, (o_older, o_newest, o, lse_older, lse_newest, lse or lse_merged))


def plan_decode_recent(
    problem: DecodeProblem, cache: KVCache, q_strides: tuple[int, ...], o_strides: tuple[int, ...], ordinal: int
) -> RecentPlan:
    """The plan for GPU ``ordinal``, with its kernels loaded."""
    p = problem
    assert cache.recent_format is not None
    shape = (p.batch, p.q_len, p.num_q_heads, p.head_dim)
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
    device = runtime.device_info(ordinal)
    selection = select_merge_states(p.dtype, Target(device.cc, device.max_smem_optin))
    lse_strides = (p.num_q_heads * p.q_len, p.q_len, 1)
    merge = MergePlan(
        runtime.load(selection.spec, ordinal),
        (own[:3], own[:3], (o_strides[0], o_strides[1], o_strides[2])),
        (lse_strides, lse_strides, lse_strides),
        shape,
        2,
    )
    rows = p.batch * p.num_q_heads * p.q_len
    return RecentPlan(older, newest, merge, 2 * rows * p.head_dim, 4 * rows)
