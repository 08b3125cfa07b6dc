"""Even shares of packed sequences, without a GPU: both records carried out in NumPy as the kernels do it."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from omniattn import Fp8, Int8
from omniattn.errors import ArgumentError
from omniattn.launch import attn_fwd_stream_k, score_mods, structs
from omniattn.launch.attn_fwd_stream_k import CLASSES, SLOTS
from omniattn.launch.host_struct import At
from omniattn.launch.structs import (
    ATTN_COMBINE_PACKED,
    ATTN_FWD_STREAM_K_MODS_SM90,
    ATTN_FWD_STREAM_K_SM90,
    ATTN_INT8_STREAM_K_SM90,
)
from omniattn.plan.attention import plan_attention
from omniattn.problems import AttentionProblem, AttentionStrides, Pages
from omniattn.problems.memory import WORKSPACE_ALIGNMENT
from omniattn.problems.score_mod import ScoreModProblem
from omniattn.problems.split import StreamK, gqa_packing
from omniattn.registry import REGISTRY, by_name
from omniattn.select import Candidate, ranked
from tests.unit.launch.launch_fakes import fields_of_record
from tests.unit.launch.test_launch_split import AMPERE, HOPPER, box_of, visible
from tests.unit.select.shape_plans import planned

ROWS = [s for s in REGISTRY if s.op == "attention_split" and not s.quantized and s.sequences == "packed"]
COMBINE = by_name("attn_combine_packed_sm90_fp16")
#: Small tiles, so that small problems have many; kernels of such tiles do not exist.
SMALL = dataclasses.replace(by_name("attn_fwd_sm90_fp16_d64_m64n64_varlen_split"), block_m=16, block_n=8)
LEAST_SHARE, TILE_WORK = 8, 2


class Part(NamedTuple):
    """Of a tile of rows. sequence: the first and the last one have the rows that are nobody's."""

    cta: int
    of_class: int
    sequence: int
    head: int
    m0: int
    part: tuple[int, int, int]
    num_parts: int
    distance: int


def packed_problem(
    batch: int, rows_q: int, rows_k: int, hq: int, hk: int, d: int = 8, left: int = -1, right: int = -1, **changes: Any
) -> AttentionProblem:
    q, kv = (0, hq * d, d), (0, hk * d, d)
    plain = AttentionProblem(
        "float16", batch, rows_q, rows_k, hq, hk, d, left, right, 0.25, 0.0, "none", "none", True, lse=True,
        strides=AttentionStrides(q, kv, kv, q, (0, rows_q), (0, 0, 0, 0)),
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def ranges(cu_q: list[int], cu_k: list[int], total: int) -> list[tuple[int, int, int, int]]:
    """(first query, queries, first key, keys), of rows of no sequence -1 keys."""
    own = [
        (q, q_end - q, k, k_end - k)
        for (q, q_end), (k, k_end) in zip(*map(itertools.pairwise, (cu_q, cu_k)), strict=True)
    ]
    return [(0, cu_q[0], 0, -1), *own, (cu_q[-1], total - cu_q[-1], 0, -1)]


def work_before(
    block: int, sq: int, sk: int, queries: int, block_n: int, left: int, right: int, of_tile: int = TILE_WORK,
    shift: int = 0,
) -> int:  # fmt: skip
    """SequenceWork::before."""
    grows = left < 0 <= right < sq and sk > 0
    keys = min(max(sk - sq + queries + right, 0), sk) if grows else sk
    keys = max(min(keys, left + max(right, 0) + queries) if left >= 0 else keys, 0)
    pairs = block * max(block - 1, 0) // 2
    return block * of_tile + ((block * keys + pairs * (queries if grows else 0)) // block_n >> shift)


def parts_of(
    sequences: list[tuple[int, int, int, int]], heads: int, pack: int, ctas: int, block_m: int, block_n: int,
    window: tuple[int, int], most_work: int = 2**30,
) -> Iterator[Part]:  # fmt: skip
    """StreamKTiles of every CTA, by a list of all tiles of each class."""
    queries = block_m // pack
    blocks = [-(-sq // queries) for _, sq, _, _ in sequences]
    gang_of = [n if 1 < n <= CLASSES else 1 for n in blocks]
    for gang in range(1, CLASSES + 1):
        own = [b for b, n in enumerate(blocks) if n and gang_of[b] == gang]

        def works(b: int, of_tile: int, shift: int, gang: int = gang) -> list[int]:
            _, sq, _, sk = sequences[b]
            at = [work_before(x, sq, sk, queries, block_n, *window, of_tile, shift) for x in range(blocks[b] + 1)]
            if gang == 1:
                return [end - begin for begin, end in itertools.pairwise(at)]
            last = work_before(1, sq, sk, queries, 1, *window, 0)
            last += (gang - 1) * (queries if window[0] < 0 <= window[1] < sq and sk > 0 else 0)
            return [of_tile + (min(last, max(sk, 0)) // block_n >> shift)]

        def all_work(of_tile: int, shift: int, own: list[int] = own, works: Any = works) -> int:
            return heads * sum(sum(works(b, of_tile, shift)) for b in own)

        if not own:
            continue
        shift = next(n for n in range(0, 44, 4) if all_work(TILE_WORK, n) < most_work)
        gangs = ctas // gang
        firsts = {b: works(b, TILE_WORK, shift)[0] for b in own}
        with_keys = [work for b, work in firsts.items() if has_keys(sequences[b], queries, window)]
        most, num_tiles = max(firsts.values()), heads * sum(len(works(b, 0, 0)) for b in own)
        of_tile, share = TILE_WORK, max((all_work(TILE_WORK, shift) - 1) // gangs + 1, LEAST_SHARE)
        cut = most // share
        if cut and -(-most // cut) <= share + TILE_WORK:
            share = -(-most // cut)
            pad = cut * share - most
            if with_keys and min(with_keys) == most and pad * num_tiles <= share * gangs - all_work(TILE_WORK, shift):
                of_tile += pad
        assert share * gangs >= all_work(of_tile, shift)
        begin = 0
        for b, head in itertools.product(own, range(heads)):
            for block, work in enumerate(works(b, of_tile, shift)):
                assert work >= TILE_WORK
                first, last = begin // share, (begin + work - 1) // share
                for at in range(first, last + 1):
                    part = max(at * share - begin, 0), min((at + 1) * share - begin, work), work
                    for tile in range(gang):
                        own_gang = gangs - 1 - at if gang % 2 == 0 else at
                        m0 = (tile if gang > 1 else block) * block_m
                        distance = -gang if gang % 2 == 0 else gang
                        yield Part(own_gang * gang + tile, gang - 1, b, head, m0, part, last - at + 1, distance)
                begin += work


def has_keys(sequence: tuple[int, int, int, int], queries: int, window: tuple[int, int]) -> bool:
    _, sq, _, sk = sequence
    blocks = -(-sq // queries)
    keys = work_before(1, sq, sk, queries, 1, *window, 0)
    if 1 < blocks <= CLASSES and window[0] < 0 <= window[1] < sq and sk > 0:
        keys = min(keys + (blocks - 1) * queries, sk)
    return keys > 0


def carried_out(
    lengths_q: list[int], lengths_k: list[int], heads: tuple[int, int], window: tuple[int, int], ctas: int,
    first: int, behind: int, with_sinks: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(ctas)
    cu_q, cu_k = ([first, *(first + x for x in itertools.accumulate(n))] for n in (lengths_q, lengths_k))
    rows_q, rows_k, d = cu_q[-1] + behind, cu_k[-1] + behind, 8
    sinks = rng.normal(size=heads[0]) if with_sinks else None
    p = packed_problem(len(lengths_q), rows_q, rows_k, *heads, d, *window, sinks="none" if sinks is None else "float32")
    pack_gqa = gqa_packing(dataclasses.replace(p, seqlen_q=max(*lengths_q, 1)), SMALL.block_m)
    (main, merge), num_bytes = attn_fwd_stream_k.build(SMALL, COMBINE, p, pack_gqa, StreamK(ctas))
    f, m = fields_of_record(main, ATTN_FWD_STREAM_K_SM90), fields_of_record(merge, ATTN_COMBINE_PACKED)
    assert (main.grid[0], merge.overlap, f["tiles.num_items"]) == (ctas, True, ctas)
    pack, of_heads = f["tiles.pack"], f["tiles.pack_heads"]
    assert SMALL.block_m % pack == 0
    q, k, v = (rng.normal(size=(n, h, d)) for n, h in ((rows_q, heads[0]), (rows_k, heads[1]), (rows_k, heads[1])))
    map_q = next(x for x in main.tensor_maps if x.operand == "q")
    o, lse = np.full(q.shape, np.nan), np.full((heads[0], rows_q), np.nan)
    partial: dict[int, Any] = {}
    cuts: dict[tuple[int, int], Part] = {}
    seen = np.zeros((heads[0], rows_q, rows_k), int)
    sequences = ranges(cu_q, cu_k, rows_q)

    def finish(b: int, row: int, head: int, top: float, total: float, out: np.ndarray) -> None:
        own, query = head * of_heads + row % pack, sequences[b][0] + row // pack
        sink = -np.inf if sinks is None or sequences[b][3] < 0 else sinks[own] * np.log2(np.e)
        base = max(top, sink)
        below = total * np.exp2(top - base) + (np.exp2(sink - base) if sink > -np.inf else 0.0)
        assert np.isnan(o[query, own]).all()
        o[query, own] = out * np.exp2(top - base) / below if below else 0.0
        with np.errstate(divide="ignore"):
            lse[own, query] = np.log(2) * base + np.log(below) if below else -np.inf

    for part in parts_of(sequences, f["fwd.num_q_heads"], pack, ctas, SMALL.block_m, SMALL.block_n, window):
        assert 0 <= part.cta < ctas
        q0, sq, k0, sk = sequences[part.sequence]
        top_row, bottom_row = part.m0 // pack, (min(part.m0 + SMALL.block_m, sq * pack) - 1) // pack
        lo, hi = visible(top_row, sq, sk, *window)[0], visible(bottom_row, sq, sk, *window)[1]
        begin, end = lo // SMALL.block_n, -(-hi // SMALL.block_n)
        count, (a, z, n) = max(end - begin, 0), part.part
        keys = range((begin + count * a // n) * SMALL.block_n, (begin + count * z // n) * SMALL.block_n)
        tile = box_of(map_q, q.ravel(), (0, 0, q0 + part.m0 // pack, part.head, 0))[:, :d]
        slot = 0 if a > 0 else 1
        for i in range(min(SMALL.block_m, sq * pack - part.m0)):
            row = part.m0 + i
            lo, hi = visible(row // pack, sq, sk, *window)
            mine = np.arange(max(lo, keys.start), max(min(hi, keys.stop), max(lo, keys.start))) + k0
            top, total, out = -3e38, 0.0, np.zeros(d)
            if mine.size:
                kv_head = part.head // (f["fwd.num_q_heads"] // heads[1])
                s = k[mine, kv_head] @ tile[i] * 0.25 * np.log2(np.e)
                top, weights = s.max(), np.exp2(s - s.max())
                total, out = weights.sum(), weights @ v[mine, kv_head]
            if row % pack < of_heads:
                seen[part.head * of_heads + row % pack, q0 + row // pack, mine] += 1
            if (a, z) == (0, n):
                if row % pack < of_heads:
                    finish(part.sequence, row, part.head, top, total, out)
                continue
            place = ((part.cta * CLASSES + part.of_class) * SLOTS + slot) * SMALL.block_m + i
            assert place not in partial
            partial[place] = top, total, out
        if (a, z) != (0, n) and slot == 1:
            assert (part.cta, part.of_class) not in cuts
            assert part.num_parts > 1
            cuts[part.cta, part.of_class] = part
    assert (merge.grid[1], m["num_ctas"]) == (-(-ctas // SMALL.ctas_per_sm), ctas)
    assert merge.grid[0] * 8 == SMALL.block_m == m["block_m"]
    for (cta, of_class), part in cuts.items():
        for i in range(min(SMALL.block_m, sequences[part.sequence][1] * pack - part.m0)):
            if (part.m0 + i) % pack >= m["pack_heads"]:
                continue
            slots = [((cta + x * part.distance) * CLASSES + of_class) * SLOTS + (x == 0) for x in range(part.num_parts)]
            of = [partial[slot * SMALL.block_m + i] for slot in slots]
            top = max(x[0] for x in of)
            weights = [np.exp2(x[0] - top) for x in of]
            total = sum(x[1] * w for x, w in zip(of, weights, strict=True))
            out = sum(x[2] * w for x, w in zip(of, weights, strict=True))
            finish(part.sequence, part.m0 + i, part.head, top, total, out)
    used = max(partial, default=-1) + 1
    assert m["cuts"].offset + structs.CUT_TILE.size * CLASSES * ctas == num_bytes
    assert m["partial_ml"].offset >= 4 * d * used
    assert m["cuts"].offset - m["partial_ml"].offset >= 8 * used
    assert not any(m[x].offset % WORKSPACE_ALIGNMENT for x in ("partial_ml", "cuts"))
    wanted = np.zeros_like(seen)
    for q0, sq, k0, sk in sequences:
        for row in range(sq):
            lo, hi = visible(row, sq, sk, *window) if sk >= 0 else (0, 0)
            wanted[:, q0 + row, k0 + lo : k0 + max(hi, lo)] = 1
    np.testing.assert_array_equal(seen, wanted)
    o_wanted, lse_wanted = np.full_like(o, np.nan), np.full_like(lse, np.nan)  # compared as a whole, which is quicker
    for row, head in np.ndindex(rows_q, heads[0]):
        keys_of = np.flatnonzero(wanted[head, row])
        s = k[keys_of, head * heads[1] // heads[0]] @ q[row, head] * 0.25
        is_own = any(q0 <= row < q0 + sq and sk >= 0 for q0, sq, _, sk in sequences)
        terms = np.exp(s) if sinks is None or not is_own else np.append(np.exp(s), np.exp(sinks[head]))
        expected = np.exp(s) @ v[keys_of, head * heads[1] // heads[0]] / terms.sum() if keys_of.size else np.zeros(d)
        o_wanted[row, head] = expected
        lse_wanted[head, row] = np.log(terms.sum()) if terms.size else -np.inf
    assert not np.isnan(o_wanted).any()
    assert not np.isnan(lse_wanted).any()
    np.testing.assert_allclose(o, o_wanted, atol=1e-9)
    np.testing.assert_allclose(lse, lse_wanted, atol=1e-9)


class Walk:
    """StreamKTiles of one CTA, step by step: 32 sequences at a time, a binary search within a head."""

    def __init__(
        self, sequences: list[tuple[int, int, int, int]], heads: int, pack: int, ctas: int, block: tuple[int, int],
        window: tuple[int, int], cta: int, most_work: int = 2**30,
    ) -> None:  # fmt: skip
        self.most_work, self.shift = most_work, 0
        self.sequences, self.heads, self.ctas, self.block, self.cta = sequences, heads, ctas, block, cta
        self.queries, self.window = block[0] // pack, window
        self.gang, self.of_tile = 0, TILE_WORK
        self.at = self.end = 0

    def blocks(self, i: int) -> int:
        return -(-self.sequences[i][1] // self.queries) if i < len(self.sequences) else 0

    def gang_of(self, i: int) -> int:
        return self.blocks(i) if 1 < self.blocks(i) <= CLASSES else 1

    def before(self, i: int, tile: int, of_tile: int) -> int:
        _, sq, _, sk = self.sequences[i]
        if self.gang_of(i) == 1:
            return work_before(tile, sq, sk, self.queries, self.block[1], *self.window, of_tile, self.shift)
        last = work_before(1, sq, sk, self.queries, 1, *self.window, 0)
        last += (self.gang_of(i) - 1) * self.queries if self.window[0] < 0 <= self.window[1] < sq and sk > 0 else 0
        return tile * of_tile + (tile * min(last, max(sk, 0)) // self.block[1] >> self.shift)

    def tiles(self, i: int) -> int:
        return self.blocks(i) if self.gang_of(i) == 1 else 1

    def work(self, i: int, of_tile: int) -> int:
        own = i < len(self.sequences) and self.blocks(i) > 0 and self.gang_of(i) == self.gang
        return self.heads * self.before(i, self.tiles(i), of_tile) if own else 0

    def next_class(self) -> bool:
        while self.gang < CLASSES:
            self.gang += 1
            own = [i for i in range(len(self.sequences)) if self.blocks(i) and self.gang_of(i) == self.gang]
            if own:
                break
        else:
            return False
        gangs, place = self.ctas // self.gang, self.cta // self.gang
        if self.gang % 2 == 0:
            place = gangs - 1 - place
        for self.shift in range(0, 44, 4):
            total = sum(self.work(i, TILE_WORK) for i in own)
            if total < self.most_work:
                break
        firsts = {i: self.before(i, 1, TILE_WORK) for i in own}
        self.of_tile, self.share, most = TILE_WORK, max((total - 1) // gangs + 1, LEAST_SHARE), max(firsts.values())
        cut = most // self.share
        if cut and -(-most // cut) <= self.share + TILE_WORK:
            self.share = -(-most // cut)
            pad, num_tiles = cut * self.share - most, self.heads * sum(map(self.tiles, own))
            least = min((x for i, x in firsts.items() if self.before(i, 1, 0) > 0 or has_keys(
                self.sequences[i], self.queries, self.window)), default=None)  # fmt: skip
            if least == most and pad * num_tiles <= self.share * gangs - total:
                self.of_tile += pad
        self.chunk = self.before_chunk = 0
        self.at = place * self.share if 0 <= place < gangs else 0
        self.end = self.at + self.share if 0 <= place < gangs else 0
        return True

    def parts(self) -> Iterator[Part]:
        while True:
            while self.at >= self.end or not self.find():
                if not self.next_class():
                    return
            begin, work, i, head, tile = self.found
            a, z = self.at - begin, min(self.end - begin, work)
            self.at = begin + z
            last = (begin + work - 1) // self.share - (self.end - 1) // self.share + 1
            distance = -self.gang if self.gang % 2 == 0 else self.gang
            m0 = (self.cta % self.gang if self.gang > 1 else tile) * self.block[0]
            yield Part(self.cta, self.gang - 1, i, head, m0, (a, z, work), last, distance)

    def find(self) -> bool:
        while True:
            sums = list(itertools.accumulate(self.work(self.chunk + lane, self.of_tile) for lane in range(32)))
            past = [lane for lane in range(32) if sums[lane] > self.at - self.before_chunk]
            if past:
                break
            self.before_chunk += sums[-1]
            self.chunk += 32
            if self.chunk >= len(self.sequences):
                return False
        i, begin = self.chunk + past[0], self.before_chunk + (sums[past[0] - 1] if past[0] else 0)
        per_head = self.before(i, self.tiles(i), self.of_tile)
        head = (self.at - begin) // per_head
        begin += head * per_head
        tile, end = 0, self.tiles(i)
        while end - tile > 1:
            middle = tile + (end - tile) // 2
            tile, end = (middle, end) if self.before(i, middle, self.of_tile) <= self.at - begin else (tile, middle)
        of_others = self.before(i, tile, self.of_tile)
        self.found = begin + of_others, self.before(i, tile + 1, self.of_tile) - of_others, i, head, tile
        return True


@pytest.mark.parametrize("seed", range(60))
def test_the_walk_finds_every_part(seed: int) -> None:
    of = random.Random(seed)
    batch, ctas = of.choice([1, 5, 30, 31, 70, 150]), of.choice([4, 7, 78, 132])
    lengths = [[of.choice([0, 1, 3, of.randrange(most)]) for _ in range(batch)] for most in (70, 300)]
    pack, block = of.choice([(1, (16, 8)), (4, (16, 8)), (4, (64, 64))])
    window = of.choice([(-1, -1), (-1, 0), (40, 3)])
    cu_q, cu_k = ([2, *(2 + x for x in itertools.accumulate(n))] for n in lengths)
    sequences = ranges(cu_q, cu_k, cu_q[-1] + of.choice([0, 50]))
    heads = of.choice([1, 3])
    # With little that can be counted, several tiles of keys count as one.
    most = of.choice([2**30, 2**30, 2 * TILE_WORK * heads * (20 + sum(-(-n // 4) + 1 for n in lengths[0]))])
    walked = [
        part for cta in range(ctas) for part in Walk(sequences, heads, pack, ctas, block, window, cta, most).parts()
    ]
    # num_parts counts from the part on.
    wanted = list(parts_of(sequences, heads, pack, ctas, *block, window, most))
    assert sorted(walked) == sorted(wanted)


@pytest.mark.parametrize("seed", range(60))
def test_carried_out(seed: int) -> None:
    of = random.Random(seed)
    batch = of.choice([1, 2, 5, 40])
    longest = 90 if batch < 40 else 20
    lengths_q = [of.choice([0, 1, 2, 7, 20]) for _ in range(batch)]
    lengths_k = [of.choice([0, 1, 8, of.randrange(longest)]) for _ in range(batch)]
    window = of.choice([(-1, -1), (-1, 0), (-1, 3), (10, 0), (3, 30), (of.randrange(40), -1)])
    carried_out(
        lengths_q, lengths_k, of.choice([(1, 1), (4, 2), (6, 2), (7, 1), (8, 1)]), window, of.choice([4, 5, 7, 50]),
        of.choice([0, 3]), of.choice([0, 5, 40]), of.random() < 0.5,
    )  # fmt: skip


#: (sequences, queries and keys of each, heads)
FEW = [(8, 32, 8192, 32, 8), (64, 1, 4096, 32, 8), (64, 4, 2048, 28, 4), (1, 16, 32768, 32, 8), (256, 1, 1024, 64, 8)]


def is_stream_k(way: Candidate) -> bool:
    return isinstance(way.schedule, StreamK)


@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("extents", FEW)
def test_few_queries_have_even_shares(extents: tuple[int, ...], right: int) -> None:
    n, sq, sk, hq, hk = extents
    p = packed_problem(n, n * sq, n * sk, hq, hk, 128, right=right, max_seqlen_q=sq, max_seqlen_k=sk)
    assert is_stream_k(ranked(p, HOPPER)[0][1])
    launches = plan_attention(p, HOPPER, None)
    main, merge = launches.records
    assert (main.spec.op, merge.spec.op) == ("attention_split", "attention_combine_packed")
    assert main.grid == (HOPPER.sm_count * main.spec.ctas_per_sm, 1, 1)
    assert merge.grid == (main.spec.block_m // 8, HOPPER.sm_count, 1)
    assert [x.spec.op for x in launches.others] == ["attention_combine_packed"]
    assert launches.workspace_bytes == attn_fwd_stream_k.workspace(main.spec, p, StreamK(main.grid[0]))[-1]
    # Other GPUs have no such kernel.
    assert not any(r.spec.arch_specific for r in plan_attention(p, AMPERE, None).records)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("precision", [Int8(), Fp8()], ids=str)
@pytest.mark.parametrize("extents", FEW)
def test_few_queries_on_8_bits(extents: tuple[int, ...], precision: Int8 | Fp8, lse: bool) -> None:
    """The same shares and operands' places; O has the same bits with an LSE and without."""
    n, sq, sk, hq, hk = extents
    p = packed_problem(
        n, n * sq, n * sk, hq, hk, 128, right=0, max_seqlen_q=sq, max_seqlen_k=sk, lse=lse, dtype="bfloat16",
        precision=precision.precision,
    )  # fmt: skip
    launches = planned(p, HOPPER, lambda way: is_stream_k(way) and way.pack_gqa.heads > 1)
    main, merge = launches.records[-2:]
    assert (main.spec.op, merge.spec.op) == ("attention_split", "attention_combine_packed")
    assert main.spec.name.endswith("_m128n64_varlen_split")
    assert {r.spec.op for r in launches.records[:-2]} <= {"quantize", "quantize_fp8_sums", "quantize_values"}
    assert main.grid == (HOPPER.sm_count, 1, 1)
    f, m = fields_of_record(main, ATTN_INT8_STREAM_K_SM90), fields_of_record(merge, ATTN_COMBINE_PACKED)
    sharing = f["tiles.pack_heads"]
    assert sharing == m["pack_heads"] == hq // hk <= f["tiles.pack"] == m["pack"] <= 8
    assert f["fwd.num_q_heads"] == hq // sharing
    assert f["map_q"].dims == (128, sharing, n * sq, hq // sharing, 1)
    assert np.prod(f["map_q"].box[1:]) == main.spec.block_m
    assert all(f[name] == m[name] for name in ("partial_o", "partial_ml", "partial_lse", "cuts"))
    assert (m["partial_lse"] is not None) == lse
    assert m["lse"] == f["fwd.lse"] == (At("lse") if lse else None)
    # Partial results lie behind the operands, side by side.
    used = [place.offset for name, place in f.items() if name.startswith("operands.") and isinstance(place, At)]
    rows = 4 * 2 * main.spec.block_m * HOPPER.sm_count
    assert f["partial_o"].offset > max(used)
    places = [f["partial_o"], f["partial_ml"], *([f["partial_lse"]] if lse else []), f["cuts"]]
    sizes = [4 * rows * 128, 8 * rows, *([8 * rows] if lse else []), 32 * 4 * HOPPER.sm_count]
    for place, size, after in zip(places, sizes, [*places[1:], None], strict=True):
        end = launches.workspace_bytes if after is None else after.offset
        assert place.offset + size <= end
    # More than heads share, or smoothed queries, is left to the kernel without shares.
    smoothed = dataclasses.replace(p, precision=Int8(smooth_q=True).precision)
    assert not any(r.spec.op == "attention_split" for r in plan_attention(smoothed, HOPPER, None).records)
    with pytest.raises(ArgumentError, match="smooth_q"):
        plan_attention(smoothed, HOPPER, "attn_int8_sm90_bf16_d128_m128n64_varlen_split")


@pytest.mark.parametrize("changes", [{"softcap": 50.0}, {"softmax_scale": -1.0}], ids=str)
def test_softcap_has_even_shares_too(changes: dict[str, Any]) -> None:
    p = packed_problem(64, 64, 64 * 4096, 32, 8, 128, right=0, max_seqlen_q=1, max_seqlen_k=4096, **changes)
    tile_of_64 = "attn_fwd_sm90_fp16_d128_m64n64_varlen_split_softcap"
    main, merge = planned(p, HOPPER, lambda way: is_stream_k(way) and way.row.name == tile_of_64).records
    f = fields_of_record(main, ATTN_FWD_STREAM_K_MODS_SM90)
    assert f["mods.flags"] == (score_mods.SOFTCAP if "softcap" in changes else score_mods.SCALED)
    assert (f["mods.lists"], f["tiles.pack"], f["tiles.num_items"]) == (None, 4, main.grid[0])
    merged = fields_of_record(merge, ATTN_COMBINE_PACKED)
    assert all(merged[name] == f[name] for name in ("partial_o", "partial_ml", "cuts"))
    for other in ({"mask": "bool"}, {"score_mod": ScoreModProblem("score + 1", None, ())}):
        records = plan_attention(dataclasses.replace(p, **other), HOPPER, None).records
        assert not any(r.spec.op == "attention_combine_packed" for r in records)


def test_one_long_sequence_among_short_ones() -> None:
    """By the mean there is nothing to split; the longest takes as long as it takes."""
    p = packed_problem(40, 40, 40 * 2000, 32, 8, 128, right=0, max_seqlen_q=1, max_seqlen_k=64000)
    assert is_stream_k(ranked(p, HOPPER)[0][1])


@pytest.mark.parametrize("spec", ROWS, ids=lambda s: s.name)
def test_forced(spec: Any) -> None:
    p = packed_problem(3, 30, 300, 8, 2, spec.head_dim, dtype=spec.dtype)
    p = dataclasses.replace(p, pages=Pages(16, 99, 30, 30) if spec.paged else None)
    assert plan_attention(p, HOPPER, spec.name).records[0].spec.name == spec.name
    unfit = {"mask": "bool"} if spec.score_mods else {"softcap": 3.0}
    for changes in ({"varlen": False}, unfit, {"tensor_maps": False}):
        with pytest.raises(ArgumentError):
            plan_attention(dataclasses.replace(p, **changes), HOPPER, spec.name)


def test_any_lengths_are_admitted() -> None:
    """A thousand sequences of a thousand queries and a million keys have more work than 31 bits count."""
    p = packed_problem(1000, 10**6, 10**9, 32, 1, 64, max_seqlen_q=1000, max_seqlen_k=10**6)
    launches = plan_attention(p, HOPPER, "attn_fwd_sm90_fp16_d64_m64n64_varlen_split")
    assert launches.records[0].spec.op == "attention_split"
