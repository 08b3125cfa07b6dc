"""The list of tiles of the persistent kernels, walked as ``kernels_cu/scheduler/persistent.cuh`` walks it."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from omniattn.problems import EXACT, UNLIMITED, Target
from omniattn.problems import AttentionProblem as Problem
from omniattn.problems.split import Whole
from omniattn.problems.tile_order import (
    HeadTiles,
    TileList,
    busiest,
    busiest_cta,
    head_by_head,
    in_pairs,
    interleave,
    num_m_blocks,
)
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.select import candidates, features, orders
from omniattn.select.model import coefficients_of
from omniattn.select.orders import best_balance, head_tiles, other_orders, usual_order

SMS = 132
HOPPER = Target((9, 0), 227 << 10, SMS)
APART = coefficients_of(HOPPER).apart
BLOCKS = [1, 2, 3, 4, 7, 8, 16, 33]
HEADS = [1, 2, 5, 16, 131, 132, 133, 300]


def walk(tiles: TileList, heads: int, blocks: int, num_ctas: int, cta: int) -> Iterator[tuple[int, int]]:
    """PersistentTiles::next of one CTA: (head over all batch entries, block of query rows)."""
    round_begin, backwards, second = 0, False, False
    while True:
        item = round_begin + (num_ctas - 1 - cta if backwards else cta)
        if item >= tiles.num_items:
            return
        last_of_item = True
        if item < tiles.num_pairs:
            head, j = divmod(item, (blocks + 1) // 2)
            m = j if second else blocks - 1 - j
            second = not second and 2 * j + 1 != blocks
            last_of_item = not second
        elif tiles.num_tail_heads:
            rank, at = divmod(item - tiles.num_pairs, tiles.num_tail_heads)
            head, m = heads - tiles.num_tail_heads + at, blocks - 1 - rank
        else:
            head, at = divmod(item, blocks)
            m = blocks - 1 - at
        if last_of_item:
            round_begin += num_ctas
            if round_begin > tiles.num_pairs:
                backwards = not backwards
        yield head, m


def rotated(head: int, m: int, blocks: int) -> int:
    """PersistentTiles with kRotate, of a list head by head."""
    return (m + ((head * 0x9E3779B9 & 0xFFFFFFFF) >> 16)) % blocks


def walk_all(tiles: TileList, heads: int, blocks: int, num_ctas: int) -> list[list[tuple[int, int]]]:
    """Of every CTA of the launch, whose grid is never larger than the list."""
    grid = min(tiles.num_items, num_ctas)
    return [list(walk(tiles, heads, blocks, grid, cta)) for cta in range(grid)]


def check_once(tiles: TileList, heads: int, blocks: int, num_ctas: int) -> None:
    met = Counter(tile for tiles_of_cta in walk_all(tiles, heads, blocks, num_ctas) for tile in tiles_of_cta)
    assert met == Counter({(head, m): 1 for head in range(heads) for m in range(blocks)}), tiles


def triangle(blocks: int, offset: int = 0) -> HeadTiles:
    """Tiles under causality, of a step of keys more each: the first one has two, and as many as ``offset`` says."""
    return HeadTiles(64 * blocks, 64 * (blocks + offset), 64, 64, UNLIMITED, 0)


def causal(of: HeadTiles, heads: int, num_ctas: int, head_bytes: float) -> TileList:
    """Pairs, with the tail that is compared if there is one."""
    return in_pairs(heads, len(of.lengths), orders._tail(of, heads, num_ctas, head_bytes, APART), of.lead_rows)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("heads", HEADS)
def test_every_tile_exactly_once(heads: int, blocks: int) -> None:
    for num_ctas in (1, 7, SMS):
        check_once(head_by_head(heads, blocks), heads, blocks, num_ctas)
        check_once(causal(triangle(blocks), heads, num_ctas, 1e6), heads, blocks, num_ctas)


def test_every_tile_exactly_once_whatever_the_tail() -> None:
    """Also lists that are not compared, and some that never would be."""
    rng = random.Random(5)
    for _ in range(300):
        heads, blocks, num_ctas = rng.randint(1, 40), rng.randint(1, 12), rng.randint(1, 30)
        tail = rng.randint(0, heads)
        num_pairs = (heads - tail) * ((blocks + 1) // 2)
        check_once(TileList(num_pairs + tail * blocks, num_pairs, tail), heads, blocks, num_ctas)


def test_a_pair_is_one_item_of_one_head() -> None:
    """Its two tiles follow each other on one CTA: the second finds the keys of the first in L2."""
    tiles = causal(triangle(6), 2 * SMS, SMS, 1e6)
    assert tiles == TileList(3 * 2 * SMS, 3 * 2 * SMS, 0)
    for of_cta in walk_all(tiles, 2 * SMS, 6, SMS):
        for (head, m), (other, n) in zip(of_cta[0::2], of_cta[1::2], strict=True):
            assert head == other
            assert m + n == 5
            assert m > n


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("heads", HEADS)
def test_makespan_is_that_of_the_walk(heads: int, blocks: int) -> None:
    rng = random.Random(heads * 100 + blocks)
    drawn = tuple(sorted(rng.randint(1, 50) for _ in range(blocks)))
    for lengths in (triangle(blocks).lengths, triangle(blocks, 30).lengths, drawn):
        for num_ctas in (3, 20, SMS):
            pairs = heads * ((blocks + 1) // 2)
            lists = [
                head_by_head(heads, blocks),
                TileList(pairs, pairs, 0),
                in_pairs(heads, blocks, rng.randint(1, heads)),
                TileList(heads * blocks, 0, heads),
            ]
            for tiles in lists:
                ctas = walk_all(tiles, heads, blocks, num_ctas)
                work = [sum(lengths[m] for _, m in cta) for cta in ctas]
                most = max(zip(work, map(len, ctas), strict=True))
                assert busiest_cta(tiles, heads, lengths, num_ctas) == most, (tiles, num_ctas)
                if tiles.num_pairs == tiles.num_tail_heads == 0:
                    turned = [sum(lengths[rotated(head, m, blocks)] for head, m in cta) for cta in ctas]
                    assert busiest(tiles, heads, lengths, num_ctas, is_rotated=True) == max(turned)
                assert max(work) >= orders._least_work(heads, lengths, num_ctas) - 1e-9


@pytest.mark.parametrize("blocks", [*BLOCKS, 64, 128])
@pytest.mark.parametrize("heads", [*HEADS, 1000])
def test_a_tail_is_never_worse_than_pairs(heads: int, blocks: int) -> None:
    for offset in (0, 5, 100):
        of = triangle(blocks, offset)
        chosen = causal(of, heads, SMS, 1e6)
        without = busiest(in_pairs(heads, blocks), heads, of.lengths, SMS)
        took = busiest(chosen, heads, of.lengths, SMS)
        # Neighbours in L2 are given up for a gain only.
        assert took == without if chosen.num_tail_heads == 0 else took < 0.98 * without
        assert took >= sum(of.lengths) * heads / SMS


def test_a_tail_helps_where_pairs_do_not_fill_the_last_round() -> None:
    of = triangle(16)
    chosen = causal(of, 20, SMS, 1e6)  # 160 pairs: 28 of them in a round of their own
    assert chosen.num_tail_heads > 0
    assert busiest(chosen, 20, of.lengths, SMS) < 0.8 * busiest(in_pairs(20, 16), 20, of.lengths, SMS)


#: (heads, rows, MB of K and V of a head, heads with which measured calls ended soonest)
MEASURED = [(256, 2048, 0.26, (240, 240)), (256, 1024, 0.52, (36, 48)), (128, 2048, 0.92, (22, 44)),
            (256, 2048, 1.05, (20, 43)), (64, 4096, 2.1, (11, 22))]  # fmt: skip


@pytest.mark.parametrize("measured", MEASURED)
def test_a_tail_is_as_long_as_l2_holds_its_keys(measured: tuple[int, int, float, tuple[int, int]]) -> None:
    """One H100: with 8 times 32 heads on 8 of 2048 rows a tail of 240 takes 419 us, of 168 427, of 42 432; where each
    head has its own K and V one of 240 takes 597, of 42 449.
    """
    heads, rows, head_mb, (least, most) = measured
    of = HeadTiles(rows, rows, 192, 64, UNLIMITED, 0, -rows % 192 // 64 * 64)
    chosen = causal(of, heads, SMS, head_mb * 1e6)
    assert least <= chosen.num_tail_heads <= most
    assert chosen.num_tail_heads * head_mb < 64


def test_heads_that_run_at_the_same_time_anyway_cost_nothing() -> None:
    """Of few heads, or long ones, pairs have as many under way as a tail."""
    for heads, rows, head_mb, least in ((1, 131072, 67, 0.96), (2, 131072, 67, 0.99), (8, 8192, 17, 0.98)):
        of = HeadTiles(rows, rows, 192, 64, UNLIMITED, 0, -rows % 192 // 64 * 64)
        chosen = causal(of, heads, SMS, head_mb * 1e6)
        assert heads * sum(of.lengths) / SMS >= least * busiest(chosen, heads, of.lengths, SMS), heads
    # More heads than that are those that L2 holds.
    long = causal(triangle(16), 200, SMS, 1e8)
    assert long.num_tail_heads <= -(-SMS // 8)


@pytest.mark.parametrize("blocks", [*BLOCKS, 64, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_windows_may_interleave_heads_where_rounds_are_uneven(heads: int, blocks: int) -> None:
    """Never the longer list, and neighbours in L2 are given up for a gain only."""
    (row,) = (s for s in REGISTRY if s.name == "attn_fwd_sm90_bf16_d128_m128n128")
    for window in (10, 1000, 4000):
        problem = dataclasses.replace(
            PLAIN, batch=1, num_q_heads=heads, num_kv_heads=heads, seqlen_q=128 * blocks, seqlen_k=128 * blocks,
            window_left=window,
        )  # fmt: skip
        others, lengths = list(other_orders(row, problem, HOPPER)), head_tiles(row, problem).lengths
        usual = usual_order(row, problem, HOPPER)
        assert usual.tiles == head_by_head(heads, blocks)
        assert others in ([], [Whole(interleave(heads, blocks), min(heads * blocks, SMS))])
        took, least = (busiest(x, heads, lengths, SMS) for x in (interleave(heads, blocks), usual.tiles))
        if heads * blocks > orders.MAX_ROUNDS * SMS:
            assert not others
            continue
        assert bool(others) == (took < 0.98 * least)
        assert took >= best_balance(row, problem, HOPPER) * least - 1e-9


def test_a_window_of_a_few_heads() -> None:
    """16 heads of 16384 rows, windows of 4096 keys: head by head one SM has a fifth more to do than the mean."""
    lengths = tuple(1 + min(3 * m + 3, 67) for m in range(86))
    mean = 16 * sum(lengths) / SMS
    assert busiest(interleave(16, 86), 16, lengths, SMS) < 1.02 * mean
    assert busiest(head_by_head(16, 86), 16, lengths, SMS) > 1.18 * mean


def test_long_lists_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated(*_: Any) -> int:
        raise AssertionError("takes as long as the list is")

    for name in ("busiest", "most_rows"):
        monkeypatch.setattr(orders, name, simulated)
        monkeypatch.setattr(features, name, simulated, raising=False)
    for changes in ({}, {"window_left": 500}, {"window_right": UNLIMITED}):
        problem = dataclasses.replace(PLAIN, batch=20_000, seqlen_q=100 * 64 + 50, seqlen_k=6500, **changes)
        for way in candidates(problem, HOPPER):
            assert features.features(way, problem, HOPPER).passes[0].items > 64


PLAIN = Problem(
    dtype="bfloat16",
    batch=3,
    seqlen_q=1000,
    seqlen_k=1300,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=128,
    window_left=UNLIMITED,
    window_right=0,
    softmax_scale=0.1,
    softcap=0.0,
    mask="none",
    sinks="none",
    varlen=False,
    precision=EXACT,
    deterministic=False,
)


def test_softcap_and_a_window_interleave_heads() -> None:
    """Masks do not: heads begin at different tiles there, which only lists head by head do."""
    (spec,) = (s for s in REGISTRY if s.name == "attn_fwd_sm90_bf16_d128_m192n64_softcap")
    problem = dataclasses.replace(PLAIN, window_left=300, softcap=20.0)
    assert usual_order(spec, problem, HOPPER).tiles == TileList(24 * 6, 0, 24)
    assert not list(other_orders(spec, problem, HOPPER))
    assert usual_order(spec, dataclasses.replace(problem, mask="bool"), HOPPER).tiles == TileList(24 * 6, 0, 0)


PERSISTENT = [
    spec for spec in REGISTRY
    if spec.op == "attention" and spec.arch_specific and spec.dtype == "bfloat16"
    if not (spec.score_mods or spec.value_factors) and spec.smooth_q == "never"
]  # fmt: skip


@pytest.mark.parametrize("spec", PERSISTENT, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window_right": UNLIMITED},
        {"window_left": 100},
        {"seqlen_q": 1300, "seqlen_k": 1000},  # rows without keys
        {"seqlen_k": 0},
        {"batch": 1, "seqlen_q": 1},
        {"batch": 0},
        {"seqlen_q": 0},
    ],
    ids=str,
)
def test_lists_of_problems(spec: KernelSpec, changes: dict[str, int]) -> None:
    problem = dataclasses.replace(PLAIN, **changes)
    blocks = num_m_blocks(problem, spec.block_m)
    heads = problem.batch * problem.num_q_heads
    every = [usual_order(spec, problem, HOPPER), *other_orders(spec, problem, HOPPER)]
    assert len(every) <= 3
    for order in every:
        assert order.tiles is not None
        check_once(order.tiles, heads, blocks, order.ctas)
    tiles = every[0].tiles
    assert tiles is not None
    causal = problem.window_right != UNLIMITED and problem.window_left == UNLIMITED
    if problem.window_left == UNLIMITED:
        assert (tiles.num_pairs + tiles.num_tail_heads > 0) == (causal and heads * blocks > 0)
    assert causal or (tiles.num_items, tiles.num_pairs) == (heads * blocks, 0)
    # The tiles of a head cover its rows once: from lead_rows before the first one on.
    assert tiles.lead_rows % 64 == 0
    assert 0 <= tiles.lead_rows < spec.block_m
    assert blocks * spec.block_m - tiles.lead_rows >= problem.seqlen_q
    if not causal or spec.smooth_q != "never":
        assert tiles.lead_rows == 0
    elif heads * blocks:
        assert blocks * spec.block_m - tiles.lead_rows - problem.seqlen_q < 64


def test_rows_before_the_first_save_work() -> None:
    """4096 causal rows in tiles of 192: the tile that is not full is the one with few keys."""
    spec = next(s for s in PERSISTENT if s.family == "attn_int8_sm90" and s.block_m == 192 and s.block_n == 64
                and s.sequences == "dense")  # fmt: skip
    problem = dataclasses.replace(PLAIN, seqlen_q=4096, seqlen_k=4096, window_right=0)
    of = head_tiles(spec, problem)
    assert of.lead_rows == 128
    assert sum(of._replace(lead_rows=0).lengths) == 757 + 22
    assert sum(of.lengths) == 715 + 22


@pytest.mark.parametrize("spec", PERSISTENT, ids=lambda spec: spec.name)
def test_packed_sequences_are_listed_head_by_head(spec: KernelSpec) -> None:
    """Their lengths are on the device, where PackedTiles pairs them; the list is a bound for any lengths."""
    problem = dataclasses.replace(PLAIN, varlen=True)
    blocks = num_m_blocks(problem, spec.block_m)
    assert blocks == -(-1000 // spec.block_m) + 3 + 2
    assert usual_order(spec, problem, HOPPER) == Whole(
        TileList(8 * blocks, 0, 0), min(8 * blocks, SMS * spec.ctas_per_sm // spec.cluster)
    )


def packed_walk(
    starts: list[int], lengths_k: list[int], total: int, heads: int, block_m: int, pairs: bool, grid: int, cta: int
) -> Iterator[tuple[int | None, int, int, int]]:
    """PackedTiles of one CTA: (sequence or None, head, first row, rows of its owner behind it)."""
    batch = len(starts) - 1
    num_items = heads * (-(-total // block_m) + batch + 2 if total else 0)
    chunk, before, walk_round = 0, 0, 0

    def units_of(b: int) -> int:
        blocks = -(-(starts[b + 1] - starts[b]) // block_m)
        return (blocks + 1) // 2 if pairs else blocks

    while True:
        item = walk_round * grid + (grid - 1 - cta if walk_round & 1 else cta)
        if item >= num_items:
            return
        walk_round += 1
        while chunk < batch:
            # The ones with the most keys first, then in their order.
            sequences = sorted(range(chunk, min(chunk + 32, batch)), key=lambda b: -lengths_k[b])
            if item - before < heads * sum(map(units_of, sequences)):
                at = item - before
                for b in sequences:
                    if at < heads * units_of(b):
                        break
                    at -= heads * units_of(b)
                head, j = divmod(at, units_of(b))
                rows = starts[b + 1] - starts[b]
                blocks = -(-rows // block_m)
                for m in dict.fromkeys((blocks - 1 - j, j)) if pairs else (blocks - 1 - j,):
                    yield b, head, starts[b] + m * block_m, rows - m * block_m
                break
            before += heads * sum(map(units_of, sequences))
            chunk += 32
        else:
            block, head = divmod(item - before, heads)
            head_blocks = -(-starts[0] // block_m)
            begin, length = (0, starts[0]) if block < head_blocks else (starts[-1], total - starts[-1])
            m0 = (block if block < head_blocks else block - head_blocks) * block_m
            if m0 < length:
                yield None, head, begin + m0, length - m0


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 31, 32, 33, 70])
def test_packed_tiles_cover_each_row_of_each_head_once(batch: int, pairs: bool) -> None:
    rng = random.Random(batch)
    for _ in range(20):
        total, heads, block_m, grid = rng.randint(1, 600), rng.randint(1, 5), rng.choice((16, 48)), rng.randint(1, 40)
        starts = sorted(rng.choice((rng.randint(0, total), 0, total)) for _ in range(batch + 1))
        lengths_k = [rng.choice((0, 5, rng.randint(0, 300))) for _ in range(batch)]
        owner: dict[tuple[int, int], int | None] = {}
        for cta in range(grid):
            walked = packed_walk(starts, lengths_k, total, heads, block_m, pairs, grid, cta)
            for sequence, head, first, rows in walked:
                assert rows > 0
                for row in range(first, first + min(rows, block_m)):
                    assert (head, row) not in owner
                    owner[head, row] = sequence
        expected: dict[tuple[int, int], int | None] = {(h, row): None for h in range(heads) for row in range(total)}
        for b in range(batch):
            expected.update({(h, row): b for h in range(heads) for row in range(starts[b], starts[b + 1])})
        assert owner == expected


def packed_key_tile(
    item: int, starts: list[int], lengths_q: list[int], total: int, heads: int, block_n: int, interleaved: int
) -> tuple[int | None, int, int, int] | None:
    """PackedBwdTiles' item: (sequence or None, head, first key, keys of its owner behind it); None behind the last.

    interleaved: tiles of a group of heads, 0 without causality.
    """
    batch = len(starts) - 1
    for chunk in range(0, batch, 32):
        for b in sorted(range(chunk, min(chunk + 32, batch)), key=lambda b: -lengths_q[b]):
            keys = starts[b + 1] - starts[b]
            blocks = -(-keys // block_n)
            if item >= heads * blocks:
                item -= heads * blocks
                continue
            per_group = min(max(interleaved // blocks, 1), heads) if interleaved else 1
            group = item // (per_group * blocks) * per_group
            block, head = divmod(item - group * blocks, min(per_group, heads - group))
            return b, group + head, starts[b] + block * block_n, keys - block * block_n
    block, head = divmod(item, heads)
    head_blocks = -(-starts[0] // block_n)
    begin, length = (0, starts[0]) if block < head_blocks else (starts[-1], total - starts[-1])
    n0 = (block if block < head_blocks else block - head_blocks) * block_n
    return (None, head, begin + n0, length - n0) if n0 < length else None


@pytest.mark.parametrize("interleaved", [0, 8, 512])
@pytest.mark.parametrize("batch", [0, 1, 3, 33, 70])
def test_packed_tiles_of_keys_cover_each_key_of_each_head_once(batch: int, interleaved: int) -> None:
    """Whichever CTA draws an item; the first one behind the last tile ends the walk of its CTA."""
    rng = random.Random(batch)
    for _ in range(20):
        total, heads, block_n = rng.randint(1, 600), rng.randint(1, 5), rng.choice((16, 48))
        starts = sorted(rng.choice((rng.randint(0, total), 0, total)) for _ in range(batch + 1))
        if batch == 0:
            starts = [total]
        lengths_q = [rng.choice((0, 5, rng.randint(0, 300))) for _ in range(batch)]
        owner: dict[tuple[int, int], int | None] = {}
        items = heads * (-(-total // block_n) + batch + 2)
        tiles = [
            packed_key_tile(item, starts, lengths_q, total, heads, block_n, interleaved) for item in range(items + 9)
        ]
        found = [tile for tile in tiles if tile is not None]
        assert tiles[: len(found)] == found
        assert len(found) <= items
        for sequence, head, first, keys in found:
            assert keys > 0
            for key in range(first, first + min(keys, block_n)):
                assert (head, key) not in owner
                owner[head, key] = sequence
        expected: dict[tuple[int, int], int | None] = {(h, key): None for h in range(heads) for key in range(total)}
        for b in range(batch):
            expected.update({(h, key): b for h in range(heads) for key in range(starts[b], starts[b + 1])})
        assert owner == expected


@pytest.mark.parametrize(("blocks", "heads", "ctas"), [(5, 256, 131), (3, 384, 131), (4, 256, SMS)])
def test_pairs_with_a_middle_tile_may_take_a_cta_less(blocks: int, heads: int, ctas: int) -> None:
    """132 is a multiple of the items of heads of three and five tiles: some CTAs would have middle tiles alone."""
    (row,) = (s for s in REGISTRY if s.name == "attn_fwd_sm90_bf16_d128_m128n128")
    problem = dataclasses.replace(
        PLAIN, batch=1, num_q_heads=heads, num_kv_heads=heads, seqlen_q=128 * blocks, seqlen_k=128 * blocks
    )
    pairs, lengths = in_pairs(heads, blocks), head_tiles(row, problem).lengths
    assert usual_order(row, problem, HOPPER) == Whole(pairs, SMS)
    others = [order for order in other_orders(row, problem, HOPPER) if order.spare]
    assert others == ([Whole(pairs, ctas, SMS - ctas)] if ctas < SMS else [])
    assert work_of(pairs, heads, lengths, ctas) == busiest(pairs, heads, lengths, ctas)
    mean = heads * sum(lengths) / SMS
    assert work_of(pairs, heads, lengths, ctas) < 1.06 * mean
    # Without a spare CTA single tiles follow, or some CTAs have far more.
    if ctas < SMS:
        assert work_of(pairs, heads, lengths, SMS) > 1.15 * mean


def test_ctas_are_left_out_for_a_gain_only_and_of_one_to_an_sm() -> None:
    """A head of 63 tiles has 32 items: 132 CTAs are as even as 131, but for less than 2 %."""
    for name, ctas in (("attn_fwd_sm90_bf16_d128_m128n128", 1), ("attn_fwd_sm90_bf16_d128_m64n64", 2)):
        (row,) = (s for s in REGISTRY if s.name == name)
        assert row.ctas_per_sm >= ctas
        for blocks in (3, 5, 7, 63):
            for heads in (64, 200, 384):
                rows = row.block_m * blocks
                problem = dataclasses.replace(
                    PLAIN, batch=1, num_q_heads=heads, num_kv_heads=heads, seqlen_q=rows, seqlen_k=rows
                )
                fewer = [order for order in other_orders(row, problem, HOPPER) if order.spare]
                assert not fewer or row.ctas_per_sm == 1
                lengths, pairs = head_tiles(row, problem).lengths, in_pairs(heads, blocks)
                for order in fewer:
                    gained = busiest(pairs, heads, lengths, order.ctas) / busiest(pairs, heads, lengths, SMS)
                    assert gained < 0.98


def work_of(tiles: TileList, heads: int, lengths: tuple[int, ...], num_ctas: int) -> int:
    """Of the busiest CTA, as the kernel walks."""
    blocks = len(lengths)
    return max(sum(lengths[block] for _, block in walk(tiles, heads, blocks, num_ctas, cta)) for cta in range(num_ctas))
