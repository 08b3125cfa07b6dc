"""Launches of packed sequences on Hopper whose keys are split into even shares, one for each CTA."""

from __future__ import annotations

from dataclasses import asdict, replace

from ..problems import AttentionProblem
from ..problems.memory import WORKSPACE_ALIGNMENT
from ..problems.split import KeySplit
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from . import tile_order
from .attn_fwd import SINKS_KINDS, forward_values
from .attn_fwd_sm90 import operand_map, shared_rows_map
from .score_forms import form_values
from .structs import ATTN_COMBINE_PACKED, ATTN_FWD_SHARES_FORMS_SM90, ATTN_FWD_SHARES_SM90, At, member

#: Classes of sequences, a CTA's partial results of each, and bytes of what it writes of the tile that goes on behind
#: its share (kernels_cu/params/attn_combine.cuh).
CLASSES, SLOTS, CUT_BYTES = 4, 2, 32
#: Rows of a CTA of the second kernel, and its threads.
_MERGED_ROWS, _MERGE_THREADS = 8, 256


def workspace(spec: KernelSpec, problem: AttentionProblem, split: KeySplit) -> tuple[int, int, int]:
    """Where bases and denominators lie behind the partial O, where the cut tiles behind those, and the bytes of all."""
    rows = split.shares * CLASSES * SLOTS * spec.block_m
    ml = _aligned(4 * rows * problem.head_dim_v)
    cuts = ml + _aligned(8 * rows)
    return ml, cuts, cuts + CUT_BYTES * CLASSES * split.shares


def build(
    spec: KernelSpec, combine: KernelSpec, problem: AttentionProblem, split: KeySplit, begin: int = 0
) -> tuple[tuple[LaunchRecord, ...], int]:
    """The launches of a call, and where their workspace ends. begin: where it begins."""
    p, s, shared = problem, problem.strides, split.shared
    assert s is not None
    ml, cuts, num_bytes = workspace(spec, p, split)
    partial: dict[str, object] = {
        "partial_o": At("workspace", begin),
        "partial_ml": At("workspace", begin + ml),
        "cuts": At("workspace", begin + cuts),
    }
    # Rows are those of packed sequences, which the kernel counts by itself; of a few heads it makes one.
    told = replace(p, num_q_heads=p.num_q_heads // shared.heads)
    unused = dict.fromkeys(("num_splits", "num_queries", "num_tiles", "first_tile"), 0)
    tiles = asdict(tile_order.first(split.shares)) | unused | {"pack": shared.pack, "pack_heads": shared.heads}
    kv_shape = (1, p.seqlen_k, p.num_kv_heads)
    values = {
        "map_q": shared_rows_map(p, shared, spec.block_m),
        "map_k": operand_map("k", p.dtype, (*kv_shape, p.head_dim), s.k, spec.block_n),
        "map_v": operand_map("v", p.dtype, (*kv_shape, p.head_dim_v), s.v, spec.block_n),
        **member("fwd", forward_values(told, 0)),
        **member("tiles", tiles),
        **partial,
    }
    layout = ATTN_FWD_SHARES_SM90
    if "score_mods" in spec.features:
        layout = ATTN_FWD_SHARES_FORMS_SM90
        values |= member("forms", form_values(p, None))
    main = LaunchRecord(spec, (split.shares, 1, 1), 32 * spec.num_warps, *layout.pack(values))
    merged = {
        **partial,
        "o": At("o"),
        "lse": At("lse") if p.lse else None,
        "sinks": At("sinks") if p.sinks != "none" else None,
        "o_stride_s": s.o[1],
        "o_stride_h": s.o[2],
        "lse_stride_h": s.lse[1],
        "block_m": spec.block_m,
        "pack": shared.pack,
        "pack_heads": shared.heads,
        "head_dim": p.head_dim_v,
        "sinks_kind": SINKS_KINDS[p.sinks],
        "num_ctas": split.shares,
    }
    grid = (spec.block_m // _MERGED_ROWS, -(-split.shares // spec.ctas_per_sm), 1)
    merge = LaunchRecord(combine, grid, _MERGE_THREADS, *ATTN_COMBINE_PACKED.pack(merged), overlap=True)
    return (main, merge), begin + num_bytes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
