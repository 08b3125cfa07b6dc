"""Plans of ``attention_with_kvcache``: attention over pages, ``decode``, or both at once, on the arrays of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..launch import decode, kv_dequantize
from ..launch.host_struct import At
from ..problems import AttentionProblem, DecodeProblem, DequantizeProblem, Target, WithCacheProblem
from ..problems.memory import aligned
from ..problems.with_cache import decode_of_pages
from ..runtime.record import LaunchRecord, Pointer, TensorMap
from ..select import Selection, row_kind, select_dequantize
from ..select.decode_ways import way_in_company
from ..select.with_cache import is_divided, one_way, split_way, way_of_others
from .attention import plan_attention
from .binaries import without_binary
from .engine import Launches
from .others import plan_decode
from .stages import launches_of

#: Where the arrays are that attention over pages reads.
_OF_PAGES = {"k": At("cache.k"), "v": At("cache.v"), "seqused_k": At("seq_lens")}
#: Where those of ``attention_varlen`` are that the kernels of ``decode`` read.
_OF_ARRAYS = {"cache.k": At("k"), "cache.v": At("v"), "seq_lens": At("seqused_k")}
#: The table of ``decode`` where a contiguous cache is a pool with one block a sequence.
_OF_INDEX = {"block_table": At("batch_index")}


@dataclass(frozen=True)
class _KeysInRounds:
    """What makes keys of 16 bits for each of several rounds of attention, and where these find them.

    Attributes
    ----------
    places : LaunchRecord
        Says where the keys of each sequence go.
    rounds : tuple of (LaunchRecord, mapping)
        What makes the keys of a round, and where the arrays are that attention reads then.
    end : int
        Of the workspace.
    kernels : tuple of Selection
    """

    places: LaunchRecord
    rounds: tuple[tuple[LaunchRecord, Mapping[str, At]], ...]
    end: int
    kernels: tuple[Selection, ...]


def plan_with_cache(problem: WithCacheProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``attention_with_kvcache``."""
    own, of_decode = problem.kernels, _OF_INDEX if problem.batch_index else {}
    if isinstance(own, DecodeProblem):
        launches = plan_decode(own, target, force)
        records = _renamed(launches.records, of_decode)
    else:
        divided = problem.few is not None and not force and is_divided(own, always=own.deterministic)
        both = _both(own, problem.few, target, _OF_PAGES, of_decode, problem.dequantize) if divided else None
        launches = both or _alone(own, target, force, problem.dequantize, problem.batch_index)
        records = launches.records
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


def _alone(
    own: AttentionProblem, target: Target, force: str | None, codes: DequantizeProblem | None, has_index: bool
) -> Launches:
    """Attention over pages of all sequences."""
    way = None
    if own.deterministic and (own.is_part or not force):
        way = one_way(own, target)
    elif own.is_part or own.num_splits:
        way = split_way(own, target, 1 if own.is_part else own.num_splits)
    if way is None:
        launches = plan_attention(own, target, force)
    else:
        why = "deterministic: the same kernel, whatever the batch is"
        if not own.deterministic:
            why = "keys in rounds, none of them split" if own.is_part else f"num_splits={own.num_splits}"
        launches = launches_of(way, own, target, force, (why,))
    if codes is None:
        return replace(launches, records=_renamed(launches.records, _OF_PAGES))
    keys = _keys_in_rounds(codes, target, force, aligned(launches.workspace_bytes), has_index)
    records = [keys.places]
    for makes, places in keys.rounds:
        records += [makes, *_renamed(launches.records, places)]
    others = (*keys.kernels, *launches.others)
    return replace(launches, records=tuple(records), workspace_bytes=keys.end, others=others)


def _keys_in_rounds(
    codes: DequantizeProblem, target: Target, force: str | None, begin: int, has_index: bool
) -> _KeysInRounds:
    """What makes the keys that attention over pages reads, from byte ``begin`` of the workspace on."""
    places_of, makes = select_dequantize(codes, target, force)
    kinds = row_kind(codes.cache.k_format), row_kind(codes.cache.v_format)
    table = "batch_index" if has_index else "block_table"
    first, *records = kv_dequantize.build(places_of.spec, makes.spec, kinds, codes, target, begin, table)
    offsets, end = codes.places()
    at = {name: At("workspace", begin + offset) for name, offset in offsets.items()}
    found = {"k": at["k"], "v": at["v"], "seqused_k": at["lens"]}
    if codes.q_len:
        found["cu_seqlens_q"] = at["cu_q"]

    def of_round(name: str, i: int, extent: int) -> At:
        return At("workspace", at[name].offset + 4 * extent * i)

    rounds = [
        (
            record,
            {
                **found,
                "cu_seqlens_k": of_round("cu_k", i, codes.batch + 1),
                "seqused_q": of_round("used_q", i, codes.batch),
            },
        )
        for i, record in enumerate(records)
    ]
    return _KeysInRounds(first, tuple(rounds), begin + end, (places_of, makes))


def _both(
    own: AttentionProblem,
    few: DecodeProblem | None,
    target: Target,
    of_pages: Mapping[str, At],
    of_decode: Mapping[str, At],
    codes: DequantizeProblem | None = None,
) -> Launches | None:
    """Attention over pages of the sequences with many queries, and ``decode`` of the others, at the same time.

    The kernel of ``decode`` begins, on a part of the SMs. Attention takes the others, and those of the first as it
    ends; it ends behind that one (other kernels than Hopper's begin when it has ended). Then partial results of
    ``decode`` are merged. Over a quantized cache ``decode`` has all SMs, because it converts as long as it reads, and
    attention those that it leaves. None where a kernel cannot be had.

    Parameters
    ----------
    own : AttentionProblem
    few : DecodeProblem
    target : Target
    of_pages, of_decode : mapping
        Where the arrays of both are in this call.
    codes : DequantizeProblem, optional
        `WithCacheProblem.dequantize`.
    """
    assert few is not None
    rest = replace(own, passed_over=few.q_len)
    if codes is not None:
        codes = replace(codes, few=few.q_len)
        rest = codes.attention(own)
    way = way_of_others(rest, target)
    if way is None:
        return None
    why = (f"sequences of more than {few.q_len} queries; the others run at the same time on decode's kernels",)
    attend = launches_of(way, rest, target, None, why)
    one = way_in_company(few, target, at_once=way.row.arch_specific and codes is None).passes[0]
    kernels = decode.Kernels(one.main.spec, one.combine.spec, one.split)
    end = aligned(attend.workspace_bytes)
    keys = None if codes is None else _keys_in_rounds(codes, target, None, end, "block_table" in of_decode)
    records, end = decode.build((kernels,), None, few, target, end if keys is None else aligned(keys.end))
    if not records or not attend.records:
        return None
    main, combine = _renamed(records, of_decode)
    before: list[LaunchRecord] = []
    rounds = [_renamed(attend.records, of_pages)]
    if keys is not None:
        before = [keys.places, keys.rounds[0][0]]
        rounds = [_renamed(attend.records, places) for _, places in keys.rounds]
    first, *others = rounds[0]
    # What is merged is complete when attention has ended; nothing of it is launched early.
    launches = [*before, main, replace(first, overlap=way.row.arch_specific), *others]
    for i, more in enumerate(rounds[1:], start=1):
        assert keys is not None
        launches += [keys.rounds[i][0], *more]
    made = () if keys is None else keys.kernels
    found = Launches(
        attend.selection, (*launches, replace(combine, overlap=False)), end,
        (*made, one.main, *attend.others, one.combine),
    )  # fmt: skip
    return found if without_binary(found, target.cc) is None else None


def _renamed(records: Iterable[LaunchRecord], places: Mapping[str, At]) -> tuple[LaunchRecord, ...]:
    """Launches whose operands are elsewhere."""

    def moved(x: Pointer | TensorMap) -> Any:
        to = places.get(x.operand)
        return x if to is None else x._replace(operand=to.operand, add=to.offset + x.add)

    return tuple(
        replace(
            record,
            pointers=tuple(moved(p) for p in record.pointers),
            tensor_maps=tuple(moved(m) for m in record.tensor_maps),
        )
        for record in records
    )
