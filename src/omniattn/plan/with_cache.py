"""Plans of ``attention_with_kvcache``: attention over pages, ``decode``, or both at once, on the arrays of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..launch import decode
from ..problems import AttentionProblem, DecodeProblem, Target, WithCacheProblem
from ..problems.memory import aligned
from ..problems.with_cache import decode_of_pages
from ..runtime.record import LaunchRecord
from ..select.decode_ways import way_in_company
from ..select.with_cache import is_divided, one_way, way_of_others
from .attention import plan_attention
from .binaries import without_binary
from .engine import Launches
from .others import plan_decode
from .stages import launches_of

#: What the arrays are called that attention over pages reads.
_OF_PAGES = {
    "k": "cache.k", "v": "cache.v", "seqused_k": "seq_lens", "k_scale": "cache.k_scale", "v_scale": "cache.v_scale",
}  # fmt: skip
#: What the arrays of ``attention_varlen`` are called that the kernels of ``decode`` read.
_OF_ARRAYS = {"cache.k": "k", "cache.v": "v", "seq_lens": "seqused_k"}
#: The table of ``decode`` where a contiguous cache is a pool with one block a sequence.
_OF_INDEX = {"block_table": "batch_index"}


def plan_with_cache(problem: WithCacheProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``attention_with_kvcache``."""
    own, of_decode = problem.kernels, _OF_INDEX if problem.batch_index else {}
    if isinstance(own, DecodeProblem):
        launches = plan_decode(own, target, force)
        records = _renamed(launches.records, of_decode)
    else:
        divided = problem.few is not None and not force and is_divided(own, always=own.deterministic)
        both = _both(own, problem.few, target, _OF_PAGES, of_decode) if divided else None
        launches = both or _alone(own, target, force)
        records = launches.records if both is not None else _renamed(launches.records, _OF_PAGES)
    selection = launches.selection
    return replace(launches, selection=replace(selection, why=(*selection.why, problem.why)), records=records)


def plan_varlen(problem: AttentionProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``attention_varlen``: over pages those of `plan_with_cache`."""
    few = None if problem.pages is None or force else decode_of_pages(problem)
    if few is None:
        return plan_attention(problem, target, force)
    if not few.has_company:
        launches = plan_decode(few, target, None)
        selection = replace(launches.selection, why=(*launches.selection.why, "up to 16 queries of each sequence"))
        return replace(launches, selection=selection, records=_renamed(launches.records, _OF_ARRAYS))
    both = _both(problem, few, target, {}, _OF_ARRAYS) if is_divided(problem) else None
    return both or plan_attention(problem, target, None)


def _alone(own: AttentionProblem, target: Target, force: str | None) -> Launches:
    """Attention over pages of all sequences."""
    way = one_way(own, target) if own.deterministic and not force else None
    if way is None:
        return plan_attention(own, target, force)
    return launches_of(way, own, target, None, ("deterministic: the same kernel, whatever the batch is",))


def _both(
    own: AttentionProblem,
    few: DecodeProblem | None,
    target: Target,
    of_pages: Mapping[str, str],
    of_decode: Mapping[str, str],
) -> Launches | None:
    """Attention over pages of the sequences with many queries, and ``decode`` of the others, at the same time.

    The kernel of ``decode`` begins, on a part of the SMs. Attention takes the others, and those of the first as it
    ends; it ends behind that one (other kernels than Hopper's begin when it has ended). Then partial results of
    ``decode`` are merged. None where a kernel cannot be had.

    Parameters
    ----------
    own : AttentionProblem
    few : DecodeProblem
    target : Target
    of_pages, of_decode : mapping
        What the arrays of both are called in this call.
    """
    assert few is not None
    rest = replace(own, passed_over=few.q_len)
    way = way_of_others(rest, target)
    if way is None:
        return None
    why = (f"sequences of more than {few.q_len} queries; the others run at the same time on decode's kernels",)
    attend = launches_of(way, rest, target, None, why)
    one = way_in_company(few, target, at_once=way.row.arch_specific).passes[0]
    kernels = decode.Kernels(one.main.spec, one.combine.spec, one.split)
    begin = aligned(attend.workspace_bytes)
    records, end = decode.build((kernels,), None, few, target, begin)
    if not records or not attend.records:
        return None
    first, *others = _renamed(attend.records, of_pages)
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
