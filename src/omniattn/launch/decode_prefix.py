"""``decode`` with a shared prefix (cascade): its keys for the queries of all sequences, theirs for each, merged."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .decode import ALL_SEE_PREFIX, plan_decode
from .decode_merged import MergedPlan

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..decode import DecodeProblem


class PrefixPlan(MergedPlan):
    """Everything about a call but its pointers; the first side is the prefix."""

    __slots__ = ()

    def launch(self, stream: int, pointers: tuple[int, ...]) -> None:
        """Queue all kernels on ``stream``; ``pointers`` as for `DecodePlan.launch`."""
        sinks, o, lse, workspace = pointers[11:]
        self.launch_sides(stream, pointers[:11], pointers[:11], (sinks, o, lse, workspace))


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
    strides = (p.q_len * row, row, p.head_dim, 1)
    own = plan_decode(p, formats, cache.hadamard, q_strides, strides, ordinal, first_key=p.shared_prefix)
    shape = (p.batch, p.q_len, p.num_q_heads, p.head_dim)
    return PrefixPlan(prefix, own, shape, (p.q_len, queries, 1), o_strides, p.dtype, ordinal)
