"""Launches of quantizers, decode, append, copies and merges."""

from __future__ import annotations

from ..launch import decode, fp8, kv_append, merge_states, quantize
from ..launch.host_struct import At
from ..problems import AppendProblem, CopyProblem, DecodeProblem, MergeProblem, QuantizeCall, Target
from ..select import (
    select_append,
    select_copy,
    select_decode,
    select_delta,
    select_fp8_quantizer,
    select_merge,
    select_quantizer,
)
from .engine import Launches


def plan_quantize(call: QuantizeCall, target: Target, force: str | None) -> Launches:
    """The launches of ``quantize_qk`` and ``quantize_v``."""
    problem = call.problem
    if fp8.takes(problem) and not problem.v:
        quantizer = select_fp8_quantizer(problem, target, force)
        arrays = {name: At(name) for name in problem.shapes()}
        return Launches(quantizer, fp8.build_quantizer(quantizer.spec, problem, call.strides[:2], arrays))
    quantizer = select_quantizer(problem, target, force)
    delta = select_delta(problem, target, force) if problem.smooth_q else None
    # The arguments v and cu_seqlens have results of the same names.
    named = {"v": "out.v", "cu_seqlens_q": "out.cu_seqlens_q", "cu_seqlens_k": "out.cu_seqlens_k"}
    outputs = {name: At(named.get(name, name)) for name in problem.shapes()}
    copies = (At("out.cu_seqlens_q"), At("out.cu_seqlens_k"))
    records = quantize.build(
        quantizer.spec, None if delta is None else delta.spec, call, target, outputs, At("workspace"), copies
    )
    size = max(quantize.scratch(quantizer.spec, problem).size, 1)
    return Launches(quantizer, records, size, () if delta is None else (delta,))


def plan_decode(problem: DecodeProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``decode``."""
    asked = [(p.problem.dtype, p.k, p.v, decode.query_tiles(p, target)) for p in decode.passes(problem)]
    selections = [select_decode(*each, target=target, force=force) for each in asked]
    kernels = tuple(decode.Kernels(main.spec, combine.spec) for main, combine in selections)
    merge = select_merge(problem.dtype, target, force) if len(selections) > 1 else None
    records, workspace_bytes = decode.build(kernels, None if merge is None else merge.spec, problem, target)
    others = [selection for pair in selections for selection in pair][1:]
    return Launches(selections[0][0], records, workspace_bytes, (*others, *(() if merge is None else (merge,))))


def plan_append(problem: AppendProblem, target: Target, force: str | None) -> Launches:
    """The launch of ``append``."""
    selection = select_append(problem, target, force)
    return Launches(selection, kv_append.build(selection.spec, problem, target))


def plan_copy(problem: CopyProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``copy_blocks`` and ``copy_recent``."""
    selection = select_copy(target, force)
    return Launches(selection, kv_append.build_copies(selection.spec, problem, target))


def plan_merge(problem: MergeProblem, target: Target, force: str | None) -> Launches:
    """The launch of ``merge_states``."""
    selection = select_merge(problem.dtype, target, force)
    return Launches(selection, merge_states.build(selection.spec, problem, target))
