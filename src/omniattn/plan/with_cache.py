"""Plans of ``attention_with_kvcache``: attention over pages, ``decode``, or both at once, on the arrays of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..launch import decode
from ..problems import AttentionProblem, DecodeProblem, Target, WithCacheProblem
from ..problems.memory import aligned
from ..runtime.record import LaunchRecord
from ..select.decode_ways import way_in_company
from ..select.with_cache import is_divided, one_way, way_of_others
from .attention import plan_attention
from .binaries import without_binary
from .engine import Launches
from .others import plan_decode
from .stages import launches_of

#: What the arrays are called that attention over pages reads.
_OF_PAGES = {"k": "cache.k", "v": "cache.v", "seqused_k": "seq_lens"}
#: The table of ``decode`` where a contiguous cache is a pool with one block a sequence.
_OF_INDEX = {"block_table": "batch_index"}


def plan_with_cache(problem: WithCacheProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``attention_with_kvcache``."""
    own, of_decode = problem.kernels, _OF_INDEX if problem.batch_index else {}
    if isinstance(own, DecodeProblem):
        launches = plan_decode(own, target, force)
        records = _renamed(launches.records, of_decode)
    else:
        both = None if force or not is_divided(problem) else _both(problem, own, target, of_decode)
        if both is not None:
            return both
        launches = _alone(own, target, force)
        records = _renamed(launches.records, _OF_PAGES)
    selection = launches.selection
    return replace(launches, selection=replace(selection, why=(*selection.why, problem.why)), records=records)


def _alone(own: AttentionProblem, target: Target, force: str | None) -> Launches:
    """Attention over pages of all sequences."""
    way = one_way(own, target) if own.deterministic and not force else None
    if way is None:
        return plan_attention(own, target, force)
    return launches_of(way, own, target, None, ("deterministic: the same kernel, whatever the batch is",))


def _both(
    problem: WithCacheProblem, own: AttentionProblem, target: Target, of_decode: Mapping[str, str]
) -> Launches | None:
    """Attention over pages of the sequences with many queries, and ``decode`` of the others, at the same time.

    The kernel of ``decode`` begins, on a part of the SMs. Attention takes the others, and those of the first as it
    ends; it ends behind that one. Then partial results of ``decode`` are merged. None where a kernel cannot be had.
    """
    few = problem.few
    assert few is not None
    rest = replace(own, passed_over=few.q_len)
    way = way_of_others(rest, target)
    if way is None:
        return None
    why = (
        f"sequences of more than {few.q_len} queries; the others run at the same time on decode's kernels",
        problem.why,
    )
    attend = launches_of(way, rest, target, None, why)
    one = way_in_company(few, target).passes[0]
    kernels = decode.Kernels(one.main.spec, one.combine.spec, one.split)
    begin = aligned(attend.workspace_bytes)
    records, end = decode.build((kernels,), None, few, target, begin)
    if not records or not attend.records:
        return None
    first, *others = _renamed(attend.records, _OF_PAGES)
    main, combine = _renamed(records, of_decode)
    beside = replace(first, overlap=way.row.arch_specific)
    # What is merged is complete when attention has ended; nothing of it is launched early.
    found = Launches(
        attend.selection, (main, beside, *others, replace(combine, overlap=False)), end,
        (one.main, *attend.others, one.combine),
    )  # fmt: skip
    return found if without_binary(found, target.cc) is None else None


def _renamed(records: Iterable[LaunchRecord], names: Mapping[str, str]) -> tuple[LaunchRecord, ...]:
    """Launches whose operands have other names."""
    return tuple(
        replace(
            record,
            pointers=tuple(p._replace(operand=names.get(p.operand, p.operand)) for p in record.pointers),
            tensor_maps=tuple(m._replace(operand=names.get(m.operand, m.operand)) for m in record.tensor_maps),
        )
        for record in records
    )
