"""Plans of ``attention_with_kvcache``: attention over pages, ``decode``, or both at once, on the arrays of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..launch import decode, kv_dequantize
from ..launch.host_struct import At
from ..problems import AttentionProblem, DecodeProblem, DequantizeProblem, Target, WithCacheProblem
from ..problems.memory import aligned
from ..problems.with_cache import decode_of_pages, keys_of_pages
from ..runtime.record import LaunchRecord, Pointer, TensorMap
from ..select import Selection, row_kind, select_dequantize
from ..select.decode_ways import way_in_company
from ..select.with_cache import is_copied, is_divided, one_way, split_way, way_of_others
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
    own, of_cache = problem.kernels, _OF_INDEX if problem.batch_index else {}
    if isinstance(own, DecodeProblem):
        launches = plan_decode(own, target, force)
        records = _renamed(launches.records, of_cache)
    else:
        divided = problem.few is not None and not force and is_divided(own, always=own.deterministic)
        keys = problem.keys if own.pages is None else None
        both = _both(own, problem.few, target, _OF_PAGES, of_cache, keys) if divided else None
        launches = both or _alone(own, problem.keys, target, force, _OF_PAGES, of_cache)
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
    return both or _alone(problem, keys_of_pages(problem, few), target, None, {}, _OF_ARRAYS)


def _alone(
    own: AttentionProblem,
    keys: DequantizeProblem | None,
    target: Target,
    force: str | None,
    of_pages: Mapping[str, At],
    of_cache: Mapping[str, At],
) -> Launches:
    """Attention of all sequences, over pages or over what is made of them; where arrays are, as in `_both`."""
    assert keys is not None
    if own.pages is None:
        return _over_keys(own, keys, target, force, of_cache)
    if not force and is_copied(own, keys, target):
        launches = _over_keys(keys.attention(own), keys, target, None, of_cache)
        if without_binary(launches, target.cc) is None:
            return launches
    launches = _attention(own, target, force)
    return replace(launches, records=_renamed(launches.records, of_pages))


def _attention(own: AttentionProblem, target: Target, force: str | None) -> Launches:
    """Attention, as far as ``deterministic`` and ``num_splits`` leave a choice, or launches that have a part each."""
    way, why = None, f"num_splits={own.num_splits}"
    if own.deterministic and (own.is_part or not force):
        way, why = one_way(own, target), "deterministic: the same kernel, whatever the batch is"
    elif own.is_part:
        way, why = split_way(own, target, 1), "keys in rounds, none of them split"
    elif own.num_splits:
        way = split_way(own, target, own.num_splits)
    return plan_attention(own, target, force) if way is None else launches_of(way, own, target, force, (why,))


def _over_keys(
    own: AttentionProblem, keys: DequantizeProblem, target: Target, force: str | None, of_cache: Mapping[str, At]
) -> Launches:
    """Attention of all sequences over keys that are made first."""
    launches = _attention(own, target, force)
    made = _keys_in_rounds(keys, target, force, aligned(launches.workspace_bytes), of_cache)
    records = [made.places]
    for makes, places in made.rounds:
        records += [makes, *_renamed(launches.records, places)]
    selection, formats = launches.selection, (keys.cache.k_format, keys.cache.v_format)
    how = "made in 16 bits" if any(f.quantized for f in formats) else "copied one behind the other"
    return replace(
        launches, selection=replace(selection, why=(*selection.why, f"keys and values are {how} first")),
        records=tuple(records), workspace_bytes=made.end, others=(*made.kernels, *launches.others),
    )  # fmt: skip


def _keys_in_rounds(
    codes: DequantizeProblem, target: Target, force: str | None, begin: int, of_cache: Mapping[str, At]
) -> _KeysInRounds:
    """What makes the keys that attention reads, from byte ``begin`` of the workspace on."""
    places_of, makes = select_dequantize(codes, target, force)
    kinds = row_kind(codes.cache.k_format), row_kind(codes.cache.v_format)
    built = kv_dequantize.build(places_of.spec, makes.spec, kinds, codes, target, begin)
    first, *records = _renamed(built, of_cache)
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
    of_cache: Mapping[str, At],
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
    of_pages, of_cache : mapping
        Where the arrays are in this call that attention over pages reads, and those that kernels of caches do.
    codes : DequantizeProblem, optional
        `WithCacheProblem.keys` of a quantized cache.
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
    keys = None if codes is None else _keys_in_rounds(codes, target, None, end, of_cache)
    records, end = decode.build((kernels,), None, few, target, end if keys is None else aligned(keys.end))
    if not records or not attend.records:
        return None
    main, combine = _renamed(records, of_cache)
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
