"""Launches of an attention call in the way that was chosen, stage by stage: mask, operands, attention, merge.

Each stage takes its memory of the workspace behind that of the stages before it, and says where the next one finds what
it made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..launch import (
    attn_fwd,
    attn_fwd_d512_sm90,
    attn_fwd_sm90,
    attn_fwd_split,
    attn_fwd_stream_k,
    attn_int8,
    attn_int8_sm80,
    attn_int8_sm90,
    dropout,
    fp8,
    masks,
    quantize,
    quantize_kv,
    score_mod,
    sparse_blocks,
    tile_kinds,
    used_rows,
)
from ..launch.attn_int8 import OperandPlaces
from ..launch.host_struct import At
from ..launch.masks import MaskPlaces
from ..problems import AttentionProblem, QuantizeCall, QuantizeProblem, Target
from ..problems.memory import aligned
from ..problems.quantize import carve
from ..problems.split import ONE_HEAD, SplitKV, StreamK, TailSplit, Whole, is_final
from ..problems.tile_order import first, num_m_blocks
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from ..select import (
    Candidate,
    MaskInput,
    Selection,
    combine_of,
    select_clear,
    select_delta,
    select_layout,
    select_mask_align,
    select_masks,
    select_tile_kinds,
    tail_row,
)
from ..select.blocks import select_blocks
from ..select.orders import handed_out
from ..select.quantize_ways import QuantizeWay, asked_of_quantizer
from ..select.ways import chosen_ways
from .engine import Launches


@dataclass(frozen=True)
class _Stage:
    """Launches, the kernels that are not the one that the call is about, and where their memory ends."""

    end: int
    records: tuple[LaunchRecord, ...] = ()
    kernels: tuple[Selection, ...] = ()


@dataclass(frozen=True)
class _Operands(_Stage):
    """What quantizes or lays out q, k and v; ``places`` is None where attention reads them as they come."""

    places: OperandPlaces | None = None


@dataclass(frozen=True)
class _Mask(_Stage):
    """What prepares the mask; ``places`` is None where attention reads it itself."""

    places: MaskPlaces | None = None


def launches_of(
    candidate: Candidate,
    problem: AttentionProblem,
    target: Target,
    force: str | None,
    why: tuple[str, ...] = (),
    quantizers: tuple[QuantizeWay, ...] = (),
) -> Launches:
    """The launches of a call, run as ``candidate`` says.

    Parameters
    ----------
    candidate : Candidate
        One that fits the problem and the GPU.
    problem : AttentionProblem
    target : Target
    force : str, optional
        ``OMNIATTN_FORCE_KERNEL``, for the kernels beside the one that attends.
    why : tuple of str
        What `explain` says of the choice.
    quantizers : tuple of QuantizeWay
        How each of `AttentionProblem.quantizations` is made; empty: as it is chosen.
    """
    p = candidate.told(problem)
    row = dropout.with_dropout(score_mod.with_score_mod(candidate.row, p.score_mod), p.dropout)
    if p.score_mod is not None:
        why = (*why, "with score_mod compiled in, which no wheel carries")
    if p.dropout is not None:
        why = (*why, f"with dropout compiled in, which no wheel carries: {p.dropout.threshold} of 256 are dropped")
    if p.sparse is not None:
        why = (*why, p.sparse.keeps)
    operands = _operands(row, p, target, force, quantizers)
    mask = _mask(candidate, p, target, force, operands.end)
    attend = _attend(candidate, row, p, target, force, operands.places, mask)
    clear = _clear(p, target, force)
    kernels = (*operands.kernels, *mask.kernels, *attend.kernels, *clear.kernels)
    records = (*mask.records, *operands.records, *attend.records, *clear.records) if attend.records else ()
    return Launches(Selection(row, why), records, attend.end, kernels)


def quantizer_launches(
    candidate: Candidate, problem: AttentionProblem, target: Target, quantizers: tuple[QuantizeWay, ...]
) -> Launches:
    """Of `launches_of` those alone that quantize the operands, to time them."""
    operands = _operands(candidate.row, candidate.told(problem), target, None, quantizers)
    return Launches(operands.kernels[0], operands.records, operands.end, operands.kernels[1:])


def quantizations(candidate: Candidate, problem: AttentionProblem) -> tuple[QuantizeProblem, ...]:
    """What is quantized for the kernel of ``candidate``; empty where operands come as it reads them."""
    if not candidate.row.quantized or problem.operands is not None or problem.descales is not None:
        return ()
    p = candidate.told(problem)
    return p.quantizations(_whole_of(candidate.row, p))


def _whole_of(row: KernelSpec, problem: AttentionProblem) -> QuantizeProblem:
    """What describes the operands that a kernel reads."""
    found = problem.quantization(
        grouping=row.grouping, pv=row.pv, pv_accumulator=row.pv_accumulator, unpacked=row.qk == "int8"
    )
    # Without Q there is nothing to mark, and the kernel makes the products of Q and K's mean itself.
    bias = "none" if found.e4m3 else "marks"
    return replace(found, rows_q=0, row_bias=bias) if row.quantizes_q else found


def _attend(
    candidate: Candidate,
    row: KernelSpec,
    problem: AttentionProblem,
    target: Target,
    force: str | None,
    places: OperandPlaces | None,
    mask: _Mask,
) -> _Stage:
    """Attention, and what merges its partial results. row: the candidate's, with what the call adds to it."""
    p, schedule, pack_gqa = problem, candidate.schedule, candidate.pack_gqa
    begin = aligned(mask.end)
    if isinstance(schedule, Whole):
        return _Stage(mask.end, _whole(row, p, schedule, target, places, mask))
    if isinstance(schedule, SplitKV) and is_final(p, schedule.splits):
        records, end = attn_fwd_split.build(row, None, p, target, pack_gqa, schedule, mask.places, begin)
        return _Stage(end, records)
    rest = tail_row(row, p, target) if isinstance(schedule, TailSplit) else row
    assert rest is not None, "a tail is split by a kernel with the same tiles"
    merge = combine_of(rest, p, target, force)
    if isinstance(schedule, StreamK):
        records, end = attn_fwd_stream_k.build(row, merge.spec, p, pack_gqa, schedule, begin, places)
        return _Stage(end, records, (merge,))
    split = attn_fwd_split.build(rest, merge.spec, p, target, pack_gqa, schedule, mask.places, begin, places)
    if isinstance(schedule, SplitKV):
        return _Stage(split[1], split[0], (merge,))
    # Whole rounds of tiles: all places have one.
    rounds = Whole(first(schedule.first_tile), min(schedule.first_tile, target.sm_count * row.ctas_per_sm))
    before = _whole(row, p, rounds, target, places, mask)
    goes_on = Selection(rest, ("the last tiles of the kernel before it, with their keys split",))
    return _Stage(split[1], (*before, *split[0]), (goes_on, merge))


def _whole(
    row: KernelSpec,
    problem: AttentionProblem,
    order: Whole,
    target: Target,
    places: OperandPlaces | None,
    mask: _Mask,
) -> tuple[LaunchRecord, ...]:
    """Attention with all keys of a tile in one CTA."""
    if target.is_shared:
        order = handed_out(order)
    if places is None and row.arch_specific:
        if row.cluster > 1:
            return attn_fwd_d512_sm90.build(row, problem, order, mask.places)
        return attn_fwd_sm90.build(row, problem, order, mask.places)
    if places is None:
        return attn_fwd.build(row, problem, mask.places)
    if row.grouping == "sm80":
        return attn_int8_sm80.build(row, problem, places)
    return attn_int8_sm90.build(row, problem, order, places, mask.places)


def _mask(candidate: Candidate, problem: AttentionProblem, target: Target, force: str | None, end: int) -> _Mask:
    """What prepares the mask, as the candidate wants it."""
    row, how, pack_gqa = candidate.row, candidate.mask, candidate.pack_gqa
    if how in (MaskInput.IN_PLACE, MaskInput.AS_TILES):
        return _Mask(end)
    memory = At("workspace", aligned(end))
    if how is MaskInput.COPIED:
        align = select_mask_align(target, force)
        records, places = masks.build_aligned(align.spec, problem, memory)
        return _Mask(memory.offset + places.num_bytes, records, (align,), places)
    # Kernels on mma.sync find masks by queries, others by rows of a tile.
    by_rows = pack_gqa if row.arch_specific else ONE_HEAD
    block_m = row.block_m // (pack_gqa.pack // by_rows.pack)
    blocks = num_m_blocks(replace(problem, seqlen_q=problem.seqlen_q * by_rows.pack), block_m)
    tiles = candidate.schedule.tiles if isinstance(candidate.schedule, Whole) else None
    lead_rows = 0 if tiles is None else tiles.lead_rows
    kernels: tuple[Selection, ...]
    if problem.packs_mask:
        pack, listing = select_masks(problem, target, force)
        kernels = (pack, listing) if how is MaskInput.LISTED else (pack,)
        lists = listing.spec if how is MaskInput.LISTED else None
        records, places = masks.build(pack.spec, lists, problem, block_m, lead_rows, blocks, memory, by_rows)
    else:
        predicted: _Stage = _Stage(end)
        given = None
        if problem.sparse is not None:
            chosen = select_blocks(problem.sparse, target, force)
            made, size, given = sparse_blocks.build(chosen[0].spec, chosen[1].spec, problem.sparse, memory)
            predicted = _Stage(memory.offset + size, made, chosen)
            memory = At("workspace", aligned(predicted.end))
        finds, listing = select_tile_kinds(target, force)
        if problem.score_mod is not None:
            finds = Selection(score_mod.with_score_mod(finds.spec, problem.score_mod), finds.why)
        kernels = (*predicted.kernels, finds, listing)
        records, places = tile_kinds.build(finds.spec, listing.spec, problem, block_m, lead_rows, blocks, memory, given)
        records = (*predicted.records, *records)
    return _Mask(memory.offset + places.num_bytes, records, kernels, places)


def _clear(problem: AttentionProblem, target: Target, force: str | None) -> _Stage:
    """What clears the queries that are not used; last, because partial results of theirs are merged, too."""
    p = problem
    if not p.used[0] or p.is_part:
        return _Stage(0)
    assert p.strides is not None
    selection = select_clear(target, force)
    o = used_rows.Cleared("o", "q", p.seqlen_q, p.num_q_heads, p.head_dim_v, p.strides.o)
    records = used_rows.build_clear(selection.spec, p.batch, [o], p.strides.lse[1] if p.lse else None)
    return _Stage(0, records, (selection,))


def _operands(
    row: KernelSpec,
    problem: AttentionProblem,
    target: Target,
    force: str | None,
    quantizers: tuple[QuantizeWay, ...],
) -> _Operands:
    """What makes the operands that the kernel reads of the arrays of the call."""
    if problem.operands is not None:
        return _Operands(0, places=attn_int8.given(problem.operands))
    if not row.quantized:
        return _Operands(0)
    whole = _whole_of(row, problem)
    if problem.descales is None:
        return _quantized(whole, problem, target, force, quantizers)
    # q and k come in e4m3, and so does v, which is laid out by channels.
    offsets, end = carve(fp8.layout_shapes(whole))
    at = {name: At("workspace", offset) for name, offset in offsets.items()}
    layout = select_layout(whole.head_dim_pad, target, force)
    records = fp8.build_layout(layout.spec, problem, whole, at)
    return _Operands(end, records, (layout,), attn_int8.in_e4m3(problem, whole, at))


def _quantized(
    whole: QuantizeProblem,
    problem: AttentionProblem,
    target: Target,
    force: str | None,
    ways: tuple[QuantizeWay, ...],
) -> _Operands:
    """ways: in which each of `AttentionProblem.quantizations` is made; none: as it is chosen."""
    strides = problem.strides
    assert strides is not None
    at, end = attn_int8.in_workspace(whole)
    delta = select_delta(whole, target, force) if whole.smooth_q else None
    records: list[LaunchRecord] = []
    kernels: list[Selection] = []
    starts: tuple[At, At] | None = None
    for i, part in enumerate(problem.quantizations(whole)):
        # Attention is loaded or compiled with it: what cannot be is an error, as of quantizers that are named.
        way = ways[i] if ways else chosen_ways(asked_of_quantizer(part, target), target, force)[0].way
        if way.values is not None:
            memory = At("workspace", aligned(end))
            specs = way.values[0].spec, way.values[1].spec
            records += fp8.build_with_values(*specs, part, (strides.q, strides.k, strides.v), at, memory)
            kernels += way.values
            end = memory.offset + fp8.values_scratch(specs[0], part)
        if way.keys_values is not None:
            memory = At("workspace", aligned(end))
            specs = way.keys_values[0].spec, way.keys_values[1].spec
            records += quantize_kv.build(*specs, part, (strides.k, strides.v), at, memory, problem.seqlen_q)
            kernels += way.keys_values
            if part.varlen:
                starts = quantize_kv.starts_in(specs[0], part, memory)
            end = memory.offset + quantize_kv.scratch_bytes(specs[0], part)
        if way.rows is not None:
            kernels.append(way.rows)
            records += fp8.build_quantizer(way.rows.spec, part, (strides.q, strides.k), at)
            part = part.of_values
        if way.general is None:
            continue
        kernels.append(way.general.kernel)
        spec = way.general.kernel.spec
        room, memory = quantize.scratch(spec, part), At("workspace", aligned(end))
        call = QuantizeCall(part, (strides.q, strides.k, strides.v), problem.layout, 0)
        delta_spec = None if delta is None else delta.spec
        # Those that attention quantizes itself are walked by the copy of cu_seqlens, too.
        queries = problem.seqlen_q if part.varlen else None
        launches = quantize.build(spec, delta_spec, call, target, at, memory, way.general.grid, queries=queries)
        if launches:  # none: there is nothing of K and V, and no copy
            starts = starts or quantize.starts_in(room, memory)
        records += launches
        end = memory.offset + room.size
    starts = starts or (At("cu_seqlens_q"), At("cu_seqlens_k"))
    made = (*dict.fromkeys(kernels), *(() if delta is None else (delta,)))
    return _Operands(end, tuple(records), made, attn_int8.own(whole, at, starts))
