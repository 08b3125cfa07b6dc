"""Steps of a ring: every visible pair of a query and a key is computed once, by whichever options."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from omniattn.distributed.schedule import SCHEDULES, Ring, Task, chunks_of, clip, length_of, ring_of

WINDOWS = ((-1, -1), (-1, 0), (3, 0), (0, 0), (2, 1), (-1, 2), (5, -1), (40, 40))


def visible(rows_q: int, rows_k: int, offset: int, window: tuple[int, int]) -> Any:
    i, j = np.arange(rows_q)[:, None] + offset, np.arange(rows_k)[None]
    left, right = window
    return ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))


def add(found: Any, task: Task, q: Any, k: Any) -> None:
    """Add the pairs of a task, whose rows stand for the tokens q and k."""
    rows_q, rows_k = q[slice(*task.q)], k[slice(*task.k)]
    if not task.starts:
        found[np.ix_(rows_q, rows_k)] += visible(len(rows_q), len(rows_k), len(rows_k) - len(rows_q), task.window)
        return
    assert len(rows_q) == len(rows_k) == task.starts[-1]
    for a, b in itertools.pairwise(task.starts):
        found[np.ix_(rows_q[a:b], rows_k[a:b])] += visible(b - a, b - a, 0, task.window)


def test_clip_keeps_what_is_seen_and_no_window_is_negative() -> None:
    for rows_q, rows_k, offset in itertools.product((1, 2, 5), (1, 3, 6), range(-9, 10)):
        for window in WINDOWS:
            expected = visible(rows_q, rows_k, offset, window)
            task = clip(rows_q, rows_k, offset, window)
            assert (task is None) == (not expected.any())
            if task is None:
                continue
            assert min(task.window) >= -1
            found = np.zeros((rows_q, rows_k), int)
            add(found, task, np.arange(rows_q), np.arange(rows_k))
            assert (found == expected).all(), (rows_q, rows_k, offset, window)
            assert task.pairs == expected.sum()


def tokens(chunks: Any) -> Any:
    return np.concatenate([np.arange(a, b) for a, b in chunks])


def covered(ring: Ring) -> Any:
    """How often each pair of tokens is computed, by all ranks; keys come from the rows that are sent."""
    found = np.zeros((ring.seqlen_q, ring.seqlen_k), int)
    for rank in range(ring.world_size):
        sources = [step.source for step in ring.steps(rank)]
        assert sorted(sources) == list(range(ring.world_size))
        assert sources[0] == rank
        for step in ring.steps(rank):
            for task in step.tasks:
                assert step.rows[0] <= task.k[0] < task.k[1] <= step.rows[1]
                assert task.q[0] < task.q[1]
                add(found, task, tokens(ring.chunks_q(rank)), tokens(ring.chunks_k(step.source)))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("unite", [True, False])
def test_every_visible_pair_is_computed_once(schedule: str, world_size: int, unite: bool) -> None:
    for lengths in ((16, 16), (17, 17), (3, 3), (1, 1), (0, 0), (24, 24), (9, 20), (20, 9)):
        for window in WINDOWS:
            ring = ring_of(*lengths, world_size, schedule, window, (), unite)
            expected = visible(*lengths, lengths[1] - lengths[0], window)
            assert (covered(ring) == expected).all(), (lengths, window)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_visible_pair_of_packed_documents_is_computed_once(schedule: str, world_size: int) -> None:
    for starts in ((0, 24), (0, 5, 5, 6, 24), (0, 1, 2, 3, 4, 20, 31), (0, 12, 24), (0,), (0, 2)):
        for window in WINDOWS:
            ring = ring_of(starts[-1], starts[-1], world_size, schedule, window, starts)
            expected = np.zeros((starts[-1], starts[-1]), int)
            for a, b in itertools.pairwise(starts):
                expected[a:b, a:b] = visible(b - a, b - a, 0, window)
            assert (covered(ring) == expected).all(), (starts, window)


def test_equal_chunks_need_few_calls() -> None:
    """Causal attention over equal chunks: one call a step, and half of the rows where the rest is hidden."""
    ring = ring_of(64, 64, 4, "zigzag", (-1, 0))
    for rank in range(4):
        for step in ring.steps(rank):
            assert len(step.tasks) == 1
            behind = step.source > rank
            if step.source == rank:
                assert step.tasks[0] == Task((0, 16), (0, 16), (-1, 0))
            else:
                assert step.tasks[0] == Task((8 if behind else 0, 16), (0, 16 if behind else 8), (-1, -1))
                assert step.rows == (0, 16 if behind else 8)
    work = [sum(task.pairs for step in ring.steps(rank) for task in step.tasks) for rank in range(4)]
    assert len(set(work)) == 1
    full = ring_of(64, 64, 4, "zigzag", (-1, -1))
    assert all(step.tasks == (Task((0, 16), (0, 16), (-1, -1)),) for rank in range(4) for step in full.steps(rank))
    contiguous = ring_of(64, 64, 4, "contiguous", (-1, 0))
    assert [len(step.tasks) for step in contiguous.steps(0)] == [1, 0, 0, 0]
    assert [step.rows for step in contiguous.steps(3)] == [(0, 16)] * 4


def test_windows_skip_steps_and_rows() -> None:
    ring = ring_of(64, 64, 4, "contiguous", (5, 0))
    assert [bool(step.tasks) for step in ring.steps(2)] == [True, True, False, False]
    assert ring.step(2, 1).rows == (11, 16)


def test_chunks() -> None:
    assert chunks_of(10, 2, 0, "zigzag") == ((0, 2), (7, 10))
    assert chunks_of(10, 2, 1, "zigzag") == ((2, 5), (5, 7))
    assert [length_of(2, 4, rank, "contiguous") for rank in range(4)] == [0, 1, 0, 1]
    assert ring_of(8, 8, 2, "zigzag", (-1, 0)) is ring_of(8, 8, 2, "zigzag", (-1, 0))
