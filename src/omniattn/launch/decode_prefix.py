"""``decode`` with a shared prefix: its keys once for all sequences, theirs for each, then `merge_states_sm80` (cascade)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .. import runtime
from ..select import Target, select_merge_states
from .decode import ALL_SEE_PREFIX, DecodePlan, plan_decode
from .merge_states import MergePlan

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..decode import DecodeProblem

_ALIGNMENT = 256


class PrefixPlan:
    """Everything about a call but its pointers.

    Parameters
    ----------
    prefix, own : DecodePlan
        Of the first tokens, all queries as those of one sequence, and of the others; the sinks are with the second one.
    merge : MergePlan
    o_bytes, lse_bytes : int
        Of one side's result.
    """

    __slots__ = ("_places", "merge", "own", "prefix", "workspace_bytes")

    def __init__(self, prefix: DecodePlan, own: DecodePlan, merge: MergePlan, o_bytes: int, lse_bytes: int) -> None:
        self.prefix, self.own, self.merge = prefix, own, merge
        # The sides' O, their LSE, a place for the merged one, and scratch memory that one side has after the other.
        self._places = [0]
        for size in (o_bytes, o_bytes, lse_bytes, lse_bytes, lse_bytes):
            self._places.append(self._places[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self.workspace_bytes = self._places[-1] + max(prefix.workspace_bytes, own.workspace_bytes)

    def launch(self, stream: int, pointers: tuple[int, ...]) -> None:
        """Queue all kernels on ``stream``; ``pointers`` as for `DecodePlan.launch`."""
        sinks, o, lse, workspace = pointers[11:]
        o_prefix, o_own, lse_prefix, lse_own, lse_merged, scratch = (workspace + at for at in self._places)
        self.prefix.launch(stream, (*pointers[:11], 0, o_prefix, lse_prefix, scratch))
        self.own.launch(stream, (*pointers[:11], sinks, o_own, lse_own, scratch))
        self.merge.launch(stream, (o_prefix, o_own, o, lse_prefix, lse_own, lse or lse_merged))


def plan_decode_prefix(
    problem: DecodeProblem, cache: KVCache, q_strides: tuple[int, ...], o_strides: tuple[int, ...], ordinal: int
) -> PrefixPlan:
    """The plan for GPU ``ordinal``, with its kernels loaded; q's queries of all sequences follow each other evenly."""
    p = problem
    formats = (cache.k_format, cache.v_format)
    queries, row = p.batch * p.q_len, p.num_q_heads * p.head_dim
    # One sequence, whose table is that of sequence 0, of so many tokens as its capacity lets it have.
    alone = dataclasses.replace(p, batch=1, q_len=queries, capacity=p.shared_prefix, sinks="none")
    step = q_strides[0] if p.q_len == 1 else q_strides[1]
    prefix = plan_decode(
        alone, formats, cache.hadamard, (0, step, q_strides[2], 1), (0, row, p.head_dim, 1), ordinal,
        first_key=ALL_SEE_PREFIX,
    )  # fmt: skip
    strides = (p.q_len * row, row, p.head_dim)
    own = plan_decode(
        p, formats, cache.hadamard, q_strides, (*strides, 1), ordinal, first_key=p.shared_prefix
    )  # fmt: skip
    device = runtime.device_info(ordinal)
    selection = select_merge_states(p.dtype, Target(device.cc, device.max_smem_optin))
    lse = (p.num_q_heads * p.q_len, p.q_len, 1)
    merge = MergePlan(
        runtime.load(selection.spec, ordinal),
        (strides, strides, (o_strides[0], o_strides[1], o_strides[2])),
        ((p.q_len, queries, 1), lse, lse),
        (p.batch, p.q_len, p.num_q_heads, p.head_dim),
        2,
    )
    return PrefixPlan(prefix, own, merge, 2 * queries * row, 4 * queries * p.num_q_heads)
