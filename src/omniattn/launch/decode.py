"""Launch of ``decode_sm80`` and ``decode_combine_sm80``; with a recent window or a shared prefix, twice and merged."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ..errors import UnsupportedError
from ..kv.formats import KVFormat
from ..problems import DecodeProblem, MergeProblem, Target
from ..problems.memory import WORKSPACE_ALIGNMENT
from ..registry import KernelSpec
from ..registry.decode import SHARED_TILES
from ..runtime.record import LaunchRecord
from . import merge_states
from .attn_fwd import SINKS_KINDS
from .host_struct import At, strides
from .numbers import MAX_GRID_X, quotient_factors
from .structs import DECODE

#: `RecentSide` of device code.
OLDER, NEWEST = 1, 2
#: `kSharedPrefix` of device code.
SHARED_PREFIX = -1
#: CTAs of the main kernel at most: the kernels compute with their square in 31 bits.
_MAX_WORKERS = 46340
#: Keys of the smallest chunk of a sequence that work is divided into; and with ``deterministic`` of every split.
CHUNK, FIXED_SPLIT = 128, 512
#: Keys of all kv heads, for each SM, from which on warps of a CTA share them: docs/performance/decode.md.
SHARED_KEYS = 768
_COMBINE_WARPS = 8
#: fp16 1024 twice; the kernels must not know it at compile time (kernels_cu/decode/kv_dequant.cuh).
_TWO_1024 = 0x64006400


def workers(most: int, segments: int, chunks: int) -> int:
    """CTAs of the main kernel.

    As many as are on the GPU at a time, ``most``, or a few less where sequences of one length then end where CTAs end:
    each split more that a CTA has costs it the time of filling its pipeline again.
    """
    most = max(1, min(most, chunks))
    if segments == 0 or chunks <= most:
        return most
    aligned = segments * (most // segments) if segments <= most else -(-segments // -(-segments // most))
    return aligned if 10 * aligned >= 9 * most else most


def combine_split(deterministic: bool, num_workers: int, segments: int) -> int:
    """Warps of the second kernel that work on one row: as many as ask for all partial results of a segment at once.

    Parameters
    ----------
    deterministic : bool
        One number for all batches then: the order of the sum depends on it.
    num_workers, segments : int
        About ``num_workers / segments`` partial results are a segment's.
    """
    if deterministic:
        return 4
    results = -(-num_workers // max(segments, 1))
    return next(split for split in (1, 2, 4, 8) if results <= 8 * split or split == 8)


@dataclass(frozen=True)
class Kernels:
    """The kernels of one pass over keys: the main one, and the one that combines its partial results."""

    main: KernelSpec
    combine: KernelSpec


@dataclass(frozen=True)
class Pass:
    """One pass over keys of a call: all of them, or one of two sides that are merged.

    Attributes
    ----------
    problem : DecodeProblem
        With strides, capacity and blocks of this pass.
    k, v : KVFormat
    planes : dict
        Places of k, v, k_params, v_params, k_mean, k_channel_scale, block_table, recent_slots, recent_state; absent
        ones None.
    hadamard : bool
    side : int
        `OLDER`: the quantized tokens before the recent window. `NEWEST`: those of the window; blocks are slots then.
    first_key : int
        Keys before it are another pass's. `SHARED_PREFIX`: this one's are those that all sequences share.
    sinks : bool
        Whether this pass counts the sinks.
    prefix_sequences : int
        Of the pass over a shared prefix, which takes all queries for those of one sequence: how many sequences.
    """

    problem: DecodeProblem
    k: KVFormat
    v: KVFormat
    planes: dict[str, At | None]
    hadamard: bool
    side: int = 0
    first_key: int = 0
    sinks: bool = True
    prefix_sequences: int = 0


def passes(problem: DecodeProblem) -> tuple[Pass, ...]:
    """What is computed one after the other: one pass, or two whose results are merged."""
    p, cache = problem, problem.cache
    planes: dict[str, At | None] = {
        "k": At("cache.k"),
        "v": At("cache.v"),
        "k_params": At("cache.k_params") if cache.k_format.plane_words else None,
        "v_params": At("cache.v_params") if cache.v_format.plane_words else None,
        **{name: At(f"cache.{name}") if name in cache.key_arrays else None for name in ("k_mean", "k_channel_scale")},
        "block_table": At("block_table") if cache.paged else None,
        "recent_slots": At("recent_slots") if cache.recent_window and cache.paged else None,
        "recent_state": At("cache.recent_state") if cache.recent_window else None,
    }
    row = p.num_q_heads * p.head_dim
    own = (p.q_len * row, row, p.head_dim, 1)
    formats = (cache.k_format, cache.v_format)
    if cache.recent_window:
        assert cache.recent_format is not None
        contiguous = dataclasses.replace(p, o_strides=own)
        older = Pass(contiguous, *formats, planes, cache.hadamard, side=OLDER, sinks=False)
        slots = dataclasses.replace(
            contiguous, block_size=cache.recent_ring, num_blocks=cache.recent_slots, table_columns=int(cache.paged)
        )
        rings = {
            **dict.fromkeys(("k_params", "v_params", "k_mean", "k_channel_scale")),
            "k": At("cache.recent_k"),
            "v": At("cache.recent_v"),
            "block_table": planes["recent_slots"],
            "recent_slots": planes["recent_slots"],
            "recent_state": planes["recent_state"],
        }
        return older, Pass(slots, cache.recent_format, cache.recent_format, rings, False, side=NEWEST)
    if p.shared_prefix and p.batch:
        # One sequence, whose table is that of sequence 0, of so many tokens as its capacity lets it have.
        queries = p.batch * p.q_len
        step = p.q_strides[0] if p.q_len == 1 else p.q_strides[1]
        alone = dataclasses.replace(
            p, batch=1, q_len=queries, capacity=p.shared_prefix, q_strides=(0, step, p.q_strides[2], 1),
            o_strides=(0, row, p.head_dim, 1),
        )  # fmt: skip
        prefix = Pass(
            alone, *formats, planes, cache.hadamard, first_key=SHARED_PREFIX, sinks=False, prefix_sequences=p.batch
        )
        rest = Pass(dataclasses.replace(p, o_strides=own), *formats, planes, cache.hadamard, first_key=p.shared_prefix)
        return prefix, rest
    return (Pass(p, *formats, planes, cache.hadamard),)


def query_tiles(one: Pass, target: Target) -> tuple[tuple[int, int], ...]:
    """Kernels that can serve a pass, the best first: tiles of 8 query rows of a warp, warps with rows of their own.

    Warps that share keys read them once for all rows of a kv head, in the smallest tile that has so many. Keys that are
    few for the GPU come from L2 after the first block of rows, and smaller tiles leave smaller partial results.
    """
    p = one.problem
    rows = p.group * p.q_len
    if rows <= 16:
        return ((1 if rows <= 8 else 2, 1),)
    apart = (2, 1)
    shared = SHARED_TILES.get(one.k.row_dim, ()) if one.k.bits == one.v.bits == 16 else ()
    few = p.batch * p.num_kv_heads * p.capacity < SHARED_KEYS * target.sm_count
    # Measured on Hopper alone. With `deterministic` the batch must not decide.
    if not shared or target.cc[0] != 9 or (few and not p.deterministic):
        return (apart, *shared)
    best = next((tiles for tiles in shared if rows <= 8 * math.prod(tiles)), shared[-1])
    return (best, *(tiles for tiles in (apart, *shared) if tiles != best))


def build(
    chosen: tuple[Kernels, ...], merge: KernelSpec | None, problem: DecodeProblem, target: Target
) -> tuple[tuple[LaunchRecord, ...], int]:
    """The launches of a call, and the bytes of their workspace.

    Parameters
    ----------
    chosen : tuple of Kernels
        For each of `passes`.
    merge : KernelSpec, optional
        The kernel that merges two passes.
    problem : DecodeProblem
    target : Target
    """
    todo = passes(problem)
    if len(todo) == 1:
        plan = _PassPlan(todo[0], chosen[0], target)
        return plan.records(At("o"), At("lse") if problem.lse else None, 0), plan.workspace_bytes
    assert merge is not None
    p, dim, heads = problem, problem.head_dim, problem.num_q_heads
    plans = [_PassPlan(one, kernels, target) for one, kernels in zip(todo, chosen, strict=True)]
    # O and LSE of both passes, a place for the merged LSE, and scratch memory that one pass has after the other.
    rows = p.batch * p.q_len * heads
    places = [0]
    for size in (2 * rows * dim, 2 * rows * dim, 4 * rows, 4 * rows, 4 * rows):
        places.append(places[-1] + -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT)
    o_at, lse_at = ([At("workspace", x) for x in places[first : first + 2]] for first in (0, 2))
    records: list[LaunchRecord] = []
    for plan, o, lse in zip(plans, o_at, lse_at, strict=True):
        records += plan.records(o, lse, places[5])
    own, own_lse = (p.q_len * heads * dim, heads * dim, dim), (heads * p.q_len, p.q_len, 1)
    # The prefix's queries are those of one sequence.
    first_lse = (p.q_len, p.batch * p.q_len, 1) if p.shared_prefix else own_lse
    joined = MergeProblem(
        p.dtype, (p.batch, p.q_len, heads, dim),
        (own, own, (p.o_strides[0], p.o_strides[1], p.o_strides[2])), (first_lse, own_lse, own_lse),
    )  # fmt: skip
    operands: dict[str, At | None] = {
        "o_a": o_at[0], "o_b": o_at[1], "o": At("o"), "lse_a": lse_at[0], "lse_b": lse_at[1],
        "lse": At("lse") if p.lse else At("workspace", places[4]),
        "seq_lens": At("seq_lens") if p.shared_prefix else None,
    }  # fmt: skip
    records += merge_states.build(merge, joined, target, operands)
    return tuple(records), places[5] + max(plan.workspace_bytes for plan in plans)


class _PassPlan:
    """How the keys of a pass are divided among CTAs."""

    def __init__(self, one: Pass, kernels: Kernels, target: Target) -> None:
        p, spec = one.problem, kernels.main
        self.one, self.kernels = one, kernels
        self.rows = spec.block_m
        self.row_blocks = -(-p.group * p.q_len // self.rows)
        self.segments = p.batch * p.num_kv_heads * self.row_blocks
        self.chunk = FIXED_SPLIT if p.deterministic else CHUNK
        most_keys = min(p.capacity, p.cache.recent_window) if one.side == NEWEST else p.capacity
        chunks = self.segments * -(-most_keys // self.chunk)
        if chunks >= 2**31 or self.segments > MAX_GRID_X:
            raise UnsupportedError(
                f"decode(): {p.batch} sequences of up to {p.capacity} tokens, {p.num_kv_heads} heads and "
                f"{self.row_blocks} blocks of query rows are more than the kernels count in 31 bits",
                instead="a smaller batch",
            )
        # As many CTAs as are on the GPU at a time: 1 KiB of each CTA's shared memory is the system's.
        at_a_time = min(spec.ctas_per_sm, (target.max_smem + 1024) // (spec.smem_bytes + 1024))
        self.num_workers = workers(min(target.sm_count * max(at_a_time, 1), _MAX_WORKERS), self.segments, chunks)
        values = (chunks if p.deterministic else 2 * self.num_workers) * self.rows
        self.ml_offset = -(-4 * values * spec.head_dim // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        self.workspace_bytes = max(self.ml_offset + 8 * values, 1)

    def records(self, o: At, lse: At | None, partials: int) -> tuple[LaunchRecord, ...]:
        """The launches, with partial results from byte ``partials`` of the workspace on."""
        if self.segments == 0:
            return ()
        one, spec, combine = self.one, self.kernels.main, self.kernels.combine
        p, cache = one.problem, one.problem.cache
        extents = (p.batch, p.q_len, p.num_q_heads)

        def three(own: tuple[int, ...]) -> tuple[int, int, int]:
            b, s, h = (0 if n == 1 else x for n, x in zip(extents, own, strict=False))
            return b, s, h

        split = combine_split(p.deterministic, self.num_workers, self.segments)
        block_multiplier, block_shift = quotient_factors(p.block_size)
        worker_multiplier, worker_shift = quotient_factors(self.num_workers)
        sinks = p.sinks if one.sinks else "none"
        values: dict[str, object] = {
            "q": At("q"),
            **one.planes,
            "seq_lens": At("seq_lens"),
            "sinks": At("sinks") if sinks != "none" else None,
            "o": o,
            "lse": lse,
            "partial_o": At("workspace", partials),
            "partial_ml": At("workspace", partials + self.ml_offset),
            **strides("q", three(p.q_strides)),
            **strides("o", three(p.o_strides)),
            "batch": p.batch,
            "q_len": p.q_len,
            "num_q_heads": p.num_q_heads,
            "num_kv_heads": p.num_kv_heads,
            "group": p.group,
            "num_row_blocks": self.row_blocks,
            "head_dim": p.head_dim,
            "capacity": p.capacity,
            "block_size": p.block_size,
            "num_blocks": p.num_blocks,
            "table_columns": p.table_columns,
            "window_left": p.window_left,
            "sinks_kind": SINKS_KINDS[sinks],
            "hadamard": int(one.hadamard),
            "chunk_log2": self.chunk.bit_length() - 1,
            "fixed_splits": int(p.deterministic),
            "num_workers": self.num_workers,
            "recent_window": cache.recent_window if one.side else 0,
            "recent_ring": cache.recent_ring if one.side else 0,
            "recent_num_slots": cache.recent_slots if one.side else 0,
            "recent_side": one.side,
            "softmax_scale": p.softmax_scale,
            "softcap": p.softcap,
            "combine_split": split,
            "block_multiplier": block_multiplier,
            "block_shift": block_shift,
            "worker_multiplier": worker_multiplier,
            "worker_shift": worker_shift,
            "two_1024": _TWO_1024,
            "first_key": one.first_key,
            "prefix_sequences": one.prefix_sequences,
            "least_seq_len": p.capacity if one.prefix_sequences else 0,
        }
        arguments = DECODE.pack(values)
        grid = (self.segments, -(-min(self.rows, p.group * p.q_len) * split // _COMBINE_WARPS), 1)
        return (
            LaunchRecord(spec, (self.num_workers, 1, 1), 32 * spec.num_warps, *arguments),
            LaunchRecord(combine, grid, 32 * _COMBINE_WARPS, *arguments, overlap=True),
        )
