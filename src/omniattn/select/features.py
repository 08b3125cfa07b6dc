"""What a way of running a call costs in work, without what work costs: tiles, steps, bytes, launches."""

from __future__ import annotations

from typing import NamedTuple

from ..problems import UNLIMITED, AttentionProblem, Target
from ..problems.memory import ITEMSIZE
from ..problems.split import SplitKV, StreamK, TailSplit, is_final
from ..registry import KernelSpec
from .candidate import Candidate, MaskInput

#: Bytes of a sector of memory: tensor maps bring rows that end within one at a fraction of the rate.
SECTOR = 32
#: Query rows of a warpgroup's product, and of a warp's.
_WGMMA_ROWS, _MMA_ROWS = 64, 16
#: Tiles of a head that are counted one by one; of more the mean is as good.
_COUNTED = 32
#: Lengths that stand for those of packed sequences; what the longest one is of the mean, at most.
_QUANTILES, _MOST_OF_MEAN = 4, 4.0


class Pass(NamedTuple):
    """One launch of a kernel that attends.

    Attributes
    ----------
    kind : str
        ``"wgmma"`` or ``"mma.sync"``: whose costs it has.
    scores : bool
        Scores are formed one by one.
    bits : int
        Of the operands of Q K^T.
    tiles : float
        Of query rows, of all heads; with their keys divided, parts of them.
    places : int
        CTAs that run at the same time.
    resident : int
        CTAs of an SM that have something to do.
    steps : float
        Tiles of keys, of all tiles.
    longest : float
        Of the longest tile.
    is_even : bool
        All tiles take the same time and are handed out in rounds.
    groups : int
        Warpgroups of a tile that have rows (wgmma), or rows in units of a warp's (mma.sync).
    warps : int
        Warps of a CTA that compute.
    keys : int
        Of a step.
    channels : float
        Mean of q's and v's head_dim, as the tile has them.
    read : float
        Bytes that have to come from memory or go there.
    reread : float
        Bytes of K and V for all tiles, from L2.
    in_parts : bool
        Rows of these bytes end within a sector.
    walks : bool
        The kernel looks at the lengths of packed sequences first.
    """

    kind: str
    scores: bool
    bits: int
    tiles: float
    places: int
    resident: int
    steps: float
    longest: float
    is_even: bool
    groups: int
    warps: int
    keys: int
    channels: float
    read: float
    reread: float
    in_parts: bool
    walks: bool


class Features(NamedTuple):
    """A way of running a call.

    Attributes
    ----------
    passes : tuple of Pass
    prepared : float
        Bytes that kernels before it read and write, to prepare the mask.
    preparing : int
        These kernels.
    merged : float
        Bytes of partial results, written and read; 0: there is nothing to merge.
    """

    passes: tuple[Pass, ...]
    prepared: float
    preparing: int
    merged: float


def features(candidate: Candidate, problem: AttentionProblem, target: Target) -> Features:
    """Count what a way of running a call has to do.

    Parameters
    ----------
    candidate : Candidate
        One of `candidates`.
    problem : AttentionProblem
    target : Target
    """
    p, schedule, row = candidate.told(problem), candidate.schedule, candidate.row
    prepared, preparing = _of_mask(candidate, p)
    merged = 0.0
    if isinstance(schedule, TailSplit):
        tiles, blocks = schedule.first_tile, -(-p.seqlen_q // row.block_m)
        share = tiles / (p.batch * p.num_q_heads * blocks)
        whole = _pass(candidate, p, target, 1)
        first = whole._replace(tiles=tiles, steps=whole.steps * share, read=whole.read * share)
        parts = schedule.num_tiles * schedule.splits
        last = whole._replace(
            tiles=parts, steps=whole.steps * (1 - share), longest=_part(whole.longest, schedule.splits),
            read=whole.read * (1 - share), reread=whole.reread * (1 - share),
            resident=_resident(parts, row, target),
        )  # fmt: skip
        merged = _partial_bytes(p, parts * row.block_m)
        return Features((first._replace(reread=whole.reread * share), last), prepared, preparing, merged)
    splits = schedule.splits if isinstance(schedule, SplitKV) else 1
    found = _pass(candidate, p, target, splits)
    if isinstance(schedule, StreamK):
        # A CTA begins in the middle of a tile, and may end in one.
        found = found._replace(tiles=found.tiles + schedule.ctas, longest=0.0, is_even=False)
        merged = _partial_bytes(p, schedule.ctas * min(row.block_m, max(p.max_seqlen_q, 1) * candidate.pack_gqa.pack))
    elif isinstance(schedule, SplitKV) and not is_final(p, splits):
        batch = 1 if p.varlen else p.batch
        rows = batch * p.num_q_heads // candidate.pack_gqa.heads * p.seqlen_q * candidate.pack_gqa.pack
        merged = _partial_bytes(p, rows * splits)
    return Features((found,), prepared, preparing, merged)


def _part(steps: float, splits: int) -> float:
    return float(-(-int(steps) // splits))


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


def _resident(tiles: float, row: KernelSpec, target: Target) -> int:
    return max(1, min(-(-int(tiles) // target.sm_count), row.ctas_per_sm))


def _pass(candidate: Candidate, p: AttentionProblem, target: Target, splits: int) -> Pass:
    row, (sharing, pack) = candidate.row, candidate.pack_gqa
    lengths = sequences(p)
    batch = max(p.batch, 1) / len(lengths)
    heads = batch * p.num_q_heads / sharing
    tiles = steps = longest = seen = 0.0
    is_even = len(lengths) == 1
    for queries, keys in lengths:
        count, total, most = tile_steps(queries * pack, keys, pack, row.block_m, row.block_n, p)
        tiles += heads * count
        steps += heads * total
        longest = max(longest, most)
        is_even = is_even and total == most * count
        seen += batch * p.num_kv_heads * _seen(p, queries, keys)
    of_hopper = row.arch_specific
    rows = max(min(pack * (p.max_seqlen_q if p.varlen and p.max_seqlen_q else lengths[-1][0]), row.block_m), 1)
    itemsize = 1 if row.quantized else ITEMSIZE[p.dtype]
    columns = p.head_dim + p.head_dim_v
    queries = (1 if p.varlen else p.batch) * p.seqlen_q * p.num_q_heads
    of_bias = row.bias_bytes * rows * row.block_n if row.bias_bytes else 0
    tiles *= splits
    if splits > 1:
        longest = _part(longest, splits)
    return Pass(
        "wgmma" if of_hopper else "mma.sync",
        row.score_mods,
        8 * itemsize,
        tiles,
        target.sm_count * row.ctas_per_sm,
        _resident(tiles, row, target),
        steps,
        longest,
        is_even,
        -(-rows // (_WGMMA_ROWS if of_hopper else _MMA_ROWS)),
        row.num_warps,
        row.block_n,
        (row.head_dim + row.head_dim_v) / 2,
        itemsize * columns * seen + 2.0 * columns * queries,
        steps * (row.block_n * itemsize * columns + of_bias),
        of_hopper and not row.quantized and p.head_dim * itemsize % SECTOR != 0,
        p.varlen,
    )


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


def tile_steps(
    rows: int, keys: int, pack: int, block_m: int, block_n: int, p: AttentionProblem
) -> tuple[int, float, float]:
    """Tiles of a head's rows, the steps of all of them, and of the longest.

    Parameters
    ----------
    rows : int
        Queries times the rows of each.
    keys, pack, block_m, block_n : int
    p : AttentionProblem
        Whose windows count.
    """
    count = -(-rows // block_m)
    whole = -(-keys // block_n)
    left, right = p.window_left, p.window_right
    if left == right == UNLIMITED or count == 0:
        return count, float(count * whole), float(whole)
    queries = rows // pack
    step = max(1, -(-count // _COUNTED))
    total = most = counted = 0
    for tile in range(count - 1, -1, -step):
        m0 = tile * block_m
        first, last = m0 // pack + keys - queries, (min(m0 + block_m, rows) - 1) // pack + keys - queries
        end = keys if right == UNLIMITED else min(max(last + right + 1, 0), keys)
        begin = 0 if left == UNLIMITED else min(max(first - left, 0), keys)
        steps = max(-(-end // block_n) - begin // block_n, 0)
        total, most, counted = total + steps, max(most, steps), counted + 1
    return count, total * count / counted, float(most)
