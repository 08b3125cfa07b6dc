"""Launch of ``latent_append_sm80``."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..kv.places import places_of
from ..problems import AppendProblem, Target
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .host_struct import At
from .kv_append import ROPE
from .numbers import MAX_GRID_X, quotient_factors
from .structs import LATENT_APPEND


def build(spec: KernelSpec, problem: AppendProblem, target: Target) -> tuple[LaunchRecord, ...]:
    """The launch of a call; none where there is no token."""
    p, cache = problem, problem.cache
    ctas = -(-p.rows // spec.block_m)
    if ctas == 0:
        return ()
    if ctas > MAX_GRID_X:
        raise UnsupportedError(f"append(): {p.rows} tokens are more than one launch takes", instead="several calls")
    rope, by_slot = p.rope != "none", bool(p.slots)
    rows = places_of(cache, "append")
    assert rows is not None
    # Side by side with k, what is behind its channels begins where they end: 2 bytes each.
    apart = bool(p.k_pe_strides)
    k_pe = At("k_pe") if apart else At("k", 2 * cache.v_format.head_dim)
    values: dict[str, object] = {
        "k": At("k"),
        "k_pe": k_pe,
        "seq_lens": None if by_slot else At("seq_lens"),
        "cu_seqlens": At("cu_seqlens") if p.packed and not by_slot else None,
        "block_table": At("block_table") if cache.paged and not by_slot else None,
        "slots": At("slot_mapping") if by_slot else None,
        "positions": At("positions") if p.positions else None,
        "cos": At("cos") if rope else None,
        "sin": At("sin") if rope else None,
        "data": At("cache.k"),
        "scale": None if cache.scales is None else At("cache.k_scale"),
        **_strides("k", p.k_strides),
        **_strides("k_pe", p.k_pe_strides if apart else p.k_strides),
        "rows": p.rows,
        "batch": p.batch,
        "tokens": p.tokens,
        "capacity": p.capacity,
        "block_size": p.block_size,
        "num_blocks": p.num_blocks,
        "table_columns": p.table_columns,
        "rope": ROPE[p.rope],
        "rope_pairs": p.rope_pairs,
        "rope_rows": p.rope_rows,
        "wide_slots": int(p.slots == "int64"),
        "wide_positions": int(p.positions == "int64"),
        "block_places": rows.block,
        "token_places": rows.token,
        "place_bytes": rows.unit_bytes,
    }
    for name, n in (("tokens", p.tokens), ("block", p.block_size)):
        values[f"{name}_multiplier"], values[f"{name}_shift"] = quotient_factors(max(n, 1))
    return (LaunchRecord(spec, (ctas, 1, 1), 32 * spec.num_warps, *LATENT_APPEND.pack(values)),)


def _strides(prefix: str, own: tuple[int, ...]) -> dict[str, object]:
    """From one sequence to the next, which packed rows have not, and from one token to the next."""
    batch, token = (0, own[0]) if len(own) == 3 else (own[0], own[1])
    return {f"{prefix}_stride_b": batch, f"{prefix}_stride_s": token}
