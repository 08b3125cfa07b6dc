"""Launches of quantizers, decode, append, copies, merges and the indexer."""

from __future__ import annotations

from ..launch import decode, fp8, indexer, kv_append, latent_append, merge_states, quantize, sparse_blocks
from ..launch.host_struct import At
from ..problems import (
    AppendProblem,
    CopyProblem,
    DecodeProblem,
    IndexLogitsProblem,
    MergeProblem,
    QuantizeCall,
    Target,
    TopKProblem,
)
from ..problems.sparse_blocks import SparseBlocksProblem
from ..select import select_append, select_copy, select_delta, select_merge
from ..select.blocks import select_blocks
from ..select.decode_ways import DecodeWay, asked_of_decode
from ..select.indexer import select_index_logits, select_top_k, span_of
from ..select.quantize_ways import QuantizeWay, asked_of_quantizer
from ..select.ways import chosen_ways
from .available import first_that_loads
from .engine import Launches


def plan_quantize(call: QuantizeCall, target: Target, force: str | None) -> Launches:
    """The launches of ``quantize_qk`` and ``quantize_v``."""
    ways = chosen_ways(asked_of_quantizer(call.problem, target), target, force)
    return first_that_loads(ways, lambda way: quantize_launches(way, call, target, force), target)


def quantize_launches(way: QuantizeWay, call: QuantizeCall, target: Target, force: str | None) -> Launches:
    """The launches of ``quantize_qk`` and ``quantize_v``, run as ``way`` says."""
    problem = call.problem
    # The arguments v and cu_seqlens have results of the same names.
    named = {"v": "out.v", "cu_seqlens_q": "out.cu_seqlens_q", "cu_seqlens_k": "out.cu_seqlens_k"}
    outputs = {name: At(named.get(name, name)) for name in problem.shapes()}
    if way.rows is not None:
        return Launches(way.rows, fp8.build_quantizer(way.rows.spec, problem, call.strides[:2], outputs))
    assert way.general is not None, "a public function quantizes Q and K, or V"
    quantizer = way.general.kernel
    delta = select_delta(problem, target, force) if problem.smooth_q else None
    copies = (At("out.cu_seqlens_q"), At("out.cu_seqlens_k"))
    records = quantize.build(
        quantizer.spec, None if delta is None else delta.spec, call, target, outputs, At("workspace"),
        way.general.grid, copies,
    )  # fmt: skip
    size = max(quantize.scratch(quantizer.spec, problem).size, 1)
    return Launches(quantizer, records, size, () if delta is None else (delta,))


def plan_decode(problem: DecodeProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``decode``."""
    ways = chosen_ways(asked_of_decode(problem, target), target, force)
    return first_that_loads(ways, lambda way: decode_launches(way, problem, target, force), target)


def decode_launches(way: DecodeWay, problem: DecodeProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``decode``, run as ``way`` says."""
    kernels = tuple(decode.Kernels(one.main.spec, one.combine.spec, one.split) for one in way.passes)
    merge = select_merge(problem.dtype, target, force) if len(kernels) > 1 else None
    records, workspace_bytes = decode.build(kernels, None if merge is None else merge.spec, problem, target)
    first, *others = (selection for one in way.passes for selection in (one.main, one.combine))
    return Launches(first, records, workspace_bytes, (*others, *(() if merge is None else (merge,))))


def plan_append(problem: AppendProblem, target: Target, force: str | None) -> Launches:
    """The launch of ``append``."""
    selection = select_append(problem, target, force)
    build = latent_append.build if problem.cache.is_latent else kv_append.build
    return Launches(selection, build(selection.spec, problem, target))


def plan_copy(problem: CopyProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``copy_blocks`` and ``copy_recent``."""
    selection = select_copy(target, force)
    return Launches(selection, kv_append.build_copies(selection.spec, problem, target))


def plan_merge(problem: MergeProblem, target: Target, force: str | None) -> Launches:
    """The launch of ``merge_states``."""
    selection = select_merge(problem.dtype, target, force)
    return Launches(selection, merge_states.build(selection.spec, problem, target))


def plan_index_logits(problem: IndexLogitsProblem, target: Target, force: str | None) -> Launches:
    """The launch of ``index_logits``."""
    selection = select_index_logits(problem, target, force)
    span = span_of(selection.spec, problem, target)
    return Launches(selection, indexer.build_logits(selection.spec, problem, span))


def plan_top_k(problem: TopKProblem, target: Target, force: str | None) -> Launches:
    """The launch of ``top_k``."""
    selection, ctas = select_top_k(problem, target, force)
    return Launches(selection, indexer.build_top_k(selection.spec, problem, ctas))


def plan_sparse_blocks(problem: SparseBlocksProblem, target: Target, force: str | None) -> Launches:
    """The launches of ``sparse_blocks``."""
    means, choosing = select_blocks(problem, target, force)
    records, workspace_bytes, _ = sparse_blocks.build(means.spec, choosing.spec, problem, At("workspace"), At("blocks"))
    return Launches(means, records, workspace_bytes, (choosing,))
