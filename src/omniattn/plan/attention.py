"""Launches of an attention call: the chosen kernel, and the quantizer before it where Q, K and V are quantized."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import ArgumentError, UnsupportedError
from ..launch import (
    attn_fwd,
    attn_fwd_shares,
    attn_fwd_sm90,
    attn_fwd_split,
    attn_int8,
    attn_int8_sm80,
    attn_int8_sm90,
    fp8,
    masks,
    quantize,
    score_mod,
    tile_kinds,
)
from ..launch.attn_int8 import OperandPlaces
from ..launch.host_struct import At
from ..launch.masks import MaskPlaces
from ..problems import AttentionProblem, QuantizeCall, Target
from ..problems.fold import heads_as_queries, keys_as_tiles
from ..problems.memory import aligned
from ..problems.precision import GROUPINGS
from ..problems.quantize import carve
from ..problems.split import ONE_HEAD, SharedRows
from ..registry import REGISTRY, KernelSpec
from ..runtime.record import LaunchRecord
from ..select import (
    Selection,
    SplitSelection,
    select_attention,
    select_delta,
    select_fp8_quantizer,
    select_fp8_values,
    select_layout,
    select_mask_align,
    select_masks,
    select_quantizer,
    select_split,
    select_tail,
    select_tile_kinds,
)
from ..select.choice import forced, named_ops
from .binaries import has_binary, without_binary
from .engine import Launches

_BUILDERS = {"attn_fwd_sm80": attn_fwd.build, "attn_fwd_sm90": attn_fwd_sm90.build}
#: By the grouping of the operands that the kernel reads.
_QUANTIZED_BUILDERS = {"sm80": attn_int8_sm80.build, "sm90": attn_int8_sm90.build}


def plan_attention(problem: AttentionProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``attention`` and ``attention_varlen``."""
    if problem.operands is not None:
        _check_grouping(problem, target)
    asked, problem = problem, heads_as_queries(problem)
    launches = _plan(problem, target, force)
    if problem is asked:
        return launches
    shared = f"one query: the {problem.seqlen_q} query heads of a kv head are the rows of a tile"
    why = (*launches.selection.why, shared)
    return replace(launches, selection=Selection(launches.selection.spec, why))


def _plan(problem: AttentionProblem, target: Target, force: str | None) -> Launches:
    selection = _with_score_mod(select_attention(problem, target, force), problem)
    # A forced kernel gets the mask as it is.
    of_split = problem if named_ops(force) & {"attention", "attention_split"} else keys_as_tiles(problem, target)
    split = select_split(of_split, target, selection, force)
    if split is None:
        return _plan_unsplit(selection, problem, target, force)
    launches = _plan_split(split, of_split, target, force)
    missing = without_binary(launches, target.cc)
    # Forced kernels run, or raise.
    if missing is None or forced(force, tuple({r.spec.op for r in launches.records}), lambda spec: None) is not None:
        return launches
    unsplit = _plan_unsplit(selection, problem, target, force)
    if without_binary(unsplit, target.cc) is not None:
        return launches
    reason = f"keys are not split: {missing.name} is not prebuilt and cannot be compiled here"
    return replace(unsplit, selection=Selection(selection.spec, (*selection.why, reason)))


def _plan_split(split: SplitSelection, problem: AttentionProblem, target: Target, force: str | None) -> Launches:
    if split.main.spec.quantized:
        if problem.descales is not None:
            return _lay_out_first(split.main, problem, target, force, split)
        if problem.operands is None:
            return _quantize_first(split.main, problem, target, force, split)
        return _split_quantized(split, problem, target, force, attn_int8.given(problem.operands), 0)
    if split.split.shares:
        assert split.combine is not None
        of_shares = split.main.spec, split.combine.spec
        return Launches(split.main, *attn_fwd_shares.build(*of_shares, problem, split.split), split.merging)
    main = _with_score_mod(split.main, problem)
    chosen = main.spec, None if split.combine is None else split.combine.spec
    mask = _prepare_mask(split.main.spec, problem, target, force, 0, split.split.shared)
    of_mask = mask.places[0] if mask.places else None
    records, end = attn_fwd_split.build(*chosen, problem, target, split.split, of_mask, aligned(mask.end))
    return Launches(main, (*mask.records, *records), end, (*mask.others, *split.merging))


def _plan_unsplit(selection: Selection, problem: AttentionProblem, target: Target, force: str | None) -> Launches:
    spec = selection.spec
    if problem.descales is not None:
        return _lay_out_first(selection, problem, target, force)
    if spec.quantized and problem.operands is None:
        return _quantize_first(selection, problem, target, force)
    mask = _prepare_mask(spec, problem, target, force, 0)
    given = None if problem.operands is None else attn_int8.given(problem.operands)
    own = _attend(selection, problem, target, force, mask, given)
    return Launches(own.selection, (*mask.records, *own.records), own.workspace_bytes, (*mask.others, *own.others))


def _attend(
    selection: Selection,
    problem: AttentionProblem,
    target: Target,
    force: str | None,
    mask: _PreparedMask,
    places: OperandPlaces | None = None,
) -> Launches:
    """Attention's own launches, behind what it needs, and where their memory ends; 0: there is none.

    places: of quantized operands.
    """
    spec = selection.spec
    given = () if places is None else (places,)
    build = _BUILDERS[spec.family] if places is None else _QUANTIZED_BUILDERS[spec.grouping]
    tail = select_tail(problem, target, selection, force)
    if tail is not None and has_binary(spec, target.cc):
        of_tail = tail.main, *tail.merging
        tail = tail if all(has_binary(x.spec, target.cc) for x in of_tail) else None
    if tail is None or tail.split.tail is None:
        return Launches(selection, build(spec, problem, target, *given, *mask.places), mask.end if mask.places else 0)
    first = tail.split.tail.first_tile
    if places is None:
        records = attn_fwd_sm90.build(spec, problem, target, first_tiles=first)
    else:
        records = attn_int8_sm90.build(spec, problem, target, places, first_tiles=first)
    chosen = tail.main.spec, None if tail.combine is None else tail.combine.spec
    begin = aligned(mask.end)
    more, end = attn_fwd_split.build(*chosen, problem, target, tail.split, begin=begin, places=places)
    why = (*selection.why, *tail.main.why)
    return Launches(Selection(spec, why), (*records, *more), end, (tail.main, *tail.merging))


def _with_score_mod(selection: Selection, problem: AttentionProblem) -> Selection:
    if problem.score_mod is None:
        return selection
    spec = score_mod.with_score_mod(selection.spec, problem.score_mod)
    return Selection(spec, (*selection.why, "with score_mod compiled in, which no wheel carries"))


@dataclass(frozen=True)
class _PreparedMask:
    """The kernels that pack a mask, or look at tiles, and list the tiles of keys that are left; nothing without any.

    Attributes
    ----------
    records : tuple of LaunchRecord
    places : tuple
        Of a MaskPlaces, or empty: what builders take behind their other arguments.
    end : int
        Where its memory in the workspace ends.
    others : tuple of Selection
    """

    records: tuple[LaunchRecord, ...] = ()
    places: tuple[MaskPlaces, ...] = ()
    end: int = 0
    others: tuple[Selection, ...] = ()


def _prepares(spec: KernelSpec, problem: AttentionProblem) -> bool:
    """Whether kernels before attention pack its mask, or find out which tiles are visible."""
    if spec.quantized:
        return spec.arch_specific and masks.takes(problem)
    if problem.varlen and ("masks" in spec.lacks or not spec.arch_specific):
        return False
    packs = masks.takes if spec.family == "attn_fwd_sm90" else masks.pay
    return packs(problem) or tile_kinds.wanted(problem) or _aligns(spec, problem)


def _aligns(spec: KernelSpec, problem: AttentionProblem) -> bool:
    """Whether a kernel before attention copies its additive mask to where a tensor map can describe it."""
    return spec.family == "attn_fwd_sm90" and problem.aligns_mask


def _prepare_mask(
    spec: KernelSpec,
    problem: AttentionProblem,
    target: Target,
    force: str | None,
    begin: int,
    shared: SharedRows = ONE_HEAD,
) -> _PreparedMask:
    """begin: where its memory in the workspace begins. shared: heads that share the rows of a tile."""
    if not _prepares(spec, problem):
        return _PreparedMask(end=begin)
    if _aligns(spec, problem):
        align = select_mask_align(target, force)
        records, places = masks.build_aligned(align.spec, problem, At("workspace", begin))
        return _PreparedMask(records, (places,), begin + places.num_bytes, (align,))
    # Kernels on mma.sync find masks by queries, others by rows of a tile.
    by_rows = shared if spec.arch_specific else ONE_HEAD
    block_m = spec.block_m // (shared.pack // by_rows.pack)
    blocks = attn_fwd.num_m_blocks(replace(problem, seqlen_q=problem.seqlen_q * by_rows.pack), block_m)
    # Kernels of an architecture are persistent: they have an order of tiles. Splits have their own.
    ordered = spec.arch_specific and spec.op != "attention_split"
    lead_rows = attn_fwd_sm90.tiles_of(problem, spec, blocks, target.sm_count).lead_rows if ordered else 0
    packed = masks.takes(problem)
    first, listing = select_masks(problem, target, force) if packed else select_tile_kinds(target, force)
    # Heads that share a tile by queries have no list in common where the mask is another for each.
    alone = by_rows.heads < shared.heads and masks.MaskExtents.of(problem).heads > 1
    memory = At("workspace", begin)
    if packed and ("lists" in spec.lacks or alone):
        records, places = masks.build(first.spec, None, problem, block_m, lead_rows, blocks, memory, by_rows)
        return _PreparedMask(records, (places,), begin + places.num_bytes, (first,))
    if not packed:
        first = _with_score_mod(first, problem)
    chosen = first.spec, listing.spec
    if packed:
        records, places = masks.build(*chosen, problem, block_m, lead_rows, blocks, memory, by_rows)
    else:
        records, places = tile_kinds.build(*chosen, problem, block_m, lead_rows, blocks, memory)
    return _PreparedMask(records, (places,), begin + places.num_bytes, (first, listing))


def _split_quantized(
    split: SplitSelection,
    problem: AttentionProblem,
    target: Target,
    force: str | None,
    places: OperandPlaces,
    begin: int,
    made: tuple[LaunchRecord, ...] = (),
    others: tuple[Selection, ...] = (),
) -> Launches:
    """begin: where the memory of masks and partial results begins. made, others: what makes the operands, and the
    kernels of that.
    """
    spec = split.main.spec
    mask = _prepare_mask(spec, problem, target, force, begin, split.split.shared)
    of_mask = mask.places[0] if mask.places else None
    chosen = spec, None if split.combine is None else split.combine.spec
    if split.split.shares:
        assert split.combine is not None
        records, end = attn_fwd_shares.build(spec, split.combine.spec, problem, split.split, aligned(mask.end), places)
    else:
        records, end = attn_fwd_split.build(*chosen, problem, target, split.split, of_mask, aligned(mask.end), places)
    return Launches(split.main, (*mask.records, *made, *records), end, (*others, *mask.others, *split.merging))


def _quantize_first(
    selection: Selection,
    problem: AttentionProblem,
    target: Target,
    force: str | None,
    split: SplitSelection | None = None,
) -> Launches:
    spec, strides = selection.spec, problem.strides
    assert strides is not None
    quantized = problem.quantization(
        grouping=spec.grouping, pv=spec.pv, pv_accumulator=spec.pv_accumulator, unpacked=spec.qk == "int8"
    )
    at, end = attn_int8.in_workspace(quantized)
    delta = select_delta(quantized, target, force) if quantized.smooth_q else None
    made: list[LaunchRecord] = []
    quantizers: list[Selection] = []
    starts: tuple[At, At] | None = None
    for part in problem.quantizations(quantized):
        both = select_fp8_values(part, target, force) if fp8.takes_values(part) else None
        if both is not None:
            memory = At("workspace", aligned(end))
            specs = both[0].spec, both[1].spec
            made += fp8.build_with_values(*specs, part, (strides.q, strides.k, strides.v), at, memory)
            quantizers += both
            end = memory.offset + fp8.values_scratch(specs[0], part)
            continue
        if fp8.takes(part):
            quantizers.append(select_fp8_quantizer(part, target, force))
            made += fp8.build_quantizer(quantizers[-1].spec, part, (strides.q, strides.k), at)
            part = part.of_values
            if not part.v:
                continue
        quantizers.append(select_quantizer(part, target, force))
        room, memory = quantize.scratch(quantizers[-1].spec, part), At("workspace", aligned(end))
        starts = starts or quantize.starts_in(room, memory)
        call = QuantizeCall(part, (strides.q, strides.k, strides.v), problem.layout, 0)
        delta_spec = None if delta is None else delta.spec
        made += quantize.build(quantizers[-1].spec, delta_spec, call, target, at, memory)
        end = memory.offset + room.size
    starts = starts or (At("cu_seqlens_q"), At("cu_seqlens_k"))
    of_delta = () if delta is None else (delta,)
    places = attn_int8.own(quantized, at, starts)
    if split is not None:
        others = (*dict.fromkeys(quantizers), *of_delta)
        return _split_quantized(split, problem, target, force, places, aligned(end), tuple(made), others)
    mask = _prepare_mask(spec, problem, target, force, aligned(end))
    own = _attend(selection, problem, target, force, mask, places)
    records = (*mask.records, *made) if own.records else ()
    others = (*dict.fromkeys(quantizers), *of_delta, *mask.others, *own.others)
    return Launches(own.selection, (*records, *own.records), own.workspace_bytes or end, others)


def _lay_out_first(
    selection: Selection,
    problem: AttentionProblem,
    target: Target,
    force: str | None,
    split: SplitSelection | None = None,
) -> Launches:
    """A call on e4m3: V is laid out by channels before attention."""
    spec = selection.spec
    whole = problem.quantization(
        grouping=spec.grouping, pv=spec.pv, pv_accumulator=spec.pv_accumulator, unpacked=spec.qk == "int8"
    )
    offsets, end = carve(fp8.layout_shapes(whole))
    at = {name: At("workspace", offset) for name, offset in offsets.items()}
    layout = select_layout(whole.head_dim_pad, target, force)
    made = fp8.build_layout(layout.spec, problem, whole, at)
    places = attn_int8.in_e4m3(problem, whole, at)
    if split is not None:
        return _split_quantized(split, problem, target, force, places, aligned(end), tuple(made), (layout,))
    mask = _prepare_mask(spec, problem, target, force, aligned(end))
    own = _attend(selection, problem, target, force, mask, places)
    records = (*mask.records, *made) if own.records else ()
    others = (layout, *mask.others, *own.others)
    return Launches(own.selection, (*records, *own.records), own.workspace_bytes or end, others)


def _check_grouping(problem: AttentionProblem, target: Target) -> None:
    """Whether the GPU has kernels for operands in this grouping at all; without any kernel, selection says so."""
    operands = problem.operands
    assert operands is not None

    def serves(spec: KernelSpec) -> bool:
        return spec.quantized and (spec.min_arch == target.cc or not spec.arch_specific)

    read = {spec.grouping for spec in REGISTRY if serves(spec)}
    function = "attention_varlen" if problem.varlen else "attention"
    if read and operands.grouping not in read and not operands.e4m3:
        wanted = " or ".join(f"grouping={g!r}" for g in GROUPINGS if g in read)
        raise ArgumentError(
            "q", f"operands of quantize_qk({wanted}), which the kernels of this GPU read",
            f"grouping={operands.grouping!r}", function=function,
        )  # fmt: skip
    if not problem.tensor_maps and operands.grouping == "sm90" and not operands.e4m3:
        raise UnsupportedError(
            f"{function}(): quantized operands of this grouping need tensor maps, which CuPy cannot make",
            instead="quantize_qk(grouping='sm80'), or cuda-bindings as the driver",
        )
