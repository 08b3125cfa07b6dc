"""Launches of ``attn_bwd_sm90``, and of ``attn_bwd_dkdv_sm90`` and ``attn_bwd_dq_sm90``: maps, grid, list of tiles."""

from __future__ import annotations

from dataclasses import replace

from ..problems import UNLIMITED, Target
from ..problems.backward import BackwardProblem
from ..problems.tile_order import TileList, num_m_blocks, num_n_blocks
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord, TensorMap
from .attn_bwd_sm80 import BackwardPlaces, backward_values, every_query_sees_a_key
from .attn_fwd_sm90 import PANEL, mapped, operand_map, tile_values
from .dropout import dropout_values
from .host_struct import member
from .masks import MaskPlaces
from .score_mods import finite, score_mod_values
from .structs import ATTN_BWD_DROPOUT_SM90, ATTN_BWD_MODS_SM90, ATTN_BWD_SM90


def _packed_map(name: str, dtype: str, shape: tuple[int, int, int], strides: tuple[int, int], rows: int) -> TensorMap:
    """One of q, k, v, do of packed sequences: (rows, heads, head_dim), strides (row, head) in elements of two bytes.

    A copy must not reach into the next sequence. Two dimensions have the stride of a row: along the first, of as many
    rows as a copy, the copy runs, and beyond its end come zeros; along the second it begins. So the copy of the n rows
    that end at row e begins at (rows - n, e), where a map that begins ``rows`` rows before the array has their first.
    """
    total, heads, head_dim = shape
    # Strides of expanded arrays are 0; a single row has none of its own.
    row_bytes, head_bytes = 2 * strides[0] or (16 if total == 1 else 0), 2 * strides[1]
    dims = (head_dim, rows, heads, total + 1)
    return mapped(name, -rows * row_bytes, dtype, dims, (row_bytes, head_bytes, row_bytes), (PANEL, rows, 1, 1))


def _launch(
    spec: KernelSpec,
    problem: BackwardProblem,
    target: Target,
    tiles: TileList,
    values: dict[str, object],
    overlap: bool = False,
) -> tuple[LaunchRecord, ...]:
    """One launch with the tensor maps; none without tiles.

    Of arrays without rows nothing is copied, but a map of zero rows cannot be made: those with rows stand in.
    """
    if tiles.num_items == 0:
        return ()
    f, s = problem.forward, problem.strides
    assert s is not None
    assert f.strides is not None
    if f.num_q_heads == 0:  # dk and dv of keys that no head asks for are zero, as without queries
        f, values = replace(f, seqlen_q=0), {**values, "fwd.seqlen_q": 0}
    q_shape = (f.batch, f.seqlen_q, f.num_q_heads, f.head_dim)
    kv_shape = (f.batch, f.seqlen_k, f.num_kv_heads, f.head_dim)
    maps = {}
    for name, shape, strides, rows in (
        # What is asserted above holds of the replaced problem too, which mypy does not see.
        ("q", q_shape, f.strides.q, spec.block_m), ("do", q_shape, s.d_o, spec.block_m),  # type: ignore[union-attr]
        ("k", kv_shape, f.strides.k, spec.block_n), ("v", kv_shape, f.strides.v, spec.block_n),  # type: ignore[union-attr]
    ):  # fmt: skip
        if shape[1] and f.varlen:
            maps[name] = _packed_map(name, f.dtype, shape[1:], strides[1:], rows)
        elif shape[1]:
            maps[name] = operand_map(name, f.dtype, shape, strides, rows)
    some = next(iter(maps.values()))
    values = {
        **{f"map_{name}": maps.get(name, some) for name in ("q", "k", "v", "do")},
        **member("bwd", values),
        **tile_values(tiles),
    }
    layout = ATTN_BWD_SM90
    if f.softcap > 0.0:
        layout = ATTN_BWD_MODS_SM90
        mods = score_mod_values(f, None)
        factor2 = mods["factor2"]
        assert isinstance(factor2, float)
        values |= {**member("mods", mods), "inv_factor2": finite(1.0 / factor2)}
    if f.dropout is not None:
        layout = ATTN_BWD_DROPOUT_SM90
        values |= member("dropout", dropout_values(f.dropout))
    # A GPU that is shared hands out tiles itself, where CTAs do not draw them from a counter.
    has_list = not (f.varlen or spec.ordered_dq or spec.block_masks)
    ctas = tiles.num_items if target.is_shared and has_list else min(tiles.num_items, target.sm_count)
    grid = (ctas, 1, 1)
    return (LaunchRecord(spec, grid, 32 * spec.num_warps, *layout.pack(values), overlap=overlap),)


def finishes_dq(spec: KernelSpec, problem: BackwardProblem) -> bool:
    """Whether the kernel rounds its sums of dq itself: with an order it knows which addition to a row is the last one.

    ``attn_bwd_finish`` does so of packed sequences, where some query may see no key, and without causality: there the
    last tile of keys of a head would finish all of its queries, and hold up what follows it.
    """
    f = problem.forward
    alone = spec.ordered_dq and spec.sequences == "dense" and f.dropout is None
    return alone and f.window_right != UNLIMITED and every_query_sees_a_key(f)


def build(
    spec: KernelSpec,
    problem: BackwardProblem,
    at: BackwardPlaces,
    dq_columns: int,
    target: Target,
    *,
    tiles: TileList,
    overlap: bool = False,
    lists: MaskPlaces | None = None,
) -> tuple[LaunchRecord, ...]:
    """The launch that makes dk and dv, and the sums of dq where there is a place for them; none without keys.

    tiles: of keys. overlap: it may begin before the kernel ahead has ended, which is ``attn_bwd_prepare``. lists: of
    tiles of queries, with a block mask.
    """
    blocks = num_n_blocks(problem.forward, spec.block_n)
    values = backward_values(problem, at, dq_columns=dq_columns, n_blocks=blocks, lists=lists)
    if not finishes_dq(spec, problem):
        values["dq"] = None
    return _launch(spec, problem, target, tiles, values, overlap and spec.waits_ahead)


def build_dq(
    spec: KernelSpec,
    problem: BackwardProblem,
    at: BackwardPlaces,
    target: Target,
    *,
    tiles: TileList,
    lists: MaskPlaces | None = None,
) -> tuple[LaunchRecord, ...]:
    """The launch that makes dq alone; none without queries. tiles: of queries. lists: of keys, with a block mask."""
    blocks = num_m_blocks(problem.forward, spec.block_m)
    values = backward_values(problem, at, m_blocks=blocks, lists=lists)
    return _launch(spec, problem, target, tiles, values)
