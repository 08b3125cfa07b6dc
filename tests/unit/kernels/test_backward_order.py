"""The order in which tiles of keys add to dq (kernels_cu/attention/bwd_ordered.cuh), worked out as the kernel does."""

from __future__ import annotations

import random

BLOCK_M, BLOCK_N = 64, 128


def drawn(blocks: int, heads: int, causal: bool, per_group: int) -> list[tuple[int, int]]:
    """DrawnBwdTiles: (head, block) of the draws 0, 1, ..., without those that are nobody's."""
    groups = (heads - 1) // per_group + 1
    parts = 2 if causal else 1
    rows = (blocks - 1) // parts + 1
    found = []
    for item in range((groups + parts - 1) * rows * parts * per_group):
        row, at = divmod(item, parts * per_group)
        part, group = at // per_group, row // rows
        head, block = (group - part) * per_group + at - part * per_group, row - group * rows + part * rows
        if group >= part and head < heads and block < blocks:
            found.append((head, block))
    return found


def query_tiles(n: int, seqlen_q: int, seqlen_k: int, left: int, right: int) -> tuple[int, int]:
    """QueryTiles: first and end of the tiles of queries that see some key of tile ``n``."""

    def seen_by(key: int) -> tuple[int, int]:
        center = key + seqlen_q - seqlen_k
        lo = 0 if right < 0 else max(min(center - right, seqlen_q), 0)
        return lo, seqlen_q if left < 0 else max(min(center + left + 1, seqlen_q), 0)

    last_key = min((n + 1) * BLOCK_N, seqlen_k) - 1
    return seen_by(n * BLOCK_N)[0] // BLOCK_M, -(-seen_by(last_key)[1] // BLOCK_M)


def test_tiles_of_a_head_are_drawn_in_the_order_of_their_keys() -> None:
    rng = random.Random(1)
    for _ in range(600):
        blocks, heads, causal = rng.randint(1, 200), rng.randint(1, 60), rng.random() < 0.5
        found = drawn(blocks, heads, causal, rng.randint(1, heads))
        assert sorted(found) == [(head, block) for head in range(heads) for block in range(blocks)]
        for head in range(heads):
            assert [block for of, block in found if of == head] == list(range(blocks))


def test_steps_that_are_waited_for() -> None:
    """BwdOrderedWriter: every tile of queries gets its sums in the order of the keys, the first one by a store."""
    rng = random.Random(0)
    for _ in range(600):
        seqlen_q, seqlen_k = rng.randint(1, 900), rng.randint(1, 1500)
        some, more = rng.randint(0, 600), rng.randint(0, 600)
        left, right = rng.choice([(-1, -1), (-1, 0), (0, 0), (some, more), (some, 0), (some, -1), (-1, more)])
        heads = rng.randint(1, 3)
        added: dict[tuple[int, int], list[int]] = {}
        steps: list[list[tuple[int, int]]] = []  # of each tile of keys, in their order
        for n in range(-(-seqlen_k // BLOCK_N)):
            first, end = query_tiles(n, seqlen_q, seqlen_k, left, right)
            count = max(end - first, 0)
            firsts = count
            if n:
                last_first, last_end = query_tiles(n - 1, seqlen_q, seqlen_k, left, right)
                if last_end > last_first:
                    firsts = min(end - last_end, count)
            assert firsts >= 0
            steps.append([])
            for i in range(count):
                for head in range(heads):
                    place, done = (head, end - 1 - i), len(steps[n]) + 1
                    if done <= firsts * heads:
                        assert place not in added
                    else:
                        assert steps[n - 1][done - firsts * heads - 1] == place
                        assert added[place][-1] == n - 1
                    added.setdefault(place, []).append(n)
                    steps[n].append(place)
        # attn_bwd_prepare clears nothing then.
        if (left < 0 and right < 0) or seqlen_q <= seqlen_k:
            assert len(added) == heads * -(-seqlen_q // BLOCK_M)


def test_who_finishes_dq() -> None:
    """BwdFinish: the tile of keys that adds last to a tile of queries, where every query sees a key."""
    rng = random.Random(3)
    for _ in range(600):
        seqlen_q = rng.randint(1, 900)
        seqlen_k = seqlen_q + rng.randint(0, 700)
        some, more = rng.randint(0, 600), rng.randint(0, 600)
        left, right = rng.choice([(-1, -1), (-1, 0), (0, 0), (some, more), (some, 0), (some, -1), (-1, more)])
        blocks = -(-seqlen_k // BLOCK_N)
        seen = [query_tiles(n, seqlen_q, seqlen_k, left, right) for n in range(blocks)]
        # Those that the next tile of keys does not see.
        finished: list[tuple[int, int]] = []
        for n, (first, end) in enumerate(seen):
            if n + 1 < blocks and seen[n + 1][1] > seen[n + 1][0]:
                end = min(end, seen[n + 1][0])
            finished += [(m, n) for m in range(first, end)]
        last = {m: n for n, (first, end) in enumerate(seen) for m in range(first, end)}
        assert sorted(finished) == sorted(last.items())
        assert len(last) == -(-seqlen_q // BLOCK_M)
