"""Launch of ``kv_append_sm80`` and ``kv_copy_sm80``."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..kv.layout import CacheLayout, ScalePlaces
from ..kv.places import RowPlaces, places_of
from ..problems import AppendProblem, CopyProblem, Target
from ..registry import KernelSpec
from ..runtime.record import LaunchRecord
from .decode import params_of, scale_values
from .host_struct import At, strides
from .numbers import MAX_GRID_X, quotient_factors
from .structs import KV_APPEND, KV_COPY, MAX_PAIRS

#: `RopeStyle` of device code.
ROPE = {"none": 0, "half": 1, "interleaved": 2}
_THREADS, _COPY_THREADS = 128, 256


def _three(own: tuple[int, ...]) -> tuple[int, int, int]:
    """Strides (batch, seq, head); packed rows have no batch."""
    return (0, own[0], own[1]) if len(own) == 3 else (own[0], own[1], own[2])


def build(spec: KernelSpec, problem: AppendProblem, target: Target) -> tuple[LaunchRecord, ...]:
    """The launch of a call; none where there is no token."""
    p, cache = problem, problem.cache
    # A thread has 16 channels of a token and head, a CTA tokens of one head.
    blocks = -(-p.rows * (cache.k_format.row_dim // 16) // _THREADS) * p.num_kv_heads
    if blocks == 0:
        return ()
    if blocks > MAX_GRID_X:
        received = f"{p.rows} tokens of {p.num_kv_heads} heads"
        raise UnsupportedError(f"append(): {received} are more than one launch takes", instead="several calls")
    rope, by_slot = p.rope != "none", bool(p.slots)
    recent = bool(cache.recent_window)
    rows = places_of(cache, "append")
    places = (0, 0, 0, 0, 0) if rows is None else (rows.block, rows.head, rows.token, rows.unit_bytes, rows.chunks)
    names = ("block_places", "head_places", "token_places", "place_bytes", "row_chunks")
    values: dict[str, object] = {
        "k": At("k"),
        "v": At("v"),
        "seq_lens": None if by_slot else At("seq_lens"),
        "cu_seqlens": At("cu_seqlens") if p.packed and not by_slot else None,
        "block_table": At("block_table") if cache.paged and not by_slot else None,
        "slots": At("slot_mapping") if by_slot else None,
        "positions": At("positions") if p.positions else None,
        "wide_slots": int(p.slots == "int64"),
        "wide_positions": int(p.positions == "int64"),
        **dict(zip(names, places, strict=True)),
        "cos": At("cos") if rope else None,
        "sin": At("sin") if rope else None,
        "k_data": At("cache.k"),
        "v_data": At("cache.v"),
        **params_of(cache),
        **scale_values(cache),
        **{name: At(f"cache.{name}") if name in cache.key_arrays else None for name in ("k_mean", "k_channel_scale")},
        "recent_slots": At("recent_slots") if recent and cache.paged else None,
        **{name: At(f"cache.{name}") if recent else None for name in ("recent_k", "recent_v", "recent_state")},
        **strides("k", _three(p.k_strides)),
        **strides("v", _three(p.v_strides)),
        "rows": p.rows,
        "batch": p.batch,
        "tokens": p.tokens,
        "num_kv_heads": p.num_kv_heads,
        "head_dim": p.head_dim,
        "capacity": p.capacity,
        "block_size": p.block_size,
        "num_blocks": p.num_blocks,
        "table_columns": p.table_columns,
        "rope": ROPE[p.rope],
        "rope_pairs": p.rope_pairs,
        "rope_rows": p.rope_rows,
        "hadamard": int(cache.hadamard),
        "zero_point": int(cache.k_format.zero_point or cache.v_format.zero_point),
        "recent_ring": cache.recent_ring,
        "recent_num_slots": cache.recent_slots,
    }
    for name, n in (("heads", p.num_kv_heads), ("tokens", p.tokens), ("block", p.block_size)):
        values[f"{name}_multiplier"], values[f"{name}_shift"] = quotient_factors(max(n, 1))
    return (LaunchRecord(spec, (blocks, 1, 1), _THREADS, *KV_APPEND.pack(values)),)


def build_copies(spec: KernelSpec, problem: CopyProblem, target: Target) -> tuple[LaunchRecord, ...]:
    """The launches of `copy_blocks` or `copy_recent`."""
    cache = problem.cache
    planes: list[At | None]
    rows = None if problem.recent or cache.strides is None else places_of(cache, "copy_blocks")
    if problem.recent:
        assert cache.recent_format is not None
        ring = cache.num_kv_heads * cache.recent_ring * cache.recent_format.row_bytes
        planes = [At("cache.recent_k"), At("cache.recent_v"), At("cache.recent_state"), None]
        return _copies(spec, problem, planes, [ring, ring, 8, 0], None)
    count = cache.num_kv_heads * cache.block_size
    formats = (cache.k_format, cache.v_format)
    planes = [At("cache.k"), None if cache.is_latent else At("cache.v")]
    planes += [
        At(name) if fmt.plane_words else None
        for name, fmt in zip(("cache.k_params", "cache.v_params"), formats, strict=True)
    ]
    widths = [f.row_bytes if rows is None else 16 * rows.chunks for f in formats]
    if cache.is_latent:
        widths[1] = 0
    sizes = [*(count * width for width in widths), *(count * 4 * f.plane_words for f in formats)]
    records = _copies(spec, problem, planes, sizes, rows)
    if cache.scales is None or not cache.scales.each_row:
        return records
    if not _is_dense(cache.scales, cache):
        raise UnsupportedError(
            "copy_blocks(): scales of tokens and heads that are not block by block without gaps",
            instead="contiguous k_scale and v_scale, or copies by their library",
        )
    places = [At("cache.k_scale"), At("cache.v_scale"), None, None]
    return (*records, *_copies(spec, problem, places, [4 * count, 4 * count, 0, 0], None))


def _is_dense(scales: ScalePlaces, cache: CacheLayout) -> bool:
    """Whether blocks of scales follow each other, and those of a block's tokens and heads do."""
    inner = sorted([(scales.token, cache.block_size), (scales.head, cache.num_kv_heads)])
    expected = 1
    for step, extent in (*inner, (scales.outer, cache.num_blocks)):
        if extent > 1 and step != expected:
            return False
        expected *= extent
    return True


def _copies(
    spec: KernelSpec, problem: CopyProblem, planes: list[At | None], sizes: list[int], rows: RowPlaces | None
) -> tuple[LaunchRecord, ...]:
    """Launches that copy blocks of so many bytes of each plane; ``rows``: of rows that are apart."""
    parts = max(1, min(32, max(sizes) // (16 * _COPY_THREADS)))
    records = []
    for first in range(0, len(problem.pairs), MAX_PAIRS):
        some = problem.pairs[first : first + MAX_PAIRS]
        flat = [x for pair in some for x in pair]
        values: dict[str, object] = {
            "planes": planes,
            "block_bytes": tuple(sizes),
            "block_step": 0 if rows is None else rows.block * rows.unit_bytes,
            "head_step": 0 if rows is None else rows.head * rows.unit_bytes,
            "token_step": 0 if rows is None else rows.token * rows.unit_bytes,
            "row_chunks": 0 if rows is None else rows.chunks,
            "block_size": problem.cache.block_size,
            "pairs": (*flat, *[0] * (2 * MAX_PAIRS - len(flat))),
        }
        records.append(LaunchRecord(spec, (len(some), 4, parts), _COPY_THREADS, *KV_COPY.pack(values)))
    return tuple(records)
