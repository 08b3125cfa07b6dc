"""The ways to run a call of ``decode``: kernels, and how keys are divided among CTAs; what they have to do and cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..problems import UNLIMITED, DecodeProblem, Target
from ..problems.costs import DecodeCosts
from ..problems.decode import FIXED_COMBINE_WARPS, MAX_WORKERS, DecodeSplit, KeyPass, box_rows, passes, query_box
from ..problems.target import Coefficients
from ..registry import KernelSpec
from ..registry.decode import (
    BESIDE_TILES,
    COMBINE_WARPS,
    LATENT_DIMS,
    LATENT_RESULTS,
    QUERY_TILES,
    RESULTS_OF_WARP,
    SHARED_TILES,
)
from ..registry.latent_sm80 import LATENT_TILES
from ..registry.targets import is_carried
from .cache import decode_spec, no_latent_kernel, select_decode, select_latent
from .choice import Selection
from .cost import longest
from .model import rules
from .ways import Asked

#: CTAs that end where sequences end, as a part of those that there could be, from which on they are the faster ones
#: (docs/performance/decode.md).
_ALIGNED = 0.9


@dataclass(frozen=True)
class PassWay:
    """One pass over keys.

    Attributes
    ----------
    tiles : (int, int)
        Tiles of 8 query rows of a warp, and warps that have rows of their own.
    main, combine : Selection
        The kernel that attends, and the one that merges its partial results.
    split : DecodeSplit
    """

    tiles: tuple[int, int]
    main: Selection
    combine: Selection
    split: DecodeSplit

    @property
    def text(self) -> str:
        """The pass in a few words."""
        return f"{self.main.spec.name} on {self.split.workers} CTAs, merged by {self.split.combine_warps} warps a row"


@dataclass(frozen=True)
class DecodeWay:
    """One way to run a call: each of `problems.decode.passes`."""

    passes: tuple[PassWay, ...]

    @property
    def text(self) -> str:
        """The way in one line."""
        return "; ".join(one.text for one in self.passes)


def asked_of_decode(problem: DecodeProblem, target: Target) -> Asked[DecodeWay]:
    """What there is to choose among in a call."""
    return Asked(
        "decode",
        lambda force: DecodeWay(tuple(_by_rule(one, target, force) for one in passes(problem))),
        lambda: decode_ways(problem, target),
        lambda way: decode_work(way, problem, target),
        decode_us,
        frozenset({"decode", "decode_combine", "latent_decode", "latent_combine"}),
    )


# The ways


def query_tiles(one: KeyPass, target: Target) -> tuple[tuple[int, int], ...]:
    """Kernels that can serve a pass, the one that the rule takes first: as `PassWay.tiles`.

    Warps that share keys read them once for all rows of a kv head, in the smallest tile that has so many. Keys that are
    few for the GPU come from L2 after the first block of rows, and smaller tiles leave smaller partial results.
    """
    p = one.problem
    if one.rows <= 8:
        return ((1, 1),)
    apart = (QUERY_TILES[one.k.row_dim][-1], 1)
    if one.rows <= 16 and apart == (2, 1):
        return (apart, (1, 1))
    shared = SHARED_TILES.get(one.k.row_dim, ()) if one.k.bits == one.v.bits == 16 else ()
    # Those of 512 channels need what Hopper has of shared memory.
    shared = tuple(x for x in shared if decode_spec(p.dtype, one.k, one.v, *x).smem_bytes <= target.max_smem)
    few = p.batch * p.num_kv_heads * p.capacity < rules().shared_keys * target.sm_count
    # Measured on Hopper alone. With `deterministic` the batch must not decide.
    if not shared or target.cc[0] != 9 or (few and not p.deterministic):
        return (apart, *shared)
    best = next((tiles for tiles in shared if one.rows <= 8 * math.prod(tiles)), shared[-1])
    return (best, *(tiles for tiles in (apart, *shared) if tiles != best))


def at_a_time(spec: KernelSpec, target: Target) -> int:
    """CTAs of an SM."""
    return spec.at_a_time(target.max_smem)


def aligned_workers(most: int, segments: int, chunks: int) -> int:
    """CTAs of the main kernel, of ``most``.

    All, or a few less where sequences of one length then end where CTAs end: each split more that a CTA has costs it
    the time of filling its pipeline again.
    """
    most = max(1, min(most, chunks))
    if segments == 0 or chunks <= most:
        return most
    aligned = segments * (most // segments) if segments <= most else -(-segments // -(-segments // most))
    return aligned if aligned >= _ALIGNED * most else most


def combine_warps(one: KeyPass, workers: int, segments: int) -> int:
    """As many warps of a row as ask for all partial results of a segment at once."""
    if one.problem.deterministic:
        return FIXED_COMBINE_WARPS
    results = -(-workers // max(segments, 1))
    if one.problem.cache.is_latent and LATENT_RESULTS < results <= RESULTS_OF_WARP:
        return COMBINE_WARPS[1]
    return next((warps for warps in COMBINE_WARPS if results <= RESULTS_OF_WARP * warps), COMBINE_WARPS[-1])


def _with_split(one: KeyPass, tiles: tuple[int, int], pair: tuple[Selection, Selection], most: int) -> PassWay:
    """The usual way of a pass on up to ``most`` CTAs."""
    rows = pair[0].spec.block_m
    workers = aligned_workers(min(most, MAX_WORKERS), one.segments(rows), one.chunks(rows))
    return PassWay(tiles, *pair, DecodeSplit(workers, combine_warps(one, workers, one.segments(rows))))


def few_at_a_time(one: KeyPass, target: Target) -> bool:
    """Whether CTAs of few rows over a latent cache are the fastest: what there is to do is little for so many of them.

    The keys of lists come row by row to every kernel. Other calls have a chunk for each CTA at most.
    """
    p, rows = one.problem, LATENT_TILES[0]
    blocks = one.row_blocks(rows) * p.batch
    if p.has_fixed_splits or not 0 < blocks <= target.sm_count:
        return False
    if p.topk:
        return one.keys <= rules().list_keys * (target.sm_count // blocks)
    return blocks * -(-one.keys // one.chunk) <= target.sm_count


def latent_clusters(one: KeyPass, target: Target) -> DecodeSplit | None:
    """How clusters of CTAs of few rows divide lists of one length over a latent cache; None where others are faster.

    Each CTA has a part of one list, and those of a cluster have the same one. Clusters of more than two CTAs find room
    on half of the SMs. Drivers without tensor maps launch no clusters.
    """
    p = one.problem
    blocks = one.row_blocks(LATENT_TILES[0]) * p.batch
    if not (p.has_even_lists and p.tensor_maps and blocks >= rules().clustered_blocks and few_at_a_time(one, target)):
        return None
    ways = ((8, 8, target.sm_count // 2), (4, 4, target.sm_count // 2), (2, 4, target.sm_count))
    for cluster, each, room in ways:
        if blocks * each <= room and one.keys <= rules().list_keys * each and each <= -(-one.keys // one.chunk):
            return DecodeSplit(p.batch * each, 1, cluster)
    return None


def _over_latents(one: KeyPass, target: Target, force: str | None) -> PassWay:
    """The way over a latent cache: all blocks of rows walk over the same keys, so that the SMs are divided by them."""
    p = one.problem
    dims = p.head_dim, p.head_dim_v
    if dims != LATENT_DIMS:
        raise no_latent_kernel(*dims)
    clusters = latent_clusters(one, target)
    pair = select_latent(
        p.dtype, one.k, one.rows, target, force, box=box_rows(p), queries=query_box(p) != (0, 0),
        few=few_at_a_time(one, target), clusters=clusters is not None,
    )  # fmt: skip
    spec = pair[0].spec
    if clusters is not None and spec.cluster > 1:
        return PassWay((1, 1), *pair, clusters)
    most = max(1, target.sm_count * at_a_time(spec, target) // max(one.row_blocks(spec.block_m), 1))
    merged = RESULTS_OF_WARP * COMBINE_WARPS[-1]
    if spec.arch_specific and p.batch == 1 and not p.has_fixed_splits and one.keys <= rules().worker_keys * merged:
        most = min(most, merged)
    return _with_split(one, (1, 1), pair, most)


def _by_rule(one: KeyPass, target: Target, force: str | None) -> PassWay:
    """The best kernel by `query_tiles`, or the one that is named, on as many CTAs as are on the GPU at a time."""
    if one.problem.cache.is_latent:
        return _over_latents(one, target, force)
    tiles = query_tiles(one, target)
    pair = select_decode(one.problem.dtype, one.k, one.v, tiles, target=target, force=force)
    own = next(each for each in tiles if 8 * math.prod(each) == pair[0].spec.block_m)
    return _with_split(one, own, pair, target.sm_count * at_a_time(pair[0].spec, target))


def way_in_company(problem: DecodeProblem, target: Target, *, at_once: bool) -> DecodeWay:
    """The way to run sequences of few queries while attention over pages runs the others.

    Parameters
    ----------
    problem : DecodeProblem
    target : Target
    at_once : bool
        Both kernels are on the GPU at the same time: this one has CTAs that fill an SM, on a part of them that is the
        smaller the more attention has to do. With ``deterministic`` the kernel is the one of a call without company.
    """
    (one,) = passes(problem)
    beside = at_once and not problem.deterministic
    tiles = (1, 1)  # most sequences have one query, whose heads are up to 8 rows
    if beside and problem.group > 8:
        tiles = (BESIDE_TILES[one.k.row_dim][-1], 1)
    elif problem.group > 8:
        tiles = query_tiles(one, target)[0]
    pair = select_decode(problem.dtype, one.k, one.v, (tiles,), target=target, beside=beside)
    most = target.sm_count * at_a_time(pair[0].spec, target)
    if at_once:
        rows = problem.total_queries * problem.group / max(problem.batch, 1)
        least = rules().busy_beside if beside else rules().busy
        most = round(target.sm_count * max(least, 1 / (1 + rows / rules().rows_of_attention)))
    return DecodeWay((_with_split(one, tiles, pair, most),))


def decode_ways(problem: DecodeProblem, target: Target) -> tuple[DecodeWay, ...]:
    """Every way to run a call that could be the fastest, in a fixed order.

    Of kernels that the wheel carries for the GPU; where it carries none of a format, of all that can be compiled. With
    ``deterministic`` the kernel is the rule's, which the batch does not decide about: it is part of what is summed in
    which order. Of two passes both are divided as the rule does.
    """
    todo = passes(problem)
    if problem.cache.is_latent:
        return (DecodeWay(tuple(_over_latents(one, target, None) for one in todo)),)
    found = [tuple(_pass_ways(one, target, alone=len(todo) == 1)) for one in todo]
    return tuple(DecodeWay(each) for each in itertools.product(*found))


def _pass_ways(one: KeyPass, target: Target, *, alone: bool) -> Iterator[PassWay]:
    able = sorted(query_tiles(one, target)[: 1 if one.problem.deterministic else None])
    pairs = [(t, select_decode(one.problem.dtype, one.k, one.v, (t,), target=target)) for t in able]
    carried = [(t, pair) for t, pair in pairs if is_carried(pair[0].spec, target.cc)]
    for tiles, pair in carried or pairs:
        spec = pair[0].spec
        resident = at_a_time(spec, target)
        usual = _with_split(one, tiles, pair, target.sm_count * resident)
        if not alone:
            yield usual
            continue
        segments, chunks = one.segments(spec.block_m), one.chunks(spec.block_m)
        counts = {usual.split.workers}
        for rounds in range(1, resident + 1):
            most = max(1, min(rounds * target.sm_count, MAX_WORKERS, chunks))
            counts |= {most, aligned_workers(most, segments, chunks)}
        if 0 < segments <= target.sm_count * resident:
            counts.add(min(segments, MAX_WORKERS))  # a CTA each: there is nothing to merge
        for workers in sorted(counts):
            warps = combine_warps(one, workers, segments)
            others = (
                ()
                if one.problem.deterministic
                else (COMBINE_WARPS[(COMBINE_WARPS.index(warps) + 2) % len(COMBINE_WARPS)],)
            )
            for each in sorted((warps, *others)):
                yield PassWay(tiles, *pair, DecodeSplit(workers, each))


# What they have to do


class DecodeWork(NamedTuple):
    """One pass.

    Attributes
    ----------
    rounds : float
        Of CTAs, one after the other.
    splits : float
        That a CTA begins.
    streams : float
        Keys of a CTA in units of what its stages hold.
    products : float
        Of an SM: 16 keys with a query row, channels, both products (the unit of attention on mma.sync).
    converted : float
        Elements of quantized rows that an SM's CTAs convert.
    read : float
        Bytes from memory.
    reread : float
        Bytes for all blocks of query rows.
    merged : float
        Bytes of partial results, written and read.
    combined : float
        Partial results that a place of the second kernel reads one after the other, rounds of its CTAs included.
    joined : float
        Bytes of two passes that are merged, with this one's; 0 of the only one.
    """

    rounds: float
    splits: float
    streams: float
    products: float
    converted: float
    read: float
    reread: float
    merged: float
    combined: float
    joined: float


def decode_work(way: DecodeWay, problem: DecodeProblem, target: Target) -> tuple[DecodeWork, ...]:
    """Count what a way of running a call has to do. Lengths are on the device: sequences count as full."""
    p = problem
    joined = 3.0 * p.batch * p.q_len * p.num_q_heads * (2 * p.head_dim + 4) / 2 if len(way.passes) > 1 else 0.0
    return tuple(_work(one, own, target, joined) for one, own in zip(passes(p), way.passes, strict=True))


def _work(one: KeyPass, way: PassWay, target: Target, joined: float) -> DecodeWork:
    p, spec = one.problem, way.main.spec
    segments, keys = one.segments(spec.block_m), one.keys
    if p.window_left != UNLIMITED:
        keys = min(keys, p.window_left + p.q_len)
    of_segment = max(-(-keys // one.chunk), 1)
    chunks = max(segments * of_segment, 1)
    workers = min(way.split.workers, chunks)
    own = -(-chunks // workers)
    is_aligned = own % of_segment == 0 or of_segment % own == 0
    splits = own if p.has_fixed_splits else -(-own // of_segment) + (0 if is_aligned else 1)
    results = 0
    if p.has_fixed_splits:
        results = chunks
    elif own % of_segment:
        results = min(2 * workers, workers + (0 if is_aligned else segments))
    token_bytes, of_cta = one.k.token_bytes + one.v.token_bytes, min(own * one.chunk, chunks * keys)
    resident = at_a_time(spec, target)
    here = min(resident, -(-workers // target.sm_count))
    formats = (one.k, one.v)
    read = float(p.batch * p.num_kv_heads * keys * token_bytes)
    rows = min(spec.block_m, one.rows)
    merges = segments * -(-rows * way.split.combine_warps // 8)
    depth = -(-max(results, 1) // max(segments, 1) // way.split.combine_warps) + 1
    return DecodeWork(
        rounds=float(-(-workers // (target.sm_count * resident))),
        splits=float(splits),
        streams=of_cta * token_bytes / max(spec.smem_bytes, 1),
        products=here * of_cta * spec.block_m / 16 * one.k.row_dim,
        converted=float(here * of_cta * one.k.row_dim * sum(fmt.quantized for fmt in formats)),
        read=read,
        reread=read * (segments / max(p.batch * p.num_kv_heads, 1)),
        merged=2.0 * 4 * results * rows * (spec.head_dim + 2),
        combined=float(depth * -(-merges // (way.combine.spec.ctas_per_sm * target.sm_count))),
        joined=joined,
    )


# What that costs


def decode_us(found: tuple[DecodeWork, ...], own: DecodeCosts, c: Coefficients) -> float:
    """µs that a way of running a call takes: a kernel that attends and one that merges, for each pass."""
    time = c.launch + c.launch_more * (len(found) - 1) + c.merge * len(found)
    for one in found:
        busy = one.products * c.sync_product + one.converted * own.convert
        work = one.rounds * longest(one.streams * own.latency, busy)
        time += one.rounds * one.splits * own.begin + longest(work, one.read / c.memory, one.reread / c.l2)
        time += one.merged / c.partial + one.combined * own.combine
    if len(found) > 1:
        time += c.launch_more + sum(one.joined for one in found) / c.memory
    return time
