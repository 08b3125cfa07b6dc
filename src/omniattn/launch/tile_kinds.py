"""Launches of ``tile_kinds_sm80`` and ``mask_list_sm80``: which tiles a block mask and a mask expression leave."""

from __future__ import annotations

from dataclasses import replace

from ..problems import AttentionProblem
from ..problems.quantize import carve
from ..problems.score_mod import ScoreModProblem
from ..registry import KernelSpec
from ..registry.masks import MASK_TILE
from ..runtime.record import LaunchRecord
from . import masks
from .host_struct import At, member
from .masks import MaskExtents, MaskPlaces
from .score_mod import array_values
from .structs import TILE_KINDS

_NO_ARRAYS = ScoreModProblem("", None, ())


def wanted(problem: AttentionProblem) -> bool:
    """Whether there is something to find out about tiles, and nothing else (a packed mask) that finds it out."""
    return problem.finds_tiles


def of_queries(problem: AttentionProblem) -> AttentionProblem:
    """The call with its block mask alone, of which a tile of queries has a list of tiles of keys."""
    return replace(problem, score_mod=None)


def of_keys(problem: AttentionProblem) -> AttentionProblem:
    """The same with queries and keys exchanged: a tile of keys has a list of tiles of queries.

    A key is seen by queries to its left as a query sees keys to its right.
    """
    p = problem
    assert p.block_mask is not None
    (rows, keys), (b, h, q, k) = p.block_mask.size, p.block_mask.strides
    return replace(
        p, score_mod=None, seqlen_q=p.seqlen_k, seqlen_k=p.seqlen_q, window_left=p.window_right,
        window_right=p.window_left, block_mask=replace(p.block_mask, size=(keys, rows), strides=(b, h, k, q)),
    )  # fmt: skip


def extents(problem: AttentionProblem) -> MaskExtents:
    """Extents of what decides: 1 where neither the map nor the expression differs between batches, or heads.

    Of packed sequences: batch 1, rows of all of them, each from a tile of its own on (kernels_cu/scheduler/slots.cuh),
    and keys of the longest one.
    """
    by_batch, by_head = problem.tiles_by
    if problem.varlen:
        rows = MASK_TILE * (-(-problem.seqlen_q // MASK_TILE) + problem.batch)
        keys = min(problem.max_seqlen_k, problem.seqlen_k)
        return MaskExtents(1, problem.num_q_heads if by_head else 1, rows, keys)
    return MaskExtents(
        problem.batch if by_batch else 1, problem.num_q_heads if by_head else 1, problem.seqlen_q, problem.seqlen_k
    )


def build(
    kinds: KernelSpec,
    listing: KernelSpec,
    problem: AttentionProblem,
    block_m: int,
    lead_rows: int,
    num_m_blocks: int,
    memory: At,
    given: At | None = None,
) -> tuple[tuple[LaunchRecord, ...], MaskPlaces]:
    """The launches before attention, and where it finds what they make; arguments as those of `masks.build`.

    given: where the block mask is; the caller's array unless given.
    """
    e = extents(problem)
    lists = masks.list_shape(problem, e, num_m_blocks)
    offsets, num_bytes = carve(
        {"kinds": ((e.batch, e.heads, e.m_tiles, e.n_tiles), "uint8"), "lists": (lists, "int32")}
    )
    at = {name: At(memory.operand, memory.offset + offset) for name, offset in offsets.items()}
    found = MaskPlaces(
        None, None, at["kinds"], at["lists"], 0, 0, 0, num_bytes=num_bytes,
        **masks.list_strides(problem, e, num_m_blocks),
    )  # fmt: skip
    if problem.batch * problem.num_q_heads * num_m_blocks == 0:
        return (), found
    records = []
    tiles = e.batch * e.heads * e.m_tiles * e.n_tiles
    if tiles:
        blocks = problem.block_mask
        strides = (0, 0, 0, 0) if blocks is None else blocks.strides
        values: dict[str, object] = {
            "kinds": found.kinds,
            **masks.sequences(problem, given=problem.varlen),
            "blocks": None if blocks is None else given or At("block_mask"),
            **dict(zip((f"block_stride_{x}" for x in "bhqk"), strides, strict=True)),
            "batch": problem.batch if problem.varlen else e.batch,
            "heads": e.heads,
            "m_tiles": e.m_tiles,
            "n_tiles": e.n_tiles,
            "seqlen_q": problem.seqlen_q,
            "seqlen_k": problem.seqlen_k,
            "block_rows": 1 if blocks is None else blocks.size[0],
            "block_keys": 1 if blocks is None else blocks.size[1],
            **member("arrays", array_values(problem.score_mod or _NO_ARRAYS)),
        }
        # A warp evaluates the expression of a tile; without one a thread does for it.
        evaluates = problem.score_mod is not None and problem.score_mod.mask is not None
        of_cta = kinds.num_warps if evaluates or problem.varlen else 32 * kinds.num_warps
        grid = (-(-tiles // of_cta), 1, 1)
        records.append(LaunchRecord(kinds, grid, 32 * kinds.num_warps, *TILE_KINDS.pack(values)))
    records.append(
        masks.list_record(
            listing,
            problem,
            e,
            found,
            block_m,
            lead_rows,
            num_m_blocks,
            broadcast_rows=False,
            overlap=bool(records),
            kinds_of_slots=problem.varlen,
        )
    )
    return tuple(records), found


assert MASK_TILE == 64, "tiles of kernels_cu/entry/tile_kinds_sm80.cu"
