"""Plans of ``attention_with_kvcache``: those of attention over pages or of ``decode``, on the arrays of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..problems import DecodeProblem, Target, WithCacheProblem
from ..runtime.record import LaunchRecord
from .attention import plan_attention
from .engine import Launches
from .others import plan_decode

#: What the arrays are called that attention over pages reads.
_OF_PAGES = {"k": "cache.k", "v": "cache.v", "seqused_k": "seq_lens"}
#: The table of ``decode`` where a contiguous cache is a pool with one block a sequence.
_OF_INDEX = {"block_table": "batch_index"}


def plan_with_cache(problem: WithCacheProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``attention_with_kvcache``."""
    own = problem.kernels
    if isinstance(own, DecodeProblem):
        launches = plan_decode(own, target, force)
        names = _OF_INDEX if problem.batch_index else {}
    else:
        launches, names = plan_attention(own, target, force), _OF_PAGES
    selection = launches.selection
    records = tuple(_renamed(record, names) for record in launches.records)
    return replace(launches, selection=replace(selection, why=(*selection.why, problem.why)), records=records)


def _renamed(record: LaunchRecord, names: Mapping[str, str]) -> LaunchRecord:
    """A launch whose operands have other names."""
    return replace(
        record,
        pointers=tuple(p._replace(operand=names.get(p.operand, p.operand)) for p in record.pointers),
        tensor_maps=tuple(m._replace(operand=names.get(m.operand, m.operand)) for m in record.tensor_maps),
    )
