"""What requests of a step have in common, against a search block by block; arrays that say it to a call."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest

from omniattn.errors import ArgumentError
from omniattn.kv.blocks import BlockManager
from omniattn.kv.runs import SharedPrefixes, SharedRun, SharedRuns, common, order_of, runs_of

SIZE = 4


def tables_of(draw: random.Random) -> list[list[int]]:
    """Requests that begin anywhere on the paths of a random tree of blocks; names of blocks are never reused."""
    count = itertools.count()
    paths: list[list[int]] = [[]]
    for _ in range(draw.randrange(1, 8)):
        base = draw.choice(paths)
        paths.append(base[: draw.randrange(len(base) + 1)] + [next(count) for _ in range(draw.randrange(1, 90))])
    found = []
    for _ in range(draw.randrange(0, 12)):
        path = draw.choice(paths)
        own = [next(count) for _ in range(draw.randrange(3))]
        found.append(path[: draw.randrange(len(path) + 1)] + own)
    return found


def brute(tables: list[list[int]], limits: list[int]) -> set[tuple[int, int, int, int]]:
    """(first, count, begin, end) of maximal runs: column by column, requests side by side with one block."""
    found: set[tuple[int, int, int, int]] = set()
    open_runs: dict[tuple[int, int], int] = {}  # where the run of these requests began
    for column in range(max(limits, default=0) + 1):
        here: dict[tuple[int, int], int] = {}
        at = 0
        while at < len(tables):
            end = at + 1
            if limits[at] > column:
                while (
                    end < len(tables) and limits[end] > column and tables[end][: column + 1] == tables[at][: column + 1]
                ):
                    end += 1
            if end - at > 1:
                here[at, end - at] = open_runs.get((at, end - at), column)
            at = end
        found |= {(*key, begin, column) for key, begin in open_runs.items() if key not in here}
        open_runs = here
    return found


@pytest.mark.parametrize("seed", range(200))
def test_runs_are_those_of_a_search_block_by_block(seed: int) -> None:
    draw = random.Random(seed)
    tables = tables_of(draw)
    limits = [draw.choice([len(t), draw.randrange(len(t) + 1)]) for t in tables]
    found = runs_of(tables, limits)
    assert {(run.first, run.count, run.begin, run.end) for run in found} == brute(tables, limits)
    assert len({(run.first, run.count, run.begin, run.end) for run in found}) == len(found)
    for run in found:
        around = [
            x
            for x in found
            if x.first <= run.first and x.first + x.count >= run.first + run.count and x.end <= run.begin
        ]
        assert run.level == len(around)
        assert run.begin == max((x.end for x in around), default=0)
    order = order_of(tables, limits)
    assert sorted(order) == list(range(len(tables)))
    moved, of = [tables[i] for i in order], [limits[i] for i in order]
    # No order has more requests that share a block with the one beside them, for any number of blocks.
    for column in range(max(limits, default=0)):
        pairs = [(tuple(t[: column + 1]) if n > column else object()) for t, n in zip(moved, of, strict=True)]
        assert sum(a == b for a, b in itertools.pairwise(pairs)) == len(pairs) - len(set(pairs))
    if order_of(moved, of) != list(range(len(moved))):
        pytest.fail("an order that is right already has changed")


def test_the_first_place_where_tables_differ() -> None:
    a = list(range(1000))
    for place in (0, 1, 15, 16, 17, 47, 48, 500, 999):
        b = [*a[:place], -1, *a[place + 1 :]]
        assert common(a, b, 0, 1000) == place
        assert common(a, b, 0, place) == place
        assert common(a, b, min(place + 1, 1000), 1000) == 1000
    assert common([], [], 0, 0) == 0


def manager() -> BlockManager:
    """A system prompt, a conversation of some of its requests, and another system prompt."""
    blocks = BlockManager(100, SIZE)
    for name, count in (("a0", 8), ("b0", 12)):
        blocks.add(name)
        blocks.extend({name: count})
    blocks.fork("a0", "a1")
    blocks.extend({"a0": 4})
    for name in ("a2", "a3"):
        blocks.fork("a0", name)
    blocks.fork("b0", "b1")
    blocks.add("alone")
    blocks.extend({"a0": 1, "a1": 5, "a2": 2, "a3": 6, "b0": 1, "b1": 1, "alone": 3})
    return blocks


def whole_tables(runs: SharedRuns, found: SharedPrefixes) -> list[list[int]]:
    """The blocks that arrays lead each request's rows to, level by level."""
    starts = np.cumsum([0, *runs.rows])
    tables = []
    for b, (begin, end) in enumerate(itertools.pairwise(starts)):
        blocks: list[int] = []
        for rows, lens, table in found.levels:
            assert rows[0] == 0
            assert (np.diff(rows) >= 0).all()
            assert not ((begin < rows) & (rows < end)).any()  # nobody is in two groups
            for group in [g for g in range(len(lens)) if rows[g] <= begin and end <= rows[g + 1]]:
                assert lens[group] % SIZE == 0
                blocks += table[group, : lens[group] // SIZE].tolist()
        own = -(-int(found.seq_lens[b]) // SIZE)
        assert len(blocks) * SIZE + found.seq_lens[b] == runs.lengths[b]
        assert found.seq_lens[b] >= runs.rows[b]
        tables.append(blocks + found.block_table[b, :own].tolist())
    return tables


def test_levels_of_a_step() -> None:
    blocks = manager()
    names = ("a0", "b0", "a1", "b1", "alone", "a2", "a3")
    order = blocks.sharing_order(names)
    assert order == ["a0", "a2", "a3", "a1", "b0", "b1", "alone"]
    new = {"a0": 1, "a2": 2, "a3": 6, "a1": 5, "b0": 1, "b1": 1, "alone": 3}
    runs = blocks.shared_runs(new)
    assert (runs.names, runs.rows) == (tuple(new), tuple(new.values()))
    assert runs.runs == (SharedRun(0, 4, 0, 2, 0), SharedRun(0, 3, 2, 3, 1), SharedRun(4, 2, 0, 3, 0))
    assert runs.num_levels == 2
    found = runs.arrays()
    (first, second) = found.levels
    assert first.cu_seqlens_q.tolist() == [0, 14, 16]
    assert first.seq_lens.tolist() == [8, 12]
    assert second.cu_seqlens_q.tolist() == [0, 9, 19]  # the rows behind it see nothing of this level
    assert second.seq_lens.tolist() == [4, 0]
    assert found.seq_lens.tolist() == [1, 2, 6, 5, 1, 1, 3]
    assert whole_tables(runs, found) == [list(blocks.blocks(name)) for name in new]
    assert all(x.dtype == np.int32 and x.flags.c_contiguous for level in found.levels for x in level)


@pytest.mark.parametrize("seed", range(60))
def test_any_part_of_the_runs_leads_to_the_same_blocks(seed: int) -> None:
    draw = random.Random(seed)
    blocks = BlockManager(4000, SIZE)
    blocks.add(0)
    names = [0]
    for i in range(1, 14):
        parent = draw.choice(names)
        blocks.extend({name: draw.randrange(1, 14) for name in draw.sample(names, draw.randrange(1, len(names) + 1))})
        blocks.fork(parent, i)
        names.append(i)
    draw.shuffle(names)
    if draw.random() < 0.7:
        names = blocks.sharing_order(names)
    new = {name: draw.choice([1, 1, 5, 9]) for name in names}
    blocks.extend(new)
    runs = blocks.shared_runs(new)
    for _ in range(6):
        kept = runs.keep([run for run in runs.runs if draw.random() < 0.6])
        assert kept.num_levels <= runs.num_levels
        sizes = {"levels": 14, "groups": 30, "batch": 20, "level_blocks": 60, "own_blocks": 70}
        for extents in ({}, sizes):
            found = kept.arrays(**extents)
            assert whole_tables(runs, found) == [list(blocks.blocks(name)) for name in new]
        assert len(found.levels) == 14
        assert {level.block_table.shape for level in found.levels} == {(30, 60)}
        assert found.block_table.shape == (20, 70)
        assert not found.seq_lens[len(names) :].any()


def test_new_tokens_are_in_no_run() -> None:
    """Also where a fork shares blocks that hold them."""
    blocks = BlockManager(20, SIZE)
    blocks.add("a")
    blocks.extend({"a": 16})
    blocks.fork("a", "b")
    assert blocks.shared_runs({"a": 16, "b": 16}).runs == ()
    assert blocks.shared_runs({"a": 1, "b": 9}).runs == (SharedRun(0, 2, 0, 1, 0),)
    assert blocks.shared_runs({"a": 1, "b": 1}).runs == (SharedRun(0, 2, 0, 3, 0),)


def test_windows_share_nothing() -> None:
    blocks = BlockManager(20, SIZE)
    blocks.add("a")
    blocks.extend({"a": 16})
    blocks.fork("a", "b")
    blocks.free_before("b", 12)
    blocks.extend({"a": 1, "b": 1})
    assert blocks.shared_runs({"a": 1, "b": 1}).runs == ()
    assert blocks.sharing_order(["a", "b"]) == ["a", "b"]


def test_what_is_not_a_step() -> None:
    blocks = manager()
    for new, argument in (({"a0": 0}, "new['a0']"), ({"a0": 99}, "new['a0']"), ({"x": 1}, "sequence"), (["a0"], "new")):
        with pytest.raises(ArgumentError) as caught:
            blocks.shared_runs(new)  # type: ignore[arg-type]
        assert caught.value.argument == argument
    with pytest.raises(ArgumentError, match="an iterable of names"):
        blocks.sharing_order(3)  # type: ignore[arg-type]
    assert blocks.shared_runs({}).runs == ()
    empty = blocks.shared_runs({}).arrays()
    assert empty.levels == ()
    assert empty.block_table.shape == (0, 1)


def test_extents_that_are_too_small() -> None:
    runs = manager().shared_runs({"a0": 1, "a2": 2, "a3": 6, "a1": 5, "b0": 1, "b1": 1, "alone": 3})
    needed: dict[str, Any] = {"levels": 2, "groups": 2, "batch": 7, "level_blocks": 3, "own_blocks": 2}
    runs.arrays(**needed)
    for name, least in needed.items():
        with pytest.raises(ArgumentError, match=f"at least {least}, which this step needs") as caught:
            runs.arrays(**{**needed, name: least - 1})
        assert caught.value.argument == name
        with pytest.raises(ArgumentError, match="an integer from 0 to 2147483647"):
            runs.arrays(**{**needed, name: 2**63})


@pytest.mark.parametrize("wrong", [None, 5, [[1]], [{}], ["a"], [None]])
def test_runs_to_keep_that_are_none(wrong: Any) -> None:
    runs = SharedRuns((0, 1), (1, 1), (9, 9), ([0, 1, 2], [0, 1, 3]), 4, runs_of([[0, 1], [0, 1]], [2, 2]))
    with pytest.raises(ArgumentError, match=r"SharedRuns\.keep\(\): argument 'runs': expected some of the runs"):
        runs.keep(wrong)
    assert runs.keep(runs.runs) == runs


def test_time_goes_with_the_blocks() -> None:
    """A step of 256 requests of 2048 blocks: within a factor of what copying their tables takes."""
    prefix = list(range(2000))
    tables = [prefix + list(range(2000 + 48 * i, 2048 + 48 * i)) for i in range(256)]
    begin = time.perf_counter()
    copies = [list(map(int, table)) for table in tables]
    copying = time.perf_counter() - begin
    begin = time.perf_counter()
    assert runs_of(copies, [2048] * 256) == (SharedRun(0, 256, 0, 2000, 0),)
    assert time.perf_counter() - begin < 5 * copying
