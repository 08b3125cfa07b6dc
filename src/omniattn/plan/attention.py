"""Launches of an attention call: the chosen kernel, and the quantizer before it where Q, K and V are quantized."""

from __future__ import annotations

from ..errors import ArgumentError, UnsupportedError
from ..launch import attn_fwd, attn_fwd_sm90, attn_int8, attn_int8_sm80, attn_int8_sm90, masks, quantize
from ..launch.attn_int8 import OperandPlaces
from ..launch.structs import At
from ..problems import AttentionProblem, QuantizeCall, Target
from ..problems.precision import GROUPINGS
from ..registry import REGISTRY, KernelSpec
from ..runtime.record import LaunchRecord
from ..select import Selection, select_attention, select_delta, select_masks, select_quantizer
from .engine import Launches

_BUILDERS = {"attn_fwd_sm80": attn_fwd.build, "attn_fwd_sm90": attn_fwd_sm90.build}
#: By the grouping of the operands that the kernel reads.
_QUANTIZED_BUILDERS = {"sm80": attn_int8_sm80.build, "sm90": attn_int8_sm90.build}


def plan_attention(problem: AttentionProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``attention`` and ``attention_varlen``."""
    if problem.operands is not None:
        _check_grouping(problem, target)
    selection = select_attention(problem, target, force)
    spec = selection.spec
    packs = {"attn_fwd_sm90": masks.takes, "attn_fwd_sm80": masks.pay}.get(spec.family)
    if packs is not None and packs(problem):
        return _prepare_mask(selection, problem, target, force)
    if not spec.quantized:
        return Launches(selection, _BUILDERS[spec.family](spec, problem, target))
    if problem.operands is not None:
        places = attn_int8.given(problem.operands)
        return Launches(selection, _QUANTIZED_BUILDERS[spec.grouping](spec, problem, target, places))
    return _quantize_first(selection, problem, target, force)


def _prepare_mask(selection: Selection, problem: AttentionProblem, target: Target, force: str | None) -> Launches:
    """Attention behind the kernels that pack its mask and find the tiles of keys that it leaves."""
    spec, (pack, listing) = selection.spec, select_masks(problem, target, force)
    blocks = attn_fwd.num_m_blocks(problem, spec.block_m)
    persistent = spec.family == "attn_fwd_sm90"
    lead_rows = attn_fwd_sm90.tiles_of(problem, spec, blocks, target.sm_count).lead_rows if persistent else 0
    before, places = masks.build(pack.spec, listing.spec, problem, spec.block_m, lead_rows, blocks, At("workspace"))
    records = _BUILDERS[spec.family](spec, problem, target, places)
    return Launches(selection, (*before, *records), places.num_bytes, (pack, listing))


def _quantize_first(selection: Selection, problem: AttentionProblem, target: Target, force: str | None) -> Launches:
    spec, strides = selection.spec, problem.strides
    assert strides is not None
    quantized = problem.quantization(
        grouping=spec.grouping, pv=spec.pv, pv_accumulator=spec.pv_accumulator, unpacked=spec.qk == "int8"
    )
    quantizer = select_quantizer(quantized, target, force)
    delta = select_delta(quantized, target, force) if quantized.smooth_q else None
    call = QuantizeCall(quantized, (strides.q, strides.k, strides.v), problem.layout, 0)
    at, outputs_bytes = attn_int8.in_workspace(quantized)
    room = quantize.scratch(quantizer.spec, quantized)
    memory = At("workspace", outputs_bytes)
    places = OperandPlaces(quantized, at, quantize.starts_in(room, memory))
    attention = _QUANTIZED_BUILDERS[spec.grouping](spec, problem, target, places)
    records: tuple[LaunchRecord, ...] = ()
    if attention:
        records = quantize.build(quantizer.spec, None if delta is None else delta.spec, call, target, at, memory)
    others = (quantizer,) if delta is None else (quantizer, delta)
    return Launches(selection, (*records, *attention), outputs_bytes + room.size, others)


def _check_grouping(problem: AttentionProblem, target: Target) -> None:
    """Whether the GPU has kernels for operands in this grouping at all; without any kernel, selection says so."""
    operands = problem.operands
    assert operands is not None

    def serves(spec: KernelSpec) -> bool:
        return spec.quantized and (spec.min_arch == target.cc or not spec.arch_specific)

    read = {spec.grouping for spec in REGISTRY if serves(spec)}
    function = "attention_varlen" if problem.varlen else "attention"
    if read and operands.grouping not in read:
        wanted = " or ".join(f"grouping={g!r}" for g in GROUPINGS if g in read)
        raise ArgumentError(
            "q", f"operands of quantize_qk({wanted}), which the kernels of this GPU read",
            f"grouping={operands.grouping!r}", function=function,
        )  # fmt: skip
    if not problem.tensor_maps and operands.grouping == "sm90":
        raise UnsupportedError(
            f"{function}(): quantized operands of this grouping need tensor maps, which CuPy cannot make",
            instead="quantize_qk(grouping='sm80'), or cuda-bindings as the driver",
        )
