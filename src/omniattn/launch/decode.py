"""Launch of ``decode_sm80`` and ``decode_combine_sm80``; with a recent window or a shared prefix, twice and merged."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedError
from ..kv.layout import CacheLayout, ScalePlaces
from ..kv.places import RowPlaces, own_strides, places_of, row_places
from ..problems import DecodeProblem, MergeProblem, Target
from ..problems.decode import NEWEST, DecodeSplit, KeyPass, passes
from ..problems.memory import WORKSPACE_ALIGNMENT
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from . import merge_states, mla_decode
from .attn_fwd import SINKS_KINDS
from .host_struct import At, strides
from .numbers import MAX_GRID_X, quotient_factors
from .structs import DECODE

_COMBINE_WARPS = 8
#: Parts of a row's channels that mla_combine_sm80 gives warps of their own, where a row has several.
_LATENT_PARTS = 4
#: fp16 1024 twice; the kernels must not know it at compile time (kernels_cu/decode/kv_dequant.cuh).
_TWO_1024 = 0x64006400


@dataclass(frozen=True)
class Kernels:
    """One pass over keys: its main kernel, the one that combines partial results, and how keys are divided."""

    main: KernelSpec
    combine: KernelSpec
    split: DecodeSplit


def _planes(one: KeyPass) -> dict[str, At | None]:
    """Places of what a pass reads of the cache; None for what is absent."""
    cache = one.problem.cache
    slots = At("recent_slots") if cache.recent_window and cache.paged else None
    state = At("cache.recent_state") if cache.recent_window else None
    if one.side == NEWEST:
        return {
            **dict.fromkeys(("k_params", "v_params", "k_mean", "k_channel_scale")),
            "k": At("cache.recent_k"),
            "v": At("cache.recent_v"),
            "block_table": slots,
            "recent_slots": slots,
            "recent_state": state,
        }
    return {
        "k": At("cache.k"),
        "v": None if cache.is_latent else At("cache.v"),
        **params_of(cache),
        **{name: At(f"cache.{name}") if name in cache.key_arrays else None for name in ("k_mean", "k_channel_scale")},
        "block_table": At("indices") if one.problem.topk else At("block_table") if cache.paged else None,
        "recent_slots": slots,
        "recent_state": state,
    }


def params_of(cache: CacheLayout) -> dict[str, At | None]:
    """Parameter planes, or the scales of a caller's arrays."""
    found: dict[str, At | None] = {}
    for name, fmt in (("k", cache.k_format), ("v", cache.v_format)):
        has_scale = cache.scales is not None and not (cache.is_latent and name == "v")
        scale = At(f"cache.{name}_scale") if has_scale else None
        found[f"{name}_params"] = At(f"cache.{name}_params") if fmt.plane_words else scale
    return found


def scale_values(cache: CacheLayout) -> dict[str, object]:
    """The arguments that say where scales of a caller's arrays are."""
    scales = cache.scales or ScalePlaces(0, 0, 0, False, 0)
    return {
        "scale_outer": scales.outer,
        "scale_head": scales.head,
        "scale_token": scales.token,
        "row_scales": int(scales.each_row),
    }


def row_places_of(one: KeyPass) -> RowPlaces | None:
    """Where a pass reads rows; None for those that `append` quantizes."""
    p = one.problem
    if one.side != NEWEST:
        return places_of(p.cache, "decode")
    row = one.k.row_dim
    extents = (p.num_blocks, p.num_kv_heads, p.block_size)
    return row_places(own_strides(p.num_kv_heads, p.block_size, row), extents, row, "decode")


def _row_values(one: KeyPass) -> dict[str, object]:
    """The arguments that say where rows are."""
    names = ("block_places", "head_places", "token_places", "place_bytes", "token_bytes", "row_chunks")
    rows = row_places_of(one)
    if rows is None:
        return dict.fromkeys(names, 0)
    # Rows of a ring follow each other up to its end, which may be within 16 of them.
    in_runs = 0 if one.side == NEWEST else rows.run_bytes(one.problem.block_size, not one.problem.cache.paged)
    return dict(zip(names, (rows.block, rows.head, rows.token, rows.unit_bytes, in_runs, rows.chunks), strict=True))


def build(
    chosen: tuple[Kernels, ...], merge: KernelSpec | None, problem: DecodeProblem, target: Target, begin: int = 0
) -> tuple[tuple[LaunchRecord, ...], int]:
    """The launches of a call, and where their part of the workspace ends.

    Parameters
    ----------
    chosen : tuple of Kernels
        For each of `passes`.
    merge : KernelSpec, optional
        The kernel that merges two passes.
    problem : DecodeProblem
    target : Target
    begin : int
        Where it begins.
    """
    todo = passes(problem)
    if len(todo) == 1:
        plan = _PassPlan(todo[0], chosen[0], target)
        return plan.records(At("o"), At("lse") if problem.lse else None, begin), begin + plan.workspace_bytes
    assert merge is not None
    p, dim, heads = problem, problem.head_dim, problem.num_q_heads
    plans = [_PassPlan(one, kernels, target) for one, kernels in zip(todo, chosen, strict=True)]
    # O and LSE of both passes, a place for the merged LSE, and scratch memory that one pass has after the other.
    batch, queries = p.rows
    rows = batch * queries * heads
    places = [begin]
    for size in (2 * rows * dim, 2 * rows * dim, 4 * rows, 4 * rows, 4 * rows):
        places.append(places[-1] + -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT)
    o_at, lse_at = ([At("workspace", x) for x in places[first : first + 2]] for first in (0, 2))
    records: list[LaunchRecord] = []
    for plan, o, lse in zip(plans, o_at, lse_at, strict=True):
        records += plan.records(o, lse, places[5])
    own, own_lse = (queries * heads * dim, heads * dim, dim), (heads * queries, queries, 1)
    # The prefix's queries are those of one sequence.
    first_lse = (p.q_len, p.batch * p.q_len, 1) if p.shared_prefix else own_lse
    joined = MergeProblem(
        p.dtype, (batch, queries, heads, dim),
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

    def __init__(self, one: KeyPass, kernels: Kernels, target: Target) -> None:
        p, spec = one.problem, kernels.main
        self.one, self.kernels = one, kernels
        self.rows = spec.block_m
        self.row_blocks = one.row_blocks(self.rows)
        # A slot of partial results has the rows of a block; over a latent cache those of all.
        self.slot_rows = self.rows * (self.row_blocks if p.cache.is_latent else 1)
        self.segments, chunks = one.segments(self.rows), one.chunks(self.rows)
        if chunks >= 2**31 or self.segments > MAX_GRID_X:
            raise UnsupportedError(
                f"decode(): {p.batch} sequences of up to {p.capacity} tokens, {p.num_kv_heads} heads and "
                f"{self.row_blocks} blocks of query rows are more than the kernels count in 31 bits",
                instead="a smaller batch",
            )
        self.num_workers, self.cluster = kernels.split.workers, kernels.split.cluster
        # Of a latent cache: on the SMs that the main kernel leaves, where they are many. CTAs that have to wait for an
        # SM begin late, and their code has yet to come.
        of_main = spec.at_a_time(target.max_smem)
        idle = target.sm_count - -(-self.row_blocks * self.num_workers // of_main)
        sms = idle if 4 * idle >= target.sm_count else target.sm_count
        self.combine_ctas = sms * kernels.combine.ctas_per_sm
        values = (chunks if p.has_fixed_splits else 2 * self.num_workers) * self.slot_rows
        self.ml_offset = -(-4 * values * spec.head_dim_v // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        self.workspace_bytes = max(self.ml_offset + 8 * values, 1)

    def records(self, o: At, lse: At | None, partials: int) -> tuple[LaunchRecord, ...]:
        """The launches, with partial results from byte ``partials`` of the workspace on."""
        if self.segments == 0 and not self.has_strays:
            return ()
        one, spec, combine = self.one, self.kernels.main, self.kernels.combine
        p, cache = one.problem, one.problem.cache
        extents = (*p.rows, p.num_q_heads)

        def three(own: tuple[int, ...]) -> tuple[int, int, int]:
            b, s, h = (0 if n == 1 else x for n, x in zip(extents, own, strict=False))
            return b, s, h

        split = self.kernels.split.combine_warps
        block_multiplier, block_shift = quotient_factors(p.block_size)
        worker_multiplier, worker_shift = quotient_factors(max(self.num_workers, 1))
        sinks = p.sinks if one.sinks else "none"
        values: dict[str, object] = {
            "q": At("q"),
            **_planes(one),
            "seq_lens": At("topk_length" if p.topk else "seq_lens") if p.has_lengths else None,
            "cu_seqlens_q": At("cu_seqlens_q") if p.packed else None,
            "total_queries": max(p.total_queries, 0),
            "has_company": int(p.has_company),
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
            "head_dim": p.head_dim_v,
            "capacity": p.capacity,
            "block_size": p.block_size,
            "num_blocks": p.num_blocks,
            "table_columns": p.table_columns,
            "window_left": p.window_left,
            "sinks_kind": SINKS_KINDS[sinks],
            "hadamard": int(one.hadamard),
            "chunk_log2": one.chunk.bit_length() - 1,
            "fixed_splits": int(p.has_fixed_splits),
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
            **_row_values(one),
            **scale_values(cache),
        }
        if cache.is_latent:
            arguments = mla_decode.arguments(values, p, self.slot_rows, spec, self.cluster)
        else:
            arguments = DECODE.pack(values)
        if self.segments == 0:
            rows = p.total_queries * p.num_q_heads
            clears = (min(-(-rows // _COMBINE_WARPS), self.combine_ctas), 1, 1)
            return (LaunchRecord(combine, clears, 32 * _COMBINE_WARPS, *arguments),)
        # The CTAs of one sequence more clear the rows that no sequence owns.
        others = self.segments // p.batch if p.packed and not p.has_company else 0
        grid = (self.segments + others, -(-min(self.slot_rows, one.rows) * split // _COMBINE_WARPS), 1)
        ctas = (self.num_workers, 1, 1)
        if cache.is_latent:
            ctas = (self.row_blocks, self.cluster * -(-self.num_workers // self.cluster), 1)
            # CTAs that find what is to be merged by themselves.
            parts = _LATENT_PARTS if split > 1 else 1
            groups = -(-min(self.slot_rows, one.rows) * parts * split // _COMBINE_WARPS)
            grid = (min(p.batch * groups, self.combine_ctas), 1, 1)
        cluster = (1, self.cluster, 1) if self.cluster > 1 else None
        main = LaunchRecord(spec, ctas, 32 * spec.num_warps, *arguments, cluster=cluster)
        if self.has_whole_sequences:
            return (main,)
        return main, LaunchRecord(combine, grid, 32 * _COMBINE_WARPS, *arguments, overlap=True)

    @property
    def has_strays(self) -> bool:
        """Whether there are rows and no sequence: over a latent cache nobody else clears them."""
        p = self.one.problem
        return p.cache.is_latent and p.batch == 0 and p.total_queries > 0 and p.num_q_heads > 0

    @property
    def has_whole_sequences(self) -> bool:
        """Whether each CTA or cluster is known to have whole sequences, of one length: nothing is to be merged."""
        p = self.one.problem
        clusters = -(-self.num_workers // self.cluster)
        return p.has_even_lists and p.batch % clusters == 0 and p.capacity > 0 and not p.has_fixed_splits
