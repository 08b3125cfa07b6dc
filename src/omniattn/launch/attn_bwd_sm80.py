"""Launches of the backward of attention on mma.sync: what it needs of each row, one CTA a tile of keys, the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UnsupportedError
from ..problems import UNLIMITED, AttentionProblem
from ..problems.backward import ROW_PADDING, BackwardProblem
from ..problems.memory import WORKSPACE_ALIGNMENT
from ..problems.tile_order import num_m_blocks, num_n_blocks
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .attn_fwd import forward_values, tile_launches
from .dropout import dropout_values
from .host_struct import At, member, strides
from .masks import MaskPlaces
from .numbers import MAX_GRID_X
from .score_mod import array_values
from .structs import ATTN_BWD, ATTN_BWD_DROPOUT, ATTN_BWD_USER_MOD

#: Padded rows to a number of ``stray_do`` (kernels_cu/params/attn_bwd.cuh).
STRAY_ROWS = 64


@dataclass(frozen=True)
class BackwardPlaces:
    """Where the memory of a backward lies in the workspace.

    Attributes
    ----------
    lse2, delta : At
        Numbers of each padded row.
    dq_accum : At or None
        Sums of dq.
    sink_partials : At or None
        Sums of dsinks.
    stray_do : At or None
        In which blocks of rows ``do`` is not finite where nothing is attended to.
    end : int
        Bytes.
    """

    lse2: At
    delta: At
    dq_accum: At | None
    sink_partials: At | None
    stray_do: At | None
    end: int


def step_counters(problem: BackwardProblem, n_blocks: int) -> int:
    """Numbers that order the additions to dq: two for each of the ``n_blocks`` tiles of keys of every head."""
    f = problem.forward
    return 2 * n_blocks * f.num_kv_heads * (1 if f.varlen else f.batch)


def every_query_sees_a_key(f: AttentionProblem) -> bool:
    """Whether that follows from the shape: row i sees key i + seqlen_k - seqlen_q, if that exists."""
    unlimited = f.window_left == UNLIMITED and f.window_right == UNLIMITED
    return not f.varlen and f.seqlen_k > 0 and (unlimited or f.seqlen_q <= f.seqlen_k)


def _every_query_attends(f: AttentionProblem) -> bool:
    """Whether besides nothing hides what it sees."""
    return every_query_sees_a_key(f) and f.mask == "none" and f.score_mod is None and f.block_mask is None


def places(problem: BackwardProblem, dq_columns: int, n_blocks: int = 0) -> BackwardPlaces:
    """Places in a workspace of their own.

    Parameters
    ----------
    problem : BackwardProblem
    dq_columns : int
        Of the sums of dq, 0 for none.
    n_blocks : int
        Tiles of keys of a head whose additions to dq have an order, 0 without one.

    Returns
    -------
    BackwardPlaces
    """
    begin = 0
    rows = problem.padded_rows * problem.forward.num_q_heads
    sums = rows // ROW_PADDING if "dsinks" in problem.wanted else 0
    at: list[At] = []
    # Counters lie behind delta (kernels_cu/params/attn_bwd.cuh).
    counters = int(problem.forward.varlen or n_blocks > 0) + step_counters(problem, n_blocks)
    blocks = 0 if _every_query_attends(problem.forward) else rows // STRAY_ROWS
    for count in (rows, rows + counters, rows * dq_columns, sums, blocks):
        at.append(At("workspace", begin))
        begin += -(-4 * count // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    dq_accum, sink_partials = at[2] if dq_columns else None, at[3] if sums else None
    return BackwardPlaces(at[0], at[1], dq_accum, sink_partials, at[4] if blocks else None, begin)


def backward_values(
    problem: BackwardProblem,
    at: BackwardPlaces,
    *,
    dq_columns: int = 0,
    m_blocks: int = 0,
    n_blocks: int = 0,
    tile_offset: int = 0,
    lists: MaskPlaces | None = None,
) -> dict[str, object]:
    """The fields of AttnBwdParams. lists: of tiles that a block mask leaves, of a kernel that passes over others."""
    f, s = problem.forward, problem.strides
    assert s is not None, "a problem without strides describes a call, it cannot be launched"
    fwd = forward_values(f, m_blocks, mask_extent=f.mask_extent, tile_offset=tile_offset)
    wanted = {name: At(name) if name in problem.wanted else None for name in ("dq", "dk", "dv", "dsinks", "dmask")}
    return {
        **member("fwd", fwd),
        **wanted,
        "d_o": At("do"),
        "dlse": At("dlse") if problem.dlse else None,
        "lse2": at.lse2,
        "delta": at.delta,
        "dq_accum": at.dq_accum,
        "sink_partials": at.sink_partials,
        "stray_do": at.stray_do,
        **strides("do", s.d_o),
        **strides("dq", s.dq),
        **strides("dk", s.dk),
        **strides("dv", s.dv),
        "dlse_stride_b": s.dlse[0],
        "dlse_stride_h": s.dlse[1],
        **dict(zip((f"dmask_stride_{x}" for x in "bhqk"), s.dmask, strict=True)),
        "rows_stride_h": problem.padded_rows,
        "dq_columns": dq_columns,
        "num_n_blocks": n_blocks,
        "lists": None if lists is None else lists.lists,
        "lists_stride_b": 0 if lists is None else lists.lists_stride_b,
        "lists_stride_h": 0 if lists is None else lists.lists_stride_h,
        "num_list_tiles": 0 if lists is None else lists.num_tiles,
        "zero": 0,
    }


def _tiles(spec: KernelSpec, problem: BackwardProblem, values: dict[str, object], count: int) -> LaunchRecord:
    mod, dropout = problem.forward.score_mod, problem.forward.dropout
    layout = ATTN_BWD
    if mod is not None:
        layout = ATTN_BWD_USER_MOD
        values = member("call", values) | member("arrays", array_values(mod))
    if dropout is not None:
        layout = ATTN_BWD_DROPOUT
        values = member("call", values) | member("dropout", dropout_values(dropout))
    return LaunchRecord(spec, (count, 1, 1), 32 * spec.num_warps, *layout.pack(values))


def build(
    spec: KernelSpec,
    problem: BackwardProblem,
    at: BackwardPlaces,
    dq_columns: int,
    lists: MaskPlaces | None = None,
) -> tuple[LaunchRecord, ...]:
    """The launches that make dk and dv, and the sums of dq where there is a place for them.

    lists: of tiles of queries, with a block mask.
    """
    f = problem.forward
    blocks = num_n_blocks(f, spec.block_n)
    tiles = blocks * f.num_kv_heads * (1 if f.varlen else f.batch)
    return tuple(
        _tiles(spec, problem,
               backward_values(
                   problem, at, dq_columns=dq_columns, n_blocks=blocks, tile_offset=first, lists=lists), count)
        for first, count in tile_launches(tiles)
    )  # fmt: skip


def build_dq(
    spec: KernelSpec, problem: BackwardProblem, at: BackwardPlaces, lists: MaskPlaces | None = None
) -> tuple[LaunchRecord, ...]:
    """The launches that make dq alone. lists: of tiles of keys, with a block mask."""
    f = problem.forward
    blocks = num_m_blocks(f, spec.block_m)
    tiles = blocks * f.num_q_heads * (1 if f.varlen else f.batch)
    return tuple(
        _tiles(spec, problem, backward_values(problem, at, m_blocks=blocks, tile_offset=first, lists=lists), count)
        for first, count in tile_launches(tiles)
    )


def _rows(
    spec: KernelSpec,
    problem: BackwardProblem,
    at: BackwardPlaces,
    dq_columns: int,
    count: int,
    *,
    n_blocks: int = 0,
    overlap: bool = False,
) -> tuple[LaunchRecord, ...]:
    if count > MAX_GRID_X:
        raise UnsupportedError(
            f"attention_backward(): {problem.padded_rows} padded rows of {problem.forward.num_q_heads} query heads are "
            f"more than {MAX_GRID_X} blocks of {ROW_PADDING}",
            instead="calls of a part of the batch each",
        )
    if count == 0:
        return ()
    values = backward_values(problem, at, dq_columns=dq_columns, n_blocks=n_blocks)
    if problem.forward.num_q_heads == 0:
        values["rows_stride_h"] = 0  # there are only gradients of masks and counters to clear, and no rows of a head
    return (LaunchRecord(spec, (count, 1, 1), 32 * spec.num_warps, *ATTN_BWD.pack(values), overlap=overlap),)


def build_prepare(
    spec: KernelSpec, problem: BackwardProblem, at: BackwardPlaces, dq_columns: int, n_blocks: int = 0
) -> tuple[LaunchRecord, ...]:
    """The launch that makes lse2, delta and the sums of sinks, and clears what is added to.

    n_blocks: as of `places`. With an order the first of the sums of dq is stored: cleared are they only if there may
    be rows that get none. Lists of a block mask are in none.
    """
    if n_blocks and problem.forward.block_mask is None and every_query_sees_a_key(problem.forward):
        at = replace(at, dq_accum=None)
    blocks = problem.padded_rows // ROW_PADDING * problem.forward.num_q_heads
    # Without queries a mask may still have a gradient to clear, and packed keys a counter.
    clears = "dmask" in problem.wanted or n_blocks > 0 or (problem.forward.varlen and problem.forward.seqlen_k > 0)
    return _rows(spec, problem, at, dq_columns, blocks or int(clears), n_blocks=n_blocks)


def build_finish(
    spec: KernelSpec, problem: BackwardProblem, at: BackwardPlaces, dq_columns: int, *, overlap: bool = False
) -> tuple[LaunchRecord, ...]:
    """The launch that makes dq of its sums, and dsinks. overlap: it may begin before the kernel ahead has ended."""
    heads = problem.forward.num_q_heads
    blocks = problem.padded_rows // ROW_PADDING * heads if at.dq_accum is not None else 0
    sinks = heads if "dsinks" in problem.wanted else 0
    return _rows(spec, problem, at, dq_columns, blocks + sinks, overlap=overlap)
