"""What a way of running a call costs in work, without what work costs: tiles, steps, bytes, launches."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from ..problems import UNLIMITED, AttentionProblem, Target
from ..problems.memory import ITEMSIZE
from ..problems.split import SplitKV, StreamK, TailSplit, Whole, is_final
from ..problems.target import SECTOR, WARP_ROWS, WARPGROUP_ROWS
from ..problems.tile_order import busiest_cta
from ..registry import KernelSpec
from .candidate import Candidate, MaskInput
from .orders import MAX_ROUNDS, head_tiles, heads_apart, heads_of, places_of, row_bytes, seen_bytes, tiles_of_busiest

#: Tiles of a head that are counted one by one; of more the mean is as good.
_COUNTED = 8
#: Lengths that stand for those of packed sequences; what the longest one is of the mean, at most.
_QUANTILES, _MOST_OF_MEAN = 4, 4.0


class Pass(NamedTuple):
    """One launch of a kernel that attends.

    Attributes
    ----------
    kind : str
        ``"wgmma"`` or ``"mma.sync"``: whose costs it has.
    scores : str
        ``"as they are"``, ``"masks"`` or ``"functions"`` (softcap, a user's): what is done to scores one by one.
    has_bias : bool
        Numbers are added to scores.
    bits : int
        Of the operands of Q K^T.
    resident : int
        CTAs of an SM that have something to do.
    items, steps : float
        Of the busiest CTA: tiles of queries, and tiles of keys.
    is_uneven : bool
        Tiles differ, and which CTA gets which nobody knows.
    short, short_groups : float, int
        Of the steps, those of tiles that have fewer warpgroups with rows, and how many these have.
    apart : float
        Bytes of K and V that are under way at one time because heads are interleaved.
    is_stream : bool
        CTAs begin in the middle of tiles, and keep partial results of them.
    groups : int
        Warpgroups of a tile that have rows (wgmma), or rows in units of a warp's (mma.sync).
    warps : int
        Warps of a CTA that compute.
    keys : int
        Of a step.
    channels : float
        Mean of q's and v's head_dim, as the tile has them.
    stored : float
        Elements of o that an SM's CTAs write for a tile each without the copy engine.
    read : float
        Bytes that have to come from memory or go there.
    reread : float
        Bytes of Q, and of K and V for all tiles, from L2.
    in_parts : bool
        Rows of these bytes end within a sector.
    walks : bool
        The kernel looks at the lengths of packed sequences first.
    """

    kind: str
    scores: str
    has_bias: bool
    bits: int
    resident: int
    items: float
    steps: float
    is_uneven: bool
    short: float
    short_groups: int
    apart: float
    is_stream: bool
    groups: int
    warps: int
    keys: int
    channels: float
    stored: float
    read: float
    reread: float
    in_parts: bool
    walks: bool


class Features(NamedTuple):
    """A way of running a call.

    Attributes
    ----------
    passes : tuple of Pass
    quantized : float
        Bytes that the quantization of the operands reads and writes.
    prepared : float
        Bytes that kernels before it read and write, to prepare the mask.
    preparing : int
        These kernels.
    merged : float
        Bytes of partial results, written and read; 0: there is nothing to merge.
    row : str
        The kernel's name without its dtype.
    """

    passes: tuple[Pass, ...]
    quantized: float
    prepared: float
    preparing: int
    merged: float
    row: str


class _Tiles(NamedTuple):
    """What a kernel has to do whatever the schedule: tiles of queries, their steps, and one launch of all of them.

    problem: as the kernel is told of it.
    """

    problem: AttentionProblem
    quantized: float
    tiles: float
    steps: float
    longest: float
    is_even: bool
    rows: int
    whole: Pass


#: Of ways of one call, by what of a way counts: they differ in little but the schedule.
Kept = dict[tuple[Any, ...], _Tiles]


def features(candidate: Candidate, problem: AttentionProblem, target: Target, kept: Kept | None = None) -> Features:
    """Count what a way of running a call has to do.

    Parameters
    ----------
    candidate : Candidate
        One of `candidates`.
    problem : AttentionProblem
    target : Target
    kept : dict, optional
        Of this call and GPU; what ways have in common is counted once.
    """
    schedule, row = candidate.schedule, candidate.row
    key = row.name, candidate.pack_gqa, candidate.mask is MaskInput.AS_TILES, candidate.heads_as_queries
    found = None if kept is None else kept.get(key)
    if found is None:
        found = _tiles(candidate, candidate.told(problem), target)
        if kept is not None:
            kept[key] = found
    p, quantized = found.problem, found.quantized
    prepared, preparing = _of_mask(candidate, p)
    merged = 0.0
    whole = found.whole
    if isinstance(schedule, TailSplit):
        share = schedule.first_tile / found.tiles
        stored = float(row.block_m * p.head_dim_v)
        passes = (
            _launch(found, row, target, schedule.first_tile, 1, 0.0, share),
            _launch(found, row, target, schedule.num_tiles, schedule.splits, stored, 1 - share),
        )
        merged = _partial_bytes(p, schedule.num_tiles * schedule.splits * row.block_m)
        return Features(passes, quantized, prepared, preparing, merged, row.twin)
    pack = candidate.pack_gqa.pack
    stored = 0.0
    if not isinstance(schedule, Whole) and row.arch_specific:
        stored = float(min(pack * (p.max_seqlen_q if p.varlen else p.seqlen_q), row.block_m) * p.head_dim_v)
    if isinstance(schedule, StreamK):
        ctas = schedule.ctas
        one = whole._replace(
            items=(found.tiles + ctas) / ctas, steps=found.steps / ctas, resident=row.ctas_per_sm, is_stream=True,
            stored=stored * row.ctas_per_sm,
        )  # fmt: skip
        merged = _partial_bytes(p, ctas * min(row.block_m, max(p.max_seqlen_q, 1) * pack))
    elif isinstance(schedule, Whole) and schedule.ctas and not p.varlen:
        one = _in_order(found, row, schedule, target)
    else:
        splits = schedule.splits if isinstance(schedule, SplitKV) else 1
        one = _launch(found, row, target, found.tiles, splits, stored, 1.0)
        if isinstance(schedule, SplitKV) and not is_final(p, splits):
            rows = found.rows * p.num_q_heads // candidate.pack_gqa.heads * pack
            merged = _partial_bytes(p, rows * splits)
    return Features((one,), quantized, prepared, preparing, merged, row.twin)


def _launch(
    found: _Tiles, row: KernelSpec, target: Target, tiles: float, splits: int, stored: float, share: float
) -> Pass:
    """A launch of so many tiles, their keys divided among so many CTAs.

    stored: elements of o of a tile that threads write. share: of the bytes of all tiles.
    """
    whole, items, places = found.whole, tiles * splits, places_of(row, target)
    resident = max(1, min(-(-int(items) // target.sm_count), row.ctas_per_sm))
    own = steps = 0.0
    is_uneven = False
    if items > 0:
        longest = float(-(-int(found.longest) // splits))
        if found.is_even:
            own = float(-(-int(items) // places))
            steps = own * longest
        else:
            busy = min(float(places), items)
            mean = found.steps * (tiles / found.tiles) / busy
            own, steps, is_uneven = items / busy, max(mean, longest), mean > longest
    if share != 1.0:
        whole = whole._replace(read=whole.read * share, reread=whole.reread * share)
    return whole._replace(
        items=own, steps=steps, resident=resident, is_uneven=is_uneven, stored=stored * resident
    )  # fmt: skip


def _in_order(found: _Tiles, row: KernelSpec, order: Whole, target: Target) -> Pass:
    """A launch of persistent CTAs that take all tiles in a known order: what the busiest one has."""
    p, tiles, items, short, groups, apart = found.problem, order.tiles, 0.0, 0.0, 0, 0.0
    assert tiles is not None
    resident = max(1, min(-(-tiles.num_items // target.sm_count), row.ctas_per_sm))
    if p.window_left == p.window_right == UNLIMITED:
        items, short, groups = tiles_of_busiest(row, p, order)
        steps, short = items * found.longest, short * found.longest
    else:
        of, heads, places = head_tiles(row, p), heads_of(p), places_of(row, target)
        if tiles.num_items > MAX_ROUNDS * order.ctas:
            items, steps = found.tiles / order.ctas, found.steps / order.ctas
        else:
            work, count = busiest_cta(tiles, heads, of.lengths, order.ctas, row.rotates_heads)
            items, steps = float(count), float(work - count)
        far = heads_apart(tiles, len(of.lengths), places, p.window_left != UNLIMITED)
        apart = far * seen_bytes(of, row_bytes(p)) if far else 0.0
    return found.whole._replace(
        items=items, steps=steps, resident=resident, short=short, short_groups=groups, apart=apart
    )  # fmt: skip


def _quantized_bytes(row: KernelSpec, p: AttentionProblem) -> float:
    """16-bit operands, read, and written as the kernel takes them; of e4m3 arrays V alone; of quantized ones none.

    Without Q where the kernel that attends quantizes it.
    """
    if not p.precision.quantized or p.operands is not None:
        return 0.0
    batch = 1 if p.varlen else p.batch
    of_qk = p.head_dim * (p.seqlen_q * p.num_q_heads * (not row.quantizes_q) + p.seqlen_k * p.num_kv_heads)
    of_v, written = p.head_dim_v * p.seqlen_k * p.num_kv_heads, 1 if row.pv == "fp8" else 2
    if p.descales is not None:
        return float(batch * of_v * (1 + written))
    return float(batch * (of_qk * (2 + 1) + of_v * (2 + written)))


def _partial_bytes(p: AttentionProblem, rows: float) -> float:
    """Of O, base and denominator in fp32, written and read."""
    return 2.0 * 4.0 * rows * (p.head_dim_v + 2)


def _of_mask(candidate: Candidate, p: AttentionProblem) -> tuple[float, int]:
    """Bytes and kernels that prepare the mask."""
    how = candidate.mask
    if how in (MaskInput.IN_PLACE, MaskInput.AS_TILES):
        return 0.0, 0
    bytes_of_mask = float(p.mask_elements * ITEMSIZE[p.mask_dtype]) if p.mask != "none" else 0.0
    if how is MaskInput.COPIED:
        return 2 * bytes_of_mask, 1
    return bytes_of_mask, 2 if how is MaskInput.LISTED else 1


def _tiles(candidate: Candidate, p: AttentionProblem, target: Target) -> _Tiles:
    row, (sharing, pack) = candidate.row, candidate.pack_gqa
    lengths = sequences(p)
    batch = max(p.batch, 1) / len(lengths)
    heads = batch * p.num_q_heads / sharing
    tiles = steps = longest = seen = 0.0
    is_even = len(lengths) == 1
    window = p.window_left, p.window_right
    for queries, keys in lengths:
        count, total, most = tile_steps(queries * pack, keys, pack, row.block_m, row.block_n, *window)
        tiles += heads * count
        steps += heads * total
        longest = max(longest, most)
        is_even = is_even and total == most * count
        seen += batch * p.num_kv_heads * _seen(p, queries, keys)
    of_hopper = row.arch_specific
    rows = max(min(pack * (p.max_seqlen_q if p.varlen and p.max_seqlen_q else lengths[-1][0]), row.block_m), 1)
    itemsize = 1 if row.quantized else ITEMSIZE[p.dtype]
    columns = p.head_dim + p.head_dim_v
    queries = (1 if p.varlen else p.batch) * p.seqlen_q
    of_q = p.head_dim * queries * p.num_q_heads
    of_bias = row.bias_bytes * rows * row.block_n if row.bias_bytes else 0
    scores = "as they are"
    if row.score_mods and (p.score_mods or row.cluster == 1):
        scores = "masks" if p.mask != "none" and not p.softcap and p.score_mod is None else "functions"
    whole = Pass(
        kind="wgmma" if of_hopper else "mma.sync",
        scores=scores,
        has_bias=bool(row.bias_bytes),
        bits=8 * itemsize,
        resident=1,
        items=0.0,
        steps=0.0,
        is_uneven=False,
        short=0.0,
        short_groups=0,
        apart=0.0,
        is_stream=False,
        groups=-(-rows // (WARPGROUP_ROWS if of_hopper else WARP_ROWS)),
        warps=row.num_warps,
        keys=row.block_n // row.cluster,  # either CTA multiplies its part, by all channels and by all keys' values
        channels=(row.head_dim + row.head_dim_v) / 2,
        stored=0.0,
        read=itemsize * columns * seen + 2.0 * columns * queries * p.num_q_heads,
        reread=steps * (row.block_n * itemsize * columns + of_bias) + itemsize * float(of_q),
        in_parts=of_hopper and not row.quantized and p.head_dim * itemsize % SECTOR != 0,
        walks=p.varlen,
    )
    return _Tiles(p, _quantized_bytes(row, p), tiles, steps, longest, is_even, queries, whole)


def _seen(p: AttentionProblem, queries: int, keys: int) -> int:
    """Keys of a sequence that some query sees."""
    if p.window_left == UNLIMITED:
        return keys
    return min(keys, p.window_left + queries + max(p.window_right, 0))


def sequences(p: AttentionProblem) -> list[tuple[int, int]]:
    """Queries and keys of sequences that stand for all: of packed ones what the host knows, the mean and the longest.

    Quantiles of lengths from 0 to the longest, with that mean: `longest * u ** (longest / mean - 1)`, u from 0 to 1. A
    longest one that is given too large would make nearly all of them too short.
    """
    if not p.varlen:
        return [(p.seqlen_q, p.seqlen_k)]
    found = []
    for rows, longest in ((p.seqlen_q, p.max_seqlen_q), (p.seqlen_k, p.max_seqlen_k)):
        mean = -(-rows // max(p.batch, 1))
        if p.batch <= 1 or longest <= mean or rows == 0:
            found.append([mean] * _QUANTILES)
            continue
        power = min(min(longest, rows) / mean, _MOST_OF_MEAN) - 1
        sizes = [((i + 0.5) / _QUANTILES) ** power for i in range(_QUANTILES)]
        found.append([max(1, round(mean * _QUANTILES * size / sum(sizes))) for size in sizes])
    pairs = list(zip(*found, strict=True))
    return pairs[:1] if len(set(pairs)) == 1 else pairs


@lru_cache(4096)
def tile_steps(
    rows: int, keys: int, pack: int, block_m: int, block_n: int, left: int, right: int
) -> tuple[int, float, float]:
    """Tiles of a head's rows, the steps of all of them, and of the longest.

    Parameters
    ----------
    rows : int
        Queries times the rows of each.
    keys, pack, block_m, block_n : int
    left, right : int
        The window.
    """
    count = -(-rows // block_m)
    whole = -(-keys // block_n)
    if left == right == UNLIMITED or count == 0:
        return count, float(count * whole), float(whole)
    queries = rows // pack
    counted = min(count, _COUNTED)
    total = most = 0
    # In the middle of parts of the tiles; the longest may be the last one.
    for tile in (*((2 * i + 1) * count // (2 * counted) for i in range(counted)), count - 1):
        m0 = tile * block_m
        first, last = m0 // pack + keys - queries, (min(m0 + block_m, rows) - 1) // pack + keys - queries
        end = keys if right == UNLIMITED else min(max(last + right + 1, 0), keys)
        begin = 0 if left == UNLIMITED else min(max(first - left, 0), keys)
        steps = max(-(-end // block_n) - begin // block_n, 0)
        most, total = max(most, steps), total + steps
    total -= steps
    return count, total * count / counted, float(most)
