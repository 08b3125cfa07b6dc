"""Launches of ``index_logits`` and ``top_k``."""

from __future__ import annotations

from ..problems import IndexLogitsProblem, TopKProblem
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .host_struct import At
from .numbers import quotient_factors
from .structs import INDEX_LOGITS, TOP_K


def build_logits(spec: KernelSpec, problem: IndexLogitsProblem, span: int) -> tuple[LaunchRecord, ...]:
    """The launch of a call whose CTAs have ``span`` keys each; none where there is nothing to compute."""
    p = problem
    if p.rows == 0 or p.max_keys == 0:
        return ()
    tile = p.query_tile(spec.block_m)
    tiles, spans = -(-p.queries // tile), -(-p.max_keys // span)
    multiplier, shift = quotient_factors(max(p.block_size, 1))
    has_lens, has_start, has_end = p.ranges
    fused = p.scale_offset >= 0
    values: dict[str, object] = {
        "q": At("q"), "k": At("k"), "k_scale": At("k", p.scale_offset) if fused else At("k_scale"),
        "weights": At("weights"), "logits": At("logits"), "seq_lens": At("seq_lens") if has_lens else None,
        "block_table": At("block_table") if p.num_blocks else None, "k_start": At("k_start") if has_start else None,
        "k_end": At("k_end") if has_end else None,
        **dict(zip(("q_stride_b", "q_stride_n", "q_stride_h"), p.q_strides, strict=True)),
        **dict(zip(("k_stride_block", "k_stride_row"), p.k_strides, strict=True)),
        **dict(zip(("scale_stride_block", "scale_stride_row"), p.scale_strides, strict=True)),
        "weights_stride": p.weights_stride, "logits_stride": p.logits_stride, "table_stride": p.table_stride,
        "queries": p.queries, "num_heads": p.num_heads, "max_keys": p.max_keys, "block_size": p.block_size,
        "block_multiplier": multiplier, "block_shift": shift, "num_blocks": p.num_blocks, "query_tile": tile,
        "query_tiles": tiles, "span": span, "spans": spans, "k_aligned": int(p.has_aligned_keys),
    }  # fmt: skip
    grid = (p.sequences * tiles * spans, 1, 1)
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *INDEX_LOGITS.pack(values)),)


def build_top_k(spec: KernelSpec, problem: TopKProblem, ctas: int) -> tuple[LaunchRecord, ...]:
    """The launch of a call in which ``ctas`` CTAs, a cluster, have a row; none where there are no rows."""
    p = problem
    if p.rows == 0:
        return ()
    multiplier, shift = quotient_factors(max(p.block_size, 1))
    has_starts, has_lengths = p.ranges
    values: dict[str, object] = {
        "logits": At("logits"), "starts": At("starts") if has_starts else None,
        "lengths": At("lengths") if has_lengths else None,
        "block_table": At("block_table") if p.block_size else None, "indices": At("indices"),
        "logits_stride": p.logits_stride, "indices_stride": p.indices_stride, "table_stride": p.table_stride,
        "width": p.width, "k": p.k, "queries": p.next_n, "block_size": p.block_size, "block_multiplier": multiplier,
        "block_shift": shift,
    }  # fmt: skip
    cluster = (ctas, 1, 1) if spec.min_arch >= (9, 0) else None
    grid = (p.rows * ctas, 1, 1)
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *TOP_K.pack(values), cluster=cluster),)
