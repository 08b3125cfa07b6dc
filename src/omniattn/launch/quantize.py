"""Launch of the quantizers: workspace, arguments (``kernels_cu/params/quantize.cuh``), order of the work.

The byte-exact formats are in docs/quantization.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass

from ..problems import QuantizeCall, QuantizeProblem, Target
from ..problems.memory import WORKSPACE_ALIGNMENT
from ..problems.precision import GRANULARITIES
from ..problems.quantize import BLOCK_ROWS, QUERY_SLICES, QuantizeGrid
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .host_struct import Arguments, At, member, strides
from .structs import QUANTIZE, QUANTIZE_DELTA, QUANTIZE_ITEM, QUANTIZE_ROTATED
from .used_rows import used_rows

# `Flag` of the device code.
_SMOOTH_Q, _SMOOTH_K, _SMOOTH_V, _FULL_BIAS, _HAS_QK, _HAS_V, _HALF_V = (1 << i for i in range(7))

_MAX_GRID, _MASK = 1 << 20, 0xFFFFFFFF
_DELTA_THREADS = 128
#: What the largest magnitude of a group becomes.
_LEVELS = {"int8": 127, "int4": 7, "float8_e4m3": 448}
#: Outputs by the names of their pointers in QuantizeParams.
_OUTPUTS = {name: name for name in ("q_int", "k_int", "q_scale", "k_scale", "row_bias", "q_mean", "k_mean")} | {
    "v_out": "v", "v_scale": "v_scale", "v_mean": "v_mean",
}  # fmt: skip
#: Words that the first launch zeroes, behind the ticket, in order.
_WORDS = ("k_ready", "v_ready", "v_bad", "v_done", "k_amax", "k_amax_done", "q_amax", "q_amax_done")


@dataclass(frozen=True)
class Scratch:
    """Memory that a quantization needs besides its outputs, in bytes.

    Attributes
    ----------
    words : tuple of int
        Word at which each of the counters begins (`_WORDS`).
    errors : int
        First word of the errors of V.
    clear_vectors : int
        16 bytes that are zeroed.
    starts, starts_bytes : int
        Copies of cu_seqlens: the first one's place, and the size of each.
    partials : int
        Partial sums.
    items, item_table_bytes : int
        Work items that are decoded ahead of time, and their size.
    size : int
    """

    words: tuple[int, ...]
    errors: int
    clear_vectors: int
    starts: int
    starts_bytes: int
    partials: int
    items: int
    item_table_bytes: int
    size: int


@dataclass(frozen=True)
class _Work:
    """Counts of work items, as QuantizeParams has them."""

    units: int
    units_per_group: int
    num_groups: int
    per_unit_r: int
    per_unit_a: int
    per_unit_q: int
    per_unit_kv: int
    last_base: int
    num_items: int


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _work(p: QuantizeProblem, units_per_group: int) -> _Work:
    units, per = p.units, p.unit_items
    per_group = max(1, min(units_per_group, units))
    groups = -(-units // per_group)
    last = units - (groups - 1) * per_group
    rest = sum(per) - per.sums
    last_base = (groups - 2) * per_group * sum(per) + last * per.sums + per_group * rest if groups > 1 else 0
    items = p.num_items
    if items >= 2**31 - 2**24:
        raise ValueError(f"{items} blocks to quantize: more than any memory holds")
    return _Work(units, per_group, groups, per.sums, per.ranges, per.queries, per.keys, last_base, items)


def scratch(spec: KernelSpec, p: QuantizeProblem) -> Scratch:
    """Scratch memory of a quantization by the kernel ``spec``, whatever heads go together."""
    work = _work(p, p.units)
    # The ticket, four kinds for each kv head, for per_tensor two more of each head, and the errors of V, two words a
    # channel, at an even one.
    kv, qs = p.batch * p.heads_kv, p.batch * p.heads_q
    counts = [kv, kv, kv, kv, *((kv, kv, qs, qs) if work.per_unit_a else (0, 0, 0, 0))]
    words = tuple(itertools.accumulate(counts[:-1], initial=1))
    errors = _up(1 + sum(counts), 2)
    corrected = p.v and p.smooth_v and p.v_dtype != "float16"
    clear = -(-(errors + (2 * kv * p.head_dim_pad if corrected else 0)) // 4)
    starts = _up(16 * clear, WORKSPACE_ALIGNMENT)
    starts_bytes = _up(4 * (p.batch + 1), WORKSPACE_ALIGNMENT) if p.varlen else 0
    partials = starts + 2 * starts_bytes
    items = partials + 16 * work.units * p.slots_r * spec.head_dim
    table_bytes = QUANTIZE_ITEM.size * work.num_items if spec.specialization else 0
    return Scratch(words, errors, clear, starts, starts_bytes, partials, items, table_bytes, items + table_bytes)


def build(
    spec: KernelSpec,
    delta_spec: KernelSpec | None,
    call: QuantizeCall,
    target: Target,
    outputs: dict[str, At],
    memory: At,
    grid: QuantizeGrid,
    copies: tuple[At, At] | None = None,
    queries: int | None = None,
) -> tuple[LaunchRecord, ...]:
    """The launches of a quantization: one that clears and decodes, one that quantizes, with smooth_q one for delta_s.

    Parameters
    ----------
    spec, delta_spec : KernelSpec
        Rows of the operations ``"quantize"`` and ``"quantize_delta"``; the second with ``smooth_q`` only.
    call : QuantizeCall
    target : Target
    outputs : dict
        Places by the names of `QuantizeProblem.shapes`.
    memory : At
        Place of the scratch memory, at a multiple of 256 bytes.
    grid : QuantizeGrid
    copies : (At, At), optional
        Where copies of cu_seqlens_q and cu_seqlens_k go, which are made even if there is nothing to quantize; in the
        scratch memory unless given.
    queries : int, optional
        Rows of packed queries that cu_seqlens_q divides, where they are not quantized.
    """
    p = call.problem
    work, room = _work(p, grid.units), scratch(spec, p)
    named = {"cu_seqlens_q": p.varlen and p.qk, "cu_seqlens_k": p.varlen}
    if work.num_items == 0 and not (copies and any(named.values())):
        return ()

    def behind(offset: int) -> At:
        return At(memory.operand, memory.offset + offset)

    where = copies or (behind(room.starts), behind(room.starts + room.starts_bytes))
    given = {name: At(name) if there else None for name, there in named.items()}
    starts = {name: at if there else None for at, (name, there) in zip(where, named.items(), strict=True)}
    values: dict[str, object] = {
        "q": At("q") if p.qk else None,
        "k": At("k") if p.qk else None,
        "v": At("v") if p.v else None,
        **{field: outputs.get(name) for field, name in _OUTPUTS.items()},
        "partials": behind(room.partials),
        "v_error": behind(4 * room.errors),
        "ticket": behind(0),
        **{name: behind(4 * word) for name, word in zip(_WORDS, room.words, strict=True)},
        **({"k_mean": At("k_mean"), "k_ready": At("k_ready")} if p.given_mean else {}),
        **used_rows((p.used[0] and p.qk, p.used[1])),
        "starts_q": starts["cu_seqlens_q"],
        "starts_k": starts["cu_seqlens_k"],
        "item_table": behind(room.items),
        **strides("q", call.strides[0]),
        **strides("k", call.strides[1]),
        **strides("v", call.strides[2]),
        **dataclasses.asdict(work),
        "batch": p.batch,
        "num_q_heads": p.heads_q,
        "num_kv_heads": p.heads_kv,
        "seqlen_q": p.rows_q,
        "seqlen_k": p.rows_k,
        "head_dim": p.head_dim,
        "head_dim_pad": p.head_dim_pad,
        "slots_q": p.slots(p.rows_q, BLOCK_ROWS),
        "slots_k": p.slots(p.rows_k, BLOCK_ROWS),
        "slots_r": p.slots_r,
        "key_tile": p.key_tile,
        "tiles_k": p.slots(p.rows_k, p.key_tile),
        "bits": p.stored_bits,
        "q_group_rows": QUERY_SLICES[p.grouping],
        "granularity": GRANULARITIES.index(p.granularity),
        "flags": _flags(p),
        "packed": int(p.varlen),
        "delta_columns": p.delta_columns,
        "levels": _LEVELS[p.qk_dtype],
        "v_levels": p.v_levels,
    }
    # The first launch reads cu_seqlens as they were given; the others the copies, which never decrease.
    rows = p.rows_q if queries is None else queries
    first = _pack(p, {**values, **given, "seqlen_q": rows, "clear_vectors": room.clear_vectors})
    second = {**values, **starts, "clear_vectors": 0}
    threads = 32 * spec.num_warps
    decoded = work.num_items if room.item_table_bytes else 0
    clear_grid = (min(-(-max(room.clear_vectors, decoded) // threads), _MAX_GRID), 1, 1)
    records = [LaunchRecord(spec, clear_grid, threads, *first)]
    if work.num_items == 0:
        return tuple(records)
    ctas = (min(work.num_items, target.sm_count * grid.ctas_per_sm), 1, 1)
    records.append(LaunchRecord(spec, ctas, threads, *_pack(p, second), overlap=True))
    delta_ctas = work.units * p.slots(p.rows_k, p.key_tile)
    if p.smooth_q and p.qk and p.rows_q > 0 and delta_ctas > 0:
        assert delta_spec is not None, "smooth_q needs the kernel of delta_s"
        arguments = QUANTIZE_DELTA.pack(member("quantize", second) | {"delta_s": outputs["delta_s"]})
        records.append(LaunchRecord(delta_spec, (delta_ctas, 1, 1), _DELTA_THREADS, *arguments))
    return tuple(records)


def _pack(p: QuantizeProblem, values: dict[str, object]) -> Arguments:
    if not p.rotated:
        return QUANTIZE.pack(values)
    return QUANTIZE_ROTATED.pack(member("quantize", values) | member("rotation", rotation_values(p)))


def rotation_values(p: QuantizeProblem) -> dict[str, object]:
    """The fields of Rotation."""
    channels = p.rotated_channels if p.hadamard else 0
    signs = sign_words(p.seed) if channels else (0,) * 8
    norm = channels**-0.5 if channels else 1.0
    return {"signs": signs, "channels": channels, "norm": norm, "to_e4m3": int(p.e4m3), "reserved": 0}


@functools.lru_cache(maxsize=64)
def sign_words(seed: int) -> tuple[int, ...]:
    """Bit c % 32 of word c / 32: whether the rotation changes the sign of channel c (docs/quantization.md)."""
    words = [0] * 8
    for channel in range(256):
        h = channel + seed * 0x9E3779B9 & _MASK
        h = (h ^ h >> 16) * 0x85EBCA6B & _MASK
        h = (h ^ h >> 13) * 0xC2B2AE35 & _MASK
        words[channel // 32] |= ((h ^ h >> 16) & 1) << channel % 32
    return tuple(words)


def starts_in(room: Scratch, memory: At) -> tuple[At, At]:
    """Places of the copies of cu_seqlens_q and cu_seqlens_k in the scratch memory."""
    first = memory.offset + room.starts
    return At(memory.operand, first), At(memory.operand, first + room.starts_bytes)


def _flags(p: QuantizeProblem) -> int:
    return (
        (_SMOOTH_Q if p.smooth_q else 0)
        | (_SMOOTH_K if p.smooth_k and p.qk else 0)
        | (_SMOOTH_V if p.smooth_v else 0)
        | (_FULL_BIAS if p.row_bias == "full" and p.smooth_k else 0)
        | (_HAS_QK if p.qk else 0)
        | (_HAS_V if p.v else 0)
        | (_HALF_V if p.v_dtype == "float16" else 0)
    )
