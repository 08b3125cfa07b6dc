"""Launch of ``kv_rounds_sm80`` and ``kv_dequantize_sm80``."""

from __future__ import annotations

from ..kv.places import places_of
from ..problems import DequantizeProblem, Target
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .decode import params_of, scale_values
from .host_struct import At
from .numbers import quotient_factors
from .structs import KV_DEQUANTIZE

_PLACES = ("block_places", "head_places", "token_places", "place_bytes")


def build(
    rounds: KernelSpec,
    dequantize: KernelSpec,
    kinds: tuple[tuple[int, int], tuple[int, int]],
    problem: DequantizeProblem,
    target: Target,
    begin: int,
) -> tuple[LaunchRecord, ...]:
    """What says where keys go, and what makes them, round by round.

    Parameters
    ----------
    rounds, dequantize : KernelSpec
    kinds : pair of (int, int)
        Kind and groups of K's and V's rows (`select.row_kind`).
    problem : DequantizeProblem
    target : Target
    begin : int
        Of the workspace.
    """
    p, cache = problem, problem.cache
    offsets, _ = p.places()
    at = {name: At("workspace", begin + offset) for name, offset in offsets.items()}
    packed, recent = not p.q_len, bool(cache.recent_window)
    rows = places_of(cache, "attention_with_kvcache")
    places = (0, 0, 0, 0) if rows is None else (rows.block, rows.head, rows.token, rows.unit_bytes)
    (k_kind, k_groups), (v_kind, v_groups) = kinds
    values: dict[str, object] = {
        "k_data": At("cache.k"),
        "v_data": At("cache.v"),
        **params_of(cache),
        **{name: At(f"cache.{name}") if name in cache.key_arrays else None for name in ("k_mean", "k_channel_scale")},
        "seq_lens": At("seq_lens"),
        "cu_seqlens_q": At("cu_seqlens_q") if packed else None,
        "leftpad": At("leftpad_k") if p.leftpad else None,
        "block_table": At("block_table") if p.table_columns else None,
        "recent_slots": At("recent_slots") if recent and cache.paged else None,
        **{name: At(f"cache.{name}") if recent else None for name in ("recent_k", "recent_v", "recent_state")},
        **at,
        "used_q": at["used_q"] if p.is_part else None,
        "cu_q": None if packed else at["cu_q"],
        "batch": p.batch,
        "q_len": p.q_len,
        "total_queries": p.rows,
        "few": p.few,
        "num_kv_heads": cache.num_kv_heads,
        "head_dim": cache.head_dim,
        "capacity": p.capacity,
        "block_size": p.block_size,
        "num_blocks": p.num_blocks,
        "table_columns": p.table_columns,
        "window_left": p.window_left,
        "pages": p.pages,
        "rounds": p.rounds,
        "k_kind": k_kind,
        "v_kind": v_kind,
        "k_groups": k_groups,
        "v_groups": v_groups,
        "hadamard": int(cache.hadamard),
        "recent_window": cache.recent_window,
        "recent_ring": cache.recent_ring,
        "recent_num_slots": cache.recent_slots,
        **dict(zip(_PLACES, places, strict=True)),
        **scale_values(cache),
    }
    for name, n in (("heads", cache.num_kv_heads), ("block", p.block_size)):
        values[f"{name}_multiplier"], values[f"{name}_shift"] = quotient_factors(max(n, 1))
    ctas = min(p.pages * cache.num_kv_heads, target.sm_count * dequantize.ctas_per_sm)
    first = LaunchRecord(rounds, (1, 1, 1), 32 * rounds.num_warps, *KV_DEQUANTIZE.pack(values | {"round": 0}))
    made = (
        LaunchRecord(dequantize, (ctas, 1, 1), 32 * dequantize.num_warps, *KV_DEQUANTIZE.pack(values | {"round": i}))
        for i in range(p.rounds)
    )
    return (first, *made)
